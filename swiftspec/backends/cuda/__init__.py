"""CUDA backend: the fused operators of the native extension, for bfloat16 models on NVIDIA GPUs since Ampere.

It implements the functions of backends/reference. All operators run asynchronously on torch's current stream. A row's
result is bitwise independent of the other rows of its batch, of their number, and of the slots in which its keys lie,
except for long prefill chunks (large_m.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from swiftspec import _C
from swiftspec.backends.cuda.attention import (
    CLUSTER_MAJORS,
    HEAD_DIMS,
    MAX_HEADS_PER_KV_HEAD,
    prepare,
    tree_attention,
)
from swiftspec.backends.cuda.chains import match_chains, reject_chains
from swiftspec.backends.cuda.devices import require_usable
from swiftspec.backends.cuda.large_m import prefill_chunk
from swiftspec.backends.cuda.linear import (
    linear_residual,
    mask_outputs,
    mlp,
    norm_head,
    norm_linear,
    norm_swiglu,
    pack,
    tilings_of,
    with_tiling,
)
from swiftspec.backends.cuda.sampling import children, draw, draw_keyed, gumbel_rows, log_probs, log_top_k, resample
from swiftspec.backends.cuda.torch_interop import current_stream, native_cache
from swiftspec.backends.cuda.tree import DeviceTree, device_tree
from swiftspec.backends.reference import DEFAULT_SCORES, Scores, rope_tables
from swiftspec.errors import UserError
from swiftspec.model.packed_model import PackedModel
from swiftspec.model.spec import ModelSpec, unknown_fields

__all__ = [
    "CLUSTER_MAJORS",
    "DEFAULT_SCORES",
    "DRAFT_HEAD",
    "MAX_CAPTURED_SEQUENCES",
    "PEER_ALL_REDUCE",
    "PREFILL_CHUNK_ROWS",
    "DeviceTree",
    "Scores",
    "capture_bucket",
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
    "make_slot_mover",
    "mask_outputs",
    "match_chains",
    "mlp",
    "norm_head",
    "norm_linear",
    "norm_swiglu",
    "pack",
    "pack_norm",
    "prefill_chunk",
    "prepare",
    "reject_chains",
    "resample",
    "rope_tables",
    "tilings_of",
    "tree_attention",
    "with_tiling",
]

KNOWN_FIELDS = ("qk_norm",)  # optional fields of a spec that these operators implement
# Bytes of the next projection's tiles to prefetch: about 2 us of an H200's memory bandwidth; an estimate, not measured.
PREFETCH_BYTES = 8 << 20
MAX_CAPTURED_SEQUENCES = 64  # in a captured forward; an arbitrary limit: no operator synchronises with the host
DRAFT_HEAD = "int4"  # a draft proposes only, so rounding its LM head changes no text
PEER_ALL_REDUCE = True
# Rows of a prefill chunk: enough for a library GEMM to be compute-bound, and for unpacking weights rarely.
PREFILL_CHUNK_ROWS = 1024


@dataclass(frozen=True, slots=True)
class CudaNorm:
    """The weight and epsilon of an RMSNorm."""

    weight: Tensor  # [hidden] bfloat16
    eps: float


def check_supported(spec: ModelSpec, dtype: torch.dtype, device: torch.device | str) -> None:
    """Raises UserError if these operators cannot run the model because of its dtype, its layers, the build, or the
    GPU."""
    require_usable(device)
    check_spec(spec, dtype)


def check_spec(spec: ModelSpec, dtype: torch.dtype) -> None:
    """Raises UserError if these operators cannot run the model on any GPU, because of its dtype or its layers."""
    if dtype != torch.bfloat16:
        raise UserError(f"the CUDA operators compute in bfloat16, not {str(dtype).removeprefix('torch.')}")
    for mixer in dict.fromkeys(spec.attention_mixers):
        if mixer.head_dim not in HEAD_DIMS:
            raise UserError(f"the CUDA operators need head dimension 64 or 128, not {mixer.head_dim}; use ops unfused")
        if mixer.qk_norm == "projection":
            raise UserError("the CUDA operators have no norm of whole query and key projections; use ops unfused")
        if mixer.num_heads // mixer.num_kv_heads > MAX_HEADS_PER_KV_HEAD:
            raise UserError(
                f"the CUDA operators need at most {MAX_HEADS_PER_KV_HEAD} heads per KV head; use ops unfused"
            )
    if spec.hidden_size % 8:
        raise UserError(f"the CUDA operators require a multiple of 8 as hidden size, not {spec.hidden_size}")
    missing = unknown_fields(spec, KNOWN_FIELDS)
    if missing is not None:
        raise UserError(f"the CUDA operators have no {missing}; use ops unfused")


def capture_bucket(max_kv_len: int | None) -> None:
    """Returns None: attention reads `Batch.kv_len` on the device."""


def pack_norm(weight: Tensor, eps: float, dtype: torch.dtype, device: torch.device | str) -> CudaNorm:
    """Packs an RMSNorm with weight [hidden]."""
    packed = weight.to(device, dtype).contiguous()
    if packed.is_cuda:  # projections copy it to shared memory before they wait for preceding kernels
        torch.cuda.current_stream(packed.device).synchronize()
    return CudaNorm(packed, eps)


def embed(tokens: Tensor, weight: Tensor, multiplier: float = 1.0) -> Tensor:
    """Embedding lookup: tokens [rows], weight [vocab, hidden] -> [rows, hidden]. `multiplier`: 1, see
    `check_supported`."""
    assert multiplier == 1
    out = weight.new_empty(tokens.shape[0], weight.shape[1])
    _C.embed_cuda(tokens, weight, out, current_stream())
    return out


def fuse(model: PackedModel) -> None:
    """Enables weight prefetching between the projections. Returns None: the model runs operator by operator."""
    enable_weight_prefetch(model)


def enable_weight_prefetch(model: PackedModel, enabled: bool = True) -> None:
    """Makes each projection prefetch the first `PREFETCH_BYTES` of the next projection's tiles to L2 once its own
    weights have been read, so that the memory is not idle while the projection reduces its sums and the next one
    starts. QKV prefetches all tiles of O, since attention, which runs in between, reads little. `enabled`: False
    switches prefetching off."""
    following = [*(layer.qkv for layer in model.layers[1:]), model.head]
    for layer, after_layer in zip(model.layers, following, strict=True):
        matrices = (layer.qkv, layer.o, layer.mlp.gate_up, layer.mlp.down, after_layer)
        for matrix, next_matrix in pairwise(matrices):
            prefetch_bytes = next_matrix.tiles.shape[0] if matrix is layer.qkv else PREFETCH_BYTES
            matrix.native.precede(next_matrix.tiles[: prefetch_bytes if enabled else 0])


def make_slot_mover(k: Tensor, v: Tensor) -> Callable[[int, Sequence[int], int], None]:
    """Returns `move(sequence, source, start)`, which moves slot source[i] of a sequence to slot start + i, in place and
    in all layers of the KV cache `k`, `v`. `source` must be ascending, with source[i] >= start + i."""
    native = native_cache(k, v)

    def move(sequence: int, source: Sequence[int], start: int) -> None:
        if source:
            native.move(sequence, source, start, current_stream())

    return move
