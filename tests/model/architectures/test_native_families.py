"""Families on the native CPU operators: as accurate as the reference, a row's bits alone as in a batch, and the fused
forward bitwise equal to its operators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from swiftspec.backends.cpu import cpu as host
from swiftspec.backends.reference import reference
from swiftspec.cache.delta import DeltaCache
from swiftspec.cache.kv import KVCache
from swiftspec.cache.model_cache import ModelCache
from swiftspec.config import EngineConfig
from swiftspec.llm_engine import LLMEngine
from swiftspec.model.loader import load_model
from swiftspec.model.tensor_parallel import TensorParallelGroup
from swiftspec.model.transformer import Transformer
from swiftspec.params import SamplingParams
from tests.support.cases import fast_first
from tests.support.thread_group import on_ranks
from tests.support.tiny_checkpoints import ALL_FAMILIES, HYBRIDS, chain, make_checkpoint, make_pair

pytestmark = pytest.mark.skipif(host.level() == "none", reason="there are no native operators here")
CAPACITY = 96
TOKENS = [(7 * i * i + i) % 64 for i in range(70)]
# the widths that the native operators need; windows that end in the middle of a block of 16 keys
SHAPE: dict[str, Any] = {"head_dim": 16, "vocab": 65, "dtype": torch.float32, "seed": 4}
NATIVE = [family for family in ALL_FAMILIES if family != "arcee"]  # which has another activation
WINDOWS = {
    "mistral": 21, "ministral": 21, "cwm": 21, "phi3": 37, "gemma2": 19, "gemma3_text": 19, "gpt_oss": 23, "olmo3": 18,
}  # fmt: skip


def checkpoint(path: Path, family: str, **more: Any) -> Path:
    """`family` with these sizes; Phi-3 without longrope, whose factors are for another width."""
    shape = SHAPE | more | ({"sliding_window": WINDOWS[family]} if family in WINDOWS else {})
    if family.startswith("olmo"):  # whose head dimension is that of the hidden size
        shape["hidden_size"] = 64
    if family in HYBRIDS:
        shape["linear_key_head_dim"] = 16
    if family == "glm4_moe":  # in bfloat16 a near-tie of experts is broken either way, by the reference as often
        shape["seed"] = 1
    if family == "gemma4_text":
        shape["global_head_dim"] = 32
    if family == "phi3":
        shape["rope"] = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
    make_checkpoint(path, family=family, **shape)
    return path


def new_cache(model: Transformer, ops: Any) -> ModelCache:
    kv, *further = (KVCache(*shape, CAPACITY, ops.make_slot_mover, dtype=model.dtype) for shape in model.cache_shapes)
    delta = None
    if model.delta_shape is not None:
        delta = DeltaCache(model.delta_shape, CAPACITY, ops, dtype=model.stream_dtype)
    return ModelCache(kv, further=further, delta=delta)


def logits(
    path: Path, ops: Any, dtype: torch.dtype, chunks: list[int], *, fused: bool = True,
    group: TensorParallelGroup | None = None,
) -> Tensor:  # fmt: skip
    """Logits of TOKENS, in chunks that end at these positions."""
    model = load_model(path, dtype=dtype, ops=ops, max_positions=CAPACITY, group=group)
    if fused and ops is host and group is None:
        assert model.fused is not None
    if not fused:
        model.fused = None
    cache, rows, first = new_cache(model, ops), list[Tensor](), 0
    for last in chunks:
        out = model.forward(chain(TOKENS[first:last], first), cache).logits
        assert out is not None
        rows.append(out)
        first = last
    local = torch.cat(rows)
    return local if group is None else torch.cat(group.all_gather(local).unbind(0), -1)[:, : model.spec.vocab_size]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", NATIVE)
def test_a_model_is_as_accurate_as_on_the_reference_and_its_rows_are_independent(tmp_path: Path, family: str) -> None:
    path, whole = checkpoint(tmp_path, family), [70]
    exact = logits(path, reference, torch.float64, whole)
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 0.3)):
        ours = logits(path, host, dtype, whole)
        theirs = logits(path, reference, dtype, whole)
        error, other = float((ours - exact).norm()), float((theirs - exact).norm())
        assert error < 1.5 * other + 1e-5 and error < bound * float(exact.norm())
        singly = logits(path, host, dtype, [30, *range(31, 50), 70])
        assert torch.equal(singly, ours), "a row alone has the bits that it has in a batch"
        assert torch.equal(logits(path, host, dtype, whole, fused=False), ours), "so have the operators, one by one"


@pytest.mark.parametrize("family", ["granite", "gemma3_text", "ministral3", "olmo2", "gpt_oss"])
def test_ranks_sum_before_the_norm_and_the_multiplier(tmp_path: Path, family: str) -> None:
    path = checkpoint(tmp_path, family)
    exact = logits(path, reference, torch.float64, [70])
    one, two = on_ranks(2, lambda group: logits(path, host, torch.float32, [70], group=group))
    assert torch.equal(one, two) and float((one - exact).norm()) < 1e-5 * float(exact.norm())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", fast_first(["gemma3_text", "qwen3", *NATIVE[3:]], 2))
def test_a_draft_does_not_change_the_text(tmp_path: Path, family: str, dtype: str) -> None:
    """Token by token, also in bfloat16 with its many near-ties, with trees inside and across windows."""
    rope = {"rope": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}}
    shape: dict[str, Any] = {"head_dim": 16, "tie": False, **(rope if family == "phi3" else {})}
    if family.startswith("olmo"):
        shape["hidden_size"] = 64
    if family in HYBRIDS:
        shape["linear_key_head_dim"] = 16
    target, draft = make_pair(tmp_path, family=family, **shape)
    options: dict[str, Any] = {"dtype": dtype, "max_model_len": 128}
    for temperature in (0.0, 0.9):
        sampling = SamplingParams(temperature=temperature, seed=5, max_tokens=64, ignore_eos=True)
        want = LLMEngine(target, **options).generate(TOKENS[:20], sampling).token_ids
        answer = LLMEngine(target, draft, EngineConfig("serial"), **options).generate(TOKENS[:20], sampling)
        assert answer.token_ids == want and answer.stats.accepted > 5 and len(set(want)) > 5
