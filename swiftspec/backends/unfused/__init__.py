"""Library backend: the operators as unfused torch kernels, for comparison in benchmarks and for debugging.

It differs from reference/ in three points:
- Int4 weights of bfloat16 models stay int4 and use torch's int4 product, whose scales are bfloat16.
- Mixtures of experts and delta layers read nothing from the device, for the same reason as `prepare`. The experts are
  dense.
- `prepare` reads nothing from the device, so that a forward can be captured in a CUDA graph
  (runtime/executors/graph.py). Attention therefore scores a power of two of slots (`capture_bucket`) and masks those
  that are not in use.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from swiftspec.backends import reference
from swiftspec.backends.cpu.packing import Int4Source
from swiftspec.backends.reference import (
    DEFAULT_SCORES,
    DRAFT_HEAD,
    PEER_ALL_REDUCE,
    PREFILL_CHUNK_ROWS,
    Scores,
    add_per_layer,
    children,
    device_tree,
    draw,
    draw_keyed,
    embed,
    fold_state,
    fuse,
    gated_delta,
    gumbel_rows,
    linear_residual,
    log_probs,
    log_top_k,
    make_slot_mover,
    mask_outputs,
    move_slots,
    multiply_sigmoid,
    norm_head,
    norm_linear,
    norm_swiglu,
    pack_norm,
    per_layer_embeddings,
    rope_tables,
    tree_attention,
)
from swiftspec.backends.reference.attention import (
    ReferenceAttentionPlan,
    ReferenceSequenceRows,
    aligned_slots,
    last_visible,
    plan_of,
)
from swiftspec.backends.reference.packing import LinearFn
from swiftspec.backends.unfused.delta import prepare_delta
from swiftspec.backends.unfused.mixture import mlp, pack_mixture
from swiftspec.model.batch import Batch
from swiftspec.model.packed_model import PLAIN_ATTENTION, AttentionOptions, KVTensors
from swiftspec.model.weights import Weight

__all__ = [
    "DEFAULT_SCORES",
    "DRAFT_HEAD",
    "MAX_CAPTURED_SEQUENCES",
    "PEER_ALL_REDUCE",
    "PREFILL_CHUNK_ROWS",
    "Scores",
    "add_per_layer",
    "capture_bucket",
    "children",
    "device_tree",
    "draw",
    "draw_keyed",
    "embed",
    "fold_state",
    "fuse",
    "gated_delta",
    "gumbel_rows",
    "linear_residual",
    "log_probs",
    "log_top_k",
    "make_slot_mover",
    "mask_outputs",
    "mlp",
    "move_slots",
    "multiply_sigmoid",
    "norm_head",
    "norm_linear",
    "norm_swiglu",
    "pack",
    "pack_mixture",
    "pack_norm",
    "per_layer_embeddings",
    "prepare",
    "prepare_delta",
    "rope_tables",
    "tree_attention",
]

MAX_CAPTURED_SEQUENCES = 1  # only forwards of one sequence do not synchronise with the host
INNER_TILES = 8  # tiles of 16 inputs in a block of the layout of torch's int4 kernels
INT4_GROUP_SIZES = (32, 64, 128, 256)  # of torch's int4 kernels
INT4_CAPABILITY = (8, 0)  # smallest compute capability for which torch has int4 kernels
MIN_BUCKET_SLOTS = 256  # fewer slots would save little of a forward and cost more graphs


def capture_bucket(max_kv_len: int | None) -> int | None:
    """Returns the number of slots that attention reads if at most `max_kv_len` slots are in use: a power of two, so
    that a graph serves many lengths. None, for an unknown length: the whole cache."""
    return None if max_kv_len is None else max(MIN_BUCKET_SLOTS, 1 << (max_kv_len - 1).bit_length())


def supports_int4(inputs: int, group_size: int, dtype: torch.dtype) -> bool:
    """Returns whether torch's int4 product supports matrices with this number of inputs in total and per group."""
    return dtype == torch.bfloat16 and inputs % (16 * INNER_TILES) == 0 and group_size in INT4_GROUP_SIZES


def has_int4_kernels(device: torch.device | str) -> bool:
    """Returns whether torch's int4 product runs on a device."""
    device = torch.device(device)
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= INT4_CAPABILITY


def keeps_int4(weight: Weight, dtype: torch.dtype, device: torch.device | str) -> bool:
    """Returns whether `pack` keeps the int4 codes of a matrix instead of dequantising it."""
    return (
        isinstance(weight, Int4Source)
        and supports_int4(weight.shape[1], weight.group_size, dtype)
        and has_int4_kernels(device)
    )


def pack(weight: Weight, dtype: torch.dtype, device: torch.device | str) -> LinearFn:
    """Packs a matrix [outputs, inputs] for torch's int4 product if dtype and shape allow it, otherwise as reference/
    does."""
    if not isinstance(weight, Int4Source) or not keeps_int4(weight, dtype, device):
        return reference.pack(weight, dtype, device)
    weight = weight.to(device).in_order()
    codes, scales = _unpack(weight.packed).t(), weight.scales.float()
    # torch computes (q - 8) * scale + zero
    zeros = (8 - _unpack(weight.zeros)) * scales
    pairs = torch.stack((scales, zeros), 2).to(dtype)  # [groups, outputs, 2]
    bias, group = None if weight.bias is None else weight.bias.to(device, dtype), weight.group_size
    aten = torch.ops.aten
    if codes.device.type == "cuda":
        high, low = codes.unflatten(1, (-1, 2)).unbind(2)
        two = (high << 4 | low).to(torch.uint8, memory_format=torch.contiguous_format)
        laid_out, product = aten._convert_weight_to_int4pack(two, INNER_TILES), aten._weight_int4pack_mm
    else:
        laid_out = aten._convert_weight_to_int4pack_for_cpu(codes.contiguous(), INNER_TILES)
        product = aten._weight_int4pack_mm_for_cpu

    order = None if weight.permutation is None else weight.permutation.to(device)

    def apply(x: Tensor) -> Tensor:
        x = x if order is None else x.index_select(1, order)
        out: Tensor = product(x, laid_out, group, pairs)
        return out if bias is None else out.add_(bias)

    return apply


def _unpack(words: Tensor) -> Tensor:
    """Unpacks int4 codes: int32 [rows, columns / 8] -> int32 [rows, columns]."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    return (words.unsqueeze(-1) >> shifts).bitwise_and_(15).flatten(1)


def prepare(
    batch: Batch,
    cache: KVTensors,
    cos: Tensor,
    sin: Tensor,
    num_heads: int,
    options: AttentionOptions = PLAIN_ATTENTION,
) -> ReferenceAttentionPlan:
    """Prepares the attention of a forward, before its layers, over `capture_bucket` slots. For a cache of several
    sequences it calls reference/, which reads on the host."""
    if cache.k.shape[1] > 1:
        return reference.prepare(batch, cache, cos, sin, num_heads, options)
    group, length, width = num_heads // cache.k.shape[2], cache.k.shape[3], batch.mask.shape[1]
    bucket = capture_bucket(batch.max_kv_len)
    if bucket is not None:
        length = min(bucket, length)
    device = batch.mask.device
    column = torch.arange(aligned_slots(length, device), device=device) - (batch.kv_len - width)
    window = F.pad(batch.mask, (0, 1)).index_select(1, column.clamp(0, width))  # slots after the window are unused
    visible = window | (column < 0)
    if options.window is not None and options.window < length:
        visible = last_visible(visible, options.window)
    mask = torch.zeros(visible.shape, dtype=cos.dtype, device=device).masked_fill_(visible.logical_not(), -math.inf)
    part = ReferenceSequenceRows(
        rows=None,
        slots=batch.slots,
        key_targets=list(cache.k.squeeze(1).transpose(1, 2).unbind(0)),
        value_targets=list(cache.v.squeeze(1).transpose(1, 2).unbind(0)),
        keys=list(cache.k.narrow(3, 0, length).unbind(0)),
        values=list(cache.v.narrow(3, 0, length).unbind(0)),
        mask=mask.repeat(1, 1, group, 1).narrow(3, 0, length),
    )
    return plan_of(batch, cos, sin, num_heads, [part], options)
