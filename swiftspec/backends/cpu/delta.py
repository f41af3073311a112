"""Delta layers of the CPU backend. Shapes as in reference/__init__.py."""

from __future__ import annotations

from torch import Tensor

from swiftspec import _C
from swiftspec.backends.cpu.attention import sequence_rows
from swiftspec.backends.cpu.decoder import native_delta_cache
from swiftspec.model.batch import Batch
from swiftspec.model.packed_model import DeltaTensors, PackedDelta


def multiply_sigmoid(x: Tensor, gate: Tensor) -> Tensor:
    """Applies the output gate of attention, in place; see reference/delta.py."""
    _C.multiply_sigmoid(gate, x)
    return x


CpuDeltaPlan = list[tuple[Tensor | None, _C.DeltaRows]]  # by sequence: indices of its rows (None: all), and the rows


def prepare_delta(batch: Batch, cache: DeltaTensors) -> CpuDeltaPlan:
    """Prepares the delta layers of a forward."""
    native = native_delta_cache(cache)
    return [
        (part.rows, _C.DeltaRows(part.slots, part.mask, native, part.sequence, part.length))
        for part in sequence_rows(batch, cache.state.shape[1])
    ]


def gated_delta(projected: Tensor, rates: Tensor, plan: CpuDeltaPlan, layer: int, weights: PackedDelta) -> Tensor:
    """Convolution, gated delta rule, norm and gate of a delta layer; see reference/delta.py."""
    out = projected.new_empty(len(projected), len(weights.decay_factor) * len(weights.norm.weight))
    for rows, native in plan:
        result = out if rows is None else out.new_empty(len(rows), out.shape[1])
        native.gated_delta(
            projected if rows is None else projected[rows],
            rates if rows is None else rates[rows],
            layer,
            weights.conv,
            weights.decay_factor,
            weights.decay_bias,
            norm=weights.norm.weight,
            eps=weights.norm.eps,
            out=result,
        )
        if rows is not None:
            out[rows] = result
    return out
