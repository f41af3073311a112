"""Weight packing for the native operators: blocks of 16 outputs, written once at load (csrc/host/ops/product.h)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from swiftspec import _C
from swiftspec.backends.reference.mixture import pack_correction
from swiftspec.model.formats.blocks import BlockWeight
from swiftspec.model.formats.int4 import Int4Weight
from swiftspec.model.formats.int8 import Int8Weight, LazyInt8Weight
from swiftspec.model.formats.mxfp4 import Mxfp4Weight
from swiftspec.model.packed_model import PackedMixture, PackedMlp
from swiftspec.model.spec import MlpSpec
from swiftspec.model.weights import DenseWeight, LayerWeights, Weight

BLOCK_OUTPUTS = 16
EIGHT = 8  # outputs that `pack_int4` packs together
MAX_GROUP = 128  # inputs per scale
SUPER_INPUTS = 256  # inputs per super-scale
OPTIONAL_TENSORS = ("scales", "zeros", "bias", "minima", "order", "super_scales", "super_minima")  # of PackedLinear
STRIP_ROWS = 4096  # rows of a dense matrix converted at a time if its dtype or layout differs


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLinear:
    """A packed projection; the native operators read its tensors. Raises ValueError if shapes or dtypes do not
    match."""

    inputs: int
    outputs: int
    int8_activations: int = 0  # int8 numbers to which an activation is quantised: 0, 1 or 2
    data: Tensor  # blocks of 16 outputs (layouts: csrc/host/ops/product.h)
    scales: Tensor | None = None  # int4, int8: [outputs / 16, groups, 16]; float4: the same, uint8 exponents plus 127
    zeros: Tensor | None = None  # int4: [outputs / 16, groups, 16] uint8; None: 0 if there are minima, otherwise 8
    bias: Tensor | None = None  # [outputs] float32
    minima: Tensor | None = None  # int4, int8: [outputs / 16, groups, 16], of the dtype of `scales`
    order: Tensor | None = None  # [inputs] int32, the input of x that each input of the matrix multiplies
    super_scales: Tensor | None = None  # [outputs / 16, inputs / 256, 16] float16, factors of scales of one byte
    super_minima: Tensor | None = None  # the same, for minima
    native: _C.Weights = field(init=False)

    def __post_init__(self) -> None:
        native = _C.Weights(
            data=self.data,
            k=self.inputs,
            n=self.outputs,
            int8_activations=self.int8_activations,
            **self.optional_tensors(),
        )
        object.__setattr__(self, "native", native)

    def optional_tensors(self) -> dict[str, Tensor | None]:
        """Returns all tensors but `data`, by name."""
        return {name: getattr(self, name) for name in OPTIONAL_TENSORS}


def pack(weight: Weight | PackedLinear, dtype: torch.dtype, device: torch.device | str) -> PackedLinear:
    """Packs a matrix [outputs, inputs] of a checkpoint with the codes of its format if PACKERS has it, otherwise dense.
    Returns a PackedLinear unchanged."""
    if isinstance(weight, PackedLinear):
        return weight
    packed = PACKERS[type(weight)](weight) if type(weight) in PACKERS else None
    if packed is None:
        dense = weight.weight if isinstance(weight, DenseWeight) else weight.dequantize(dtype)
        outputs, inputs = dense.shape
        packed = PackedLinear(inputs=inputs, outputs=outputs, data=_pack_dense(dense, dtype))
    if weight.bias is None:
        return packed
    return replace(packed, bias=weight.bias.to(device, torch.float32, copy=True))


def pack_mixture(weights: LayerWeights, spec: MlpSpec, dtype: torch.dtype, device: torch.device | str) -> PackedMixture:
    """Packs the MLP of a layer that is a mixture of experts: one matrix each for gate and up, and for down, of all
    experts but the shared one."""
    assert weights.router is not None and spec.experts is not None
    matrices = (weights.router, weights.gate_up, weights.down)
    router, gate_up, down = (pack(matrix, dtype, device) for matrix in matrices)
    shared = None
    if weights.shared_gate_up is not None and weights.shared_down is not None:
        shared_gate_up, shared_down = (
            pack(matrix, dtype, device) for matrix in (weights.shared_gate_up, weights.shared_down)
        )
        shared = PackedMlp(shared_gate_up, shared_down, spec.activation)
    correction = pack_correction(weights, dtype, device)
    return PackedMixture(router, gate_up, down, spec.experts, spec.activation, shared, correction=correction)


def mask_outputs(packed: PackedLinear, outputs: Sequence[int], device: torch.device | str) -> PackedLinear:
    """Returns a projection with the same weights whose `outputs` are -inf. Used for the LM head of a draft."""
    bias = torch.zeros(packed.outputs, device=device) if packed.bias is None else packed.bias.clone()
    bias[list(outputs)] = -torch.inf
    return replace(packed, bias=bias)


def _blocks(outputs: int) -> int:
    return -(-outputs // BLOCK_OUTPUTS)


def _pack_int4(weight: Int4Weight) -> PackedLinear | None:
    """Packs codes to [outputs / 16, inputs / 8, 16] int32. An int32 contains eight inputs: input 2i in nibble i, input
    2i + 1 in nibble 4 + i. Returns None if the operators do not support the group size."""
    if weight.group_size % BLOCK_OUTPUTS:
        return None
    outputs, inputs = weight.shape
    blocks, groups = _blocks(outputs), inputs // weight.group_size
    data = torch.empty(blocks, inputs // 8, BLOCK_OUTPUTS, dtype=torch.int32)
    kind = weight.scales.dtype if weight.scales.itemsize <= 4 else torch.float32
    scales = torch.empty(blocks, groups, BLOCK_OUTPUTS, dtype=kind)
    zeros = torch.empty(blocks, groups, BLOCK_OUTPUTS, dtype=torch.uint8)
    _zero_padding(outputs, data, scales, zeros)
    first = 0
    for part in weight.parts:
        _C.pack_int4(
            codes=part.packed,
            scales=part.scales.to(kind),
            zeros=part.zeros,
            order=part.order,
            first=first,
            data=data,
            block_scales=scales,
            block_zeros=zeros,
        )
        first += part.shape[0]
    return PackedLinear(
        inputs=inputs,
        outputs=outputs,
        int8_activations=weight.int8_activations,
        data=data,
        scales=scales,
        zeros=zeros,
        order=None if weight.permutation is None else weight.permutation.to(torch.int32),
    )


def _pack_float4(weight: Mxfp4Weight) -> PackedLinear | None:
    """Packs float4 codes as `_pack_int4` does those of int4. The operators multiply twice the value of a code by a
    scale 2^(e - 1), which is 0 if 2^(e - 1) is not a normal number of float32."""
    outputs, groups = weight.exponents.shape
    if outputs % EIGHT:
        return _pack_int8(weight.unpacked())
    words = weight.codes.reshape(outputs, -1).view(torch.int32)  # of eight inputs, the first in the lowest bits
    data = torch.empty(_blocks(outputs), words.shape[1], BLOCK_OUTPUTS, dtype=torch.int32)
    _zero_padding(outputs, data)
    scales = _by_blocks((weight.exponents.clamp_min(1) - 1).T)
    _C.pack_int4(
        codes=words,
        scales=torch.zeros(1, 1, dtype=torch.bfloat16).expand(outputs, groups),
        zeros=None,
        order="inputs",
        first=0,
        data=data,
        block_scales=torch.empty_like(scales, dtype=torch.bfloat16),
        block_zeros=torch.empty_like(scales),
    )
    inputs, activations = 8 * words.shape[1], weight.int8_activations
    return PackedLinear(inputs=inputs, outputs=outputs, int8_activations=activations, data=data, scales=scales)


def _pack_blocks(weight: BlockWeight) -> PackedLinear | None:
    """Packs blocks to codes [outputs / 16, inputs * bits / 32, 16] int32. An int32 contains eight int4 codes as in
    `_pack_int4`, or four int8 codes as in `_pack_bytes`."""
    (outputs, inputs), kind = weight.shape, weight.kind
    if not kind.packs:
        return _pack_int8(weight.unpacked())
    blocks, groups = _blocks(outputs), inputs // kind.group_size
    data = torch.empty(blocks, inputs * kind.bits // 32, BLOCK_OUTPUTS, dtype=torch.int32)
    scales = torch.empty(blocks, groups, BLOCK_OUTPUTS, dtype=kind.scale_dtype)
    minima = torch.empty_like(scales) if kind.minima else None
    super_scales = super_minima = None
    if not kind.scale_dtype.is_floating_point:
        super_scales = torch.empty(blocks, inputs // SUPER_INPUTS, BLOCK_OUTPUTS, dtype=torch.float16)
        super_minima = torch.empty_like(super_scales) if kind.minima else None
    made = {"scales": scales, "minima": minima, "super_scales": super_scales, "super_minima": super_minima}
    _zero_padding(outputs, data, *made.values())
    first = 0
    for part in weight.parts:
        _C.pack_blocks(rows=part.rows, type=kind.name, first=first, data=data, **made)
        first += part.shape[0]
    return PackedLinear(inputs=inputs, outputs=outputs, int8_activations=weight.int8_activations, data=data, **made)


def _zero_padding(outputs: int, *tensors: Tensor | None) -> None:
    """Zeroes the last block of tensors [outputs / 16, ...] if it has fewer than 16 outputs."""
    for tensor in tensors if outputs % BLOCK_OUTPUTS else ():
        if tensor is not None:
            tensor[-1].zero_()


def _strips(dense: Tensor, kinds: Sequence[torch.dtype]) -> Iterator[tuple[slice, Tensor]]:
    """Yields (slice of blocks, rows of the matrix), where the rows have a dtype in `kinds` and a multiple of 8 inputs.

    Yields the whole matrix if it is already in that form, otherwise strips that are padded and converted to kinds[0].
    """
    whole = dense.dtype in kinds and dense.shape[1] % 8 == 0 and dense.stride(1) == 1 and dense.stride(0) % 2 == 0
    step = len(dense) if whole else STRIP_ROWS
    for start in range(0, len(dense), step):
        part = dense[start : start + step]
        blocks = slice(start // BLOCK_OUTPUTS, start // BLOCK_OUTPUTS + _blocks(len(part)))
        yield blocks, part if whole else F.pad(part.to(kinds[0]), (0, -dense.shape[1] % 8)).contiguous()


def _pack_dense(dense: Tensor, dtype: torch.dtype) -> Tensor:
    """Packs a dense matrix: [outputs, inputs] -> bfloat16 [outputs / 16, inputs / 2, 16, 2] or float32 [outputs / 16,
    inputs, 16]. Outputs and inputs are padded with zeros."""
    outputs, inputs = dense.shape[0], -(-dense.shape[1] // 8) * 8
    shape = (inputs // 2, BLOCK_OUTPUTS, 2) if dtype == torch.bfloat16 else (inputs, BLOCK_OUTPUTS)
    data = torch.empty(_blocks(outputs), *shape, dtype=dtype)
    for blocks, part in _strips(dense, [dtype]):
        _C.pack_dense(part, data[blocks])
    return data


def _quantize(weight: LazyInt8Weight) -> PackedLinear:
    """Quantises to int8 and packs in one step. Returns the same data and scales as packing `weight.rounded()`."""
    outputs, inputs = weight.shape
    blocks = _blocks(outputs)
    data = torch.empty(blocks, inputs // 4, BLOCK_OUTPUTS, dtype=torch.int32)
    scales = torch.empty(blocks, inputs // weight.group_size, BLOCK_OUTPUTS, dtype=torch.bfloat16)
    for here, part in _strips(weight.dense, [torch.float32, torch.bfloat16]):
        _C.pack_int8(part, data[here], scales[here])
    activations = weight.int8_activations
    return PackedLinear(inputs=inputs, outputs=outputs, int8_activations=activations, data=data, scales=scales)


def _pack_int8(weight: Int8Weight) -> PackedLinear | None:
    """Packs int8 codes. Returns None if the operators do not support the group size."""
    if weight.group_size % BLOCK_OUTPUTS or weight.group_size > MAX_GROUP:
        return None
    outputs, inputs = weight.codes.shape
    return PackedLinear(
        inputs=inputs,
        outputs=outputs,
        int8_activations=weight.int8_activations,
        data=_pack_bytes(weight.codes),
        scales=_by_blocks(weight.scales.T),
        minima=None if weight.minima is None else _by_blocks(weight.minima.T),
    )


def _pack_bytes(codes: Tensor) -> Tensor:
    """Packs int8 codes [outputs, inputs] to int32 [outputs / 16, inputs / 4, 16], whose bytes are codes plus 128. Of
    eight inputs, 0, 4, 1 and 5 are the bytes of one int32, and 2, 6, 3 and 7 those of the next."""
    stored = F.pad(codes, (0, 0, 0, -codes.shape[0] % BLOCK_OUTPUTS)).view(torch.uint8) ^ 128
    eights = stored.unflatten(1, (-1, 8))[:, :, [0, 4, 1, 5, 2, 6, 3, 7]]  # [outputs, inputs / 8, 8]
    words = eights.flatten(1).view(torch.int32)  # [outputs, inputs / 4]
    return words.unflatten(0, (-1, BLOCK_OUTPUTS)).transpose(1, 2).contiguous()


def _by_blocks(groups: Tensor) -> Tensor:
    """Rearranges [groups, outputs] to [outputs / 16, groups, 16]; outputs are padded with zeros."""
    padded = F.pad(groups, (0, -groups.shape[1] % BLOCK_OUTPUTS))
    return padded.unflatten(1, (-1, BLOCK_OUTPUTS)).transpose(0, 1).contiguous()


# Registry of the weight codes that the native operators read: by class of weight, the function that packs it without
# its bias. It returns None for a shape that the operators do not support. Other weights are dequantised.
PACKERS: dict[type[Any], Callable[[Any], PackedLinear | None]] = {
    Int4Weight: _pack_int4,
    Int8Weight: _pack_int8,
    LazyInt8Weight: _quantize,
    Mxfp4Weight: _pack_float4,
    BlockWeight: _pack_blocks,
}
