"""Projections of a prompt's chunk: weights become bfloat16 rows once, for a library's product over all the rows.

Up to ROWS rows go to the kernels of linear.py, which read a weight anew for every 64 of them, or every 128 in
bfloat16. No tree has so many rows, and a population's go in parts, so what comes here is a prompt's: a row's result may
depend, in its last bits, on how many rows there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from swiftspec import _C
from swiftspec.backends.cuda.checks import current_stream

MAX_KERNEL_ROWS = 256
SCRATCH_BYTES = 256 << 20  # bytes of rows that weights become at a time; enough outputs to keep every SM at work
STRIP_OUTPUTS = 16  # outputs that begin together in each half of a weight (csrc/cuda/linear/tiles.h)
BF16_BYTES = 2  # bytes of bfloat16


class NormWeights(Protocol):
    """An RMSNorm made ready at load."""

    @property
    def weight(self) -> Tensor: ...  # [D] bfloat16
    @property
    def eps(self) -> float: ...


class LinearWeights(Protocol):
    """A projection made ready at load."""

    @property
    def native(self) -> _C.CudaWeights: ...
    @property
    def inputs(self) -> int: ...
    @property
    def outputs(self) -> int: ...
    @property
    def bias(self) -> Tensor | None: ...  # [N] float32


def uses_library(x: Tensor, packed: LinearWeights) -> bool:
    """Whether the functions here are to be asked for x [n, K]."""
    return x.shape[0] > MAX_KERNEL_ROWS and packed.outputs % 2 == 0


def normalise(x: Tensor, norm: NormWeights) -> Tensor:
    """RMSNorm of [n, D], rounded before the weight is applied, as transformers does."""
    return F.rms_norm(x, x.shape[-1:], None, norm.eps).mul_(norm.weight)


def linear(x: Tensor, packed: LinearWeights) -> Tensor:
    """The projection with its bias: [n, K] -> [n, N]."""
    out, half = x.new_empty(x.shape[0], packed.outputs), packed.outputs // 2
    for columns, first, second in _products_of_halves(x, packed):
        out[:, columns], out[:, half + columns.start : half + columns.stop] = first, second
    return out


def swiglu(x: Tensor, gate_up: LinearWeights) -> Tensor:
    """SiLU(gate) * up: [n, K] -> [n, N / 2]."""
    out = x.new_empty(x.shape[0], gate_up.outputs // 2)
    for columns, gate, up in _products_of_halves(x, gate_up):
        torch.mul(F.silu(gate, inplace=True), up, out=out[:, columns])
    return out


def _products_of_halves(x: Tensor, packed: LinearWeights) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Some outputs of a weight's first half, and the product of these and of those in the other half: [n, m] each."""
    half = packed.outputs // 2
    step = max(SCRATCH_BYTES // (2 * STRIP_OUTPUTS * packed.inputs * BF16_BYTES), 1) * STRIP_OUTPUTS
    for start in range(0, half, step):
        columns = slice(start, min(start + step, half))
        count = columns.stop - start
        rows = x.new_empty(2 * count, packed.inputs)
        _C.expand_cuda(packed.native, start // STRIP_OUTPUTS, rows, current_stream())
        bias = None
        if packed.bias is not None:
            bias = packed.bias.view(2, half)[:, columns].flatten().to(x.dtype)
        first, second = F.linear(x, rows, bias).split(count, 1)
        yield columns, first, second
