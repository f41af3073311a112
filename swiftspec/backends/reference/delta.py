"""The gated delta rule over the slots of a delta cache (cache/delta.py), for prefill chunks and trees alike.

For a row n with the key k, value v, query q, decay g and rate b, S the folded state at its fold point, a its ancestors
since the fold point, and G(n, a) the sum of the decays of the rows after a up to n, G(n) that of all since the fold
point:

    u_n = b_n (v_n - e^G(n) S' k_n - sum over a of e^G(n, a) (k_n . k_a) u_a)
    o_n = e^G(n) S' q_n + sum over a, and n itself, of e^G(n, a) (q_n . k_a) u_a

The first equation is a triangular system in slot order, since ancestors have lower slots. Shapes as in
reference/__init__.py; `slots` are those of the delta cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from swiftspec.backends.reference.linear import rms_norm
from swiftspec.cache.delta import FOLD_POSITIONS, fold_point
from swiftspec.model.batch import Batch
from swiftspec.model.packed_model import DeltaTensors, PackedDelta

NORM_EPS = 1e-6  # of the L2 norm of queries and keys


@dataclass(frozen=True, slots=True)
class ReferenceFoldGroup:
    """The rows of a sequence that have the same ancestors before their fold point."""

    rows: Tensor  # [m] int64, indices in `ReferenceDeltaRows.rows`
    restarts: bool  # whether their state follows from the folded state, and not from the state of the group before
    folds: tuple[Tensor, ...]  # [FOLD_POSITIONS] int64 each, the slots that are folded into that state, in this order
    first: int  # the slot after these ancestors
    end: int  # one more than the largest slot of the rows
    visible: Tensor  # [m, end - first] bool, the ancestors of each row and itself
    own: Tensor  # [m] int64, slots of the rows, counted from `first`
    earlier: Tensor  # [m, m] bool: row i depends on the slot of row j; one of several rows with the same slot counts


@dataclass(frozen=True, slots=True)
class ReferenceDeltaRows:
    """The rows of one sequence in a batch, in the order of their slots."""

    sequence: int
    rows: Tensor  # [m] int64, indices in the batch
    slots: Tensor  # [m] int64
    window: Tensor  # [m, conv width] int64, slots that the convolution reads, the own one last; -1: before the text
    # by ascending fold point, so that ancestors come first, then by the slots before it
    groups: list[ReferenceFoldGroup]


@dataclass(frozen=True, slots=True)
class ReferenceDeltaPlan:
    """Inputs of the delta layers that are the same in every layer of a forward."""

    cache: DeltaTensors
    parts: list[ReferenceDeltaRows]


def prepare_delta(batch: Batch, cache: DeltaTensors) -> ReferenceDeltaPlan:
    """Prepares the delta layers of a forward. Reads the batch on the host."""
    lengths, sequences = batch.kv_len.tolist(), batch.sequence.cpu().numpy()
    slots, mask = batch.slots.cpu().numpy(), batch.mask.cpu().numpy()
    parts: list[ReferenceDeltaRows] = []
    for sequence in sorted(set(sequences.tolist())):
        folded = int(cache.folded[sequence])
        used = lengths[sequence] - folded
        assert used <= cache.keys.shape[2], "more slots than the delta cache has"
        rows = np.flatnonzero(sequences == sequence)
        rows = rows[np.argsort(slots[rows], kind="stable")]
        visible = np.ones((len(rows), used), np.bool_)
        width = min(used, mask.shape[1])
        visible[:, used - width :] = mask[rows, mask.shape[1] - width :]
        parts.append(_rows_of(sequence, rows, slots[rows] - folded, visible, folded, cache))
    return ReferenceDeltaPlan(cache, parts)


def _rows_of(
    sequence: int, rows: NDArray, slots: NDArray, visible: NDArray, folded: int, cache: DeltaTensors
) -> ReferenceDeltaRows:
    device = cache.keys.device
    ancestors = np.where(visible, np.arange(visible.shape[1]), -1)
    ancestors.sort(axis=1)
    window = np.full((len(rows), cache.conv_width), -1)
    width = min(window.shape[1], ancestors.shape[1])
    window[:, window.shape[1] - width :] = ancestors[:, ancestors.shape[1] - width :]
    counts = visible.sum(1)
    wanted = [max(fold_point(folded + int(count) - 1) - folded, 0) for count in counts]
    paths = [tuple(np.flatnonzero(seen)[:count].tolist()) for seen, count in zip(visible, wanted, strict=True)]
    members = dict[tuple[int, ...], list[int]]()
    for row, path in enumerate(paths):
        members.setdefault(path, []).append(row)
    groups, before = list[ReferenceFoldGroup](), tuple[int, ...]()
    for path in sorted(members, key=lambda path: (len(path), path)):
        groups.append(_group_of(np.array(members[path]), before, path, slots, visible, device))
        before = path
    return ReferenceDeltaRows(
        sequence=sequence,
        rows=torch.from_numpy(rows).to(device),
        slots=torch.from_numpy(slots).to(device),
        window=torch.from_numpy(window).to(device),
        groups=groups,
    )


def _group_of(
    rows: NDArray,
    before: tuple[int, ...],
    path: tuple[int, ...],
    slots: NDArray,
    visible: NDArray,
    device: torch.device,
) -> ReferenceFoldGroup:
    """`before`: the folded ancestors of the group before. `path`: those of these rows."""
    restarts = path[: len(before)] != before
    folds = torch.tensor(path if restarts else path[len(before) :], dtype=torch.int64, device=device)
    first = path[-1] + 1 if path else 0
    own = slots[rows] - first
    end = first + int(own.max()) + 1
    seen = visible[rows, first:end]
    same = own[:, None] == own
    repeated = np.tril(same, -1).any(1)  # a row before this one has the same slot
    earlier = np.tril(seen[:, own] & ~same, -1) & ~repeated
    return ReferenceFoldGroup(
        rows=torch.from_numpy(rows).to(device),
        restarts=restarts,
        folds=folds.split(FOLD_POSITIONS) if len(folds) else (),
        first=first,
        end=end,
        visible=torch.from_numpy(seen).to(device),
        own=torch.from_numpy(own).to(device),
        earlier=torch.from_numpy(earlier).to(device),
    )


def fold_state(state: Tensor, keys: Tensor, updates: Tensor, decays: Tensor) -> None:
    """Folds FOLD_POSITIONS slots of a chain into the state of one layer and sequence, in place: state [v_heads,
    k_head_dim, v_head_dim], keys [slots, k_heads, k_head_dim], updates [slots, v_heads, v_head_dim], decays [slots,
    v_heads]."""
    state.copy_(_folded(state, keys, updates, decays))


def move_slots(buffer: Tensor, sequence: int, slots: Sequence[int], first: int) -> None:
    """Moves `slots` of a sequence, which ascend, to the consecutive slots from `first` on, none of which is above its
    source, in place and in all layers: buffer [layers, sequences, slots, ...]."""
    region, source = buffer[:, sequence], torch.tensor(slots, dtype=torch.int64, device=buffer.device)
    region[:, first : first + len(slots)] = region.index_select(1, source)


def multiply_sigmoid(x: Tensor, gate: Tensor) -> Tensor:
    """Applies the output gate of attention: x [rows, size] times sigmoid(gate [rows, size])."""
    return x * gate.sigmoid()


def _folded(state: Tensor, keys: Tensor, updates: Tensor, decays: Tensor) -> Tensor:
    """Returns the state that `fold_state` computes."""
    total, after = _decay_sums(decays)
    keys = keys.repeat_interleave(updates.shape[1] // keys.shape[1], 1)
    added = keys.permute(1, 2, 0) @ (updates * after.exp().unsqueeze(2)).transpose(0, 1)
    return state * total.exp()[:, None, None] + added


def _decay_sums(decays: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the sum of decays [..., slots, heads] over the slots, and for each slot the sum of those after it."""
    sums = decays.flip(-2).cumsum(-2).flip(-2)
    return sums[..., 0, :], F.pad(sums[..., 1:, :], (0, 0, 0, 1))


def gated_delta(projected: Tensor, rates: Tensor, plan: ReferenceDeltaPlan, layer: int, weights: PackedDelta) -> Tensor:
    """Applies the convolution, the gated delta rule, the norm of each head and the gate, and writes the states of the
    rows to the cache: projected [rows, conv_size + v_size] and rates [rows, 2 * v_heads] -> [rows, v_size].

    `projected`: queries, keys, values and gate. `rates`: those of the update, before the sigmoid, and of the decay,
    before the softplus. `layer`: index of the layer in the cache.
    """
    cache, wide = plan.cache, plan.cache.state.dtype
    v_heads, v_head_dim = cache.updates.shape[3:]
    inputs, gate = projected.split((cache.inputs.shape[3], v_heads * v_head_dim), -1)
    update, decay = rates.to(wide).chunk(2, -1)
    update, decay = update.sigmoid(), F.softplus(decay + weights.decay_bias) * weights.decay_factor
    mixed = projected.new_empty(len(projected), v_heads, v_head_dim)
    for part in plan.parts:
        rows, cached = part.rows, _LayerSlots.of(cache, layer, part.sequence)
        cached.inputs.index_put_((part.slots,), inputs[rows])
        q, k, v = _convolve(cached, part, weights)
        cached.keys.index_put_((part.slots,), k)
        cached.decays.index_put_((part.slots,), decay[rows])
        mixed[rows] = _apply_rule(cached, part, (q, k, v, update[rows])).to(mixed.dtype)
    normed = rms_norm(mixed, weights.norm).to(wide)
    return (normed.flatten(1) * F.silu(gate.to(wide))).to(projected.dtype)


@dataclass(frozen=True, slots=True)
class _LayerSlots:
    """Views of one layer and sequence of a delta cache."""

    state: Tensor
    keys: Tensor
    updates: Tensor
    decays: Tensor
    inputs: Tensor

    @staticmethod
    def of(cache: DeltaTensors, layer: int, sequence: int) -> _LayerSlots:
        parts = (cache.state, cache.keys, cache.updates, cache.decays, cache.inputs)
        return _LayerSlots(*(part[layer, sequence] for part in parts))


def _convolve(cached: _LayerSlots, part: ReferenceDeltaRows, weights: PackedDelta) -> tuple[Tensor, Tensor, Tensor]:
    """Returns queries and keys [rows, k_heads, k_head_dim], normed, and values [rows, v_heads, v_head_dim]."""
    wide, (k_heads, k_head_dim) = cached.state.dtype, cached.keys.shape[1:]
    k_size = k_heads * k_head_dim
    seen = cached.inputs[part.window.clamp_min(0)].masked_fill((part.window < 0).unsqueeze(2), 0)
    sums = (seen.to(wide) * weights.conv).sum(1)
    activated = F.silu(sums).to(cached.inputs.dtype).to(wide)
    q, k, v = activated.split((k_size, k_size, activated.shape[1] - 2 * k_size), 1)
    q, k = (_l2_norm(x.unflatten(1, (k_heads, k_head_dim))) for x in (q, k))
    return q * k_head_dim**-0.5, k, v.unflatten(1, (cached.updates.shape[1], -1))


def _l2_norm(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()


def _apply_rule(cached: _LayerSlots, part: ReferenceDeltaRows, new: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
    """Returns o [rows, v_heads, v_head_dim] and writes u to the cache. `new`: q, k, v and b of the rows."""
    out = torch.empty_like(new[2])
    for group, state in zip(part.groups, _folded_states(cached, part.groups), strict=True):
        rows = group.rows
        out[rows] = _solve(cached, group, state, *(each[rows] for each in new))
    return out


def _folded_states(cached: _LayerSlots, groups: list[ReferenceFoldGroup]) -> Iterator[Tensor]:
    """Yields the state at the fold point of each group. Reads the slots before it when the group before is done."""
    state = cached.state
    for group in groups:
        state = cached.state if group.restarts else state
        for part in group.folds:
            state = _folded(state, cached.keys[part], cached.updates[part], cached.decays[part])
        yield state


def _solve(
    cached: _LayerSlots, group: ReferenceFoldGroup, state: Tensor, q: Tensor, k: Tensor, v: Tensor, rate: Tensor
) -> Tensor:
    """Solves the rows of a group. Returns o [m, v_heads, v_head_dim]."""
    columns = slice(group.first, group.end)
    keys, updates, visible = cached.keys[columns], cached.updates[columns], group.visible.unsqueeze(2)
    total, after = _decay_sums(torch.where(visible, cached.decays[columns], 0))
    decay = after.exp().masked_fill_(~visible, 0)  # [m, slots, v_heads]
    heads = v.shape[1] // k.shape[1]

    def scores(x: Tensor) -> Tensor:
        """Returns e^G(n, a) (x_n . k_a), [m, slots, v_heads]."""
        return torch.einsum("mhd,nhd->mnh", x, keys).repeat_interleave(heads, 2) * decay

    def read(x: Tensor) -> Tensor:
        """Returns e^G(n) S' x_n, [m, v_heads, v_head_dim]."""
        folded = torch.einsum("mhd,hde->mhe", x.repeat_interleave(heads, 1), state)
        return folded * total.exp().unsqueeze(2)

    by_key = scores(k)
    known = by_key.index_fill(1, group.own, 0)
    right = rate.unsqueeze(2) * (v - read(k) - torch.einsum("mnh,nhd->mhd", known, updates))
    among = rate.unsqueeze(1) * by_key.index_select(1, group.own) * group.earlier.unsqueeze(2)
    solved = torch.linalg.solve_triangular(
        among.permute(2, 0, 1), right.transpose(0, 1), upper=False, unitriangular=True
    )
    updates.index_put_((group.own,), solved.transpose(0, 1))
    return read(q) + torch.einsum("mnh,nhd->mhd", scores(q), updates)
