"""Draft tree in device memory, so that d expansions need no host round trip (csrc/cuda/tree/tree.h, paper section
3.1)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swiftspec import _C
from swiftspec.backends.cuda.sampling import MAX_CANDIDATES
from swiftspec.backends.cuda.torch_interop import current_stream, use_current_device

MAX_LEAVES = 64
NO_SLOT = -1  # the slot of a leaf


class HostTree(Protocol):
    """The arrays of tree.DraftTree: nodes in order of creation, mask rows by tree slot, and the numbers in use."""

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
    """The part of `tree.DraftTree` that expansions need, in device tensors with fixed addresses.

    An expansion always has w rows and takes w tree slots. Its rows are the w best leaves by descending weight, ties by
    node index. If there are fewer leaves, the last rows belong to no node, and no mask contains their slots.
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
        """Copies a tree of the same size to a staging buffer on the device; `restore` makes it the current tree."""
        nodes, slots = tree.sizes.tolist()
        host = self._host
        host["token"][:nodes], host["parent"][:nodes] = tree.token[:nodes], tree.parent[:nodes]
        host["slot"][:nodes] = np.where(tree.slot[:nodes] == tree.slots, NO_SLOT, tree.slot[:nodes])
        host["logprob"][:nodes], host["visible"][:slots] = tree.logprob[:nodes], tree.visible[:slots]
        host["used"][:] = nodes, slots
        self._start.copy_(self._staged, non_blocking=True)

    def restore(self) -> None:
        """Resets the current tree to the last uploaded one, with device operations only, so it can begin a graph."""
        self.state.copy_(self._start)
        self.expansions_left = self.visible.shape[0] // len(self.rows.nodes)

    def download(self, tree: HostTree) -> None:
        """Copies the tree from the device into `tree`, the one that was uploaded. Waits for all earlier operations."""
        self._staged.copy_(self.state)
        host = self._host
        nodes, slots = host["used"].tolist()
        tree.token[:nodes], tree.parent[:nodes] = host["token"][:nodes], host["parent"][:nodes]
        tree.slot[:nodes] = np.where(host["slot"][:nodes] == NO_SLOT, tree.slots, host["slot"][:nodes])
        tree.logprob[:nodes], tree.visible[:slots] = host["logprob"][:nodes], host["visible"][:slots]
        tree.sizes[:] = nodes, slots

    def best_leaves(self, prefix: Tensor) -> DeviceExpansion:
        """Assigns the next tree slots to the best leaves and returns their rows. `prefix` [1] int64: number of slots
        before the tree, which is also the position of the root. Replays of a graph are not counted here: the caller has
        to count its expansions."""
        if self.expansions_left == 0:
            raise ValueError("the tree's slots are used up")
        self.expansions_left -= 1
        self._native.leaves(prefix, current_stream())
        return self.rows

    def add_children(self, tokens: Tensor, logprobs: Tensor) -> None:
        """Children of the last expansion's rows: tokens [w, k] int64, log-probabilities [w, k] float32."""
        self._native.add(tokens, logprobs, current_stream())


def device_tree(slots: int, children: int, leaves: int, vocab: int, device: torch.device) -> DeviceTree | None:
    """A device tree, or None if the kernels do not support expansions of this width."""
    if leaves > MAX_LEAVES or children > min(MAX_CANDIDATES, vocab):
        return None
    return DeviceTree(slots, children, leaves, device)


def _fields_of(buffer: Tensor, fields: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> dict[str, Tensor]:
    """Views of consecutive fields in a byte buffer."""
    parts: dict[str, Tensor] = {}
    at = 0
    for name, (dtype, shape) in fields.items():
        end = at + dtype.itemsize * math.prod(shape)
        parts[name] = buffer[at:end].view(dtype).view(shape)
        at = end
    return parts
