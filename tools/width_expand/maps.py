"""Positions of a small model's rows and columns in large matrices.

A large row copies a small one, is SILENT (its output must be exactly zero) or FREE (its output is not used). A large
column copies a small one, is LOUD (its inputs must not count) or QUIET (its inputs are exact zeros).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from swiftspec.errors import UserError
from swiftspec.model.config import ModelConfig
from swiftspec.model.formats import format_of
from swiftspec.model.spec import AttentionSpec, unknown_fields
from swiftspec.model.tensor_names import HF_NAMES

SILENT = LOUD = -1
FREE = QUIET = -2
GROUP = 128  # inputs that share a scale in the written checkpoint


@dataclass(frozen=True, slots=True)
class Maps:
    """Maps of one layer, int64: for each large row or column the index of the small one, or a constant above."""

    hidden: Tensor  # [large hidden size], rows of O and down: a small row or SILENT
    input: Tensor  # [large hidden size], columns of QKV, gate and up: a small column or QUIET
    qkv: Tensor  # rows
    o: Tensor  # columns
    gate_up: Tensor  # rows
    down: Tensor  # columns

    def blank(self) -> Maps:
        """Returns the maps of a layer that adds exactly zero although O and down are random: V and up are silent."""
        qkv = torch.where(self.qkv >= 0, FREE, self.qkv)
        heads = self.o.shape[0]
        qkv[heads + (qkv.shape[0] - heads) // 2 :] = SILENT
        gate, up = self.gate_up.chunk(2)
        gate_up = torch.cat((torch.full_like(gate, FREE), torch.full_like(up, SILENT)))
        return Maps(
            self.hidden, self.input, qkv, torch.full_like(self.o, QUIET), gate_up, torch.full_like(self.down, QUIET)
        )


def spread(count: int, size: int, filler: int, run: int = 1, slot: int = 1) -> Tensor:
    """Returns an index map [size] in which 0 .. count - 1 are evenly spread and the other entries are `filler`.

    The indices come in runs of `run` entries, each at the start of a slot of `slot` entries. Raises UserError if they
    do not fit.
    """
    runs, slots = -(-count // run), size // slot
    if runs > slots:
        raise UserError(f"{count} columns, heads or layers of the small model do not fit {size} of the large one")
    index = torch.full((size,), filler)
    for i in range(runs):
        start, length = i * slots // runs * slot, min(run, count - i * run)
        index[start : start + length] = torch.arange(i * run, i * run + length)
    return index


def map_layer(small: ModelConfig, large: ModelConfig) -> Maps:
    """Returns the maps of a layer. Raises UserError if the small model does not fit, or has a feature of which no large
    model with the same function is known, such as norms of heads, whose epsilon cannot be scaled."""
    feature, rope = unknown_fields(small.spec), small.spec.layer.attention.rope
    if feature is not None:
        raise UserError(f"a model with a {feature} cannot be width-expanded")
    if rope.kind not in ("default", "linear", "llama3") or rope.share != 1 or small.names != HF_NAMES:
        raise UserError("a model with this RoPE or with these matrices cannot be width-expanded")
    # runs keep the scale of a small group whole; dense columns are spread singly, for finer groups when converted to
    # int4
    layout = format_of(small)
    run, slot = (1, 1) if layout is None else (layout.group_size, GROUP)
    hidden = spread(small.spec.hidden_size, large.spec.hidden_size, SILENT, run, slot)
    small_inner, large_inner = (config.spec.layer.mlp.intermediate_size for config in (small, large))
    inner = spread(small_inner, large_inner, SILENT, run, slot)
    ups = torch.where(inner < 0, SILENT, inner + small_inner)
    qkv, o = _map_heads(small.spec.layer.attention, large.spec.layer.attention)
    return Maps(
        hidden=hidden,
        input=torch.where(hidden < 0, QUIET, hidden),
        qkv=qkv,
        o=o,
        gate_up=torch.cat((torch.where(inner < 0, FREE, inner), ups)),
        down=torch.where(inner < 0, QUIET, inner),
    )


def _map_heads(small: AttentionSpec, large: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Returns the map of the rows of QKV and that of the columns of O.

    RoPE rotates dimensions i and i + head_dim / 2 of a head by theta^(-2i / head_dim). In a large head, s times as wide
    and with the same theta, the pair s * i rotates equally, so dimension d of the small head is dimension s * d of the
    large one. Raises UserError if the large head dimension is not a multiple of the small one.
    """
    group, wide = small.num_heads // small.num_kv_heads, large.num_heads // large.num_kv_heads
    stride, rest = divmod(large.head_dim, small.head_dim)
    if rest or stride == 0:
        raise UserError(f"head dimension {large.head_dim} is not a multiple of the small model's {small.head_dim}")
    dims = spread(small.head_dim, large.head_dim, SILENT, 1, stride)
    copies = -(-group // wide)  # copies of a key-value head, if it has too many query heads for one
    units = spread(small.num_kv_heads * copies, large.num_kv_heads, SILENT)
    q = torch.full((large.num_heads,), QUIET)
    for head, unit in enumerate(units.tolist()):
        if unit >= 0:
            owner, part = divmod(unit, copies)
            members = torch.arange(part * wide, (part + 1) * wide)
            mine = torch.where(members < group, owner * group + members, LOUD)
            q[head * wide : (head + 1) * wide] = mine
    kv = torch.where(units < 0, units, units // copies)
    columns = _cross(q, dims, small.head_dim)
    columns[(q.unsqueeze(1) == LOUD) & (dims >= 0)] = LOUD  # the head attends to real values
    columns[(q.unsqueeze(1) == QUIET) | (dims < 0)] = QUIET
    before_k, before_v = small.q_size, small.q_size + small.kv_size
    values = _cross(kv, dims, small.head_dim)
    keys = torch.where(values < 0, SILENT, values + before_k)
    keys[kv < 0] = FREE  # scores of heads with zero values
    rows = torch.where(columns < 0, FREE, columns)  # padding of a query is multiplied by zeros in the key
    values = torch.where(values < 0, SILENT, values + before_v)
    return torch.cat((rows.flatten(), keys.flatten(), values.flatten())), columns.flatten()


def _cross(heads: Tensor, dims: Tensor, width: int) -> Tensor:
    """Returns the indices [heads, dims] of small rows, SILENT if the head or the dimension is not a copy."""
    rows = heads.unsqueeze(1) * width + dims
    return torch.where((heads.unsqueeze(1) < 0) | (dims < 0), SILENT, rows)
