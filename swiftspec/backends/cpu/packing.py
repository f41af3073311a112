"""Weight packing for the native operators: blocks of 16 outputs, written once at load (csrc/host/ops/product.h)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from swiftspec import _C
from swiftspec.backends.reference.mixture import pack_correction
from swiftspec.model.packed_model import PackedMixture, PackedMlp
from swiftspec.model.spec import MlpSpec
from swiftspec.model.weights import DenseWeight, LayerWeights, Weight

BLOCK_OUTPUTS = 16
EIGHT = 8  # outputs that `pack_int4` packs together
MAX_GROUP = 128  # inputs per scale
SUPER_INPUTS = 256  # inputs per super-scale
OPTIONAL_TENSORS = ("scales", "zeros", "bias", "minima", "order", "super_scales", "super_minima")  # of PackedLinear
STRIP_ROWS = 4096  # rows of a dense matrix converted at a time if its dtype or layout differs


@runtime_checkable
class Int4Source(Protocol):
    """Int4 weights of a checkpoint; model.formats.int4.Int4Weight documents the members."""

    packed: Tensor
    scales: Tensor
    zeros: Tensor
    group_size: int
    int8_activations: int  # int8 numbers to which an activation is quantised: 0, 1 or 2
    order: str
    permutation: Tensor | None

    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def parts(self) -> Sequence[Self]: ...
    def to(self, device: torch.device | str, /) -> Self: ...
    def in_order(self) -> Self: ...


@runtime_checkable
class Int8Source(Protocol):
    """Int8 weights; see model.formats.int8.Int8Weight."""

    codes: Tensor  # [outputs, inputs] int8
    scales: Tensor  # [outputs, groups]
    minima: Tensor | None  # [outputs, groups]
    int8_activations: int

    @property
    def group_size(self) -> int: ...


@runtime_checkable
class Mxfp4Source(Protocol):
    """Weights in float4 codes; see model.formats.mxfp4.Mxfp4Weight."""

    codes: Tensor  # [outputs, groups, 16] uint8
    exponents: Tensor  # [outputs, groups] uint8
    int8_activations: int

    def unpacked(self) -> Any: ...  # an Int8Source


class BlockKind(Protocol):
    """Type of GGML's quantised blocks; see model.formats.blocks.BlockType."""

    @property
    def name(self) -> str: ...
    @property
    def group_size(self) -> int: ...
    @property
    def bits(self) -> int: ...  # of a packed code
    @property
    def scale_dtype(self) -> torch.dtype: ...  # uint8 or int8: there are super-scales
    @property
    def minima(self) -> bool: ...
    @property
    def packs(self) -> bool: ...  # whether `pack_blocks` knows the type


@runtime_checkable
class BlockSource(Protocol):
    """Weights in GGML's quantised blocks; see model.formats.blocks.BlockWeight."""

    rows: Tensor  # [outputs, bytes] uint8
    int8_activations: int

    @property
    def kind(self) -> BlockKind: ...
    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def parts(self) -> Sequence[Self]: ...
    def unpacked(self) -> Any: ...  # an Int8Source


@runtime_checkable
class UnquantizedSource(Protocol):
    """Dense matrix that is quantised to int8 when it is packed; see model.formats.int8.LazyInt8Weight."""

    dense: Tensor  # [outputs, inputs]
    group_size: int  # inputs per scale of the int8 weight
    int8_activations: int


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A packed projection; the native operators read its tensors."""

    native: _C.Weights
    inputs: int
    outputs: int
    int8_activations: int  # int8 numbers to which an activation is quantised: 0, 1 or 2
    data: Tensor  # blocks of 16 outputs (layouts: csrc/host/ops/product.h)
    scales: Tensor | None  # int4, int8: [outputs / 16, groups, 16]; float4: the same, uint8 exponents plus 127
    zeros: Tensor | None  # int4: [outputs / 16, groups, 16] uint8; None: 0 if there are minima, otherwise 8
    bias: Tensor | None  # [outputs] float32
    minima: Tensor | None = None  # int4, int8: [outputs / 16, groups, 16], of the dtype of `scales`
    order: Tensor | None = None  # [inputs] int32, the input of x that each input of the matrix multiplies
    super_scales: Tensor | None = None  # [outputs / 16, inputs / 256, 16] float16, factors of scales of one byte
    super_minima: Tensor | None = None  # the same, for minima

    @staticmethod
    def create(
        inputs: int,
        outputs: int,
        int8_activations: int,
        data: Tensor,
        scales: Tensor | None,
        zeros: Tensor | None,
        bias: Tensor | None,
        minima: Tensor | None = None,
        order: Tensor | None = None,
        super_scales: Tensor | None = None,
        super_minima: Tensor | None = None,
    ) -> PackedLinear:
        """Creates a packed projection with its native object. Raises ValueError if shapes or dtypes do not match."""
        native = _C.Weights(
            data, scales, zeros, bias, inputs, outputs, int8_activations, minima, order, super_scales, super_minima
        )
        return PackedLinear(
            native,
            inputs,
            outputs,
            int8_activations,
            data,
            scales,
            zeros,
            bias,
            minima,
            order,
            super_scales,
            super_minima,
        )

    def optional_tensors(self) -> dict[str, Tensor | None]:
        """Returns all tensors but `data`, as the arguments of `create`."""
        return {name: getattr(self, name) for name in OPTIONAL_TENSORS}


def pack(weight: Weight | PackedLinear, dtype: torch.dtype, device: torch.device | str) -> PackedLinear:
    """Packs a dense, int4, int8 or MXFP4 matrix [outputs, inputs] of a checkpoint. Returns a PackedLinear unchanged."""
    if isinstance(weight, PackedLinear):
        return weight
    bias = None if weight.bias is None else weight.bias.to(device, torch.float32, copy=True)
    if isinstance(weight, Int4Source) and weight.group_size % 16 == 0:
        outputs, inputs = weight.shape
        order = None if weight.permutation is None else weight.permutation.to(torch.int32)
        codes = _pack_codes(weight)
        return PackedLinear.create(inputs, outputs, weight.int8_activations, *codes, bias, order=order)
    if isinstance(weight, BlockSource):
        return _pack_blocks(weight, bias) if weight.kind.packs else pack(weight.unpacked(), dtype, device)
    if isinstance(weight, UnquantizedSource):
        outputs, inputs = weight.dense.shape
        codes = _quantize(weight.dense, weight.group_size)
        return PackedLinear.create(inputs, outputs, weight.int8_activations, *codes, None, bias)
    if isinstance(weight, Mxfp4Source):
        whole = weight.exponents.shape[0] % EIGHT == 0
        return _pack_float4(weight, bias) if whole else pack(weight.unpacked(), dtype, device)
    if isinstance(weight, Int8Source) and weight.group_size % 16 == 0 and weight.group_size <= MAX_GROUP:
        outputs, inputs = weight.codes.shape
        data, scales = _pack_bytes(weight.codes), _by_blocks(weight.scales.T)
        minima = None if weight.minima is None else _by_blocks(weight.minima.T)
        return PackedLinear.create(inputs, outputs, weight.int8_activations, data, scales, None, bias, minima)
    dense = weight.weight if isinstance(weight, DenseWeight) else weight.dequantize(dtype)
    outputs, inputs = dense.shape
    return PackedLinear.create(inputs, outputs, False, _pack_dense(dense, dtype), None, None, bias)


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
    tensors = packed.optional_tensors() | {"bias": bias}
    return PackedLinear.create(packed.inputs, packed.outputs, packed.int8_activations, packed.data, **tensors)


def _blocks(outputs: int) -> int:
    return -(-outputs // BLOCK_OUTPUTS)


def _pack_codes(weight: Int4Source) -> tuple[Tensor, Tensor, Tensor]:
    """Returns codes [outputs / 16, inputs / 8, 16] int32, scales and zero points as in `PackedLinear`. An int32
    contains eight inputs: input 2i in nibble i, input 2i + 1 in nibble 4 + i."""
    outputs, inputs = weight.shape
    blocks, groups = _blocks(outputs), inputs // weight.group_size
    data = torch.empty(blocks, inputs // 8, BLOCK_OUTPUTS, dtype=torch.int32)
    kind = weight.scales.dtype if weight.scales.itemsize <= 4 else torch.float32
    scales = torch.empty(blocks, groups, BLOCK_OUTPUTS, dtype=kind)
    zeros = torch.empty(blocks, groups, BLOCK_OUTPUTS, dtype=torch.uint8)
    if outputs % BLOCK_OUTPUTS:
        for tensor in (data, scales, zeros):
            tensor[-1].zero_()
    first = 0
    for part in weight.parts:
        _C.pack_int4(part.packed, part.scales.to(kind), part.zeros, part.order, first, data, scales, zeros)
        first += part.shape[0]
    return data, scales, zeros


def _pack_float4(weight: Mxfp4Source, bias: Tensor | None) -> PackedLinear:
    """Packs float4 codes as `_pack_codes` does those of int4. The operators multiply twice the value of a code by a
    scale 2^(e - 1), which is 0 if 2^(e - 1) is not a normal number of float32."""
    outputs, groups = weight.exponents.shape
    words = weight.codes.reshape(outputs, -1).view(torch.int32)  # of eight inputs, the first in the lowest bits
    data = torch.empty(_blocks(outputs), words.shape[1], BLOCK_OUTPUTS, dtype=torch.int32)
    if outputs % BLOCK_OUTPUTS:
        data[-1].zero_()
    scales = _by_blocks((weight.exponents.clamp_min(1) - 1).T)
    none, zeros = torch.zeros(1, 1, dtype=torch.bfloat16).expand(outputs, groups), torch.empty_like(scales)
    _C.pack_int4(words, none, None, "inputs", 0, data, torch.empty_like(scales, dtype=torch.bfloat16), zeros)
    return PackedLinear.create(8 * words.shape[1], outputs, weight.int8_activations, data, scales, None, bias)


def _pack_blocks(weight: BlockSource, bias: Tensor | None) -> PackedLinear:
    """Packs blocks to codes [outputs / 16, inputs * bits / 32, 16] int32. An int32 contains eight int4 codes as in
    `_pack_codes`, or four int8 codes as in `_pack_bytes`."""
    (outputs, inputs), kind = weight.shape, weight.kind
    blocks, groups = _blocks(outputs), inputs // kind.group_size
    data = torch.empty(blocks, inputs * kind.bits // 32, BLOCK_OUTPUTS, dtype=torch.int32)
    scales = torch.empty(blocks, groups, BLOCK_OUTPUTS, dtype=kind.scale_dtype)
    minima = torch.empty_like(scales) if kind.minima else None
    super_scales = super_minima = None
    if not kind.scale_dtype.is_floating_point:
        super_scales = torch.empty(blocks, inputs // SUPER_INPUTS, BLOCK_OUTPUTS, dtype=torch.float16)
        super_minima = torch.empty_like(super_scales) if kind.minima else None
    if outputs % BLOCK_OUTPUTS:
        for tensor in (data, scales, minima, super_scales, super_minima):
            if tensor is not None:
                tensor[-1].zero_()
    first = 0
    for part in weight.parts:
        _C.pack_blocks(part.rows, kind.name, first, data, scales, minima, super_scales, super_minima)
        first += part.shape[0]
    return PackedLinear.create(
        inputs, outputs, weight.int8_activations, data, scales, None, bias, minima, None, super_scales, super_minima
    )


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


def _quantize(dense: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Quantises to int8 and packs in one step. Returns the same data and scales as packing `Int8Weight.of(dense)`."""
    blocks, inputs = _blocks(dense.shape[0]), dense.shape[1]
    data = torch.empty(blocks, inputs // 4, BLOCK_OUTPUTS, dtype=torch.int32)
    scales = torch.empty(blocks, inputs // group, BLOCK_OUTPUTS, dtype=torch.bfloat16)
    for here, part in _strips(dense, [torch.float32, torch.bfloat16]):
        _C.pack_int8(part, data[here], scales[here])
    return data, scales


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
