"""The forward compared with transformers, and with itself in other batches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from swiftspec.backends.reference import reference
from swiftspec.cache.kv import KVCache
from swiftspec.cache.model_cache import ModelCache
from swiftspec.model.batch import Batch
from swiftspec.model.loader import load_model
from swiftspec.model.transformer import Transformer
from tests.support.tiny_checkpoints import FAMILIES, ROPES, chain, make_checkpoint, make_model

CAPACITY = 96
TOKENS = [5, 17, 3, 29, 11, 8, 2, 30, 44, 1, 7, 9, 60, 3, 3, 21, 50, 33, 4, 6]


def load(path: Path, dtype: torch.dtype = torch.float64) -> Transformer:
    return load_model(path, dtype=dtype, device="cpu", ops=reference, max_positions=128)


def new_cache(model: Transformer, sequences: int = 1) -> ModelCache:
    mixer = model.spec.layer.attention
    size = (len(model.spec.layers), mixer.num_kv_heads, mixer.head_dim, CAPACITY)
    return ModelCache(KVCache(*size, reference.make_slot_mover, dtype=model.dtype), sequences)


def logits(model: Transformer, batch: Batch, cache: ModelCache) -> Tensor:
    out = model.forward(batch, cache).logits
    assert out is not None
    return out


def alone(model: Transformer, tokens: Sequence[int]) -> Tensor:
    """Logits of an ordinary causal forward."""
    return logits(model, chain(list(tokens)), new_cache(model))


CASES: list[dict[str, Any]] = [
    *({"family": family, "rope": ROPES[rope]} for family in FAMILIES for rope in ROPES),
    {"family": "llama", "tie": True},
    {"family": "qwen2", "tie": True, "vocab": 152},
    {"family": "llama", "attention_bias": True, "mlp_bias": True},
    {"family": "llama", "num_key_value_heads": 4},
    {"family": "llama", "num_key_value_heads": 1, "head_dim": 16},
    {"family": "qwen2", "num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 48, "vocab": 65},
    {"family": "llama", "rms_norm_eps": 0.1, "layers": 3},
    {"family": "qwen3", "tie": True, "attention_bias": True, "head_dim": 16},
    {"family": "qwen3", "num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 8, "rms_norm_eps": 0.1},
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(v) for v in case.values())[:60])
def test_float64_equals_transformers(tmp_path: Path, case: dict[str, Any]) -> None:
    theirs = make_checkpoint(tmp_path, dtype=torch.float64, **case)
    with torch.no_grad():
        want = theirs(torch.tensor([TOKENS])).logits[0]
    got = alone(load(tmp_path), TOKENS)
    assert got.dtype == torch.float64 and got.shape == want.shape
    # transformers computes its norms in float32 whatever the model's dtype, and these weights magnify that
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)


def test_large_positions_equal_transformers(tmp_path: Path) -> None:
    theirs = make_checkpoint(tmp_path, rope=ROPES["llama3"], dtype=torch.float64)
    tokens = [(7 * i * i + i) % 64 for i in range(90)]
    with torch.no_grad():
        want = theirs(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(alone(load(tmp_path), tokens), want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_dtypes_are_close(tmp_path: Path, dtype: torch.dtype) -> None:
    """About as close to the float64 model as transformers is in the same dtype."""
    theirs = make_checkpoint(tmp_path, dtype=torch.float64, family="qwen2")
    narrow = make_model(dtype=dtype, family="qwen2")
    with torch.no_grad():
        exact = theirs(torch.tensor([TOKENS])).logits[0]
        rounded = narrow(torch.tensor([TOKENS])).logits[0].double()
    got = alone(load(tmp_path, dtype), TOKENS)
    assert got.dtype == torch.float32
    assert (got - exact).norm() <= 1.5 * (rounded - exact).norm()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path, dtype=torch.float64, family="qwen2", rope=ROPES["llama3"])
    return load(path)


def test_chunked_prefill_equals_whole_prefill(model: Transformer) -> None:
    want, cache = alone(model, TOKENS), new_cache(model)
    assert model.forward(chain(TOKENS[:7]), cache, head=False) == (None, None)
    got = [logits(model, chain(TOKENS[a:b], a), cache) for a, b in ((7, 8), (8, 15), (15, 20))]
    torch.testing.assert_close(torch.cat(got), want[7:])


def test_logits_are_plain_tensors(model: Transformer) -> None:
    """A sampler may write to them outside inference mode."""
    assert not alone(model, TOKENS).add_(1).is_inference()


def tree(parents: Sequence[int], tokens: Sequence[int], start: int, pad: int = 0, done: int = 0) -> Batch:
    """The nodes of a tree from number `done` on; their slots begin at `start`."""
    count, sees = len(parents), torch.eye(len(parents), dtype=torch.bool)
    depth = torch.zeros(count, dtype=torch.int64)
    for node, parent in enumerate(parents):
        if parent >= 0:
            sees[node] |= sees[parent]
            depth[node] = depth[parent] + 1
    mask = torch.cat((torch.ones(count, pad, dtype=torch.bool), sees), 1)
    rest = slice(done, count)
    return Batch(
        tokens=torch.tensor(tokens)[rest],
        positions=(start + depth)[rest],
        slots=torch.arange(start, start + count)[rest],
        mask=mask[rest],
        sequence=torch.zeros(count - done, dtype=torch.int64),
        kv_len=torch.tensor([start + count]),
    )


def paths(parents: Sequence[int], tokens: Sequence[int]) -> list[list[int]]:
    """The tokens from the root to each node."""
    found: list[list[int]] = []
    for node, parent in enumerate(parents):
        found.append([*(found[parent] if parent >= 0 else []), tokens[node]])
    return found


@pytest.mark.parametrize("seed", range(6))
def test_tree_rows_equal_their_paths(model: Transformer, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    count = 12
    parents = [-1, *(int(torch.randint(0, i, (), generator=random)) for i in range(1, count))]
    tokens = torch.randint(0, 64, (count,), generator=random).tolist()
    prompt, cache = TOKENS[:9], new_cache(model)
    model.forward(chain(prompt), cache, head=False)
    done = 4 if seed % 2 else 0  # in two steps: the second's rows see the first's slots
    pad = seed if seed < 4 else 30  # a window that is wider than the slots in use is cut
    got = [logits(model, tree(parents[:done], tokens[:done], len(prompt)), cache)] if done else []
    batch = tree(parents, tokens, len(prompt), pad, done)
    got.append(logits(model, batch, cache))
    for row, path in zip(torch.cat(got), paths(parents, tokens)):
        torch.testing.assert_close(row, alone(model, prompt + path)[-1])


def test_two_sequences_in_one_batch(model: Transformer) -> None:
    first, second = TOKENS[:11], TOKENS[8:]
    cache = new_cache(model, sequences=2)
    model.forward(chain(first[:6], sequence=0, sequences=2), cache, head=False)
    model.forward(chain(second[:4], sequence=1, sequences=2), cache, head=False)
    a, b = chain(first[6:], 6), chain(second[4:], 4)
    order = torch.tensor([0, 5, 6, 1, 7, 2, 8, 9, 3, 10, 4, 11, 12])  # interleaved, each in its own order
    width = max(a.mask.shape[1], b.mask.shape[1])

    def widen(mask: Tensor) -> Tensor:
        return torch.cat((torch.ones(mask.shape[0], width - mask.shape[1], dtype=torch.bool), mask), 1)

    both = Batch(
        tokens=torch.cat((a.tokens, b.tokens))[order],
        positions=torch.cat((a.positions, b.positions))[order],
        slots=torch.cat((a.slots, b.slots))[order],
        mask=torch.cat((widen(a.mask), widen(b.mask)))[order],
        sequence=torch.cat((torch.zeros(len(a)), torch.ones(len(b)))).long()[order],
        kv_len=torch.tensor([len(first), len(second)]),
    )
    got = logits(model, both, cache)
    want = torch.cat((alone(model, first)[6:], alone(model, second)[4:]))[order]
    torch.testing.assert_close(got, want)


def test_slots_out_of_order(model: Transformer) -> None:
    """Rows may have any order; the mask is by slot."""
    cache, batch = new_cache(model), chain(TOKENS)
    order = torch.randperm(len(TOKENS), generator=torch.Generator().manual_seed(0))
    rows = (x[order] for x in (batch.tokens, batch.positions, batch.slots, batch.mask, batch.sequence))
    got = logits(model, Batch(*rows, kv_len=batch.kv_len), cache)
    torch.testing.assert_close(got, alone(model, TOKENS)[order])
