"""CUDA backend: the fused operators of the native extension, for bfloat16 models on NVIDIA GPUs since Ampere.

It overrides the operators of backends/reference. All operators run asynchronously on torch's current stream. A row's
result is bitwise independent of the other rows of its batch, of their number, and of the slots in which its keys lie,
except for long prefill chunks (large_m.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from swiftspec.backends.cuda import attention, large_m, linear, sampling, tree
from swiftspec.backends.cuda.attention import CudaAttentionPlan
from swiftspec.backends.cuda.devices import require_usable
from swiftspec.backends.cuda.linear import CudaLinear, ProjectionTiling
from swiftspec.backends.cuda.norm import pack_norm
from swiftspec.backends.reference import Backend
from swiftspec.capabilities import OPERATORS
from swiftspec.errors import UserError
from swiftspec.model.batch import Batch
from swiftspec.model.packed_model import PLAIN_ATTENTION, AttentionOptions, KVTensors, PackedModel
from swiftspec.model.spec import ModelSpec, unknown_fields
from swiftspec.model.weights import Weight


class CudaBackend(Backend):
    """The operators of a bfloat16 model on an NVIDIA GPU.

    `tilings`: those of projections by `linear.shape_name`, instead of the default ones. `kernel_shapes`: those of
    attention by `attention.heads_name`. `multiprocessors`: that a projection occupies at a time, so that another model
    finds room beside it; None: all.
    """

    name = "cuda"
    # of the next projection's tiles: about 2 us of an H200's memory bandwidth; an estimate, not measured
    PREFETCH_BYTES = 8 << 20
    DRAFT_HEAD = "int4"  # a draft proposes only, so rounding its LM head changes no text
    FUSED_ATTENTION = True
    MAX_CAPTURED_SEQUENCES = 64  # an arbitrary limit: no operator synchronises with the host
    PEER_ALL_REDUCE = True
    PERMUTED_INT4 = False
    PREFILL_CHUNK_ROWS = 1024  # enough for a library GEMM to be compute-bound, and for unpacking weights rarely
    TILINGS = True

    pack_norm = staticmethod(pack_norm)
    mask_outputs = staticmethod(linear.mask_outputs)
    tilings_of = staticmethod(linear.tilings_of)
    with_tiling = staticmethod(linear.with_tiling)

    embed = staticmethod(linear.embed)
    norm_linear = staticmethod(linear.norm_linear)
    norm_swiglu = staticmethod(linear.norm_swiglu)
    linear_residual = staticmethod(linear.linear_residual)
    mlp = staticmethod(linear.mlp)
    norm_head = staticmethod(linear.norm_head)
    attention_shapes = staticmethod(attention.attention_shapes)
    tree_attention = staticmethod(attention.tree_attention)
    prefill_chunk = staticmethod(large_m.prefill_chunk)

    make_slot_mover = staticmethod(attention.make_slot_mover)

    gumbel_rows = staticmethod(sampling.gumbel_rows)
    draw = staticmethod(sampling.draw)
    draw_keyed = staticmethod(sampling.draw_keyed)
    children = staticmethod(sampling.children)
    log_probs = staticmethod(sampling.log_probs)
    resample = staticmethod(sampling.resample)

    def __init__(
        self,
        tilings: Mapping[str, ProjectionTiling] = linear.NO_TILINGS,
        kernel_shapes: Mapping[str, str] = MappingProxyType({}),
        multiprocessors: int | None = None,
    ) -> None:
        self.tilings = tilings
        self.kernel_shapes = kernel_shapes
        self.multiprocessors = multiprocessors

    def pack(self, weight: Weight, dtype: torch.dtype, device: torch.device | str) -> CudaLinear:
        """Packs a matrix with the `tilings`, for the `multiprocessors`; see `linear.pack`."""
        return linear.pack(weight, dtype, device, self.tilings, self.multiprocessors)

    def prepare(
        self,
        batch: Batch,
        cache: KVTensors,
        cos: Tensor,
        sin: Tensor,
        num_heads: int,
        options: AttentionOptions = PLAIN_ATTENTION,
        shape: str | None = None,
    ) -> attention.CudaAttentionPlan:
        """Prepares the attention of a forward with the shape of `kernel_shapes`, unless `shape` names one; see
        `attention.prepare`."""
        if shape is None and self.kernel_shapes:
            _, _, kv_heads, capacity, dim = cache.k.shape
            default = self.attention_shapes(capacity)[0]
            shape = self.kernel_shapes.get(attention.heads_name(num_heads, kv_heads, dim, default))
        return attention.prepare(batch, cache, cos, sin, num_heads, options=options, shape=shape)

    def pack_qkv(self, weight: Weight, head_dim: int, dtype: torch.dtype, device: torch.device | str) -> CudaLinear:
        """Packs a QKV projection, so that `qkv_attention` can append in its kernel."""
        return linear.pack(weight, dtype, device, self.tilings, self.multiprocessors, head_dim)

    def qkv_attention(
        self,
        x: Tensor,
        norm: Any,
        packed: Any,
        plan: Any,
        layer: int,
        qk_norm: Any = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """As that of the reference, in two launches if the QKV projection can append. Packed weights and plan may be
        those of other operators (backends/families.py)."""
        if qk_norm is None and isinstance(packed, CudaLinear) and isinstance(plan, CudaAttentionPlan):
            attended = attention.project_and_attend(x, norm, packed.native, plan, layer)
            if attended is not None:
                return attended
        return super().qkv_attention(x, norm, packed, plan, layer, qk_norm=qk_norm, sinks=sinks)

    def check_supported(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device | str) -> None:
        """Raises UserError if these operators cannot run the model because of its dtype, its layers, the build, or the
        GPU."""
        require_usable(device)
        self.check_spec(spec, dtype)

    def check_spec(self, spec: ModelSpec, dtype: torch.dtype) -> None:
        """Raises UserError if these operators cannot run the model on any GPU, because of its dtype or its layers."""
        if dtype != torch.bfloat16:
            raise UserError(f"the CUDA operators compute in bfloat16, not {str(dtype).removeprefix('torch.')}")
        for mixer in dict.fromkeys(spec.attention_mixers):
            if mixer.head_dim not in attention.HEAD_DIMS:
                raise UserError(
                    f"the CUDA operators need head dimension 64 or 128, not {mixer.head_dim}; use ops unfused"
                )
            if mixer.num_heads // mixer.num_kv_heads > attention.MAX_HEADS_PER_KV_HEAD:
                most = attention.MAX_HEADS_PER_KV_HEAD
                raise UserError(f"the CUDA operators need at most {most} heads per KV head; use ops unfused")
        if spec.hidden_size % 8:
            raise UserError(f"the CUDA operators require a multiple of 8 as hidden size, not {spec.hidden_size}")
        missing = unknown_fields(spec, OPERATORS["cuda"])
        if missing is not None:
            raise UserError(f"the CUDA operators have no {missing}; use ops unfused")

    def kept_int4_group(self, inputs: int, group: int, dtype: torch.dtype) -> int:
        return linear.tile_group_size(group)

    def device_tree(
        self, slots: int, children: int, leaves: int, vocab: int, device: torch.device
    ) -> tree.DeviceTree | None:
        return tree.device_tree(slots, children, leaves, vocab, device)

    def enable_weight_prefetch(self, model: PackedModel, enabled: bool = True) -> None:
        """Makes each projection prefetch the first `PREFETCH_BYTES` of the next projection's tiles to L2 once its own
        weights have been read, so that the memory is not idle while the projection reduces its sums and the next one
        starts. QKV prefetches all tiles of O, since attention, which runs in between, reads little. `enabled`: False
        switches prefetching off."""
        following = [*(layer.qkv for layer in model.layers[1:]), model.head]
        for layer, after_layer in zip(model.layers, following, strict=True):
            matrices = (layer.qkv, layer.o, layer.mlp.gate_up, layer.mlp.down, after_layer)
            for matrix, next_matrix in pairwise(matrices):
                prefetch_bytes = next_matrix.tiles.shape[0] if matrix is layer.qkv else self.PREFETCH_BYTES
                matrix.native.precede(next_matrix.tiles[: prefetch_bytes if enabled else 0])

    def fuse(self, stack: PackedModel) -> None:
        """Enables weight prefetching between the projections. Returns None: the model runs operator by operator."""
        self.enable_weight_prefetch(stack)


cuda = CudaBackend()
