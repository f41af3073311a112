"""Where a small model's matrices lie in large ones, and what fills the rest; tools/grow.py says why that is right.

A large row takes a small one, is SILENT (must give exactly zero) or FREE (gives what nobody looks at). A large column
takes a small one, is LOUD (meets values that must not count) or QUIET (meets exact zeros). Free rows and quiet columns
hold random weights; where a row that matters meets a loud column, or a silent row a column that is not quiet, the
weight is zero. In int4 a zero over a whole group is a scale of zero, so that the codes stay random.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from swiftspec.errors import UserError
from swiftspec.model.config import ModelConfig
from swiftspec.model.linear import DenseWeight, Int4Weight, Weight, pack_int4, unpack_int4

SILENT = LOUD = -1
FREE = QUIET = -2
GROUP = 128  # inputs that share a scale in what is written
SPREAD, STEP = 0.02, 2e-3  # of random dense weights, and between random int4 ones


@dataclass(frozen=True, slots=True)
class Maps:
    """One layer, int64: for each large row or column the number of the small one, or one of the words above."""

    hidden: Tensor  # [D'], rows of O and down: a small row or SILENT
    input: Tensor  # [D'], columns of QKV, gate and up: a small column or QUIET
    qkv: Tensor  # rows
    o: Tensor  # columns
    gate_up: Tensor  # rows
    down: Tensor  # columns

    def blank(self) -> Maps:
        """A layer that adds exactly zero, though all that O and down hold is random: V and up are silent."""
        qkv = torch.where(self.qkv >= 0, FREE, self.qkv)
        heads = self.o.shape[0]
        qkv[heads + (qkv.shape[0] - heads) // 2 :] = SILENT
        gate, up = self.gate_up.chunk(2)
        gate_up = torch.cat((torch.full_like(gate, FREE), torch.full_like(up, SILENT)))
        return Maps(
            self.hidden, self.input, qkv, torch.full_like(self.o, QUIET), gate_up, torch.full_like(self.down, QUIET)
        )


def spread(count: int, size: int, filler: int, run: int = 1, slot: int = 1) -> Tensor:
    """[size]: 0..count - 1 in runs of `run`, each at the start of a slot, the slots evenly spread; else `filler`."""
    runs, slots = -(-count // run), size // slot
    if runs > slots:
        raise UserError(f"{count} columns, heads or layers of the small model do not fit {size} of the large one")
    index = torch.full((size,), filler)
    for i in range(runs):
        start, length = i * slots // runs * slot, min(run, count - i * run)
        index[start : start + length] = torch.arange(i * run, i * run + length)
    return index


def place(small: ModelConfig, large: ModelConfig) -> Maps:
    """The maps of a layer. Raises UserError where the small model does not fit."""
    # runs keep a small group's scale whole; dense columns are spread one by one, for finer groups when they become int4
    run, slot = (1, 1) if small.quant is None else (small.quant.group_size, GROUP)
    hidden = spread(small.hidden_size, large.hidden_size, SILENT, run, slot)
    inner = spread(small.intermediate_size, large.intermediate_size, SILENT, run, slot)
    ups = torch.where(inner < 0, SILENT, inner + small.intermediate_size)
    qkv, o = _place_heads(small, large)
    return Maps(
        hidden=hidden,
        input=torch.where(hidden < 0, QUIET, hidden),
        qkv=qkv,
        o=o,
        gate_up=torch.cat((torch.where(inner < 0, FREE, inner), ups)),
        down=torch.where(inner < 0, QUIET, inner),
    )


def _place_heads(small: ModelConfig, large: ModelConfig) -> tuple[Tensor, Tensor]:
    """Rows of QKV and columns of O.

    RoPE turns dimensions i and i + hd / 2 of a head by theta^(-2i / hd). With hd' = s hd and the same theta the pair
    s i of the large head turns alike, and dimension d of the small head is dimension s d of the large one.
    """
    group, wide = small.num_heads // small.num_kv_heads, large.num_heads // large.num_kv_heads
    stride, rest = divmod(large.head_dim, small.head_dim)
    if rest or stride == 0:
        raise UserError(f"heads of {small.head_dim} do not turn alike in heads of {large.head_dim}: not a multiple")
    dims = spread(small.head_dim, large.head_dim, SILENT, 1, stride)
    copies = -(-group // wide)  # of a key-value head, where its query heads are too many for one
    units = spread(small.num_kv_heads * copies, large.num_kv_heads, SILENT)
    q = torch.full((large.num_heads,), QUIET)
    for place_, unit in enumerate(units.tolist()):
        if unit >= 0:
            owner, part = divmod(unit, copies)
            members = torch.arange(part * wide, (part + 1) * wide)
            mine = torch.where(members < group, owner * group + members, LOUD)
            q[place_ * wide : (place_ + 1) * wide] = mine
    kv = torch.where(units < 0, units, units // copies)
    columns = _cross(q, dims, small.head_dim)
    columns[(q.unsqueeze(1) == LOUD) & (dims >= 0)] = LOUD  # it attends to true values
    columns[(q.unsqueeze(1) == QUIET) | (dims < 0)] = QUIET
    before_k, before_v = (small.num_heads * small.head_dim, (small.num_heads + small.num_kv_heads) * small.head_dim)
    values = _cross(kv, dims, small.head_dim)
    keys = torch.where(values < 0, SILENT, values + before_k)
    keys[kv < 0] = FREE  # scores of heads whose values are zero
    rows = torch.where(columns < 0, FREE, columns)  # padding of a query meets zeros in the key
    values = torch.where(values < 0, SILENT, values + before_v)
    return torch.cat((rows.flatten(), keys.flatten(), values.flatten())), columns.flatten()


def _cross(heads: Tensor, dims: Tensor, width: int) -> Tensor:
    """[heads, dims] numbers of rows, SILENT where there is none."""
    rows = heads.unsqueeze(1) * width + dims
    return torch.where((heads.unsqueeze(1) < 0) | (dims < 0), SILENT, rows)


@dataclass(frozen=True, slots=True)
class Filler:
    """Makes the large matrices on a device, the random part from `noise`."""

    noise: torch.Generator
    dtype: torch.dtype  # of dense ones
    int4: bool

    @property
    def device(self) -> torch.device:
        return self.noise.device

    def matrix(self, source: Weight, rows: Tensor, columns: Tensor, gain: Tensor | None = None) -> Weight:
        """Rows and columns of `source` among others; `gain` [rows] float32 multiplies rows that are taken."""
        bias = None
        if source.bias is not None:
            taken = source.bias[rows.clamp_min(0)].float() * (1 if gain is None else gain)
            bias = torch.where(rows < 0, 0, taken).to(self.device)
        if self.int4:
            return self._int4(source, rows, columns, gain, bias)
        return DenseWeight(self.dense_matrix(source, rows, columns, gain), bias)

    def dense_matrix(self, source: Weight, rows: Tensor, columns: Tensor, gain: Tensor | None = None) -> Tensor:
        """The same without a bias, and never in int4."""
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
        heard = grouped[at] != QUIET  # in those that are loud the code is the zero point
        lines = (at.unsqueeze(1) * GROUP + torch.arange(GROUP))[heard].to(device)
        at, real = at.to(device), real.to(device)
        scales[at.unsqueeze(1), real] = scale.to(device, torch.float16)
        _overlay(zeros, at, real, block.zeros.to(device))
        _overlay(packed, lines, real, block.codes[heard].to(device))
        return Int4Weight(packed, scales, zeros, GROUP, bias)

    def _words(self, *shape: int) -> Tensor:
        """int32 of random bits."""
        return torch.randint(-(2**31), 2**31, shape, generator=self.noise, dtype=torch.int32, device=self.device)


def _where(condition: Tensor) -> Tensor:
    return condition.nonzero().squeeze(1)


def _overlay(words: Tensor, lines: Tensor, rows: Tensor, codes: Tensor) -> None:
    """Writes uint8 codes [lines, rows] among those that `words` [K, N / 8] packs."""
    if lines.numel() == 0:
        return
    plain = unpack_int4(words[lines])
    plain[:, rows] = codes
    words[lines] = pack_int4(plain)


@dataclass(frozen=True, slots=True)
class Block:
    """The groups of a large matrix that take small columns, for n rows. A code that takes nothing is the zero point."""

    codes: Tensor  # [j, GROUP, n] uint8
    scales: Tensor  # [j, n] float32
    zeros: Tensor  # [j, n] uint8


def _take(source: Weight, rows: Tensor, columns: Tensor) -> Block:
    """Small rows [n] at large groups of columns [j, GROUP]: int4 exactly as it is, dense rounded to nearest."""
    if isinstance(source, DenseWeight):
        values = source.weight[rows].float()[:, columns.clamp_min(0)] * (columns >= 0)  # [n, j, GROUP]
        low, high = values.amin(2).clamp_max(0), values.amax(2).clamp_min(0)
        scales = ((high - low) / 15).clamp_min(1e-7).half().float()
        zeros = (-low / scales).round().clamp(0, 15)
        codes = (values / scales.unsqueeze(2) + zeros.unsqueeze(2)).round().clamp(0, 15)
        return Block(codes.permute(1, 2, 0).to(torch.uint8), scales.t(), zeros.t().to(torch.uint8))
    groups = torch.where(columns < 0, -1, columns // source.group_size)
    group = groups.amax(1)
    if bool(((groups >= 0) & (groups != group.unsqueeze(1))).any()):
        raise UserError("two int4 groups of the small model would share one of the large: heads too narrow; take bf16")
    zeros = unpack_int4(source.zeros)[group][:, rows]  # [j, n]
    codes = unpack_int4(source.packed)[columns.clamp_min(0)][:, :, rows]
    codes = torch.where((columns < 0).unsqueeze(2), zeros.unsqueeze(1), codes)
    return Block(codes, source.scales[group][:, rows].float(), zeros)
