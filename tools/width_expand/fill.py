"""Builds large matrices from small ones, by the maps of a layer (maps.py).

An entry in a FREE row or a QUIET column is random. Any other entry is copied if its row and its column copy small ones,
and zero if the row is SILENT or the column LOUD. In int4 a whole group of zeros has a scale of zero, so that its codes
stay random.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from swiftspec.errors import UserError
from swiftspec.model.formats.int4 import Int4Weight, pack_int4, unpack_int4
from swiftspec.model.weights import DenseWeight, Weight
from tools.width_expand.maps import FREE, GROUP, QUIET

SPREAD, STEP = 0.02, 2e-3  # standard deviation of random dense weights; scale of random int4 weights


@dataclass(frozen=True, slots=True)
class Filler:
    """Builder of the large matrices, on the device of `noise`, the generator of the random weights."""

    noise: torch.Generator
    dtype: torch.dtype  # of dense weights
    int4: bool

    @property
    def device(self) -> torch.device:
        return self.noise.device

    def matrix(self, source: Weight, rows: Tensor, columns: Tensor, gain: Tensor | None = None) -> Weight:
        """Returns a large matrix with entries of `source`, placed by the maps `rows` and `columns`.

        `gain` [rows] float32 multiplies the copied rows.
        """
        bias = None
        if source.bias is not None:
            taken = source.bias[rows.clamp_min(0)].float() * (1 if gain is None else gain)
            bias = torch.where(rows < 0, 0, taken).to(self.device)
        if self.int4:
            return self._int4(source, rows, columns, gain, bias)
        return DenseWeight(self.dense_matrix(source, rows, columns, gain), bias)

    def dense_matrix(self, source: Weight, rows: Tensor, columns: Tensor, gain: Tensor | None = None) -> Tensor:
        """Returns the same matrix as `matrix`, but always dense and without a bias."""
        shape, device = (rows.shape[0], columns.shape[0]), self.device
        out = torch.randn(shape, generator=self.noise, dtype=self.dtype, device=device).mul_(SPREAD)
        bound, heard = _where(rows != FREE), _where(columns != QUIET)
        block = source.dequantize(torch.float32)[rows[bound].clamp_min(0)][:, columns[heard].clamp_min(0)]
        block = block if gain is None else block * gain[bound].unsqueeze(1)
        block = torch.where((rows[bound] < 0).unsqueeze(1) | (columns[heard] < 0), 0, block)
        out[bound.to(device).unsqueeze(1), heard.to(device)] = block.to(device, self.dtype)
        return out

    def _int4(
        self, source: Weight, rows: Tensor, columns: Tensor, gain: Tensor | None, bias: Tensor | None
    ) -> Int4Weight:
        shape, device = (columns.shape[0] // GROUP, rows.shape[0]), self.device
        packed, zeros = self._words(columns.shape[0], shape[1] // 8), self._words(shape[0], shape[1] // 8)
        scales = torch.rand(shape, generator=self.noise, device=device).add_(0.5).mul_(STEP).half()
        grouped = columns.view(-1, GROUP)
        touched = _where((grouped != QUIET).any(1)).to(device)
        scales[touched.unsqueeze(1), _where(rows != FREE).to(device)] = 0
        real, at = _where(rows >= 0), _where((grouped >= 0).any(1))
        block = _take(source, rows[real], grouped[at])
        scale = block.scales if gain is None else block.scales * gain[real]
        heard = grouped[at] != QUIET  # the code of a loud column is the zero point
        lines = (at.unsqueeze(1) * GROUP + torch.arange(GROUP))[heard].to(device)
        at, real = at.to(device), real.to(device)
        scales[at.unsqueeze(1), real] = scale.to(device, torch.float16)
        _overlay(zeros, at, real, block.zeros.to(device))
        _overlay(packed, lines, real, block.codes[heard].to(device))
        return Int4Weight(packed, scales, zeros, GROUP, bias)

    def _words(self, *shape: int) -> Tensor:
        """Returns int32 words of random bits."""
        return torch.randint(-(2**31), 2**31, shape, generator=self.noise, dtype=torch.int32, device=self.device)


def _where(condition: Tensor) -> Tensor:
    return condition.nonzero().squeeze(1)


def _overlay(words: Tensor, lines: Tensor, rows: Tensor, codes: Tensor) -> None:
    """Writes `codes` [lines, rows] uint8 at the inputs `lines` and outputs `rows` of packed `words` [inputs, outputs /
    8]."""
    if lines.numel() == 0:
        return
    plain = unpack_int4(words[lines])
    plain[:, rows] = codes
    words[lines] = pack_int4(plain)


@dataclass(frozen=True, slots=True)
class Block:
    """Int4 groups of a large matrix that contain small columns, for some rows.

    A code without a small column is the zero point.
    """

    codes: Tensor  # [groups, GROUP, rows] uint8
    scales: Tensor  # [groups, rows] float32
    zeros: Tensor  # [groups, rows] uint8


def _take(source: Weight, rows: Tensor, columns: Tensor) -> Block:
    """Returns the block of the small `rows` [rows] and, for each large group, the small `columns` [groups, GROUP].

    Int4 is copied exactly, dense is rounded to nearest. Raises UserError if two int4 groups of `source` would share a
    large group.
    """
    if isinstance(source, DenseWeight):
        values = source.weight[rows].float()[:, columns.clamp_min(0)] * (columns >= 0)  # [rows, groups, GROUP]
        low, high = values.amin(2).clamp_max(0), values.amax(2).clamp_min(0)
        scales = ((high - low) / 15).clamp_min(1e-7).half().float()
        zeros = (-low / scales).round().clamp(0, 15)
        codes = (values / scales.unsqueeze(2) + zeros.unsqueeze(2)).round().clamp(0, 15)
        return Block(codes.permute(1, 2, 0).to(torch.uint8), scales.t(), zeros.t().to(torch.uint8))
    assert isinstance(source, Int4Weight)
    groups = torch.where(columns < 0, -1, columns // source.group_size)
    group = groups.amax(1)
    if bool(((groups >= 0) & (groups != group.unsqueeze(1))).any()):
        raise UserError("heads are too narrow: two int4 groups of the small model share one of the large; use bf16")
    all_codes, scales, all_zeros = source.unpack()
    # zeros [groups, rows], codes [groups, GROUP, rows]
    zeros, codes = all_zeros[group][:, rows], all_codes[columns.clamp_min(0)][:, :, rows]
    codes = torch.where((columns < 0).unsqueeze(2), zeros.unsqueeze(1), codes)
    return Block(codes, scales[group][:, rows].float(), zeros)
