"""KV events as vLLM encodes them: msgpack, a batch as an array and each event as a map with the key `type`.

Fields without a default are always sent. Subscribers ignore fields that they do not know, and vLLM has further ones for
adapters, images and several kinds of attention layers, which a server here does not need.
"""

from __future__ import annotations

import msgspec

MEDIUM = "GPU"  # vLLM's name for the memory that forwards read, whatever the device


class KvEvent(msgspec.Struct, frozen=True, tag=True):
    """Base class of the events. The class name is the value of `type`."""


class BlockStored(KvEvent, frozen=True):
    """Blocks can be reused from now on. They follow one another.

    `block_hashes`: identifiers of the blocks. Each depends on all tokens up to the end of its block.
    `parent_block_hash`: the block before the first one; None: the first one begins a text.
    `token_ids`: the tokens of all blocks.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = MEDIUM
    lora_name: str | None = None


class BlockRemoved(KvEvent, frozen=True):
    """Blocks cannot be reused any more."""

    block_hashes: list[int]
    medium: str | None = MEDIUM


class AllBlocksCleared(KvEvent, frozen=True):
    """No block can be reused any more."""


class KvEventBatch(msgspec.Struct, frozen=True, array_like=True):
    """Events of one message, in the order in which they apply. `ts`: seconds since 1970."""

    ts: float
    events: list[KvEvent]
    data_parallel_rank: int = 0
