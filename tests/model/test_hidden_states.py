"""Hidden states of chosen layers as part of a forward's output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from swiftspec import _C
from swiftspec.backends.cpu import cpu as host
from swiftspec.backends.reference import reference
from swiftspec.cache.kv import KVCache
from swiftspec.cache.model_cache import ModelCache
from swiftspec.model.batch import Batch
from swiftspec.model.loader import load_model
from tests.support.tiny_checkpoints import chain, make_checkpoint

TOKENS = [5, 17, 3, 29, 11, 8, 2, 30, 44, 1, 7, 9]
LAYERS = 3


def hidden_of(model: Any, batches: list[Batch], ops: Any = reference, sequences: int = 1) -> Tensor:
    """The hidden states of all rows of some forwards over one cache; the last forward also runs the LM head."""
    kv = KVCache(LAYERS, model.kv_heads, model.cache_shapes[0][2], 64, ops.make_slot_mover, dtype=model.dtype)
    cache = ModelCache(kv, sequences)
    outputs = [model.forward(batch, cache, head=batch is batches[-1]) for batch in batches]
    assert [output.logits is None for output in outputs[:-1]] == [True] * (len(batches) - 1)
    return torch.cat([output.hidden for output in outputs])


def test_float64_equals_transformers(tmp_path: Path) -> None:
    """After each layer; transformers returns the last layer's only after the final norm."""
    theirs = make_checkpoint(tmp_path, dtype=torch.float64, layers=LAYERS)
    with torch.no_grad():
        want = theirs.model(torch.tensor([TOKENS]), output_hidden_states=True).hidden_states
    model = load_model(tmp_path, dtype=torch.float64, ops=reference, max_positions=64, hidden_layers=(0, 1, 2))
    got = hidden_of(model, [chain(TOKENS[:5]), chain(TOKENS[5:], 5)])
    assert got.shape == (len(TOKENS), 3, 32) and got.dtype == torch.float64
    for layer in (0, 1):
        torch.testing.assert_close(got[:, layer], want[layer + 1][0], rtol=0, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(theirs.model.norm(got[:, 2]), want[3][0], rtol=0, atol=1e-4)
    some = load_model(tmp_path, dtype=torch.float64, ops=reference, max_positions=64, hidden_layers=(2,))
    assert torch.equal(hidden_of(some, [chain(TOKENS[:5]), chain(TOKENS[5:], 5)]), got[:, 2:])
    assert not got.add_(1).is_inference()


def interleaved() -> list[Batch]:
    """A prefill, a chain of two sequences whose rows alternate, and a tree of two nodes below the same slot."""
    sequence = torch.arange(8) % 2
    rows = torch.arange(8) // 2
    mask = torch.ones(4, 4, dtype=torch.bool).tril()[rows]
    two = Batch(torch.tensor(TOKENS[:8]), 6 + rows, 6 + rows, mask, sequence, torch.tensor([10, 10]))
    prompts = [chain(TOKENS[:6], sequence=each, sequences=2) for each in (0, 1)]
    where, own = torch.tensor([10, 11]), torch.eye(2, dtype=torch.bool)
    siblings = Batch(
        torch.tensor([4, 9]), torch.tensor([10, 10]), where, own, torch.tensor([1, 1]), torch.tensor([10, 12])
    )
    return [*prompts, two, siblings]


@pytest.mark.skipif(_C.level() == "none", reason="this CPU has no AVX2")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_native_forward_equals_its_operators(tmp_path: Path, dtype: torch.dtype) -> None:
    """Bitwise, as its logits do."""
    make_checkpoint(tmp_path, layers=LAYERS, hidden_size=64, dtype=torch.float32)
    native, stepped = (
        load_model(tmp_path, dtype=dtype, ops=host, max_positions=64, hidden_layers=(0, 2)) for _ in range(2)
    )
    stepped.fused = None
    assert native.fused is not None
    got = hidden_of(native, interleaved(), host, 2)
    assert got.dtype == torch.float32 and torch.equal(got, hidden_of(stepped, interleaved(), host, 2))
    with pytest.raises(ValueError, match="fewer rows"):
        native.fused.hidden_states(3)  # the last forward had two rows


def test_without_hidden_layers_nothing_is_kept(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, layers=LAYERS, hidden_size=64, dtype=torch.float32)
    backends: list[Any] = [reference] if _C.level() == "none" else [reference, host]
    for ops in backends:
        model = load_model(tmp_path, dtype=torch.float32, ops=ops, max_positions=64)
        cache = ModelCache(KVCache(LAYERS, model.kv_heads, model.cache_shapes[0][2], 64, ops.make_slot_mover))
        output = model.forward(chain(TOKENS), cache)
        assert output.logits is not None and output.hidden is None
        if model.fused is not None:
            assert model.fused.hidden_states(1) is None
            with pytest.raises(ValueError, match="fewer rows"):
                model.fused._native.hidden_states(torch.empty(1, 0, 64))


@pytest.mark.parametrize("layers", [(3,), (-1,), (1, 0), (1, 1)])
def test_layers_that_the_model_lacks_are_refused(tmp_path: Path, layers: tuple[int, ...]) -> None:
    make_checkpoint(tmp_path, layers=LAYERS)
    with pytest.raises(ValueError, match="ascending layers below 3"):
        load_model(tmp_path, ops=reference, max_positions=64, hidden_layers=layers)
