"""Qwen3-MoE: which layers are mixtures of experts, what is read from a checkpoint, and which operators take it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from swiftspec.backends import cpu, cuda, reference, unfused
from swiftspec.backends.cpu.packed_weight_cache import PackedWeightCache
from swiftspec.builder.memory_estimate import MemoryEstimate
from swiftspec.builder.model_pair import ModelPair
from swiftspec.config import EngineConfig
from swiftspec.errors import UserError
from swiftspec.file_io import Fields
from swiftspec.lab.latency_model import GPUS, constants, forward
from swiftspec.lab.pair import parameters
from swiftspec.lab.quantize import quantize
from swiftspec.llm_engine import LLMEngine
from swiftspec.model.architectures import architecture_of
from swiftspec.model.checkpoint_files import read_config
from swiftspec.model.config_json import parse_config
from swiftspec.model.loader import load_model
from swiftspec.model.shard import Shard
from swiftspec.model.spec import ExpertsSpec, MlpSpec, ModelSpec
from swiftspec.params import SamplingParams
from tests.model.architectures.test_families import TOKENS, expected, logits
from tests.model.architectures.test_native_families import logits as native_logits
from tests.model.test_loader import change_config, quantise
from tests.support.thread_group import on_ranks
from tests.support.tiny_checkpoints import make_checkpoint, make_pair

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
SIZES = {
    "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_experts": 8, "moe_intermediate_size": 16,
}  # fmt: skip
# sizes that the native operators need, and that two ranks can share in groups of 32 inputs
INT4 = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 64, "moe_intermediate_size": 64}
native = pytest.mark.skipif(cpu.level() == "none", reason="there are no native operators here")


def spec(**fields: Any) -> ModelSpec:
    data = Fields(SIZES | fields)
    return architecture_of(data).spec(data)


def mixtures(**fields: Any) -> list[bool]:
    return [layer.mlp.experts is not None for layer in spec(**fields).layers]


def test_which_layers_are_mixtures() -> None:
    assert mixtures() == [True] * 4
    assert mixtures(decoder_sparse_step=2) == [False, True] * 2
    assert mixtures(mlp_only_layers=[0, 3]) == [False, True, True, False]
    assert mixtures(mlp_only_layers=None, decoder_sparse_step=3) == [False, False, True, False]
    sparse, dense = (layer.mlp for layer in spec(decoder_sparse_step=2).layers[1::-1])
    assert dense == MlpSpec(6144) and sparse == MlpSpec(16, experts=ExpertsSpec(8, 8, False))
    assert spec(norm_topk_prob=True, num_experts_per_tok=2).layers[0].mlp.experts == ExpertsSpec(8, 2, True)
    assert spec(num_experts=None, num_local_experts=16) == spec(num_experts=16), "transformers 5 renames the field"
    windows = [layer.attention.window for layer in spec(use_sliding_window=True, sliding_window=9).layers]
    assert windows == [9] * 4 and spec(sliding_window=9).layers[0].attention.window is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 exceeds num_experts 8"),
        ({"num_experts": 0}, "num_experts"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ({"mlp_only_layers": ["x"]}, "mlp_only_layers"),
    ],
)
def test_invalid_fields_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        spec(**fields)


@pytest.mark.parametrize("norm_topk_prob", [False, True])
@pytest.mark.parametrize("joined", [False, True], ids=["each expert", "all experts"])
def test_logits_equal_those_of_transformers(tmp_path: Path, norm_topk_prob: bool, joined: bool) -> None:
    """`joined`: the tensors of all experts in one, which transformers 5 writes on request."""
    shape = {"norm_topk_prob": norm_topk_prob, "decoder_sparse_step": 2, "mlp_only_layers": []}
    theirs = make_checkpoint(tmp_path, family="qwen3_moe", dtype=F64, **shape)
    if joined:
        theirs.save_pretrained(tmp_path, save_original_format=False)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert ("model.layers.1.mlp.experts.gate_up_proj" in names) == joined
    want = expected(theirs, TOKENS)
    for ops in (reference, unfused):
        torch.testing.assert_close(logits(tmp_path, ops), want, rtol=0, atol=1e-9)
    for size in (2, 3):
        ranks = on_ranks(size, lambda group: logits(tmp_path, reference, group))
        assert all(torch.equal(each, ranks[0]) for each in ranks)
        torch.testing.assert_close(ranks[0], want, rtol=0, atol=1e-9)


@pytest.mark.parametrize("layout", ["awq", "pack-quantized"])
def test_int4_experts(tmp_path: Path, layout: str) -> None:
    """The router is dense. On two ranks each has half of every expert."""
    path = tmp_path / "model"
    make_checkpoint(path, family="qwen3_moe", dtype=F64, vocab=65, **INT4)
    twin = quantise(path, layout, skip=("mlp.gate.",))
    want = logits(twin, reference)
    for ops in (reference, unfused):
        torch.testing.assert_close(logits(path, ops), want, rtol=0, atol=1e-9)
    one, two = on_ranks(2, lambda group: logits(path, reference, group))
    assert torch.equal(one, two)
    torch.testing.assert_close(one, want, rtol=0, atol=1e-9)
    if cpu.level() == "none":
        return
    exact, whole = native_logits(path, reference, F64, [70]), [70]
    one, two = on_ranks(2, lambda group: native_logits(path, cpu, F32, whole, group=group))
    assert torch.equal(one, two)
    for ours in (one, native_logits(path, cpu, F32, whole)):
        assert float((ours - exact).norm()) < 1e-5 * float(exact.norm())
    ours = native_logits(path, cpu, BF16, whole)
    assert torch.equal(native_logits(path, cpu, BF16, [30, *range(31, 50), 70]), ours)
    assert torch.equal(native_logits(path, cpu, BF16, whole, fused=False), ours)


@native
def test_packed_experts_are_mapped_at_the_next_start(tmp_path: Path) -> None:
    path, cached = tmp_path / "model", tmp_path / "cache"
    make_checkpoint(path, family="qwen3_moe", dtype=BF16, **INT4)
    quantise(path, "awq", skip=("mlp.gate.",))

    def start() -> tuple[list[Any], dict[Path, int]]:
        """Returns the packed MLPs, and when the files of the cache were written."""
        cache = PackedWeightCache(cached, min_model_bytes=0)
        model = load_model(path, dtype=BF16, ops=cpu, max_positions=64, packed_cache=cache)
        cache.writer.resume()
        cache.writer.close(60.0)
        return [layer.mlp for layer in model.stack.layers], {f: f.stat().st_mtime_ns for f in cached.glob("*/*")}

    (packed, written), (mapped, kept) = start(), start()
    assert written == kept and len(written) == 4, "three layers and the head"
    for one, other in zip(packed, mapped, strict=True):
        assert torch.equal(one.gate_up.data, other.gate_up.data) and torch.equal(one.down.data, other.down.data)
    assert torch.equal(packed[0].router.data, mapped[0].router.data)


@native
def test_a_draft_does_not_change_the_text(tmp_path: Path) -> None:
    """On the native operators, token by token, greedily and with noise."""
    target, draft = make_pair(tmp_path, family="qwen3_moe", tie=False, **INT4)
    for temperature in (0.0, 0.9):
        sampling = SamplingParams(temperature=temperature, seed=5, max_tokens=48, ignore_eos=True)
        options: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 96}
        want = LLMEngine(target, **options).generate(TOKENS, sampling).token_ids
        answer = LLMEngine(target, draft, EngineConfig("serial"), **options).generate(TOKENS, sampling)
        assert answer.token_ids == want and answer.stats.accepted > 5 and len(set(want)) > 5


def test_which_operators_take_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path, family="qwen3_moe", hidden_size=128, head_dim=64, dtype=BF16)
    mixture = read_config(tmp_path).spec
    cpu.check_spec(mixture, BF16)
    with pytest.raises(UserError, match=r"the CUDA operators have no mixture of experts \(experts\); use ops unfused"):
        cuda.check_spec(mixture, BF16)
    with pytest.raises(UserError, match="need experts whose sizes are multiples of 16, not 24"):
        cpu.check_spec(spec(head_dim=16, moe_intermediate_size=24), BF16)
    lines: list[str] = []
    monkeypatch.setattr(cpu, "level", lambda: "none")
    ModelPair.create(tmp_path, None, EngineConfig("ar"), None, {"note": lines.append})
    assert lines == ["the target runs on torch's own operators: the CPU operators need x86-64 with AVX2, or aarch64"]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("quantised", [False, True], ids=["bf16", "awq"])
def test_the_memory_of_experts(tmp_path: Path, ranks: int, quantised: bool) -> None:
    """torch's operators keep experts dense. The memory estimate is that of the tensors that a rank packs."""
    make_checkpoint(tmp_path / "model", family="qwen3_moe", dtype=BF16, **INT4)
    if quantised:
        quantise(tmp_path / "model", "awq", skip=("mlp.gate.",))
    config = read_config(tmp_path / "model")

    def held(group: Any) -> float:
        model = load_model(tmp_path / "model", dtype=BF16, ops=unfused, max_positions=64, group=group)
        mlps: list[Any] = [layer.mlp for layer in model.stack.layers]
        return sum(mlp.gate_up.nbytes + mlp.down.nbytes for mlp in (mlps[0], mlps[2]))

    sizes = on_ranks(ranks, held)
    part = Shard.of(config, 0, ranks).layers[0]
    assert sizes == [2 * 2 * (len(part.gate_up) * 64 + 6 * 64 * len(part.down))] * ranks
    need = MemoryEstimate(config, BF16, 64, ranks, ops=unfused, int4_kernels=False)
    dense_layer, heads = need.shard.layers[1], need.shard.head_rows
    matrices = sum(64 * (len(each.qkv) + len(each.o)) for each in need.shard.layers) + 64 * 3 * len(dense_layer.down)
    ends = (config.spec.vocab_size + heads) * 64
    others = 2 * (matrices + ends) + 4 * 64 * (2 * 6 + 4 * 3 + 1)  # routers and norms in float32
    assert need.weights == sizes[0] + others


def test_quantising_leaves_the_router_dense(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model", family="qwen3_moe", dtype=BF16, **INT4)
    quantize(tmp_path / "model", tmp_path / "int4", 32)
    tensors = load_file(tmp_path / "int4" / "model.safetensors")
    assert "model.layers.0.mlp.gate.weight" in tensors
    assert "model.layers.0.mlp.experts.5.down_proj.qweight" in tensors
    assert logits(tmp_path / "int4", reference).isfinite().all()
    change_config(tmp_path / "int4", num_local_experts=5)
    with pytest.raises(UserError, match=r"mlp\.gate\.weight has shape \[6, 64\], config\.json implies \[5, 64\]"):
        logits(tmp_path / "int4", reference)


def test_predictions_count_the_experts_that_rows_use() -> None:
    """Of a model like Qwen3-30B-A3B: most of a forward's time is that of its experts."""
    sizes = {
        "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "head_dim": 128,
        "num_experts": 128, "moe_intermediate_size": 768,
    }  # fmt: skip
    config = parse_config(SIZES | sizes)
    assert parameters(config) == pytest.approx(30.5e9, rel=0.005)
    lines = constants(GPUS["h100"])[0]
    one, eight, all_used = (forward(config, 1, rows, lines, True) for rows in (1, 8, 64))
    assert 2 * one < eight < 8 * one and eight < all_used < 16 * one
