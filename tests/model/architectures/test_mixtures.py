"""Families with mixtures of experts: which layers are mixtures, what is read from a checkpoint in each form and format,
and which operators take it. test_gpt_oss.py, test_qwen3_next.py and test_qwen3_5_moe.py have what only those have."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.pair import parameters
from bench.prediction.latency_model import GPUS, constants, forward
from swiftspec.backends.cpu import cpu
from swiftspec.backends.cpu.packed_weight_cache import PackedWeightCache
from swiftspec.backends.cuda import cuda
from swiftspec.backends.reference import reference
from swiftspec.backends.unfused import unfused
from swiftspec.builder.memory_estimate import MemoryEstimate
from swiftspec.builder.plan import Plan
from swiftspec.config import EngineConfig, PopulationConfig
from swiftspec.errors import UserError
from swiftspec.file_io import Fields
from swiftspec.lab.quantize import quantize
from swiftspec.llm_engine import LLMEngine
from swiftspec.model.architectures import architecture_of
from swiftspec.model.checkpoint_files import read_config
from swiftspec.model.config_json import parse_config
from swiftspec.model.loader import load_model
from swiftspec.model.shard import Shard
from swiftspec.model.spec import ExpertsSpec, MlpSpec, ModelSpec, SigmoidRouting
from swiftspec.params import SamplingParams
from tests.model.architectures.test_families import TOKENS, expected, logits
from tests.model.architectures.test_native_families import logits as native_logits
from tests.model.test_loader import change_config, quantise
from tests.support.cases import fast_first
from tests.support.ranks import Pool
from tests.support.thread_group import on_ranks
from tests.support.tiny_checkpoints import make_checkpoint, make_model, make_pair

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_experts": 8, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 40, "n_routed_experts": 8,
}  # fmt: skip
QWEN2, QWEN3, GLM = "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "Glm4MoeForCausalLM"
# sizes that the native operators need, and that ranks can share in groups of 32 inputs
INT4: dict[str, Any] = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 64, "moe_intermediate_size": 64}
SHARED: dict[str, dict[str, Any]] = {"qwen2_moe": {"shared_expert_intermediate_size": 96}}
DENSE = ("mlp.gate.", "shared_expert_gate")
GREEDY = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=0.9, seed=5)
native = pytest.mark.skipif(cpu.level() == "none", reason="there are no native operators here")


def spec(name: str, **fields: Any) -> ModelSpec:
    data = Fields(SIZES | {"architectures": [name]} | fields)
    return architecture_of(data).spec(data)


def test_which_layers_are_mixtures() -> None:
    def mixtures(name: str, **fields: Any) -> list[bool]:
        return [layer.mlp.experts is not None for layer in spec(name, **fields).layers]

    assert mixtures(QWEN3) == mixtures(QWEN2) == [True] * 4
    assert mixtures(QWEN3, decoder_sparse_step=2) == [False, True] * 2
    assert mixtures(QWEN3, mlp_only_layers=[0, 3]) == [False, True, True, False]
    assert mixtures(QWEN3, mlp_only_layers=None, decoder_sparse_step=3) == [False, False, True, False]
    assert mixtures(GLM) == [False, True, True, True]
    assert mixtures(GLM, first_k_dense_replace=3) == [False, False, False, True]
    sparse, dense = (layer.mlp for layer in spec(QWEN3, decoder_sparse_step=2).layers[1::-1])
    assert dense == MlpSpec(6144) and sparse == MlpSpec(16, experts=ExpertsSpec(8, 8, False))
    chosen = spec(QWEN3, norm_topk_prob=True, num_experts_per_tok=2).layers[0].mlp.experts
    assert chosen == ExpertsSpec(8, 2, True)
    renamed = {"num_experts": None, "num_local_experts": 16}
    assert spec(QWEN3, **renamed) == spec(QWEN3, num_experts=16), "transformers 5 renames the field"
    assert [layer.mlp for layer in spec(QWEN2, mlp_only_layers=[1]).layers[:2]] == [
        MlpSpec(16, experts=ExpertsSpec(8, 4, False, 40)), MlpSpec(5632),
    ]  # fmt: skip
    assert ExpertsSpec(8, 4, False, 40).router_rows == 9 and ExpertsSpec(8, 4, False).router_rows == 8
    groups = {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "routed_scaling_factor": 2.5}
    grouped = spec(GLM, **groups).layers[1].mlp.experts
    assert grouped == ExpertsSpec(8, 3, True, 16, False, SigmoidRouting(4, 2, 2.5))


def test_the_defaults_are_those_of_released_models() -> None:
    plain = {name: value for name, value in SIZES.items() if "expert" not in name and "moe" not in name}
    fields = Fields(plain | {"architectures": [QWEN2]})
    released = architecture_of(fields).spec(fields).layers[0]
    assert released.mlp == MlpSpec(1408, experts=ExpertsSpec(60, 4, False, 5632)) and released.attention.qkv_bias
    assert not spec(QWEN2, qkv_bias=False).layers[0].attention.qkv_bias
    fields = Fields(plain | {"architectures": [GLM]})
    released = architecture_of(fields).spec(fields).layers[1]
    assert released.mlp == MlpSpec(1408, experts=ExpertsSpec(128, 8, True, 1408, False, SigmoidRouting()))
    assert released.attention.rope.share == 0.5 and released.attention.qk_norm == "none"
    assert spec(GLM, use_qk_norm=True).layers[0].attention.qk_norm == "head"


def test_which_layers_have_a_window() -> None:
    def windows(name: str, **fields: Any) -> list[int | None]:
        return [layer.attention.window for layer in spec(name, sliding_window=9, **fields).layers]

    assert windows(QWEN3) == windows(QWEN2) == [None] * 4
    assert windows(QWEN3, use_sliding_window=True) == [9] * 4
    assert windows(QWEN2, use_sliding_window=True, max_window_layers=3) == [9, None, 9, None]
    assert windows(QWEN2, use_sliding_window=True, max_window_layers=2) == [9, None, None, None]


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        (QWEN3, {"num_experts_per_tok": 9}, "num_experts_per_tok 9 exceeds num_experts 8"),
        (QWEN3, {"num_experts": 0}, "num_experts"),
        (QWEN3, {"moe_intermediate_size": 0}, "moe_intermediate_size"),
        (QWEN3, {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        (QWEN3, {"mlp_only_layers": ["x"]}, "mlp_only_layers"),
        *[(QWEN2, {"shared_expert_intermediate_size": size}, "shared_expert_intermediate") for size in (0, None, "x")],
        (GLM, {"n_group": 3}, "n_group 3 and topk_group 1 do not fit 8 experts"),
        (GLM, {"n_group": 2, "topk_group": 3}, "n_group 2 and topk_group 3 do not fit 8 experts"),
        (GLM, {"n_group": 8, "topk_group": 4, "num_experts_per_tok": 4}, "n_group 8 and topk_group 4 do not fit"),
        (GLM, {"n_group": 2, "num_experts_per_tok": 5}, "num_experts_per_tok 5 exceeds the experts of topk_group 1"),
        (GLM, {"routed_scaling_factor": 0}, "routed_scaling_factor"),
        (GLM, {"first_k_dense_replace": -1}, "first_k_dense_replace"),
        (GLM, {"use_sliding_window": True}, "sliding window attention is not supported"),
    ],
)
def test_invalid_fields_are_refused(name: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        spec(name, **fields)


SPARSE = {"decoder_sparse_step": 2, "mlp_only_layers": []}
FORMS: dict[str, dict[str, Any]] = {  # of Qwen3-MoE, unless a family is named
    "each expert": {"norm_topk_prob": False, **SPARSE},
    "all experts": {"joined": True, **SPARSE},
    "a shared expert": {"family": "qwen2_moe", "norm_topk_prob": True},
    "windows": {"family": "qwen2_moe", "use_sliding_window": True, "sliding_window": 6},
    "gpt-oss": {"family": "gpt_oss"},
    "unequal parts": {"family": "gpt_oss", "num_attention_heads": 6, "head_dim": 8, "intermediate_size": 40},
    "all experts of a hybrid": {"family": "qwen3_5_moe_text", "joined": True},
    "one group": {"family": "glm4_moe", "n_group": 1, "topk_group": 1, "use_qk_norm": False},
    "raw scores": {"family": "glm4_moe", "norm_topk_prob": False, "first_k_dense_replace": 0, "joined": True},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("form", FORMS)
def test_logits_equal_those_of_transformers(tmp_path: Path, form: str) -> None:
    """On two and three ranks, which may divide the heads unequally, too. `joined`: the tensors of all experts in one,
    which transformers 5 writes on request."""
    shape = {"family": "qwen3_moe", **FORMS[form]}
    joined = shape.pop("joined", False)
    theirs = make_checkpoint(tmp_path, dtype=F64, **shape)
    if joined:
        theirs.save_pretrained(tmp_path, save_original_format=False)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert ("model.layers.1.mlp.experts.gate_up_proj" in names) == (joined or shape["family"] == "gpt_oss")
    want = expected(theirs, TOKENS)
    for ops in (reference, unfused):
        torch.testing.assert_close(logits(tmp_path, ops), want, rtol=0, atol=1e-9)
        size = 3 if ops is unfused and shape["family"] != "qwen3_5_moe_text" else 2
        ranks = on_ranks(size, lambda group, ops=ops: logits(tmp_path, ops, group))
        assert all(torch.equal(each, ranks[0]) for each in ranks)
        torch.testing.assert_close(ranks[0], want, rtol=0, atol=1e-9)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("family", "layout"),
    [("qwen3_moe", "awq"), ("qwen2_moe", "pack-quantized"), ("glm4_moe", "awq")],
)
def test_int4_experts(tmp_path: Path, family: str, layout: str) -> None:
    """Router and gate are dense. On two ranks each has half of every expert."""
    path, whole = tmp_path / "model", [70]
    make_checkpoint(path, family=family, dtype=F64, vocab=65, **INT4, **SHARED.get(family, {}))
    want = logits(quantise(path, layout, skip=DENSE), reference)
    for ops in (reference, unfused):
        torch.testing.assert_close(logits(path, ops), want, rtol=0, atol=1e-9)
    one, two = on_ranks(2, lambda group: logits(path, reference, group))
    assert torch.equal(one, two)
    torch.testing.assert_close(one, want, rtol=0, atol=1e-9)
    if cpu.level() == "none":
        return
    exact = native_logits(path, reference, F64, whole)
    one, two = on_ranks(2, lambda group: native_logits(path, cpu, F32, whole, group=group))
    assert torch.equal(one, two)
    for ours in (one, native_logits(path, cpu, F32, whole)):
        assert float((ours - exact).norm()) < 1e-5 * float(exact.norm())
    ours = native_logits(path, cpu, BF16, whole)
    assert torch.equal(native_logits(path, cpu, BF16, [30, *range(31, 50), 70]), ours)
    assert torch.equal(native_logits(path, cpu, BF16, whole, fused=False), ours)


@native
@pytest.mark.parametrize(
    ("family", "dense"),
    [("qwen3_moe", ()), ("qwen2_moe", ()), ("qwen2_moe", ("mlp.shared_expert.",)), ("glm4_moe", ())],
)
def test_packed_experts_are_mapped_at_the_next_start(tmp_path: Path, family: str, dense: tuple[str, ...]) -> None:
    """The shared expert has the format of the others or its own."""
    path, cached = tmp_path / "model", tmp_path / "cache"
    make_checkpoint(path, family=family, dtype=BF16, **INT4, **SHARED.get(family, {}))
    quantise(path, "awq", skip=(*DENSE, *dense))

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
        pairs = [(one.gate_up, other.gate_up), (one.down, other.down)]
        if hasattr(one, "router"):
            pairs.append((one.router, other.router))
            assert (one.correction is None) == (family != "glm4_moe")
            assert one.correction is None or torch.equal(one.correction, other.correction)
        if getattr(one, "shared", None) is not None:
            pairs += [(one.shared.gate_up, other.shared.gate_up), (one.shared.down, other.shared.down)]
            assert (one.shared.gate_up.scales is None) == bool(dense)
        assert all(torch.equal(mine.data, theirs.data) for mine, theirs in pairs)


@pytest.fixture(scope="module", params=fast_first(["glm4_moe", "qwen2_moe", "qwen3_moe"], 1))
def pair(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> tuple[Path, Path]:
    """With the sizes of the native operators."""
    shape = {**INT4, **SHARED.get(request.param, {})}
    return make_pair(tmp_path_factory.mktemp("pair"), family=request.param, tie=False, **shape)


@native
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_mode_on_the_native_operators(pair: tuple[Path, Path], dtype: str) -> None:
    """A draft and company do not change a text, greedy or with noise. Particles give the same text again."""
    options: dict[str, Any] = {"dtype": dtype, "max_model_len": 96}
    alone, serial = LLMEngine(pair[0], **options), LLMEngine(*pair, EngineConfig("serial"), **options)
    want = [alone.generate(TOKENS, sampling).token_ids for sampling in (GREEDY, SEEDED)]
    for sampling, text in zip((GREEDY, SEEDED), want, strict=True):
        answer = serial.generate(TOKENS, sampling)
        assert answer.token_ids == text and answer.stats.accepted > 5 and len(set(text)) > 5
    batch = LLMEngine(*pair, EngineConfig("serial", max_num_seqs=3), **options)
    kinds = [GREEDY, SEEDED, GREEDY, SEEDED]
    assert [each.token_ids for each in batch.generate_batch([TOKENS] * 4, kinds)] == 2 * want
    particles = EngineConfig("smc", population=PopulationConfig(particles=3, smc_draft_tokens=3))
    one, other = (LLMEngine(*pair, particles, **options).generate(TOKENS, SEEDED).token_ids for _ in range(2))
    assert one == other and len(one) == 48


@pytest.mark.slow
def test_ranks(pool: Pool, pair: tuple[Path, Path]) -> None:
    """A draft group beside the target group, and two ranks that share both models."""
    want = LLMEngine(pair[0], dtype=F64, max_model_len=96).generate(TOKENS, SEEDED).token_ids
    request = (TOKENS, {"temperature": 0.9, "seed": 5, "max_tokens": 48, "ignore_eos": True})
    for ranks, plan in ((2, {"mode": "async", "target_tp": 1, "draft_tp": 1}), (2, {"mode": "serial", "target_tp": 2})):
        answers = pool.run(
            ranks, "decode", target=str(pair[0]), draft=str(pair[1]), plan=plan, max_model_len=96, requests=[request]
        )[0]
        assert [answer["tokens"] for answer in answers] == [want]


@native
def test_the_native_text_is_that_of_transformers(pair: tuple[Path, Path], request: pytest.FixtureRequest) -> None:
    """In float32. A greedy text predicts itself."""
    family = request.node.callspec.params["pair"]
    theirs = make_model(family=family, dtype=F64, tie=False, seed=1, **INT4, **SHARED.get(family, {}))
    text = LLMEngine(pair[0], dtype="float32", max_model_len=96).generate(TOKENS, GREEDY).token_ids
    want = expected(theirs, [*TOKENS, *text]).argmax(-1).tolist()
    assert text == want[len(TOKENS) - 1 : -1] and len(set(text)) > 5


@pytest.mark.parametrize(
    ("family", "missing"),
    [
        ("qwen3_moe", "no mixture of experts (experts)"),
        ("qwen2_moe", "no mixture of experts (experts), no shared expert (shared_intermediate_size)"),
        (
            "glm4_moe",
            "no mixture of experts (experts), no shared expert (shared_intermediate_size), no choice of experts by"
            " sigmoid scores (sigmoid)",
        ),
        (
            "gpt_oss",
            "no sliding window (window), no attention sinks (sinks), no activation other than SiLU (activation), no"
            " mixture of experts (experts)",
        ),
    ],
)
def test_which_operators_take_it(tmp_path: Path, family: str, missing: str) -> None:
    make_checkpoint(tmp_path, family=family, hidden_size=128, head_dim=64, dtype=BF16)
    mixture = read_config(tmp_path).spec
    cpu.check_spec(mixture, BF16)
    with pytest.raises(UserError) as caught:
        cuda.check_spec(mixture, BF16)
    assert str(caught.value) == f"the CUDA operators have {missing}; use ops unfused"


def test_torchs_own_operators_replace_the_native_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="need experts whose sizes are multiples of 16, not 24"):
        cpu.check_spec(spec(QWEN3, head_dim=16, moe_intermediate_size=24), BF16)
    make_checkpoint(tmp_path, family="qwen3_moe", hidden_size=128, head_dim=64, dtype=BF16)
    lines: list[str] = []
    monkeypatch.setattr(cpu, "level", lambda: "none")
    Plan.create(tmp_path, None, EngineConfig("ar"), None, {"note": lines.append})
    assert lines == ["the target runs on torch's own operators: the CPU operators need x86-64 with AVX2, or aarch64"]


QWEN_GATE, BIAS = "model.layers.0.mlp.shared_expert_gate", "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.mark.parametrize(
    ("family", "changed", "message"),
    [
        ("qwen2_moe", {f"{QWEN_GATE}.weight": None}, r"shared_expert_gate\.weight"),
        ("qwen2_moe", {f"{QWEN_GATE}.bias": torch.zeros(1)}, r"expert_gate\.bias is not part of the architecture"),
        ("qwen2_moe", {f"{QWEN_GATE}.weight": torch.zeros(2, 32)}, r"shape \[2, 32\], config\.json implies \[1, 32\]"),
        ("glm4_moe", {BIAS: None}, r"e_score_correction_bias is missing"),
        ("glm4_moe", {BIAS: torch.zeros(3)}, r"shape \[3\], config\.json implies \[12\]"),
        ("glm4_moe", {"model.layers.4.eh_proj.weight": torch.zeros(2)}, r"layers\.4\.eh_proj\.weight is not part"),
    ],
)
def test_tensors_that_do_not_fit_take_one_line(
    tmp_path: Path, family: str, changed: dict[str, Tensor | None], message: str
) -> None:
    make_checkpoint(tmp_path, family=family, dtype=F64)
    file = tmp_path / "model.safetensors"
    save_file({name: tensor for name, tensor in {**load_file(file), **changed}.items() if tensor is not None}, file)
    with pytest.raises(UserError, match=message) as caught:
        logits(tmp_path, reference)
    assert "\n" not in str(caught.value)


def test_the_layer_of_multi_token_prediction_is_not_read(tmp_path: Path) -> None:
    want = expected(make_checkpoint(tmp_path, family="glm4_moe", dtype=F64), TOKENS)
    file, more = tmp_path / "model.safetensors", "model.layers.3"
    save_file({**load_file(file), f"{more}.eh_proj.weight": torch.zeros(2), f"{more}.x.weight": torch.ones(3)}, file)
    torch.testing.assert_close(logits(tmp_path, reference), want, rtol=0, atol=1e-9)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("quantised", [False, True], ids=["bf16", "awq"])
def test_the_memory_of_experts(tmp_path: Path, ranks: int, quantised: bool) -> None:
    """torch's operators keep experts dense. The memory estimate is that of the tensors that a rank packs."""
    make_checkpoint(tmp_path / "model", family="qwen3_moe", dtype=BF16, **INT4)
    if quantised:
        quantise(tmp_path / "model", "awq", skip=DENSE)
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


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_memory_of_the_shared_expert(tmp_path: Path, ranks: int) -> None:
    """The matrices of the shared expert count, as each rank has them."""
    needs, packed = list[float](), list[float]()
    for size in (32, 96):
        path = tmp_path / str(size)
        make_checkpoint(path, family="qwen2_moe", dtype=BF16, **INT4, shared_expert_intermediate_size=size)
        needs.append(MemoryEstimate(read_config(path), BF16, 64, ranks, ops=unfused).weights)
        rows = 16 * math.ceil(size / 16 / ranks)  # of the shared expert on each rank
        packed.append(2 * 2 * 3 * 64 * rows)  # bytes of three matrices in two layers
    assert needs[1] - needs[0] == packed[1] - packed[0] > 0


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
def test_quantising_leaves_the_router_dense(tmp_path: Path, family: str) -> None:
    make_checkpoint(tmp_path / "model", family=family, dtype=BF16, **INT4)
    quantize(tmp_path / "model", tmp_path / "int4", 32)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "int4"))
    assert "model.layers.2.mlp.experts.5.down_proj.qweight" in after
    gate = "model.layers.2.mlp.gate"
    for name in (f"{gate}.weight", *([f"{gate}.e_score_correction_bias"] if family == "glm4_moe" else [])):
        assert torch.equal(after[name].float(), before[name].float())
    assert logits(tmp_path / "int4", reference).isfinite().all()
    change_config(tmp_path / "int4", num_local_experts=5, n_routed_experts=5, num_experts=5, n_group=1, topk_group=1)
    with pytest.raises(UserError, match=r"mlp\.gate\.weight has shape \[(6|12), 64\], config\.json implies \[5, 64\]"):
        logits(tmp_path / "int4", reference)


LARGE: dict[str, tuple[str, dict[str, Any], float]] = {  # name, sizes, billions of parameters
    "Qwen3-30B-A3B": (QWEN3, {
        "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "head_dim": 128, "num_experts": 128,
        "num_key_value_heads": 4, "moe_intermediate_size": 768, "vocab_size": 151936,
    }, 30.5),
    "Qwen1.5-MoE-A2.7B": (QWEN2, {
        "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16,
        "num_experts": 60, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
        "vocab_size": 151936,
    }, 14.3),
    "GLM-4.5-Air": (GLM, {
        "hidden_size": 4096, "num_hidden_layers": 46, "num_attention_heads": 96, "num_key_value_heads": 8,
        "head_dim": 128, "n_routed_experts": 128, "moe_intermediate_size": 1408, "vocab_size": 151552,
    }, 106.8),
}  # fmt: skip


@pytest.mark.parametrize("model", LARGE)
def test_predictions_count_the_experts_that_rows_use(model: str) -> None:
    """Most of a forward's time is that of its experts."""
    name, sizes, billions = LARGE[model]
    config = parse_config(SIZES | {"architectures": [name]} | sizes)
    assert parameters(config) == pytest.approx(billions * 1e9, rel=0.005)
    lines = constants(GPUS["h100"])[0]
    one, eight, all_used = (forward(config, 1, rows, lines, True) for rows in (1, 8, 64))
    assert 1.2 * one < eight < 8 * one and eight < all_used < 16 * one
    if name == QWEN2:
        without = parse_config(SIZES | {"architectures": [name]} | sizes | {"shared_expert_intermediate_size": 16})
        assert 0 < one - forward(without, 1, 1, lines, True) < one / 2
