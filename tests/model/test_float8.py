"""Keys and values in float8: rescaled weights compute the same function, no key overflows, and every mode keeps its
text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.data.heldout import DEMO
from swiftspec.backends.reference import reference
from swiftspec.config import EngineConfig
from swiftspec.errors import UserError
from swiftspec.llm_engine import LLMEngine
from swiftspec.model.checkpoint import Checkpoint
from swiftspec.model.checkpoint_files import open_tensors, read_config
from swiftspec.model.float8 import FLOAT8, LARGEST, Fp8KVScale
from swiftspec.model.loader import load_model
from swiftspec.params import SamplingParams
from swiftspec.runtime.runner import Runner
from tests.support.cases import fast_first
from tests.support.roles import make_runner, scheduler_of, verifier_of
from tests.support.tiny_checkpoints import make_checkpoint, make_pair

GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=0.9, seed=7)
GUIDED = replace(SEEDED, guidance_scale=2.0, negative_prompt_ids=(7, 30, 12))
PROMPTS = [[5, 17, 3, 29, 11], list(range(1, 35)), [5, 17, 3, 29, 11, 8, 2]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_pair(tmp_path_factory.mktemp("pair"), vocab=40, seed=3)


def runner_of(path: Path, dtype: torch.dtype, *, moved: bool) -> Runner:
    """A runner with a cache of the model's own dtype."""
    model = load_model(path, dtype=dtype, ops=reference, max_positions=64, cache_dtype=FLOAT8 if moved else None)
    model.cache_dtype = dtype
    return make_runner(model, reference, context=48, tree_slots=8)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", ["int4", "qwen2", "qwen3"])
def test_rescaled_weights_give_bitwise_identical_logits(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    """For the int4 demo target, a model with biases, and one whose norms of query and key heads cancel the scale of a
    projection."""
    path = DEMO / "target" if family == "int4" else tmp_path
    if family != "int4":
        make_checkpoint(path, family=family, dtype=torch.bfloat16)
    tokens = torch.randint(3, 64, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    plain, moved = (runner_of(path, dtype, moved=moved) for moved in (False, True))
    assert torch.equal(*(runner.logits(runner.chain_batch(tokens)) for runner in (plain, moved)))
    for ours, theirs in ((moved.cache.kv.k, plain.cache.kv.k), (moved.cache.kv.v, plain.cache.kv.v)):
        layers = [a[a != 0].double() / b[b != 0].double() for a, b in zip(ours, theirs, strict=True)]
        assert all(bool((ratio == ratio[0]).all()) and float(ratio[0].log2()).is_integer() for ratio in layers)
        assert 1 < float(ours.abs().max()) <= LARGEST


def test_no_key_or_value_can_overflow(tmp_path: Path) -> None:
    """The largest rows that a norm can output come near the bound, but not beyond it."""
    make_checkpoint(tmp_path, family="qwen2", dtype=torch.float32)
    spec = read_config(tmp_path).spec
    weights, mixer = Checkpoint(spec, open_tensors(tmp_path)).read(), spec.layer.attention
    for read in Fp8KVScale(mixer.num_heads, mixer.num_kv_heads, mixer.head_dim).of_weights(weights).layers:
        layer = read()
        assert layer.qkv.bias is not None and layer.input_norm is not None
        matrix = (layer.qkv.dequantize(torch.float32) * layer.input_norm)[mixer.q_size :]
        worst = matrix / matrix.norm(dim=1, keepdim=True) * spec.hidden_size**0.5  # parallel to each output's weights
        out = torch.cat((worst, -worst)) @ matrix.T + layer.qkv.bias[mixer.q_size :]
        keys, values = out.view(-1, 2, mixer.num_kv_heads, 2, mixer.head_dim // 2).unbind(1)
        assert LARGEST / 4 < float(keys.norm(dim=2).max()) <= LARGEST
        assert LARGEST / 4 < float(values.abs().max()) <= LARGEST


def test_no_key_with_a_norm_can_overflow(tmp_path: Path) -> None:
    """A head with all its length in the pair with the largest weight, rotated onto one element, comes near the
    bound."""
    make_checkpoint(tmp_path, family="qwen3", dtype=torch.float32)
    spec = read_config(tmp_path).spec
    weights, mixer = Checkpoint(spec, open_tensors(tmp_path)).read(), spec.layer.attention
    scale = Fp8KVScale(mixer.num_heads, mixer.num_kv_heads, mixer.head_dim)
    for plain, read in zip(weights.layers, scale.of_weights(weights).layers):
        before, after = plain(), read()
        assert before.q_norm is not None and before.k_norm is not None
        assert after.q_norm is not None and after.k_norm is not None
        assert torch.equal(after.q_norm * after.k_norm, before.q_norm * before.k_norm)
        rows = slice(0, mixer.q_size + mixer.kv_size)  # the norms would cancel a scale of these
        assert torch.equal(after.qkv.dequantize(torch.float32)[rows], before.qkv.dequantize(torch.float32)[rows])
        largest = mixer.head_dim**0.5 * float(after.k_norm.abs().max())
        assert LARGEST / 4 < largest <= LARGEST


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan", fast_first([EngineConfig("serial"), EngineConfig("serial", verify_batch=4, draft_leaves=2)], 1)
)
@pytest.mark.parametrize("ops", fast_first(["reference", "unfused"], 1))
def test_tree_decoding_equals_autoregressive_decoding(pair: tuple[Path, Path], ops: str, plan: EngineConfig) -> None:
    """With the same cache: whole requests, requests that continue from a cached prefix, and guided ones."""
    options = {"dtype": torch.float64, "max_model_len": 128, "ops": ops, "kv_cache_dtype": "fp8"}
    plain, tree = LLMEngine(pair[0], **options), LLMEngine(*pair, plan, **options)  # pyright: ignore[reportArgumentType]
    assert verifier_of(tree).runner.cache.kv.k.dtype == FLOAT8
    accepted = 0
    for sampling in (GREEDY, SEEDED, GUIDED):
        for prompt in PROMPTS:
            answer = tree.generate(prompt, sampling)
            assert answer.token_ids == plain.generate(prompt, sampling).token_ids
            accepted += answer.stats.accepted
    assert accepted > 20
    exact = LLMEngine(pair[0], dtype=torch.float64, max_model_len=128, ops="reference")
    assert any(exact.generate(p, GREEDY).token_ids != plain.generate(p, GREEDY).token_ids for p in PROMPTS)


def test_particles_fan_out_over_float8(pair: tuple[Path, Path]) -> None:
    """The same text for the same seed, after any earlier requests."""
    plan = EngineConfig("smc")
    llm, other = (LLMEngine(*pair, plan, dtype=torch.float64, ops="reference", kv_cache_dtype="fp8") for _ in range(2))
    assert scheduler_of(llm).target.cache.kv.v.dtype == FLOAT8
    other.generate(PROMPTS[1], replace(SEEDED, seed=1))
    assert llm.generate(PROMPTS[0], SEEDED).token_ids == other.generate(PROMPTS[0], SEEDED).token_ids


def test_float8_is_refused_where_it_is_not_supported(pair: tuple[Path, Path]) -> None:
    with pytest.raises(UserError, match="with the native operators of a CPU; remove it, or use ops reference"):
        LLMEngine(pair[0], kv_cache_dtype="fp8")
    with pytest.raises(UserError, match="kv_cache_dtype must be one of auto, fp8, not"):
        LLMEngine(pair[0], kv_cache_dtype="fp4")  # pyright: ignore[reportArgumentType]
