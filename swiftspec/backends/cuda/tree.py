"""Draft tree in device memory, so that d expansions need no host round trip (csrc/cuda/tree/tree.h, paper section
3.1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swiftspec import _C
from swiftspec.backends.cuda.sampling import MAX_CANDIDATES
from swiftspec.backends.cuda.torch_interop import current_stream, use_current_device

MAX_LEAVES = 64  # largest w of the kernels
NO_SLOT = -1  # tree slot of a leaf


class HostTree(Protocol):
    """Arrays of a `tree.DraftTree` in host memory. The first four are indexed by node, `visible` by tree slot."""

    token: NDArray[np.int64]
    parent: NDArray[np.int64]
    slot: NDArray[np.int64]  # tree slot; a leaf has the value `slots`
    logprob: NDArray[np.float64]
    visible: NDArray[np.bool_]
    sizes: NDArray[np.int64]  # [2]: nodes and tree slots in use
    slots: int  # tree slots


@dataclass(frozen=True, slots=True)
class DeviceExpansion:
    """Rows of one expansion, in tensors that the next expansion overwrites. `mask` covers the whole tree region."""

    nodes: Tensor  # [w] int32, node of each row; -1 for rows without a leaf, which come last
    tokens: Tensor  # [w] int64
    positions: Tensor  # [w] int64, absolute
    slots: Tensor  # [w] int64, counted from the first slot of the sequence
    mask: Tensor  # [w, tree slots] bool


class DeviceTree:
    """The part of `tree.DraftTree` that expansions need, in device tensors with fixed addresses.

    An expansion always has w rows and takes w tree slots. Its rows are the w leaves with the highest `logprob`, best
    first, ties by node index. If there are fewer leaves, the last rows belong to no node, and no mask contains their
    slots.

    The host uploads a tree that it has already, and `add_root` makes one that begins with its root.

    `slots`: number of tree slots. `children`: children per expanded leaf. Raises ValueError if `w` is out of range.
    """

    region: Tensor  # [2] int64, cache slots before the tree region, which is the root's position, and up to its end
    token: Tensor  # [nodes] int64
    logprob: Tensor  # [nodes] float64, cumulative from the root
    parent: Tensor  # [nodes] int32
    slot: Tensor  # [nodes] int32, tree slot; NO_SLOT for a leaf
    used: Tensor  # [2] int32: nodes and tree slots in use
    visible: Tensor  # [slots, slots] bool, mask rows by tree slot

    def __init__(self, slots: int, children: int, w: int, device: torch.device | str) -> None:
        if not 1 <= w <= min(MAX_LEAVES, slots):
            raise ValueError(f"w must lie in 1..{min(MAX_LEAVES, slots)}, not {w}")
        nodes = 1 + slots * children
        fields = {
            "region": (torch.int64, (2,)),
            "token": (torch.int64, (nodes,)),
            "logprob": (torch.float64, (nodes,)),
            "parent": (torch.int32, (nodes,)),
            "slot": (torch.int32, (nodes,)),
            "used": (torch.int32, (2,)),  # nodes, tree slots
            "visible": (torch.bool, (slots, slots)),
        }  # widest dtype first, so that all fields are aligned; `visible`, by far the largest, is copied in part
        size = sum(dtype.itemsize * math.prod(shape) for dtype, shape in fields.values())
        self.state = torch.zeros(size, dtype=torch.uint8, device=device)
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

    def upload(self, tree: HostTree, prefix: int) -> None:
        """Makes a host tree with the same `slots` the current tree, by one copy. `prefix`: number of cache slots before
        the tree region."""
        nodes, slots = tree.sizes.tolist()
        host = self._host
        host["token"][:nodes], host["parent"][:nodes] = tree.token[:nodes], tree.parent[:nodes]
        host["slot"][:nodes] = np.where(tree.slot[:nodes] == tree.slots, NO_SLOT, tree.slot[:nodes])
        host["logprob"][:nodes], host["visible"][:slots] = tree.logprob[:nodes], tree.visible[:slots]
        host["used"][:], host["region"][:] = (nodes, slots), (prefix, prefix + tree.slots)
        part = self._bytes(slots)
        self.state[:part].copy_(self._staged[:part], non_blocking=True)
        self.expansions_left = (tree.slots - slots) // len(self.rows.nodes)

    def download(self, tree: HostTree, slots: int) -> None:
        """Copies the current tree, which has `slots` tree slots in use, to `tree`, a host tree of the same size. Waits
        for all earlier device operations."""
        part = self._bytes(slots)
        self._staged[:part].copy_(self.state[:part])
        host = self._host
        nodes, used = host["used"].tolist()
        assert used == slots, "the host has counted other expansions"
        tree.token[:nodes], tree.parent[:nodes] = host["token"][:nodes], host["parent"][:nodes]
        tree.slot[:nodes] = np.where(host["slot"][:nodes] == NO_SLOT, tree.slots, host["slot"][:nodes])
        tree.logprob[:nodes], tree.visible[:slots] = host["logprob"][:nodes], host["visible"][:slots]
        tree.sizes[:] = nodes, slots

    def _bytes(self, slots: int) -> int:
        """Returns the bytes of `state` up to the mask row of the last of `slots` tree slots."""
        return len(self.state) - (len(self.visible) - slots) * self.visible.shape[1]

    def best_leaves(self, prefix: Tensor) -> DeviceExpansion:
        """Assigns the next tree slots to the w best leaves and returns their rows. Raises ValueError if no tree slots
        are left.

        `prefix`: [1] int64, number of cache slots before the tree region, which is also the position of the root. The
        replay of a captured CUDA graph does not update `expansions_left`; the caller must count its expansions.
        """
        if self.expansions_left == 0:
            raise ValueError("no free slots in the tree")
        self.expansions_left -= 1
        self._native.leaves(prefix, current_stream())
        return self.rows

    def add_children(self, tokens: Tensor, logprobs: Tensor) -> None:
        """Adds children to the leaves of the last expansion: `tokens` [w, children] int64, `logprobs` [w, children]
        float32."""
        self._native.add(tokens, logprobs, current_stream())

    def add_root(self, token: Tensor, slot: Tensor, tokens: Tensor, logprobs: Tensor) -> None:
        """Makes a root with its children the current tree; the root takes tree slot 0. `token`, `slot`: [1] int64, of
        the root, the slot counted from the first one of the sequence. `tokens`, `logprobs`: as in `add_children`, of
        one row."""
        self._native.root(token, slot, self.region, tokens, logprobs, current_stream())
        self.expansions_left = (self.visible.shape[0] - 1) // len(self.rows.nodes)

    @staticmethod
    def host_tree(arrays: Sequence[NDArray]) -> _C.Tree:
        """Returns a native draft tree on the `arrays` of a `DraftTree`: token, parent, slot, logprob, visible,
        sizes."""
        return _C.Tree(*arrays)


def device_tree(slots: int, children: int, leaves: int, vocab: int, device: torch.device) -> DeviceTree | None:
    """Returns a device tree, or None if the kernels do not support `leaves` per expansion or `children` per leaf."""
    if leaves > MAX_LEAVES or children > min(MAX_CANDIDATES, vocab):
        return None
    return DeviceTree(slots, children, leaves, device)


def _fields_of(buffer: Tensor, fields: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> dict[str, Tensor]:
    """Returns views of consecutive fields in a byte buffer. `fields`: dtype and shape of each."""
    parts: dict[str, Tensor] = {}
    at = 0
    for name, (dtype, shape) in fields.items():
        end = at + dtype.itemsize * math.prod(shape)
        parts[name] = buffer[at:end].view(dtype).view(shape)
        at = end
    return parts
