"""Projections of prefill chunks.

On Hopper they use a kernel of their own (csrc/cuda/linear/prefill.h) from 33 rows on, in the context `prefill_chunk`.
On other GPUs the weights of a chunk of more than MAX_KERNEL_ROWS rows are unpacked to bfloat16 rows for a library GEMM
over all rows; the kernels of linear.py read the weights once for every 64 rows (bf16: 128). The last bits of these
results may depend on the number of rows. Trees have fewer rows.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from swiftspec import _C
from swiftspec.backends.cuda.norm import CudaNorm
from swiftspec.backends.cuda.torch_interop import current_stream

MAX_KERNEL_ROWS = 256
SCRATCH_BYTES = 256 << 20  # weights unpacked at a time; enough outputs to keep every SM busy
STRIP_OUTPUTS = 16  # granularity of unpacking, in outputs of each half of a weight (csrc/cuda/linear/tiles.h)
BF16_BYTES = 2


class Float32Sums:
    """Context in which cuBLAS does not add partial sums of a bfloat16 product (split K) in bfloat16, which torch allows
    by default. The setting belongs to the process, so of the products of several threads the last one restores it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._products = 0  # in progress, in all threads
        self._allowed = True  # the setting before the first of them

    def __enter__(self) -> None:
        matmul: Any = torch.backends.cuda.matmul
        with self._lock:
            if self._products == 0:
                self._allowed = matmul.allow_bf16_reduced_precision_reduction
                matmul.allow_bf16_reduced_precision_reduction = False
            self._products += 1

    def __exit__(self, *_: object) -> None:
        matmul: Any = torch.backends.cuda.matmul
        with self._lock:
            self._products -= 1
            if self._products == 0:
                matmul.allow_bf16_reduced_precision_reduction = self._allowed


float32_sums = Float32Sums()


class _ThreadState(threading.local):
    prefill_chunk = False


_state = _ThreadState()


@contextmanager
def prefill_chunk() -> Iterator[None]:
    """Context of the layers of a prefill chunk: on Hopper its projections use a kernel of their own from 33 rows on
    (csrc/cuda/linear/prefill.h). Other batches of as many rows, such as those of populations, keep the kernels with
    which a row's bits do not depend on the number of rows."""
    _state.prefill_chunk = True
    try:
        yield
    finally:
        _state.prefill_chunk = False


def in_prefill_chunk() -> bool:
    """Returns whether this thread is in the context of `prefill_chunk`."""
    return _state.prefill_chunk


class LinearWeights(Protocol):
    """The packed weights of a projection."""

    @property
    def native(self) -> _C.CudaWeights: ...
    @property
    def inputs(self) -> int: ...
    @property
    def outputs(self) -> int: ...
    @property
    def bias(self) -> Tensor | None: ...  # [outputs] float32
    @property
    def head_dim(self) -> int: ...  # of a QKV projection; 0 for other projections


def uses_library(x: Tensor, packed: LinearWeights) -> bool:
    """Returns whether the functions of this module, instead of the kernels, compute the projection of x [rows,
    inputs]."""
    many = x.shape[0] > MAX_KERNEL_ROWS and packed.outputs % 2 == 0
    return many and not (in_prefill_chunk() and packed.native.has_prefill_kernel)


def normalise(x: Tensor, norm: CudaNorm) -> Tensor:
    """Returns the RMSNorm of x [rows, hidden], rounded before the weight is applied, as transformers does."""
    return F.rms_norm(x, x.shape[-1:], None, norm.eps).mul_(norm.weight)


def linear(x: Tensor, packed: LinearWeights) -> Tensor:
    """Returns the projection with its bias: x [rows, inputs] -> [rows, outputs]."""
    out, half = x.new_empty(x.shape[0], packed.outputs), packed.outputs // 2
    for columns, product in _products(x, packed):
        start, stop = columns.start, columns.stop
        if packed.head_dim:
            out[:, 2 * start : 2 * stop] = product
        else:
            out[:, columns], out[:, half + start : half + stop] = product.chunk(2, 1)
    return out


def swiglu(x: Tensor, gate_up: LinearWeights) -> Tensor:
    """Returns SiLU(gate) * up: x [rows, inputs] -> [rows, outputs / 2]."""
    out = x.new_empty(x.shape[0], gate_up.outputs // 2)
    for columns, product in _products(x, gate_up):
        gate, up = product.chunk(2, 1)
        torch.mul(F.silu(gate, inplace=True), up, out=out[:, columns])
    return out


def _products(x: Tensor, packed: LinearWeights) -> Iterator[tuple[slice, Tensor]]:
    """Yields (columns, product) for consecutive slices `columns` of the first half of the outputs: the product of these
    outputs and of the corresponding ones of the second half, [rows, 2 * len(columns)]. With `head_dim` it is that of
    whole heads, from output 2 * columns.start on."""
    half, granularity = packed.outputs // 2, packed.head_dim // 2 or STRIP_OUTPUTS
    step = max(SCRATCH_BYTES // (2 * granularity * packed.inputs * BF16_BYTES), 1) * granularity
    for start in range(0, half, step):
        columns = slice(start, min(start + step, half))
        count = columns.stop - start
        rows = x.new_empty(2 * count, packed.inputs)
        _C.expand_cuda(packed.native, start // STRIP_OUTPUTS, rows, current_stream())
        bias = None
        if packed.bias is not None:
            pairs = packed.bias.view(half, 2)[columns] if packed.head_dim else packed.bias.view(2, half)[:, columns]
            bias = pairs.flatten().to(x.dtype)
        with float32_sums:
            product = F.linear(x, rows, bias)
        yield columns, product
