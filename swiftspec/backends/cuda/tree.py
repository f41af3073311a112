"""Growth of a draft tree on a GPU, so that d expansions need no host (csrc/cuda/tree/tree.h, paper section 3.1)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swiftspec import _C
from swiftspec.backends.cuda.checks import current_stream, use_current_device
from swiftspec.backends.cuda.sampling import MAX_CANDIDATES

MAX_LEAVES = 64
NO_SLOT = -1  # the slot of a node that has none


class HostTree(Protocol):
    """The arrays of tree.DraftTree: nodes in order of creation, mask rows by tree slot; how many are in use."""

    token: NDArray[np.int64]
    parent: NDArray[np.int64]
    slot: NDArray[np.int64]  # `slots` of leaves
    logprob: NDArray[np.float64]
    visible: NDArray[np.bool_]
    sizes: NDArray[np.int64]  # nodes, tree slots
    slots: int


@dataclass(frozen=True, slots=True)
class DeviceExpansion:
    """The rows of one expansion, in tensors that the next one overwrites. `mask` covers the whole tree region."""

    nodes: Tensor  # [w] int32, -1 of rows without a leaf, which come last
    tokens: Tensor  # [w] int64
    positions: Tensor  # [w] int64, absolute
    slots: Tensor  # [w] int64, from the sequence's start
    mask: Tensor  # [w, slots] bool


class DeviceTree:
    """`tree.DraftTree` as far as growing goes, in tensors on a device that stay where they are.

    An expansion always has w rows and takes w tree slots. Its rows are the w likeliest leaves, likeliest first and of
    equal weights the earlier node; where there are fewer, the last rows belong to no node, and nobody sees them.
    """

    token: Tensor  # [nodes] int64
    logprob: Tensor  # [nodes] float64, summed from the root
    parent: Tensor  # [nodes] int32
    slot: Tensor  # [nodes] int32
    used: Tensor  # [2] int32: nodes, tree slots
    visible: Tensor  # [slots, slots] bool

    def __init__(self, slots: int, children: int, w: int, device: torch.device | str) -> None:
        if not 1 <= w <= min(MAX_LEAVES, slots):
            raise ValueError(f"w must lie in 1..{min(MAX_LEAVES, slots)}, not {w}")
        nodes = 1 + slots * children
        fields = {
            "token": (torch.int64, (nodes,)),
            "logprob": (torch.float64, (nodes,)),
            "parent": (torch.int32, (nodes,)),
            "slot": (torch.int32, (nodes,)),
            "used": (torch.int32, (2,)),  # nodes, tree slots
            "visible": (torch.bool, (slots, slots)),
        }  # the wide ones first, so that all are aligned
        size = sum(dtype.itemsize * math.prod(shape) for dtype, shape in fields.values())
        self.state, self._start = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
        self._staged = torch.zeros(size, dtype=torch.uint8, pin_memory=self.state.device.type == "cuda")
        for name, part in _fields_of(self.state, fields).items():
            setattr(self, name, part)
        self._host = {name: part.numpy() for name, part in _fields_of(self._staged, fields).items()}

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.rows = DeviceExpansion(
            zeros(w, dtype=torch.int32),
            zeros(w, dtype=torch.int64),
            zeros(w, dtype=torch.int64),
            zeros(w, dtype=torch.int64),
            zeros(w, slots, dtype=torch.bool),
        )
        self.children, self.expansions_left = children, 0
        self._first = torch.tensor([1, 0], dtype=torch.int32, device=device)
        use_current_device()
        self._native = _C.CudaTree(
            token=self.token,
            parent=self.parent,
            slot=self.slot,
            weight=self.logprob,
            visible=self.visible,
            used=self.used,
            node=self.rows.nodes,
            tokens=self.rows.tokens,
            positions=self.rows.positions,
            slots=self.rows.slots,
            mask=self.rows.mask,
            children=children,
        )

    def reset(self, token: Tensor) -> None:
        """Starts over from an unexpanded root, `token` [1] int64."""
        self.used.copy_(self._first)
        self.slot[:1].fill_(-1)
        self.logprob[:1].zero_()
        self.token[:1].copy_(token)
        self.expansions_left = self.visible.shape[0] // len(self.rows.nodes)  # expansions

    def upload(self, tree: HostTree) -> None:
        """Sends a tree of the same size to the device; `restore` makes it this one."""
        nodes, slots = tree.sizes.tolist()
        host = self._host
        host["token"][:nodes], host["parent"][:nodes] = tree.token[:nodes], tree.parent[:nodes]
        host["slot"][:nodes] = np.where(tree.slot[:nodes] == tree.slots, NO_SLOT, tree.slot[:nodes])
        host["logprob"][:nodes], host["visible"][:slots] = tree.logprob[:nodes], tree.visible[:slots]
        host["used"][:] = nodes, slots
        self._start.copy_(self._staged, non_blocking=True)

    def restore(self) -> None:
        """Back to the tree that was `put` last, on the device alone: a graph may begin with it."""
        self.state.copy_(self._start)
        self.expansions_left = self.visible.shape[0] // len(self.rows.nodes)

    def download(self, tree: HostTree) -> None:
        """Reads the tree from the device, when all that came before is done, into the one that was `put`."""
        self._staged.copy_(self.state)
        host = self._host
        nodes, slots = host["used"].tolist()
        tree.token[:nodes], tree.parent[:nodes] = host["token"][:nodes], host["parent"][:nodes]
        tree.slot[:nodes] = np.where(host["slot"][:nodes] == NO_SLOT, tree.slots, host["slot"][:nodes])
        tree.logprob[:nodes], tree.visible[:slots] = host["logprob"][:nodes], host["visible"][:slots]
        tree.sizes[:] = nodes, slots

    def best_leaves(self, prefix: Tensor) -> DeviceExpansion:
        """Hands the best leaves the next tree slots. `prefix` [1] int64: slots before the tree's, and the root's
        position. A graph that replays this counts its expansions itself."""
        if self.expansions_left == 0:
            raise ValueError("the tree's slots are used up")
        self.expansions_left -= 1
        self._native.leaves(prefix, current_stream())
        return self.rows

    def add_children(self, tokens: Tensor, logprobs: Tensor) -> None:
        """Children of the last expansion's rows: tokens [w, k] int64, log-probabilities [w, k] float32."""
        self._native.add(tokens, logprobs, current_stream())


def device_tree(slots: int, children: int, leaves: int, vocab: int, device: torch.device) -> DeviceTree | None:
    """A tree whose expansions the kernels can do; None where they are too wide for them."""
    if leaves > MAX_LEAVES or children > min(MAX_CANDIDATES, vocab):
        return None
    return DeviceTree(slots, children, leaves, device)


def _fields_of(buffer: Tensor, fields: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> dict[str, Tensor]:
    """The fields of a buffer of bytes, one after the other."""
    parts: dict[str, Tensor] = {}
    at = 0
    for name, (dtype, shape) in fields.items():
        end = at + dtype.itemsize * math.prod(shape)
        parts[name] = buffer[at:end].view(dtype).view(shape)
        at = end
    return parts
