"""Qwen2-MoE, whose mixtures have a shared expert: what is read from a checkpoint, and which operators take it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from swiftspec.backends import cpu, cuda, reference, unfused
from swiftspec.backends.cpu.packed_weight_cache import PackedWeightCache
from swiftspec.builder.memory_estimate import MemoryEstimate
from swiftspec.config import EngineConfig
from swiftspec.errors import UserError
from swiftspec.file_io import Fields
from swiftspec.lab.latency_model import GPUS, constants, forward
from swiftspec.lab.pair import parameters
from swiftspec.llm_engine import LLMEngine
from swiftspec.model.architectures import architecture_of
from swiftspec.model.checkpoint_files import read_config
from swiftspec.model.config_json import parse_config
from swiftspec.model.loader import load_model
from swiftspec.model.spec import ExpertsSpec, MlpSpec, ModelSpec
from swiftspec.params import SamplingParams
from tests.model.architectures.test_families import TOKENS, expected, logits
from tests.model.architectures.test_native_families import logits as native_logits
from tests.model.test_loader import quantise
from tests.support.thread_group import on_ranks
from tests.support.tiny_checkpoints import make_checkpoint, make_model, make_pair

FAMILY = "qwen2_moe"
F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
SIZES = {
    "architectures": ["Qwen2MoeForCausalLM"], "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 8, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 40,
}  # fmt: skip
# sizes that the native operators need, and that ranks can share in groups of 32 inputs
INT4 = {
    "hidden_size": 64, "head_dim": 16, "intermediate_size": 64, "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 96,
}  # fmt: skip
DENSE = ("mlp.gate.", "shared_expert_gate")
native = pytest.mark.skipif(cpu.level() == "none", reason="there are no native operators here")


def spec(**fields: Any) -> ModelSpec:
    data = Fields(SIZES | fields)
    return architecture_of(data).spec(data)


def test_the_mixtures_of_a_model() -> None:
    experts = ExpertsSpec(8, 4, False, 40)
    assert [layer.mlp for layer in spec(mlp_only_layers=[1]).layers[:2]] == [
        MlpSpec(16, experts=experts),
        MlpSpec(5632),
    ]
    assert experts.router_rows == 9 and ExpertsSpec(8, 4, False).router_rows == 8
    fields = Fields({name: value for name, value in SIZES.items() if "expert" not in name and "moe" not in name})
    released = architecture_of(fields).spec(fields).layers[0]
    assert released.mlp == MlpSpec(1408, experts=ExpertsSpec(60, 4, False, 5632)) and released.attention.qkv_bias
    assert not spec(qkv_bias=False).layers[0].attention.qkv_bias


def test_windows_are_those_of_every_second_layer() -> None:
    windows = {"use_sliding_window": True, "sliding_window": 9}
    found = [layer.attention.window for layer in spec(max_window_layers=3, **windows).layers]
    assert found == [9, None, 9, None]
    assert [layer.attention.window for layer in spec(max_window_layers=2, **windows).layers] == [9, None, None, None]
    assert all(layer.attention.window is None for layer in spec(sliding_window=9).layers)


@pytest.mark.parametrize("size", [0, None, "x"])
def test_a_mixture_without_the_size_of_its_shared_expert_is_refused(size: Any) -> None:
    with pytest.raises(UserError, match="shared_expert_intermediate_size"):
        spec(shared_expert_intermediate_size=size)


@pytest.mark.parametrize(
    "fields", [{"norm_topk_prob": True}, {"use_sliding_window": True, "sliding_window": 6}], ids=str
)
def test_logits_equal_those_of_transformers(tmp_path: Path, fields: dict[str, Any]) -> None:
    want = expected(make_checkpoint(tmp_path, family=FAMILY, dtype=F64, **fields), TOKENS)
    torch.testing.assert_close(logits(tmp_path, reference), want, rtol=0, atol=1e-9)
    for size in (2, 3):
        ranks = on_ranks(size, lambda group: logits(tmp_path, reference, group))
        assert all(torch.equal(each, ranks[0]) for each in ranks)
        torch.testing.assert_close(ranks[0], want, rtol=0, atol=1e-9)


@pytest.mark.parametrize("layout", ["awq", "pack-quantized"])
def test_int4_experts(tmp_path: Path, layout: str) -> None:
    """Router and gate are dense. The ranks share three groups of the shared expert."""
    path = tmp_path / "model"
    make_checkpoint(path, family=FAMILY, dtype=F64, vocab=65, **INT4)
    twin = quantise(path, layout, skip=DENSE)
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
@pytest.mark.parametrize("skip", [DENSE, (*DENSE, "mlp.shared_expert.")], ids=["int4", "dense"])
def test_packed_experts_are_mapped_at_the_next_start(tmp_path: Path, skip: tuple[str, ...]) -> None:
    """The shared expert has the format of the others or its own."""
    path, cached = tmp_path / "model", tmp_path / "cache"
    make_checkpoint(path, family=FAMILY, dtype=BF16, **INT4)
    quantise(path, "awq", skip=skip)

    def start() -> tuple[list[Any], dict[Path, int]]:
        """Returns the packed MLPs, and when the files of the cache were written."""
        cache = PackedWeightCache(cached, min_model_bytes=0)
        model = load_model(path, dtype=BF16, ops=cpu, max_positions=64, packed_cache=cache)
        cache.writer.resume()
        cache.writer.close(60.0)
        return [layer.mlp for layer in model.stack.layers], {f: f.stat().st_mtime_ns for f in cached.glob("*/*")}

    (packed, written), (mapped, kept) = start(), start()
    assert written == kept and len(written) == 4, "three layers and the head"
    for one, other in zip(packed[::2], mapped[::2], strict=True):
        assert (one.shared.gate_up.scales is None) == ("mlp.shared_expert." in skip)
        for name in ("router", "gate_up", "down"):
            assert torch.equal(getattr(one, name).data, getattr(other, name).data)
        for name in ("gate_up", "down"):
            assert torch.equal(getattr(one.shared, name).data, getattr(other.shared, name).data)


@native
def test_the_native_text_is_that_of_transformers(tmp_path: Path) -> None:
    """In float32, without and with a draft tree. A greedy text predicts itself."""
    target, draft = make_pair(tmp_path, family=FAMILY, tie=False, head_dim=16)
    theirs = make_model(family=FAMILY, dtype=F64, tie=False, head_dim=16, seed=1)
    sampling = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 96}
    text = LLMEngine(target, **options).generate(TOKENS, sampling).token_ids
    want = expected(theirs, [*TOKENS, *text]).argmax(-1).tolist()
    assert text == want[len(TOKENS) - 1 : -1] and len(set(text)) > 10
    assert LLMEngine(target, draft, EngineConfig("serial"), **options).generate(TOKENS, sampling).token_ids == text


@native
def test_a_draft_does_not_change_the_text(tmp_path: Path) -> None:
    """On the native operators, token by token, greedily and with noise."""
    target, draft = make_pair(tmp_path, family=FAMILY, tie=False, **INT4)
    for temperature in (0.0, 0.9):
        sampling = SamplingParams(temperature=temperature, seed=5, max_tokens=48, ignore_eos=True)
        options: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 96}
        want = LLMEngine(target, **options).generate(TOKENS, sampling).token_ids
        answer = LLMEngine(target, draft, EngineConfig("serial"), **options).generate(TOKENS, sampling)
        assert answer.token_ids == want and answer.stats.accepted > 5 and len(set(want)) > 5


def test_which_operators_take_it(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, family=FAMILY, hidden_size=128, head_dim=64, dtype=BF16)
    mixture = read_config(tmp_path).spec
    cpu.check_spec(mixture, BF16)
    missing = r"no mixture of experts \(experts\), no shared expert \(shared_intermediate_size\); use ops unfused"
    with pytest.raises(UserError, match=missing):
        cuda.check_spec(mixture, BF16)


def test_tensors_that_are_missing_or_not_known_take_one_line(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, family=FAMILY, dtype=F64)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    gate = "model.layers.0.mlp.shared_expert_gate.weight"
    bias = {"model.layers.0.mlp.shared_expert_gate.bias": torch.zeros(1)}
    for changed, message in (
        ({name: tensor for name, tensor in tensors.items() if name != gate}, r"shared_expert_gate\.weight"),
        (tensors | bias, r"shared_expert_gate\.bias is not part of the architecture"),
        (tensors | {gate: torch.zeros(2, 32, dtype=F64)}, r"shape \[2, 32\], config\.json implies \[1, 32\]"),
    ):
        save_file(changed, file)
        with pytest.raises(UserError, match=message) as caught:
            logits(tmp_path, reference)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_memory_of_the_shared_expert(tmp_path: Path, ranks: int) -> None:
    """The matrices of the shared expert count, as each rank has them."""
    needs, packed = list[float](), list[float]()
    for size in (32, 96):
        path = tmp_path / str(size)
        make_checkpoint(path, family=FAMILY, dtype=BF16, **INT4 | {"shared_expert_intermediate_size": size})
        needs.append(MemoryEstimate(read_config(path), BF16, 64, ranks, ops=unfused).weights)
        rows = 16 * math.ceil(size / 16 / ranks)  # of the shared expert on each rank
        packed.append(2 * 2 * 3 * 64 * rows)  # bytes of three matrices in two layers
    assert needs[1] - needs[0] == packed[1] - packed[0] > 0


def test_predictions_count_the_shared_expert() -> None:
    """Of a model like Qwen1.5-MoE-A2.7B, with 14.3 billion parameters."""
    sizes = {
        "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16,
        "num_key_value_heads": 16, "num_experts": 60, "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    }  # fmt: skip
    config = parse_config(SIZES | sizes)
    assert parameters(config) == pytest.approx(14.3e9, rel=0.005)
    lines = constants(GPUS["h100"])[0]
    without = parse_config(SIZES | sizes | {"shared_expert_intermediate_size": 16})
    more = forward(config, 1, 1, lines, True) - forward(without, 1, 1, lines, True)
    assert 0 < more < forward(config, 1, 1, lines, True) / 2
