"""Projections on a GPU: the functions of reference/ with weights in them, for bfloat16 models.

int4 weights are read as they are, scales and zero points applied in float32 (csrc/cuda/linear/tiles.h). Sums are
float32. A row's result does not depend, to the bit, on the other rows of its batch or on their number, but for the
chunks of a prompt that wide.py takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swiftspec import _C
from swiftspec.backends.cpu.packing import Int4Source
from swiftspec.backends.cuda import large_m
from swiftspec.backends.cuda.checks import current_stream, on_gpu, use_current_device
from swiftspec.backends.cuda.devices import require_usable
from swiftspec.backends.cuda.large_m import NormWeights
from swiftspec.errors import UserError
from swiftspec.model.weights import Weight

MAX_REDUCED_ROWS = 32  # of one launch that sums over ranks
WORD_BYTES, LINE_BYTES = 4, 8  # bytes that a message counts in, and of an LL line
MAX_GATHER_LAUNCHES = 64  # launches of a message at most, longer ones go through a library; an estimate, not measured
INT4_GROUP_SIZES = (32, 64, 128)  # inputs of an int4 group, as the tiles hold them


@dataclass(frozen=True, slots=True)
class CudaLinear:
    """A projection made ready at load; the tensors are what the native side reads."""

    native: _C.CudaWeights
    inputs: int
    outputs: int
    tiles: Tensor  # bytes
    bias: Tensor | None  # [N] float32


def pack(weight: Weight, dtype: torch.dtype, device: torch.device | str) -> CudaLinear:
    """A checkpoint's matrix [N, K] in tiles on `device`; returns when they are there.

    Groups of more than 128 inputs, or of other than a multiple of 32, are cut into smaller ones; where that leaves less
    than 32 the matrix is dequantised.
    """
    device = require_usable(device)
    if dtype != torch.bfloat16:
        raise UserError(f"the CUDA operators compute in bfloat16, not {str(dtype).removeprefix('torch.')}")
    with torch.cuda.device(device):
        use_current_device()
        group = math.gcd(weight.group_size, 128) if isinstance(weight, Int4Source) else 0
        if isinstance(weight, Int4Source) and group in INT4_GROUP_SIZES:
            tiles, inputs, outputs = _int4_tiles(weight, group, device)
        else:
            group = 0
            tiles, inputs, outputs = _bf16_tiles(weight.dequantize(dtype).to(device))
        bias = None if weight.bias is None else weight.bias.to(device, torch.float32).contiguous()
        # a projection asks for its weights before it waits for the kernels in front of it
        torch.cuda.current_stream().synchronize()
        native = _C.CudaWeights(tiles, bias, inputs, outputs, group)
    return CudaLinear(native, inputs, outputs, tiles, bias)


def _int4_tiles(weight: Int4Source, group: int, device: torch.device) -> tuple[Tensor, int, int]:
    splits, weight = weight.group_size // group, weight.to(device).in_order()  # words are put in order on the device
    codes = weight.packed.contiguous()
    scales = weight.scales.float().repeat_interleave(splits, 0).contiguous()
    zeros = weight.zeros.repeat_interleave(splits, 0).contiguous()
    inputs, outputs = codes.shape[0], scales.shape[1]
    tiles = torch.empty(_C.cuda_tile_bytes(inputs, outputs, group), dtype=torch.uint8, device=device)
    _C.repack_int4_cuda(codes, scales, zeros, group, tiles, current_stream())
    return tiles, inputs, outputs


def _bf16_tiles(matrix: Tensor) -> tuple[Tensor, int, int]:
    outputs, inputs = matrix.shape
    if inputs % 8 != 0:
        raise UserError(f"the CUDA operators need a multiple of 8 inputs, a projection has {inputs}")
    matrix = matrix.contiguous()
    tiles = torch.empty(_C.cuda_tile_bytes(inputs, outputs, 0), dtype=torch.uint8, device=matrix.device)
    _C.repack_bf16_cuda(matrix, tiles, current_stream())
    return tiles, inputs, outputs


class PeerCommunicator:
    """This rank's end of a group of GPUs that sum products in the kernel that computes them.

    `inboxes` are the addresses at which this rank sees every rank's inbox, in rank order; `trouble` is one int64 in
    pinned memory that all ranks see. The ranks make the same calls in the same order, each on one stream.
    """

    def __init__(
        self,
        rank: int,
        inboxes: Sequence[int],
        lines: int,
        error_word: Tensor,
        device: torch.device,
        timeout_s: float = 2.0,
    ) -> None:
        self.rank, self.size, self._lines, self._error_word = rank, len(inboxes), lines, error_word
        self._epoch = torch.zeros(1, dtype=torch.int64, device=device)
        self._done = torch.zeros(1, dtype=torch.int32, device=device)
        use_current_device()
        self.native = _C.CudaChannel(rank, inboxes, lines, self._epoch, self._done, error_word, timeout_s)

    @property
    def epoch(self) -> Tensor:
        """[1] int64 on the device: how many products have been summed, and pieces of messages gathered."""
        return self._epoch

    def supports(self, x: Tensor) -> bool:
        """Whether `gather` takes x: on a GPU, whole words of 4 bytes, and at most PIECES times the longest product."""
        limit = MAX_GATHER_LAUNCHES * self._lines * LINE_BYTES
        return on_gpu(x.device) and x.nbytes % WORD_BYTES == 0 and x.nbytes <= limit

    def gather(self, x: Tensor) -> Tensor:
        """The ranks' x, in rank order: [...] -> [size, ...], a launch for each piece of it that the group's lines hold.
        Nothing waits for the host, so a graph may hold it."""
        out = x.new_empty(self.size, *x.shape)
        _C.gather_cuda(self.native, x.contiguous(), out, current_stream())
        return out

    def describe_fault(self) -> str | None:
        """Why a kernel ended itself, in one line; to be asked when the device reports an error."""
        found = _C.cuda_trouble(int(self._error_word[0]) & (2**64 - 1))
        if found is None:
            return None
        rank, source, slot, epoch = found
        return f"GPU rank {rank} waited too long for rank {source} (slot {slot}, epoch {epoch})"


@dataclass(frozen=True, slots=True)
class RowwiseReduce:
    """How a group of GPUs sums its products: few rows in the kernel that computes them, more by a library."""

    fused: PeerCommunicator  # up to MAX_ROWS
    library: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        """For operators without such kernels."""
        return self.library(x)


def make_inbox(ranks: int, lines: int, device: torch.device | str) -> Tensor:
    """The memory that one rank of a group reads, empty; `lines` is the longest product's, see `lines_of`."""
    return torch.zeros(_C.cuda_inbox_bytes(ranks, lines), dtype=torch.uint8, device=device)


def max_lines(outputs: int) -> int:
    """LL lines of the longest product that is summed in one launch."""
    return _C.cuda_lines(outputs, MAX_REDUCED_ROWS)


def _linear(
    x: Tensor,
    packed: CudaLinear,
    out: Tensor,
    *,
    norm: NormWeights | None = None,
    residual: Tensor | None = None,
    swiglu: bool = False,
    channel: PeerCommunicator | None = None,
) -> Tensor:
    """On the current stream; a float32 `out` has logits."""
    weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
    native, scratch = None if channel is None else channel.native, None
    if channel is None and (bytes_ := packed.native.scratch_bytes(x.shape[0])) > 0:
        scratch = torch.empty(bytes_, dtype=torch.uint8, device=x.device)
    _C.linear_cuda(packed.native, x, weight, eps, residual, out, swiglu, native, scratch, current_stream())
    return out


def norm_linear(x: Tensor, norm: NormWeights, packed: CudaLinear) -> Tensor:
    """RMSNorm, then the projection (QKV): [n, D] -> [n, N]."""
    if large_m.uses_library(x, packed):
        return large_m.linear(large_m.normalise(x, norm), packed)
    return _linear(x, packed, x.new_empty(x.shape[0], packed.outputs), norm=norm)


def norm_swiglu(x: Tensor, norm: NormWeights, gate_up: CudaLinear) -> Tensor:
    """RMSNorm, gate and up projections, SiLU(gate) * up: [n, D] -> [n, N / 2]."""
    if large_m.uses_library(x, gate_up):
        return large_m.swiglu(large_m.normalise(x, norm), gate_up)
    return _linear(x, gate_up, x.new_empty(x.shape[0], gate_up.outputs // 2), norm=norm, swiglu=True)


def linear_residual(
    x: Tensor,
    packed: CudaLinear,
    residual: Tensor,
    reduce: PeerCommunicator | Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Projection, all-reduce over a group's ranks, residual added (O, down): [n, K] and [n, D] -> [n, D].

    A Communicator sums in the projection's own kernel, anything else after it; `Sums` goes by the rows.
    """
    if isinstance(reduce, RowwiseReduce):
        reduce = reduce.fused if x.shape[0] <= MAX_REDUCED_ROWS else reduce.library
    if large_m.uses_library(x, packed) and not isinstance(reduce, PeerCommunicator):
        product = large_m.linear(x, packed)
        return (product if reduce is None else reduce(product)).add_(residual)
    out = torch.empty_like(residual)
    if reduce is None or isinstance(reduce, PeerCommunicator):
        return _linear(x, packed, out, residual=residual, channel=reduce)
    return reduce(_linear(x, packed, out)).add_(residual)


def norm_head(x: Tensor, norm: NormWeights, packed: CudaLinear) -> Tensor:
    """Final RMSNorm and vocabulary projection: [n, D] -> logits [n, vocab], float32, not rounded to bfloat16."""
    out = torch.empty(x.shape[0], packed.outputs, dtype=torch.float32, device=x.device)
    return _linear(x, packed, out, norm=norm)
