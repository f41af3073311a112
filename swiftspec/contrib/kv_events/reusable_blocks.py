"""The blocks of tokens that subscribers know, and the events that bring them up to date."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from swiftspec.cache.prefix_cache import Tokens, TokenText, common_prefix_len
from swiftspec.contrib.kv_events.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent

HASH_BYTES = 8  # subscribers use 64-bit integers


class ReusableBlocks:
    """The reusable blocks, as subscribers know them: whole blocks at the beginning of the texts that a prefix cache
    holds. With a block all blocks before it are known.

    `block_size`: tokens per block.
    `model_name`: hashes of models with different names differ, since some subscribers keep one table for all servers.
    """

    def __init__(self, block_size: int, model_name: str) -> None:
        self._block_size, self._root = block_size, blake2b(model_name.encode(), digest_size=HASH_BYTES).digest()
        self._hashed: list[tuple[Tokens, list[int]]] = []  # texts of the last update, hashes of their blocks
        self._known: dict[int, None] | None = None  # in order of storage, so that a block follows its parent

    def update(self, texts: Sequence[TokenText]) -> list[KvEvent]:
        """Returns the events after which the known blocks are those of `texts`. The first update begins with
        `AllBlocksCleared`, because subscribers may know blocks of an earlier process. `texts`: must not change later.
        """
        arrays = [np.asarray(text, np.int64) for text in texts]
        self._hashed = [(text, self._block_hashes(text)) for text in arrays]
        wanted = {block for _, blocks in self._hashed for block in blocks}
        events: list[KvEvent] = []
        if self._known is None:
            self._known = {}
            events.append(AllBlocksCleared())
        if removed := [block for block in reversed(self._known) if block not in wanted]:  # children before parents
            events.append(BlockRemoved(removed))
            for block in removed:
                del self._known[block]
        for text, blocks in self._hashed:
            first = next((place for place, block in enumerate(blocks) if block not in self._known), len(blocks))
            if new := blocks[first:]:
                tokens = text[first * self._block_size : len(blocks) * self._block_size].tolist()
                events.append(BlockStored(new, blocks[first - 1] if first else None, tokens, self._block_size))
                self._known.update(dict.fromkeys(new))
        return events

    def _block_hashes(self, text: Tokens) -> list[int]:
        """Returns the hashes of the whole blocks of a text. Hashes only the blocks that no text of the last update
        has."""
        size, hashes = self._block_size, list[int]()
        for other, known in self._hashed:
            if other is text:
                return known
        for other, known in self._hashed:
            if len(known) > len(hashes):
                hashes = max(hashes, known[: common_prefix_len(other, text) // size], key=len)
        data, width = np.ascontiguousarray(text, "<i8").tobytes(), 8 * size
        previous = hashes[-1].to_bytes(HASH_BYTES, "big") if hashes else self._root
        for begin in range(len(hashes) * width, len(text) // size * width, width):
            previous = blake2b(previous + data[begin : begin + width], digest_size=HASH_BYTES).digest()
            hashes.append(int.from_bytes(previous, "big"))
        return hashes
