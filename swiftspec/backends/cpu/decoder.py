"""A model's whole stack as one native call: what host.py's operators do one by one, without Python in between."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from numpy.typing import NDArray
from torch import Tensor

from swiftspec import _C
from swiftspec.backends.cpu.rounds import HostRounds
from swiftspec.backends.cpu.shm import SharedGroup
from swiftspec.model.stack import Cache, Layer, Stack

if TYPE_CHECKING:
    from swiftspec.model.batch import Batch

Rows = tuple[int, int, int, int, int, int, int]  # first, count, mask, width, length, keys, values


def fuse(stack: Stack) -> HostDecoder | None:
    """The stack as one call; None where its ranks share no memory."""
    return HostDecoder(stack) if stack.group is None or stack.group.memory is not None else None


class HostDecoder:
    """Runs a stack that host.py has packed. Its buffers grow to the largest batch; one thread at a time uses it."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack  # keeps alive what the native side points to
        self._outputs = stack.head.outputs
        shared: SharedGroup | None = None if stack.group is None else stack.group.memory
        self._native = _C.Decoder(
            stack.embedding.dtype == torch.float32,
            stack.norm.eps,
            stack.embedding.shape[1],
            stack.num_heads,
            stack.kv_heads,
            stack.cos.shape[1],
            stack.embedding.shape[0],
            stack.cos.shape[0],
            stack.embedding.data_ptr(),
            stack.cos.data_ptr(),
            stack.sin.data_ptr(),
            stack.norm.address,
            stack.head.native,
            [_addresses(layer) for layer in stack.layers],
            None if shared is None else shared.native,
            0.0 if shared is None else shared.timeout,
        )

    def rounds(self, cache: Cache) -> HostRounds:
        """The inner part of a round over the only sequence of a cache."""
        return HostRounds(self._native, cache.k, cache.v)

    @staticmethod
    def tree(arrays: Sequence[NDArray], nodes: int, slots: int) -> _C.Tree:
        """The native side of a draft tree on its arrays, which the caller keeps: token, parent, slot, logprob, visible
        and sizes."""
        assert all(array.flags.c_contiguous for array in arrays)
        token, parent, slot, logprob, visible, sizes = (array.ctypes.data for array in arrays)
        return _C.Tree(token, parent, slot, logprob, visible, sizes, nodes, slots)

    def forward(self, batch: Batch, cache: Cache, head: bool) -> Tensor | None:
        """Writes the rows' keys and values into the cache. Returns logits [n, V] (float32), or None without `head`."""
        assert cache.k.is_contiguous() and cache.v.is_contiguous() and cache.k.dtype == self._stack.cos.dtype
        order = None
        if cache.k.shape[1] > 1 and bool((batch.sequence.diff() < 0).any()):
            order = batch.sequence.argsort(stable=True)  # a sequence's rows must follow each other
            rows = ("tokens", "positions", "slots", "mask", "sequence")
            batch = replace(batch, **{name: getattr(batch, name)[order] for name in rows})
        logits = torch.empty(len(batch), self._outputs) if head else None
        kept: list[Tensor] = []  # masks until the call is over
        parts = list(_parts(batch, cache, kept))
        _, sequences, kv_heads, capacity, head_dim = cache.k.shape
        try:
            self._native.forward(
                batch.tokens.data_ptr(),
                batch.positions.data_ptr(),
                batch.slots.data_ptr(),
                len(batch),
                parts,
                capacity,
                sequences * kv_heads * capacity * head_dim * cache.k.element_size(),
                0 if logits is None else logits.data_ptr(),
            )
        except OSError as error:
            lost = None if self._stack.group is None else self._stack.group.lost(error)
            raise lost or error from None
        return logits if logits is None or order is None else logits[order.argsort()]


def _addresses(layer: Layer) -> tuple[int, _C.Weights, _C.Weights, int, _C.Weights, _C.Weights]:
    return (
        layer.input_norm.address, layer.qkv.native, layer.o.native,
        layer.post_norm.address, layer.gate_up.native, layer.down.native,
    )  # fmt: skip


def _parts(batch: Batch, cache: Cache, kept: list[Tensor]) -> Iterator[Rows]:
    """The rows of each sequence of a batch, which follow each other."""
    _, sequences, kv_heads, capacity, head_dim = cache.k.shape
    region = kv_heads * capacity * head_dim * cache.k.element_size()
    counts = [len(batch)] if sequences == 1 else batch.sequence.bincount(minlength=sequences).tolist()
    first = 0
    for sequence, (count, length) in enumerate(zip(counts, batch.kv_len.tolist(), strict=True)):
        if count == 0:
            continue
        mask = batch.mask[first : first + count, max(batch.mask.shape[1] - length, 0) :].contiguous()
        kept.append(mask)
        at = sequence * region
        yield (
            first, count, mask.data_ptr(), mask.shape[1], length,
            cache.k.data_ptr() + at, cache.v.data_ptr() + at,
        )  # fmt: skip
        first += count
