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

from swiftspec.backends.reference import Backend, attention, packing
from swiftspec.backends.unfused import delta, mixture
from swiftspec.model.batch import Batch
from swiftspec.model.formats.int4 import Int4Weight
from swiftspec.model.packed_model import PLAIN_ATTENTION, AttentionOptions, KVTensors
from swiftspec.model.weights import Weight

INNER_TILES = 8  # tiles of 16 inputs in a block of the layout of torch's int4 kernels
INT4_GROUP_SIZES = (32, 64, 128, 256)  # of torch's int4 kernels
INT4_CAPABILITY = (8, 0)  # smallest compute capability for which torch has int4 kernels


def has_int4_kernels(device: torch.device | str) -> bool:
    """Returns whether torch's int4 product runs on a device."""
    device = torch.device(device)
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= INT4_CAPABILITY


def _unpack(words: Tensor) -> Tensor:
    """Unpacks int4 codes: int32 [rows, columns / 8] -> int32 [rows, columns]."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    return (words.unsqueeze(-1) >> shifts).bitwise_and_(15).flatten(1)


class UnfusedBackend(Backend):
    """The operators of a model in torch kernels that CUDA graphs can contain."""

    name = "unfused"
    MAX_CAPTURED_SEQUENCES = 1  # only forwards of one sequence do not synchronise with the host
    MIN_BUCKET_SLOTS = 256  # fewer slots would save little of a forward and cost more graphs

    pack_mixture = staticmethod(mixture.pack_mixture)
    mlp = staticmethod(mixture.mlp)
    prepare_delta = staticmethod(delta.prepare_delta)

    def pack(self, weight: Weight, dtype: torch.dtype, device: torch.device | str) -> packing.LinearFn:
        """Packs a matrix [outputs, inputs] for torch's int4 product if dtype and shape allow it, otherwise as
        reference/ does."""
        if not isinstance(weight, Int4Weight) or not has_int4_kernels(device):
            return packing.pack(weight, dtype, device)
        if self.kept_int4_group(weight.shape[1], weight.group_size, dtype) == 0:
            return packing.pack(weight, dtype, device)
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

    def prepare(
        self,
        batch: Batch,
        cache: KVTensors,
        cos: Tensor,
        sin: Tensor,
        num_heads: int,
        options: AttentionOptions = PLAIN_ATTENTION,
    ) -> attention.ReferenceAttentionPlan:
        """Prepares the attention of a forward over `capture_bucket` slots. For a cache of several
        sequences it calls reference/, which reads on the host."""
        if cache.k.shape[1] > 1:
            return attention.prepare(batch, cache, cos, sin, num_heads, options)
        group, length, width = num_heads // cache.k.shape[2], cache.k.shape[3], batch.mask.shape[1]
        bucket = self.capture_bucket(batch.max_kv_len)
        if bucket is not None:
            length = min(bucket, length)
        device = batch.mask.device
        column = torch.arange(attention.aligned_slots(length, device), device=device) - (batch.kv_len - width)
        window = F.pad(batch.mask, (0, 1)).index_select(1, column.clamp(0, width))  # slots after the window are unused
        visible = window | (column < 0)
        if options.window is not None and options.window < length:
            visible = attention.last_visible(visible, options.window)
        mask = torch.zeros(visible.shape, dtype=cos.dtype, device=device).masked_fill_(visible.logical_not(), -math.inf)
        part = attention.ReferenceSequenceRows(
            rows=None,
            slots=batch.slots,
            key_targets=list(cache.k.squeeze(1).transpose(1, 2).unbind(0)),
            value_targets=list(cache.v.squeeze(1).transpose(1, 2).unbind(0)),
            keys=list(cache.k.narrow(3, 0, length).unbind(0)),
            values=list(cache.v.narrow(3, 0, length).unbind(0)),
            mask=mask.repeat(1, 1, group, 1).narrow(3, 0, length),
        )
        return attention.plan_of(batch, cos, sin, num_heads, [part], options)

    def kept_int4_group(self, inputs: int, group: int, dtype: torch.dtype) -> int:
        supported = dtype == torch.bfloat16 and inputs % (16 * INNER_TILES) == 0 and group in INT4_GROUP_SIZES
        return group if supported else 0

    def int4_needs(self, dtype: torch.dtype, device: torch.device | str) -> str | None:
        if dtype != torch.bfloat16:
            return "dtype bfloat16"
        return None if has_int4_kernels(device) else "a GPU since Ampere"

    def capture_bucket(self, max_kv_len: int | None) -> int | None:
        """Returns a power of two, so that a graph serves many lengths; None, for an unknown length: the whole cache."""
        return None if max_kv_len is None else max(self.MIN_BUCKET_SLOTS, 1 << (max_kv_len - 1).bit_length())


unfused = UnfusedBackend()
