"""Projections on a GPU, for bfloat16 models: packing, the fused linear operators, and all-reduce in the kernel.

int4 weights are not dequantised in memory: scales and zero points are applied in float32 (csrc/cuda/linear/tiles.h).
Sums are float32. A row's result is bitwise independent of the other rows of its batch and of their number, except for
long prefill chunks, which large_m.py computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from swiftspec import _C
from swiftspec.backends.cuda import large_m
from swiftspec.backends.cuda.devices import require_usable
from swiftspec.backends.cuda.norm import CudaNorm
from swiftspec.backends.cuda.torch_interop import current_stream, on_gpu, use_current_device
from swiftspec.errors import UserError
from swiftspec.model.formats.int4 import Int4Weight
from swiftspec.model.packed_model import PackedMlp
from swiftspec.model.weights import Weight

MAX_REDUCED_ROWS = 32  # rows of one launch that all-reduces in its kernel
WORD_BYTES, LINE_BYTES = 4, 8  # granularity of gathered messages; payload of an LL line
MAX_GATHER_LAUNCHES = 64  # per gathered message; longer ones use a library; an estimate, not measured
INT4_GROUP_SIZES = (32, 64, 128)  # inputs per int4 group that the tiles support


class ProjectionTiling(NamedTuple):
    """How a kernel splits a projection over a GPU: a row of `_C.cuda_tilings`. All tilings of a matrix read the same
    tiles, and those with equal `cluster` and `warps` add in the same order, so that their results are bitwise
    identical."""

    variant: str  # the kernel for up to 8 rows: "ring", "direct" or "stream" (csrc/cuda/linear/tiling.h)
    cluster: int  # CTAs that split the inputs
    warps: int  # that compute a strip of outputs together
    strips: int  # of a block at a time
    blocks_per_sm: int


def shape_name(inputs: int, outputs: int, group: int) -> str:
    """Returns the name of a matrix's shape, under which its tiling is kept."""
    return f"{inputs} x {outputs} {f'int4/{group}' if group else 'bf16'}"


@dataclass(frozen=True, slots=True)
class CudaLinear:
    """The packed weights of a projection. The tensors are the memory that the native object reads."""

    native: _C.CudaWeights
    inputs: int
    outputs: int
    tiles: Tensor  # uint8; layout: csrc/cuda/linear/tiles.h
    bias: Tensor | None  # [outputs] float32
    group: int  # inputs per scale of int4 weights; 0 for bfloat16 weights
    head_dim: int = 0  # of a QKV projection, which can append to the cache; 0 for other projections

    @property
    def shape_name(self) -> str:
        return shape_name(self.inputs, self.outputs, self.group)


NO_TILINGS: Mapping[str, ProjectionTiling] = MappingProxyType({})


def pack(
    weight: Weight,
    dtype: torch.dtype,
    device: torch.device | str,
    tilings: Mapping[str, ProjectionTiling] = NO_TILINGS,
    multiprocessors: int | None = None,
    head_dim: int = 0,
) -> CudaLinear:
    """Packs a matrix [outputs, inputs] of a checkpoint into tiles on `device`; returns after the device has finished.

    `tilings`: by `shape_name`, other tilings than the default ones; those that the device does not have are ignored.
    `multiprocessors`: that launches occupy at a time, with the default tiling; None: all.
    `head_dim`: of a QKV projection, whose tiles have another order of the outputs; 0: another projection.
    int4 groups whose size is not 32, 64 or 128 are split into groups of such a size; if that is impossible, the matrix
    is dequantised, as is one whose inputs are permuted. Raises UserError if the CUDA operators cannot run on `device`
    or do not support the matrix.
    """
    device = require_usable(device)
    if dtype != torch.bfloat16:
        raise UserError(f"the CUDA operators compute in bfloat16, not {str(dtype).removeprefix('torch.')}")
    with torch.cuda.device(device):
        use_current_device()
        group = int4_group_size(weight)
        if isinstance(weight, Int4Weight) and group != 0:
            tiles, inputs, outputs = _int4_tiles(weight, group, device, head_dim)
        else:
            tiles, inputs, outputs = _bf16_tiles(weight.dequantize(dtype).to(device), head_dim)
        bias = None if weight.bias is None else weight.bias.to(device, torch.float32).contiguous()
        # a projection loads its weights before it waits for preceding kernels, so packing must have finished
        torch.cuda.current_stream().synchronize()
        # tilings were timed on the whole GPU, and "direct" does not keep to a part
        row = tilings.get(shape_name(inputs, outputs, group)) if multiprocessors is None else None
        native = _C.CudaWeights(
            data=tiles,
            bias=bias,
            k=inputs,
            n=outputs,
            group=group,
            row=row,
            multiprocessors=multiprocessors,
            head_dim=head_dim,
        )
    return CudaLinear(native, inputs, outputs, tiles, bias, group, head_dim=head_dim)


def tilings_of(packed: CudaLinear, each: int) -> list[ProjectionTiling]:
    """Returns the default tiling of a projection on the current GPU, then up to `each` others of each variant, by
    estimated time."""
    rows = _C.cuda_tilings(packed.inputs, packed.outputs, packed.group, each)
    return [ProjectionTiling(*row) for row in rows]


def with_tiling(packed: CudaLinear, tiling: ProjectionTiling, tiles: Tensor | None = None) -> CudaLinear:
    """Returns the projection with another tiling. `tiles`: a copy of its tiles to read instead."""
    memory = packed.tiles if tiles is None else tiles
    native = _native(packed, memory, packed.bias, tiling)
    return replace(packed, native=native, tiles=memory)


def _native(packed: CudaLinear, tiles: Tensor, bias: Tensor | None, tiling: ProjectionTiling) -> _C.CudaWeights:
    """Returns the native object of a projection of the shape of `packed`, on as many multiprocessors."""
    return _C.CudaWeights(
        data=tiles,
        bias=bias,
        k=packed.inputs,
        n=packed.outputs,
        group=packed.group,
        row=tiling,
        multiprocessors=packed.native.multiprocessors,
        head_dim=packed.head_dim,
    )


def int4_group_size(weight: Weight) -> int:
    """Returns the inputs per scale of the tiles that keep the int4 codes of a matrix; 0 if it is dequantised."""
    if not isinstance(weight, Int4Weight) or weight.permutation is not None:
        return 0
    return tile_group_size(weight.group_size)


def tile_group_size(group: int) -> int:
    """Returns the inputs per scale of the tiles of int4 weights with `group` inputs per scale; 0 if no tiles have such
    groups."""
    found = math.gcd(group, INT4_GROUP_SIZES[-1])
    return found if found in INT4_GROUP_SIZES else 0


def mask_outputs(packed: CudaLinear, outputs: Sequence[int], device: torch.device | str) -> CudaLinear:
    """Returns a projection with the same weights whose `outputs` are -inf. Used for the LM head of a draft."""
    bias = torch.zeros(packed.outputs, device=device) if packed.bias is None else packed.bias.clone()
    with torch.cuda.device(device):
        use_current_device()
        bias[list(outputs)] = -torch.inf
        torch.cuda.current_stream().synchronize()  # a projection may load its bias before it waits for other kernels
        native = _native(packed, packed.tiles, bias, ProjectionTiling(*packed.native.row))
    return replace(packed, native=native, bias=bias)


def _int4_tiles(weight: Int4Weight, group: int, device: torch.device, head_dim: int) -> tuple[Tensor, int, int]:
    splits, weight = weight.group_size // group, weight.to(device).in_order()  # reorders the codes on the device
    codes = weight.packed.contiguous()
    scales = weight.scales.float().repeat_interleave(splits, 0).contiguous()
    zeros = weight.zeros.repeat_interleave(splits, 0).contiguous()
    inputs, outputs = codes.shape[0], scales.shape[1]
    tiles = torch.empty(_C.cuda_tile_bytes(inputs, outputs, group), dtype=torch.uint8, device=device)
    _C.repack_int4_cuda(codes, scales, zeros, group, tiles, head_dim=head_dim, stream=current_stream())
    return tiles, inputs, outputs


def _bf16_tiles(matrix: Tensor, head_dim: int) -> tuple[Tensor, int, int]:
    outputs, inputs = matrix.shape
    if inputs % 8 != 0:
        raise UserError(f"the CUDA operators require a multiple of 8 inputs per projection, not {inputs}")
    matrix = matrix.contiguous()
    tiles = torch.empty(_C.cuda_tile_bytes(inputs, outputs, 0), dtype=torch.uint8, device=matrix.device)
    _C.repack_bf16_cuda(matrix, tiles, head_dim, current_stream())
    return tiles, inputs, outputs


class PeerCommunicator:
    """A rank's endpoint of a group of GPUs that all-reduce products in the kernel that computes them.

    `inboxes`: the addresses at which this rank sees the inbox of each rank, in rank order. `lines`: LL lines of the
    longest product (`max_lines`). `error_word`: [2] int64 in pinned memory that all ranks can access: the reason of a
    kernel that has aborted, and the time limit of all ranks. `timeout_s`: seconds after which a kernel that waits for a
    peer aborts. All ranks make the same calls in the same order, each on one stream.
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
        self.set_timeout(timeout_s)
        self.native = _C.CudaChannel(rank, inboxes, lines, self._epoch, self._done, error_word)

    def two_shot(self) -> PeerCommunicator:
        """Returns the same endpoint with two-shot sums (csrc/cuda/peers/channel.h), which have the same bits. Both may
        be used in turn, if all ranks use the same one. Never measured; only `bench.gpu.all_reduce` uses it."""
        other = copy(self)
        other.native = self.native.two_shot()
        return other

    def set_timeout(self, seconds: float) -> None:
        """Sets the time after which a kernel that waits for a peer aborts, on all ranks, also in captured graphs."""
        self._error_word[1] = math.ceil(seconds * 1000)

    @property
    def epoch(self) -> Tensor:
        """Number of exchanges so far (all-reduced products and launches of `gather`): [1] int64 on the device."""
        return self._epoch

    def supports(self, x: Tensor) -> bool:
        """Returns whether `gather` supports x: it is on a GPU, its size is a multiple of 4 bytes, and it takes at most
        MAX_GATHER_LAUNCHES launches."""
        limit = MAX_GATHER_LAUNCHES * self._lines * LINE_BYTES
        return on_gpu(x.device) and x.nbytes % WORD_BYTES == 0 and x.nbytes <= limit

    def gather(self, x: Tensor) -> Tensor:
        """Returns x of all ranks in rank order: [...] -> [size, ...]. Launches one kernel per chunk of `lines` LL
        lines. Does not synchronise with the host, so it can be captured in a CUDA graph."""
        out = x.new_empty(self.size, *x.shape)
        _C.gather_cuda(self.native, x.contiguous(), out, current_stream())
        return out

    def describe_fault(self) -> str | None:
        """Returns in one line why a kernel of the group aborted; None if no kernel did. Call it after the device has
        reported an error."""
        found = _C.cuda_decode_fault(int(self._error_word[0]) & (2**64 - 1))
        if found is None:
            return None
        rank, source, slot, epoch = found
        where = f"GPU rank {rank} waited too long for rank {source} (slot {slot}, epoch {epoch})"
        return f"{where}; if rank {source} was not ended, SWIFTSPEC_PEERS=0 avoids peer memory"


@dataclass(frozen=True, slots=True)
class RowwiseReduce:
    """All-reduce of a group of GPUs: in the kernel of the projection for few rows, by a library for more rows."""

    fused: PeerCommunicator  # for up to MAX_REDUCED_ROWS rows
    library: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        """All-reduces x by the library, for operators without an all-reduce in their kernel."""
        return self.library(x)

    def two_shot(self) -> RowwiseReduce:
        """Returns the same all-reduce with two-shot sums in the kernel."""
        return RowwiseReduce(self.fused.two_shot(), self.library)


def make_inbox(ranks: int, lines: int, device: torch.device | str) -> Tensor:
    """Returns a zeroed inbox for a rank. `lines`: LL lines of the longest product, see `max_lines`."""
    return torch.zeros(_C.cuda_inbox_bytes(ranks, lines), dtype=torch.uint8, device=device)


def max_lines(outputs: int) -> int:
    """Returns the number of LL lines of the largest product with `outputs` outputs that one launch all-reduces."""
    return _C.cuda_lines(outputs, MAX_REDUCED_ROWS)


def _linear(
    x: Tensor,
    packed: CudaLinear,
    out: Tensor,
    *,
    norm: CudaNorm | None = None,
    residual: Tensor | None = None,
    swiglu: bool = False,
    channel: PeerCommunicator | None = None,
) -> Tensor:
    """Launches a projection on the current stream. A float32 `out` receives logits, which are not rounded to
    bfloat16."""
    weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
    native, scratch = None if channel is None else channel.native, None
    prefill = large_m.in_prefill_chunk()
    if channel is None and (bytes_ := packed.native.scratch_bytes(x.shape[0], prefill)) > 0:
        scratch = torch.empty(bytes_, dtype=torch.uint8, device=x.device)
    _C.linear_cuda(
        packed.native,
        x,
        weight,
        eps,
        residual,
        out,
        swiglu=swiglu,
        channel=native,
        scratch=scratch,
        prefill=prefill,
        stream=current_stream(),
    )
    return out


def embed(tokens: Tensor, weight: Tensor, multiplier: float = 1.0) -> Tensor:
    """Embedding lookup; see reference/linear.py. `multiplier`: 1, see `check_supported`."""
    assert multiplier == 1
    out = weight.new_empty(tokens.shape[0], weight.shape[1])
    _C.embed_cuda(tokens, weight, out, current_stream())
    return out


def norm_linear(x: Tensor, norm: CudaNorm, packed: CudaLinear) -> Tensor:
    """RMSNorm and a projection; see reference/linear.py."""
    if large_m.uses_library(x, packed):
        return large_m.linear(large_m.normalise(x, norm), packed)
    return _linear(x, packed, x.new_empty(x.shape[0], packed.outputs), norm=norm)


def norm_swiglu(x: Tensor, norm: CudaNorm, gate_up: CudaLinear) -> Tensor:
    """RMSNorm, gate and up projections, and SwiGLU; see reference/linear.py."""
    if large_m.uses_library(x, gate_up):
        return large_m.swiglu(large_m.normalise(x, norm), gate_up)
    return _linear(x, gate_up, x.new_empty(x.shape[0], gate_up.outputs // 2), norm=norm, swiglu=True)


def linear_residual(
    x: Tensor,
    packed: CudaLinear,
    residual: Tensor,
    reduce: PeerCommunicator | Callable[[Tensor], Tensor] | None = None,
    norm: None = None,
    multiplier: float = 1.0,
) -> Tensor:
    """Applies a projection (O, down), all-reduces it over the ranks of a group with `reduce`, and adds the residual: x
    [rows, inputs] and residual [rows, hidden] -> [rows, hidden].

    A PeerCommunicator all-reduces in the kernel of the projection, any other callable after it; RowwiseReduce selects
    by the number of rows. `norm`, `multiplier`: None and 1, see `check_supported`.
    """
    assert norm is None and multiplier == 1
    if isinstance(reduce, RowwiseReduce):
        reduce = reduce.fused if x.shape[0] <= MAX_REDUCED_ROWS else reduce.library
    if large_m.uses_library(x, packed) and not isinstance(reduce, PeerCommunicator):
        product = large_m.linear(x, packed)
        return (product if reduce is None else reduce(product)).add_(residual)
    out = torch.empty_like(residual)
    if reduce is None or isinstance(reduce, PeerCommunicator):
        return _linear(x, packed, out, residual=residual, channel=reduce)
    return reduce(_linear(x, packed, out)).add_(residual)


def mlp(
    hidden: Tensor,
    norm: CudaNorm,
    weights: PackedMlp,
    residual: Tensor,
    reduce: PeerCommunicator | Callable[[Tensor], Tensor] | None = None,
    output_norm: None = None,
    multiplier: float = 1.0,
) -> Tensor:
    """Applies RMSNorm, the MLP down(SiLU(gate) * up), the all-reduce over the ranks of a group with `reduce`, and adds
    the residual: hidden [rows, hidden] and residual [rows, hidden] -> [rows, hidden].

    Contract: a row's bits depend on its own inputs, never on the other rows, their number or their slots, except in
    long prefill chunks (large_m.py). `output_norm`, `multiplier`: None and 1, see `check_supported`.
    """
    assert weights.activation == "silu"
    gated = norm_swiglu(hidden, norm, weights.gate_up)
    return linear_residual(gated, weights.down, residual, reduce, output_norm, multiplier)


def norm_head(
    x: Tensor, norm: CudaNorm, packed: CudaLinear, multiplier: float = 1.0, softcap: float | None = None
) -> Tensor:
    """Applies the final RMSNorm and the LM head: x [rows, hidden] -> logits [rows, vocab], float32, not rounded to
    bfloat16. `multiplier`, `softcap`: 1 and None, see `check_supported`."""
    assert multiplier == 1 and softcap is None
    out = torch.empty(x.shape[0], packed.outputs, dtype=torch.float32, device=x.device)
    return _linear(x, packed, out, norm=norm)
