"""The fused operators on an NVIDIA GPU since Ampere: the functions of reference/ for bfloat16 models, through the
native extension.

Everything runs on torch's current stream and waits for nothing. A row's result does not depend, to the bit, on the
other rows of its batch, on their number, or on the slots in which its keys lie; but for a prompt's chunks (wide.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from swiftspec import _C
from swiftspec.backends.cuda.attention import HEAD_DIMS, MAX_HEADS_PER_KV_HEAD, prepare, tree_attention
from swiftspec.backends.cuda.checks import current_stream, native_cache
from swiftspec.backends.cuda.devices import require_usable
from swiftspec.backends.cuda.linear import linear_residual, norm_head, norm_linear, norm_swiglu, pack
from swiftspec.backends.cuda.sampling import children, draw, draw_keyed, gumbel_rows, log_probs, log_top_k, resample
from swiftspec.backends.cuda.tree import DeviceTree, device_tree
from swiftspec.backends.reference import DEFAULT_SCORES, Scores, rope_tables
from swiftspec.errors import UserError
from swiftspec.model.packed_model import PackedModel

if TYPE_CHECKING:
    from swiftspec.model.config import ModelConfig

__all__ = [
    "DEFAULT_SCORES",
    "MAX_CAPTURED_SEQUENCES",
    "PREFILL_CHUNK_ROWS",
    "DeviceTree",
    "Scores",
    "check_supported",
    "children",
    "device_tree",
    "draw",
    "draw_keyed",
    "embed",
    "fuse",
    "gumbel_rows",
    "linear_residual",
    "log_probs",
    "log_top_k",
    "mover",
    "norm_head",
    "norm_linear",
    "norm_swiglu",
    "pack",
    "pack_norm",
    "prepare",
    "resample",
    "rope_tables",
    "tree_attention",
]

# bytes of the next projection's tiles; what its memory gives in about 2 us of an H200, to be measured
PREFETCH_BYTES = 8 << 20
MAX_CAPTURED_SEQUENCES = 64  # sequences of a forward that can be a graph: with any number it touches the host nowhere
# of a prompt at a time, so that a library's product is bound by compute and weights expand rarely
PREFILL_CHUNK_ROWS = 1024


@dataclass(frozen=True, slots=True)
class CudaNorm:
    """An RMSNorm made ready at load."""

    weight: Tensor  # [D] bfloat16
    eps: float


def check_supported(config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> None:
    """Raises UserError where these operators cannot run the model: its type, its heads, the build, the GPU."""
    require_usable(device)
    if dtype != torch.bfloat16:
        raise UserError(f"the CUDA operators compute in bfloat16, not {str(dtype).removeprefix('torch.')}")
    if config.head_dim not in HEAD_DIMS:
        raise UserError(f"the CUDA operators take heads of 64 or 128, not {config.head_dim}: use ops reference")
    if config.num_heads // config.num_kv_heads > MAX_HEADS_PER_KV_HEAD:
        raise UserError(f"the CUDA operators let at most {MAX_HEADS_PER_KV_HEAD} heads share keys: use ops reference")
    if config.hidden_size % 8:
        raise UserError(f"the CUDA operators take a hidden size that 8 divides, not {config.hidden_size}")


def pack_norm(weight: Tensor, eps: float, dtype: torch.dtype, device: torch.device | str) -> CudaNorm:
    """An RMSNorm's weight [D] and epsilon."""
    return CudaNorm(weight.to(device, dtype).contiguous(), eps)


def embed(tokens: Tensor, weight: Tensor) -> Tensor:
    """tokens [n], weight [vocab, D] -> [n, D]."""
    out = weight.new_empty(tokens.shape[0], weight.shape[1])
    _C.embed_cuda(tokens, weight, out, current_stream())
    return out


def fuse(model: PackedModel) -> None:
    """The stack still runs operator by operator, but its projections ask for each other's weights."""
    enable_weight_prefetch(model)


def enable_weight_prefetch(model: PackedModel, enabled: bool = True) -> None:
    """Has each projection ask, once its own weights have come, for the first tiles of the one behind it, so that the
    memory has less rest while it joins its sums and the next one starts. QKV asks for more: attention, which comes in
    between, reads little. Not `on`: they ask for nothing."""
    next_matrices = [*(layer.qkv for layer in model.layers[1:]), model.head]
    for layer, next_layer in zip(model.layers, next_matrices, strict=True):
        matrices = (layer.qkv, layer.o, layer.gate_up, layer.down, next_layer)
        for matrix, next_matrix in pairwise(matrices):
            prefetch_bytes = next_matrix.tiles.shape[0] if matrix is layer.qkv else PREFETCH_BYTES
            matrix.native.precede(next_matrix.tiles[: prefetch_bytes if enabled else 0])


def mover(k: Tensor, v: Tensor) -> Callable[[int, Sequence[int], int], None]:
    """`move(sequence, source, start)` for a cache: in place, in all layers, slots source[i] -> start + i, where
    source [m] ascends and source[i] >= start + i."""
    native = native_cache(k, v)
    device = k.device

    def move(sequence: int, source: Sequence[int], start: int) -> None:
        if source:
            native.move(sequence, torch.tensor(source, device=device), start, current_stream())

    return move
