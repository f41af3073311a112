"""KV cache: keys and values of the attention layers of a model."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# sequence, ascending source slots, first destination slot: moves keys and values to consecutive slots
MoveSlots = Callable[[int, Sequence[int], int], None]
SlotMoverFactory = Callable[[Tensor, Tensor], MoveSlots]  # k and v of a cache -> its MoveSlots


class KVCache:
    """A `LayerCache` of attention layers: the buffers `k` and `v` are [layers, sequences, kv_heads, capacity,
    head_dim]."""

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        capacity: int,
        make_slot_mover: SlotMoverFactory,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """`capacity`: slots of each sequence. The buffers are allocated by `allocate`."""
        self.capacity, self._make_slot_mover = capacity, make_slot_mover
        self._shape, self._dtype, self._device = (layers, kv_heads, capacity, head_dim), dtype, device
        self.k = self.v = torch.empty(0)
        self._move: MoveSlots | None = None

    def allocate(self, sequences: int) -> None:
        self.k = self.v = torch.empty(0)  # frees the old buffers before the new ones are allocated
        self._move = None
        # free slots must be finite: a masked NaN would still propagate through sums
        shape = (self._shape[0], sequences, *self._shape[1:])
        self.k, self.v = (_zeros(shape, self._dtype, torch.device(self._device)) for _ in range(2))
        self._move = self._make_slot_mover(self.k, self.v)

    def move(self, sequence: int, slots: Sequence[int], first: int) -> None:
        assert self._move is not None
        self._move(sequence, slots, first)

    def settle(self, sequence: int, verified: int, used: int) -> None:
        pass

    def reusable_len(self, sequence: int, count: int) -> int:
        return count

    def saved_len(self, saved: tuple[Tensor, Tensor], count: int) -> int:
        return min(count, saved[0].shape[2])

    def snapshot(self, sequence: int, count: int) -> None:
        pass  # every slot has its own state

    def num_snapshots(self, sequence: int, count: int) -> int:
        return 0

    def truncate(self, sequence: int, count: int) -> None:
        pass  # attention reads only slots that were written since

    def clear(self, sequence: int) -> None:
        pass  # attention reads only slots that were written since

    def copy_prefix(self, source: int, destination: int, count: int) -> None:
        for part in (self.k, self.v):
            part[:, destination, :, :count] = part[:, source, :, :count]

    def save_prefix(self, sequence: int, count: int) -> tuple[Tensor, Tensor]:
        """Returns copies of keys and values, [layers, kv_heads, count, head_dim] each."""
        k, v = (part[:, sequence, :, :count].clone() for part in (self.k, self.v))
        return k, v

    def load_prefix(self, sequence: int, saved: tuple[Tensor, Tensor], count: int) -> None:
        for part, copy in zip((self.k, self.v), saved, strict=True):
            part[:, sequence, :, :count] = copy[:, :, :count]

    def wipe(self, sequence: int, count: int) -> None:
        for part in (self.k, self.v):
            part[:, sequence, :, :count].zero_()


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns zeros. On a CPU they are pages that the system maps when they are first written, so that a long context
    uses memory only as it fills; `torch.zeros` writes them."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    try:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        raise MemoryError(f"a KV cache of {size} bytes") from None
    return torch.frombuffer(pages, dtype=torch.uint8).view(dtype).view(shape)
