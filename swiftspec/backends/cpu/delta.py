"""Delta layers of the CPU backend. Shapes as in reference/__init__.py."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from swiftspec import _C
from swiftspec.backends.cpu.attention import sequence_rows
from swiftspec.backends.cpu.decoder import native_delta_cache
from swiftspec.model.batch import Batch
from swiftspec.model.packed_model import DeltaTensors, PackedDelta


def multiply_sigmoid(x: Tensor, gate: Tensor) -> Tensor:
    """Applies the output gate of attention, in place: x [rows, size] times sigmoid(gate [rows, size])."""
    _C.multiply_sigmoid(gate, x)
    return x


@dataclass(frozen=True, slots=True)
class CpuDeltaRows:
    """Inputs of the delta layers for the m rows of one sequence in a batch."""

    rows: Tensor | None  # [m] int64, indices of the rows in the batch; None: all rows of the batch
    slots: Tensor  # [m] int64, slots to write
    mask: Tensor  # [m, window] bool; window is at most `length`
    length: int  # slots in use
    sequence: int  # index in the cache


@dataclass(frozen=True, slots=True)
class CpuDeltaPlan:
    """Inputs of the delta layers that are the same in every layer of a forward."""

    parts: list[CpuDeltaRows]
    cache: _C.DeltaCache


def prepare_delta(batch: Batch, cache: DeltaTensors) -> CpuDeltaPlan:
    """Prepares the delta layers of a forward."""
    parts = [CpuDeltaRows(*part) for part in sequence_rows(batch, cache.state.shape[1])]
    return CpuDeltaPlan(parts, native_delta_cache(cache))


def gated_delta(projected: Tensor, rates: Tensor, plan: CpuDeltaPlan, layer: int, weights: PackedDelta) -> Tensor:
    """Applies the convolution, the gated delta rule, the norm of each head and the gate, and writes the states of the
    rows to the cache: projected [rows, conv_size + v_size] and rates [rows, 2 * v_heads] -> [rows, v_size].

    `layer`: index of the layer in the cache. Contract: a row's bits depend on its own inputs and those of its
    ancestors, never on the other rows, their number or their slots.
    """
    tensors = weights.conv, weights.decay_factor, weights.decay_bias, weights.norm.weight, weights.norm.eps
    out = projected.new_empty(len(projected), len(weights.decay_factor) * len(weights.norm.weight))
    for part in plan.parts:
        mine = (projected, rates) if part.rows is None else (projected[part.rows], rates[part.rows])
        result = out if part.rows is None else out.new_empty(len(part.rows), out.shape[1])
        _C.gated_delta(
            *mine,
            part.slots,
            part.mask,
            plan.cache,
            layer,
            part.sequence,
            part.length,
            *tensors,
            result,
        )
        if part.rows is not None:
            out[part.rows] = result
    return out
