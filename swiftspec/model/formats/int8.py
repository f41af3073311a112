"""Int8 weights and quantisation at load. An int8 weight is w = q * s + m, where each output has one scale s and, in
some formats, one minimum m per group of inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from swiftspec.model.formats.activation_quantization import quantized_matmul
from swiftspec.model.formats.int4 import Int4Weight
from swiftspec.model.weights import DenseWeight, LayerWeights, ModelWeights, Weight, select

GROUPS = (128, 64, 32)  # supported group sizes, the largest first
HeadFormat = Literal["int8", "int4"]  # to which a dense LM head can be quantised at load


def group_of(inputs: int) -> int | None:
    """Returns the largest supported group size that divides `inputs`, or None if no supported size does."""
    return next((size for size in GROUPS if inputs % size == 0), None)


@dataclass(frozen=True, slots=True)
class LoadTimeQuantization:
    """What is quantised at load. A dense LM head is quantised to the format `head` if its shape allows it."""

    activations: int = 0  # int8 numbers to which the products of quantised matrices quantise an activation: 0, 1 or 2
    head: HeadFormat | None = None  # None: a dense LM head stays dense
    head_activations: int = 1  # as `activations`, of a head that becomes int8 here: 1 or 2

    def of_weights(self, weights: ModelWeights) -> ModelWeights:
        """Returns the weights with this quantisation. Quantised matrices keep their codes."""
        layers = weights.layers
        if self.activations:
            layers = [partial(_quantize_layer_activations, read, self.activations) for read in layers]
        return replace(weights, layers=layers, head=partial(self._of_head, weights.head))

    def _of_head(self, read: Callable[[], Weight]) -> Weight:
        head = read()
        if isinstance(head, DenseWeight):
            group = group_of(head.weight.shape[1])
            if self.head == "int8" and (rounded := LazyInt8Weight.of(head.weight, head.bias)) is not None:
                return replace(rounded, int8_activations=self.head_activations)
            if self.head == "int4" and group is not None and head.weight.shape[0] % 8 == 0:
                head = Int4Weight.of(head.weight, group, head.bias)
        return _quantize_activations(head, self.activations) if self.activations else head


def _quantize_layer_activations(read: Callable[[], LayerWeights], parts: int) -> LayerWeights:
    layer = read()
    names = ("qkv", "o", "gate_up", "down", "shared_gate_up", "shared_down")
    present = {name: weight for name in names if (weight := getattr(layer, name)) is not None}
    return replace(layer, **{name: _quantize_activations(weight, parts) for name, weight in present.items()})


def _quantize_activations(weight: Weight, parts: int) -> Weight:
    if not isinstance(weight, WithActivations):
        return weight
    quantised: Any = weight  # each such class is a dataclass
    return replace(quantised, int8_activations=parts)


@runtime_checkable
class WithActivations(Protocol):
    """A weight whose product can quantise an activation to one or two int8 numbers."""

    int8_activations: int


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """Int8 matrix [outputs, inputs]."""

    codes: Tensor  # [outputs, inputs] int8
    scales: Tensor  # [outputs, groups]
    bias: Tensor | None = None  # [outputs]
    minima: Tensor | None = None  # [outputs, groups]; None: 0
    int8_activations: int = 1  # int8 numbers to which the product quantises an activation: 0, 1 or 2

    @staticmethod
    def of(dense: Tensor, bias: Tensor | None = None) -> Int8Weight | None:
        """Quantises a dense matrix [outputs, inputs]. Returns None if no supported group size divides the inputs."""
        group = group_of(dense.shape[1])
        if group is None:
            return None
        codes = torch.empty(dense.shape, dtype=torch.int8)
        scales = torch.empty(dense.shape[0], dense.shape[1] // group, dtype=torch.bfloat16)
        for start in range(0, dense.shape[0], 4096):  # in parts, because intermediates are float32
            part = dense[start : start + 4096].float().unflatten(1, (-1, group))
            scale = (part.abs().amax(2) / 127).to(torch.bfloat16)
            scales[start : start + 4096] = scale
            inverse = torch.where(scale == 0, 0.0, 1 / scale.float()).unsqueeze(2)
            codes[start : start + 4096] = (part * inverse).round_().clamp_(-127, 127).flatten(1).to(torch.int8)
        return Int8Weight(codes, scales, bias)

    @property
    def shape(self) -> tuple[int, int]:
        outputs, inputs = self.codes.shape
        return outputs, inputs

    @property
    def group_size(self) -> int:
        return self.codes.shape[1] // self.scales.shape[1]

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Returns the dense matrix [outputs, inputs] in `dtype`: q * s + m in float32, rounded once."""
        wide = self.codes.float().unflatten(1, (-1, self.group_size)).mul_(self.scales.float().unsqueeze(2))
        if self.minima is not None:
            wide.add_(self.minima.float().unsqueeze(2))
        return wide.flatten(1).to(dtype)

    def product(self, device: torch.device | str) -> Callable[[Tensor], Tensor] | None:
        """Returns the product with int8 activations, or None if `int8_activations` is not set; see `Weight.product`."""
        parts = int(self.int8_activations)
        if parts == 0:
            return None
        codes = self.codes.to(device, torch.float32).T.unflatten(0, (-1, self.group_size)).contiguous()
        scales = self.scales.to(device, torch.float32).T.contiguous()
        minima = None if self.minima is None else self.minima.to(device, torch.float32).T.contiguous()
        bias = None if self.bias is None else self.bias.to(device, torch.float32)
        zeros = torch.zeros_like(scales)
        factors = {"codes": codes, "scales": scales, "zeros": zeros, "minima": minima}
        return partial(quantized_matmul, **factors, bias=bias, parts=parts)

    def outputs(self, index: Tensor) -> Int8Weight:
        """See `Weight.outputs`."""
        bias = None if self.bias is None else select(self.bias, 0, index)
        minima = None if self.minima is None else select(self.minima, 0, index)
        codes, scales = select(self.codes, 0, index), select(self.scales, 0, index)
        return replace(self, codes=codes, scales=scales, minima=minima, bias=bias)

    def inputs(self, index: Tensor, run: int) -> Int8Weight:
        """See `Weight.inputs`. If a run is not a multiple of the group size, the groups are split."""
        weight = self.regroup(math.gcd(self.group_size, run))
        groups = torch.div(index[:: weight.group_size], weight.group_size, rounding_mode="floor")
        minima = None if weight.minima is None else select(weight.minima, 1, groups)
        return replace(
            weight, codes=select(self.codes, 1, index), scales=select(weight.scales, 1, groups), minima=minima
        )

    def stack(self, others: Sequence[Int8Weight], bias: Tensor | None) -> Int8Weight:
        """See `Weight.stack`. All parts have minima, or none has."""
        parts = (self, *others)
        minima = [part.minima for part in parts if part.minima is not None]
        assert len(minima) in (0, len(parts))
        codes, scales = torch.cat([part.codes for part in parts]), torch.cat([part.scales for part in parts])
        return replace(self, codes=codes, scales=scales, minima=torch.cat(minima) if minima else None, bias=bias)

    def regroup(self, group_size: int) -> Int8Weight:
        """Returns the same matrix in smaller groups, with repeated scales and minima. `group_size` must divide the
        present one."""
        times, rest = divmod(self.group_size, group_size)
        assert rest == 0
        if times == 1:
            return self
        minima = None if self.minima is None else self.minima.repeat_interleave(times, 1)
        return replace(self, scales=self.scales.repeat_interleave(times, 1), minima=minima)

    def with_minima(self) -> Int8Weight:
        """Returns the same matrix with minima, which are 0 if it has none."""
        return self if self.minima is not None else replace(self, minima=torch.zeros_like(self.scales))


@dataclass(frozen=True, slots=True)
class LazyInt8Weight:
    """Dense matrix [outputs, inputs] that behaves like an `Int8Weight` but is quantised only when it is used, so that a
    backend can quantise and pack in one step."""

    dense: Tensor  # [outputs, inputs]
    group_size: int  # inputs per scale after quantisation
    bias: Tensor | None = None  # [outputs]
    int8_activations: int = 1  # as in `Int8Weight`

    @staticmethod
    def of(dense: Tensor, bias: Tensor | None = None) -> LazyInt8Weight | None:
        """Returns the weight, or None if no supported group size divides the inputs."""
        group = group_of(dense.shape[1])
        return None if group is None else LazyInt8Weight(dense, group, bias)

    @property
    def shape(self) -> tuple[int, int]:
        outputs, inputs = self.dense.shape
        return outputs, inputs

    def rounded(self) -> Int8Weight:
        """Returns the quantised matrix."""
        weight = Int8Weight.of(self.dense, self.bias)
        assert weight is not None
        return replace(weight, int8_activations=self.int8_activations)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Returns the matrix [outputs, inputs], quantised to int8, in `dtype`."""
        return self.rounded().dequantize(dtype)

    def product(self, device: torch.device | str) -> Callable[[Tensor], Tensor] | None:
        """See `Weight.product`."""
        return self.rounded().product(device)

    def outputs(self, index: Tensor) -> LazyInt8Weight:
        """See `Weight.outputs`."""
        bias = None if self.bias is None else select(self.bias, 0, index)
        return replace(self, dense=select(self.dense, 0, index), bias=bias)

    def inputs(self, index: Tensor, run: int) -> Int8Weight:
        """See `Weight.inputs`."""
        return self.rounded().inputs(index, run)

    def stack(self, others: Sequence[LazyInt8Weight], bias: Tensor | None) -> LazyInt8Weight:
        return replace(self, dense=torch.cat([part.dense for part in (self, *others)]), bias=bias)
