"""Cache truth for delta layers: after any sequence of prefills, expansions, commits, re-roots and compactions, the
folded state, every live slot and the output of every row equal a recomputation of the recurrence, token by token, on
the reference operators and on those of the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from swiftspec.backends.cpu import cpu
from swiftspec.backends.reference import reference
from swiftspec.cache.delta import FOLD_POSITIONS, DeltaCache, fold_point
from swiftspec.cache.kv import KVCache
from swiftspec.cache.model_cache import ModelCache
from swiftspec.model.batch import Batch
from swiftspec.model.packed_model import DeltaShape, PackedDelta
from tests.support.cases import examples

SHAPE = DeltaShape(layers=2, k_heads=2, v_heads=4, k_head_dim=16, v_head_dim=16, conv_size=128, conv_width=4)
TOKENS = 4  # few, so that siblings often have the same token
CAPACITY, SLOTS = 400, 190
POISON = 1e4  # in every slot that is free


def drawn(*size: int, seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


PROJECTED = drawn(SHAPE.layers, TOKENS, SHAPE.conv_size + SHAPE.v_heads * SHAPE.v_head_dim, seed=1)
RATES = drawn(SHAPE.layers, TOKENS, 2 * SHAPE.v_heads, seed=2)
WEIGHTS = [
    PackedDelta(
        rates=None,
        conv=drawn(SHAPE.conv_width, SHAPE.conv_size, seed=3 + layer),
        decay_factor=-drawn(SHAPE.v_heads, seed=5 + layer, scale=0.5).exp() / 20,  # a state that outlives two folds
        decay_bias=drawn(SHAPE.v_heads, seed=7 + layer),
        norm=reference.pack_norm(1 + drawn(SHAPE.v_head_dim, seed=9, scale=0.1), 1e-6, torch.float64, "cpu"),
    )
    for layer in range(SHAPE.layers)
]
native = pytest.mark.skipif(cpu.level() == "none", reason="there are no native operators here")
OPS = [reference, pytest.param(cpu, marks=native)]


def weights_in(ops: Any, dtype: torch.dtype) -> list[PackedDelta]:
    """WEIGHTS for a model of this dtype."""
    wide = torch.promote_types(dtype, torch.float32)
    return [
        PackedDelta(
            None, w.conv.to(wide), w.decay_factor.to(wide), w.decay_bias.to(wide),
            ops.pack_norm(w.norm.weight.to(dtype), 1e-6, dtype, "cpu"),
        )
        for w in WEIGHTS
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Step:
    """What the recurrence of one layer computes for the last token of a text."""

    state: Tensor
    key: Tensor
    update: Tensor
    decay: Tensor
    conv_input: Tensor
    output: Tensor


class Recurrence:
    """The gated delta rule of a text, one token at a time."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], list[Step]] = {}

    def steps(self, text: tuple[int, ...]) -> list[Step]:
        """By layer, for the last token of a text."""
        missing = len(text)
        while missing > 1 and text[: missing - 1] not in self._known:
            missing -= 1
        for end in range(missing, len(text) + 1):
            if text[:end] not in self._known:
                self._known[text[:end]] = [self._step(layer, text[:end]) for layer in range(SHAPE.layers)]
        return self._known[text]

    def state(self, layer: int, text: tuple[int, ...]) -> Tensor:
        if not text:
            return torch.zeros(SHAPE.v_heads, SHAPE.k_head_dim, SHAPE.v_head_dim, dtype=torch.float64)
        return self.steps(text)[layer].state

    def _step(self, layer: int, text: tuple[int, ...]) -> Step:
        w, token, size = WEIGHTS[layer], text[-1], SHAPE.k_heads * SHAPE.k_head_dim
        channels = PROJECTED[layer, :, : SHAPE.conv_size]
        last = torch.zeros(SHAPE.conv_width, SHAPE.conv_size, dtype=torch.float64)
        count = min(SHAPE.conv_width, len(text))
        last[SHAPE.conv_width - count :] = channels[list(text[-count:])]
        mixed = torch.nn.functional.silu((w.conv * last).sum(0))
        q, k, v = mixed.split((size, size, SHAPE.conv_size - 2 * size))
        q, k = (
            each.view(SHAPE.k_heads, -1) / (each.view(SHAPE.k_heads, -1).square().sum(1, True) + 1e-6).sqrt()
            for each in (q, k)
        )
        group = SHAPE.v_heads // SHAPE.k_heads
        queries, keys = (each.repeat_interleave(group, 0) for each in (q * SHAPE.k_head_dim**-0.5, k))
        rate, decay = RATES[layer, token].chunk(2)
        g = torch.nn.functional.softplus(decay + w.decay_bias) * w.decay_factor
        before = self.state(layer, text[:-1]) * g.exp()[:, None, None]
        update = rate.sigmoid()[:, None] * (v.view(SHAPE.v_heads, -1) - (before * keys[:, :, None]).sum(1))
        state = before + keys[:, :, None] * update[:, None]
        out = (state * queries[:, :, None]).sum(1)
        normed = out / (out.square().mean(1, True) + 1e-6).sqrt() * w.norm.weight
        gate = PROJECTED[layer, token, SHAPE.conv_size :]
        return Step(state, k, update, g, channels[token], normed.flatten() * torch.nn.functional.silu(gate))


class DeltaSequences:
    """Two sequences with unequal prefixes under one tree, as a runner keeps them."""

    def __init__(self, ops: Any = reference) -> None:
        self.ops, self.dtype = ops, torch.float64 if ops is reference else torch.float32
        self.tolerance: dict[str, Any] = {"rtol": 0, "atol": 1e-10 if ops is reference else 2e-5, "check_dtype": False}
        self.weights = weights_in(ops, self.dtype)
        self.delta = DeltaCache(SHAPE, SLOTS, ops, dtype=self.dtype)
        kv = KVCache(1, 1, 16, CAPACITY, ops.make_slot_mover)
        self.cache = ModelCache(kv, 2, delta=self.delta)
        self.truth = Recurrence()
        self.reset()

    def reset(self) -> None:
        self.cache.reset(2)
        self.prefix: list[list[int]] = [[], []]
        self.tokens: list[int] = []  # of the tree's slots
        self.parents: list[int] = []  # tree slots; -1 for the root

    def path(self, slot: int) -> list[int]:
        """Tree slots from the root to `slot`."""
        return [] if slot < 0 else [*self.path(self.parents[slot]), slot]

    def prefill(self, tokens: list[int], sequence: int) -> None:
        first = self.cache.append_prefix(len(tokens), sequence)
        self.prefix[sequence] += tokens
        self._run(np.arange(first, first + len(tokens)), np.tri(len(tokens), dtype=np.bool_), sequence)

    def open_tree(self, pending: list[int], root: int) -> None:
        """Pending tokens get prefix slots, and the root tree slot 0, in one forward."""
        starts = [self.cache.append_prefix(len(pending), sequence) for sequence in range(2)]
        self.cache.append_tree(1)
        for text in self.prefix:
            text += pending
        self.tokens, self.parents = [root], [-1]
        rows = len(pending) + 1
        for sequence, start in enumerate(starts):
            self._run(np.arange(start, start + rows), np.tri(rows, dtype=np.bool_), sequence)

    def grow(self, tokens: list[int], parents: list[int]) -> None:
        first = self.cache.append_tree(len(tokens))
        self.tokens, self.parents = self.tokens + tokens, self.parents + parents
        mask = np.zeros((len(tokens), len(self.tokens)), np.bool_)
        for row in range(len(tokens)):
            mask[row, self.path(first + row)] = True
        for sequence in range(2):
            slots = np.arange(first, first + len(tokens)) + self.cache.prefix_len[sequence]
            self._run(slots, mask, sequence)

    def commit(self, path: list[int], keep: list[int]) -> None:
        self.cache.commit(path, keep)
        for text in self.prefix:
            text += [self.tokens[slot] for slot in path]
        place = {slot: index for index, slot in enumerate(keep)}
        self.tokens = [self.tokens[slot] for slot in keep]
        self.parents = [place.get(self.parents[slot], -1) for slot in keep]

    def text(self, sequence: int, slot: int) -> tuple[int, ...]:
        """The tokens up to a slot of the model cache."""
        prefix = self.prefix[sequence]
        if slot < len(prefix):
            return (*prefix[: slot + 1],)
        return (*prefix, *(self.tokens[each] for each in self.path(slot - len(prefix))))

    def _run(self, slots: Any, mask: Any, sequence: int) -> None:
        """Runs the operator and compares its output. `mask` covers the last slots in use."""
        self.poison_free(sequence, int(slots[0]))
        texts = [self.text(sequence, slot) for slot in slots.tolist()]
        tokens = torch.tensor([text[-1] for text in texts])
        positions = torch.tensor([len(text) - 1 for text in texts])
        rows = torch.full((len(slots),), sequence)
        batch = Batch(
            tokens, positions, torch.from_numpy(slots), torch.from_numpy(mask), rows, torch.tensor(self.cache.kv_len())
        )
        plan = self.ops.prepare_delta(batch, self.delta)
        for layer, weights in enumerate(self.weights):
            projected, rates = (part[layer, tokens].to(self.dtype) for part in (PROJECTED, RATES))
            ours = self.ops.gated_delta(projected, rates, plan, layer, weights)
            want = torch.stack([self.truth.steps(text)[layer].output for text in texts])
            torch.testing.assert_close(ours, want, **self.tolerance)

    def poison_free(self, sequence: int, used: int) -> None:
        for buffer in (self.delta.keys, self.delta.updates, self.delta.decays, self.delta.inputs):
            buffer[:, sequence, used - self.delta.folded[sequence] :] = POISON

    def check(self) -> None:
        """Compares every live slot and the folded state."""
        for sequence, used in enumerate(self.cache.kv_len()):
            folded, prefix = self.delta.folded[sequence], self.prefix[sequence]
            assert folded % FOLD_POSITIONS == 0 and folded <= fold_point(len(prefix))
            for layer in range(SHAPE.layers):
                want = self.truth.state(layer, (*prefix[:folded],))
                torch.testing.assert_close(self.delta.state[layer, sequence], want, **self.tolerance)
            live = [self.truth.steps(self.text(sequence, slot)) for slot in range(folded, used)]
            for layer in range(SHAPE.layers if live else 0):
                for buffer, name in (
                    (self.delta.keys, "key"), (self.delta.updates, "update"),
                    (self.delta.decays, "decay"), (self.delta.inputs, "conv_input"),
                ):  # fmt: skip
                    want = torch.stack([getattr(steps[layer], name) for steps in live])
                    torch.testing.assert_close(buffer[layer, sequence, : used - folded], want, **self.tolerance)


TEXTS = st.integers(0, 2**32)


def text_of(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, TOKENS, count).tolist()


class DeltaMachine(RuleBasedStateMachine):
    ops: Any = reference

    def __init__(self) -> None:
        super().__init__()
        self.sequences = DeltaSequences(self.ops)

    @initialize(counts=st.tuples(*[st.sampled_from([1, 3, 31, 32, 33, 62, 64, 65, 95])] * 2), seed=TEXTS)
    def prompt(self, counts: tuple[int, int], seed: int) -> None:
        for sequence, count in enumerate(counts):
            self.sequences.prefill(text_of(seed + sequence, count), sequence)

    @precondition(lambda self: not self.sequences.tokens and max(self.sequences.cache.prefix_len) < 200)
    @rule(sequence=st.integers(0, 1), count=st.integers(1, 40), seed=TEXTS)
    def prefill(self, sequence: int, count: int, seed: int) -> None:
        self.sequences.prefill(text_of(seed, count), sequence)

    @precondition(lambda self: not self.sequences.tokens)
    @rule(pending=st.lists(st.integers(0, TOKENS - 1), max_size=4), root=st.integers(0, TOKENS - 1))
    def open_tree(self, pending: list[int], root: int) -> None:
        self.sequences.open_tree(pending, root)

    @precondition(lambda self: 0 < len(self.sequences.tokens) < 40)
    @rule(data=st.data(), count=st.integers(1, 8))
    def grow(self, data: st.DataObject, count: int) -> None:
        """Often from the latest nodes, so that paths become long; parents may be in the same forward."""
        first = len(self.sequences.tokens)
        parents = [first + row - 1 - data.draw(st.integers(0, min(first + row - 1, 3))) for row in range(count)]
        self.sequences.grow(data.draw(st.lists(st.integers(0, TOKENS - 1), min_size=count, max_size=count)), parents)

    @precondition(lambda self: len(self.sequences.tokens) > 0)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        """Re-roots at a node, whose sub-tree survives, or at a token that is not in the tree."""
        path = self.sequences.path(data.draw(st.integers(0, len(self.sequences.tokens) - 1)))
        below = [slot for slot in range(len(self.sequences.tokens)) if path[-1] in self.sequences.path(slot)[:-1]]
        first = [slot for slot in below if self.sequences.parents[slot] == path[-1]]
        root = data.draw(st.sampled_from([None, *first]))
        keep = [slot for slot in below if root is not None and root in self.sequences.path(slot)]
        self.sequences.commit(path, keep)

    @precondition(lambda self: len(self.sequences.tokens) > 1)
    @rule(data=st.data())
    def compact(self, data: st.DataObject) -> None:
        """Drops some sub-trees."""
        gone = data.draw(st.sets(st.integers(1, len(self.sequences.tokens) - 1), max_size=3))
        keep = [slot for slot in range(len(self.sequences.tokens)) if not gone & {*self.sequences.path(slot)}]
        self.sequences.commit([], keep)

    @precondition(lambda self: not self.sequences.tokens)
    @rule(sequence=st.integers(0, 1))
    def snapshot(self, sequence: int) -> None:
        self.sequences.cache.take_snapshot(sequence)

    @precondition(lambda self: not self.sequences.tokens)
    @rule(data=st.data(), source=st.integers(0, 1), sequence=st.integers(0, 1), stored=st.booleans())
    def reuse(self, data: st.DataObject, source: int, sequence: int, stored: bool) -> None:
        """A part of a text becomes the prefix of another one, of the same sequence or the other, also after a copy of
        it was stored."""
        cache, text = self.sequences.cache, self.sequences.prefix[source]
        most = data.draw(st.sampled_from([len(text)]) | st.integers(0, len(text)))
        count = cache.reusable_len(source, most)
        if stored and len(text) == cache.reusable_len(source, len(text)) > 0:
            saved = cache.save_prefix(source, len(text))
            assert len(saved[-1]) == cache.num_snapshots(source, len(text))
            assert cache.saved_len(saved, most) == count
            cache.load_prefix(sequence, saved, count)
        else:
            cache.set_prefix(sequence, count, source)
        self.sequences.prefix[sequence] = text[:count]

    @rule()
    def close(self) -> None:
        """Ends a request: nothing is committed."""
        self.sequences.commit([], [])

    @rule(seed=TEXTS)
    def reset(self, seed: int) -> None:
        self.sequences.reset()
        for sequence in range(2):
            self.sequences.prefill(text_of(seed + sequence, 3), sequence)

    @invariant()
    def live_slots_equal_a_recomputation(self) -> None:
        self.sequences.check()


DeltaMachine.TestCase.settings = settings(max_examples=examples(10), stateful_step_count=20)
TestDeltaCache = DeltaMachine.TestCase


class NativeDeltaMachine(DeltaMachine):
    ops = cpu


NativeDeltaMachine.TestCase.settings = settings(max_examples=examples(10), stateful_step_count=20)
TestNativeDeltaCache = native(NativeDeltaMachine.TestCase)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("count", [31, 32, 33, 63, 64, 65, 95, 96, 97])
def test_trees_and_chunks_around_a_fold(count: int) -> None:
    """A tree from each position around a multiple of the fold, whose paths cross it; then the accepted path, and
    rejected siblings with the same token."""
    sequences = DeltaSequences()
    for sequence in range(2):
        text = text_of(count, count)
        for first in range(0, count, 20):
            sequences.prefill(text[first : first + 20], sequence)
    sequences.open_tree([], 1)
    sequences.grow([2, 2, 3, 2, 2, 3], [0, 0, 1, 2, 3, 4])  # siblings 1 and 2 have the same token
    sequences.check()
    for path, keep in (([0, 1, 3], [5]), ([0], [])):
        sequences.commit(path, keep)
        sequences.check()
    assert sequences.delta.folded.tolist() == [fold_point(count + 4)] * 2


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ops", OPS, ids=["reference", "cpu"])
def test_a_path_deeper_than_the_fold(ops: Any) -> None:
    """Its rows would fold unverified slots; a branch hides some of them."""
    sequences = DeltaSequences(ops)
    for sequence in range(2):
        sequences.prefill(text_of(5, 40), sequence)
    sequences.open_tree([], 0)
    sequences.grow([1, 1], [0, 0])
    for depth in range(100):
        sequences.grow([depth % TOKENS], [len(sequences.tokens) - 1])
    sequences.check()
    sequences.commit(sequences.path(90), [91])
    sequences.check()


@pytest.mark.parametrize("ops", OPS, ids=["reference", "cpu"])
def test_rows_that_share_a_slot_count_once(ops: Any) -> None:
    """Particles that are copies of each other compute a token several times, in the same slot."""
    sequences = DeltaSequences(ops)
    sequences.prefill([1, 2, 3], 0)
    sequences.prefill([1, 2, 3], 1)
    sequences.open_tree([], 0)
    first = sequences.cache.append_tree(2)
    sequences.tokens, sequences.parents = [0, 2, 3], [-1, 0, 1]
    mask = np.array([[1, 1, 0], [1, 1, 0], [1, 1, 1], [1, 1, 1]], np.bool_)
    sequences._run(np.array([first, first, first + 1, first + 1]) + 3, mask, 0)


def test_a_prefix_is_copied_only_if_its_state_is_there() -> None:
    sequences = DeltaSequences()
    cache, delta = sequences.cache, sequences.delta
    for sequence, count in ((0, 70), (1, 5)):
        sequences.prefill(text_of(7, count), sequence)
    sequences.prefill([1], 0)
    assert delta.folded.tolist() == [32, 0]
    assert [count for count in range(72) if cache.reusable_len(0, count) == count] == [0, *range(64, 72)]
    cache.set_prefix(1, 66, 0)
    sequences.prefix[1] = sequences.prefix[0][:66]
    sequences.prefix[0] = sequences.prefix[0][:66]
    cache.set_prefix(0, 66)
    sequences.open_tree([1], 2)
    sequences.check()
    cache.wipe(0, 1)
    assert all(not part[:, 0].any() for part in (delta.state, delta.keys, delta.updates, delta.decays, delta.inputs))
    cache.set_prefix(1, 0)
    assert delta.folded.tolist() == [0, 0] and not delta.state.any()


@pytest.mark.parametrize("ops", OPS, ids=["reference", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_dtypes_are_close(dtype: torch.dtype, ops: Any) -> None:
    """The states are float32 whatever the dtype of the model."""
    truth, text = Recurrence(), text_of(3, 150)
    delta = DeltaCache(SHAPE, SLOTS, ops, dtype=dtype)
    delta.allocate(1)
    assert delta.state.dtype == delta.updates.dtype == torch.float32 and delta.inputs.dtype == dtype
    tokens, places = torch.tensor(text), torch.arange(150)
    batch = Batch(tokens, places, places, torch.ones(150, 150).tril().bool(), 0 * places, torch.tensor([150]))
    plan, weights = ops.prepare_delta(batch, delta), weights_in(ops, dtype)
    ours = ops.gated_delta(PROJECTED[0, tokens].to(dtype), RATES[0, tokens].to(dtype), plan, 0, weights[0])
    want = torch.stack([truth.steps((*text[: end + 1],))[0].output for end in range(150)])
    assert ours.dtype == dtype
    error = float((ours.double() - want).norm() / want.norm())
    assert error < (1e-5 if dtype == torch.float32 else 0.02)
