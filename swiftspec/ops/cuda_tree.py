"""Growth of a draft tree on a GPU, so that d expansions need no host (csrc/tree.h, paper section 3.1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from swiftspec import _C
from swiftspec.ops.cuda_checks import check, current_stream

MOST_LEAVES = 64


@dataclass(frozen=True, slots=True)
class Expansion:
    """The rows of one expansion, in tensors that the next one overwrites. `mask` covers the whole tree region."""

    nodes: Tensor  # [w] int32, -1 of rows without a leaf, which come last
    tokens: Tensor  # [w] int64
    positions: Tensor  # [w] int64, absolute
    slots: Tensor  # [w] int64, from the sequence's start
    mask: Tensor  # [w, slots] bool


class DeviceTree:
    """`spec.tree.DraftTree` as far as growing goes, in tensors on a device that stay where they are.

    An expansion always has w rows and takes w tree slots. Its rows are the w likeliest leaves, likeliest first and of
    equal weights the earlier node; where there are fewer, the last rows belong to no node, and nobody sees them.
    """

    def __init__(self, slots: int, children: int, w: int, device: torch.device | str) -> None:
        if not 1 <= w <= min(MOST_LEAVES, slots):
            raise ValueError(f"w must lie in 1..{min(MOST_LEAVES, slots)}, not {w}")
        nodes = 1 + slots * children

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.token, self.parent = zeros(nodes, dtype=torch.int64), zeros(nodes, dtype=torch.int32)
        self.slot, self.logprob = zeros(nodes, dtype=torch.int32), zeros(nodes, dtype=torch.float64)
        self.visible = zeros(slots, slots, dtype=torch.bool)
        self.used = zeros(2, dtype=torch.int32)  # nodes, tree slots
        self.rows = Expansion(
            zeros(w, dtype=torch.int32),
            zeros(w, dtype=torch.int64),
            zeros(w, dtype=torch.int64),
            zeros(w, dtype=torch.int64),
            zeros(w, slots, dtype=torch.bool),
        )
        self.children, self.room = children, 0
        self._first = torch.tensor([1, 0], dtype=torch.int32, device=device)
        self._native = _C.CudaTree(
            token=self.token.data_ptr(),
            parent=self.parent.data_ptr(),
            slot=self.slot.data_ptr(),
            weight=self.logprob.data_ptr(),
            visible=self.visible.data_ptr(),
            used=self.used.data_ptr(),
            nodes=nodes,
            slots=slots,
        )

    def reset(self, token: Tensor) -> None:
        """Starts over from an unexpanded root, `token` [1] int64."""
        self.used.copy_(self._first)
        self.slot[:1].fill_(-1)
        self.logprob[:1].zero_()
        self.token[:1].copy_(token)
        self.room = self.visible.shape[0] // len(self.rows.nodes)  # expansions

    def best_leaves(self, prefix: Tensor) -> Expansion:
        """Hands the best leaves the next tree slots. `prefix` [1] int64: slots before the tree's, and the root's
        position. A graph that replays this counts its expansions itself."""
        if self.room == 0:
            raise ValueError("the tree's slots are used up")
        self.room -= 1
        rows, start = self.rows, check("prefix", prefix, torch.int64, (1,), self.token.device)
        self._native.leaves(
            len(rows.nodes),
            start,
            rows.nodes.data_ptr(),
            rows.tokens.data_ptr(),
            rows.positions.data_ptr(),
            rows.slots.data_ptr(),
            rows.mask.data_ptr(),
            current_stream(),
        )
        return rows

    def add_children(self, tokens: Tensor, logprobs: Tensor) -> None:
        """Children of the last expansion's rows: tokens [w, k] int64, log-probabilities [w, k] float32."""
        shape = (len(self.rows.nodes), self.children)
        self._native.add(
            shape[0],
            self.rows.nodes.data_ptr(),
            self.children,
            check("tokens", tokens, torch.int64, shape, self.token.device),
            check("logprobs", logprobs, torch.float32, shape, self.token.device),
            current_stream(),
        )
