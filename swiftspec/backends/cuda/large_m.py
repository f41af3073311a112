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

ROWS = 256
SCRATCH = 256 << 20  # bytes of rows that weights become at a time; enough outputs to keep every SM at work
STRIP = 16  # outputs that begin together in each half of a weight (csrc/cuda/linear/tiles.h)
WIDTH = 2  # bytes of bfloat16


class Norm(Protocol):
    """An RMSNorm made ready at load."""

    @property
    def weight(self) -> Tensor: ...  # [D] bfloat16
    @property
    def eps(self) -> float: ...


class Packed(Protocol):
    """A projection made ready at load."""

    @property
    def native(self) -> _C.CudaWeights: ...
    @property
    def inputs(self) -> int: ...
    @property
    def outputs(self) -> int: ...
    @property
    def bias(self) -> Tensor | None: ...  # [N] float32


def is_wide(x: Tensor, packed: Packed) -> bool:
    """Whether the functions here are to be asked for x [n, K]."""
    return x.shape[0] > ROWS and packed.outputs % 2 == 0


def normalise(x: Tensor, norm: Norm) -> Tensor:
    """RMSNorm of [n, D], rounded before the weight is applied, as transformers does."""
    return F.rms_norm(x, x.shape[-1:], None, norm.eps).mul_(norm.weight)


def linear(x: Tensor, packed: Packed) -> Tensor:
    """The projection with its bias: [n, K] -> [n, N]."""
    out, half = x.new_empty(x.shape[0], packed.outputs), packed.outputs // 2
    for here, first, second in _halves(x, packed):
        out[:, here], out[:, half + here.start : half + here.stop] = first, second
    return out


def swiglu(x: Tensor, gate_up: Packed) -> Tensor:
    """SiLU(gate) * up: [n, K] -> [n, N / 2]."""
    out = x.new_empty(x.shape[0], gate_up.outputs // 2)
    for here, gate, up in _halves(x, gate_up):
        torch.mul(F.silu(gate, inplace=True), up, out=out[:, here])
    return out


def _halves(x: Tensor, packed: Packed) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Some outputs of a weight's first half, and the product of these and of those in the other half: [n, m] each."""
    half = packed.outputs // 2
    step = max(SCRATCH // (2 * STRIP * packed.inputs * WIDTH), 1) * STRIP
    for start in range(0, half, step):
        here = slice(start, min(start + step, half))
        count = here.stop - start
        rows = x.new_empty(2 * count, packed.inputs)
        _C.expand_cuda(packed.native, start // STRIP, rows, current_stream())
        bias = None
        if packed.bias is not None:
            bias = packed.bias.view(2, half)[:, here].flatten().to(x.dtype)
        first, second = F.linear(x, rows, bias).split(count, 1)
        yield here, first, second
