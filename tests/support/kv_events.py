"""A subscriber of KV events, written against the schema that vLLM publishes, with an index as llm-d and Dynamo have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

END_OF_REPLAY = 2**64 - 1


class StoredEvent(msgspec.Struct, tag="BlockStored", forbid_unknown_fields=True):
    """vLLM's BlockStored, of versions that encode events as maps."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class RemovedEvent(msgspec.Struct, tag="BlockRemoved", forbid_unknown_fields=True):
    """vLLM's BlockRemoved."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class ClearedEvent(msgspec.Struct, tag="AllBlocksCleared", forbid_unknown_fields=True):
    """vLLM's AllBlocksCleared."""


class EventBatch(msgspec.Struct, array_like=True):
    """vLLM's KVEventBatch."""

    ts: float
    events: list[StoredEvent | RemovedEvent | ClearedEvent]
    data_parallel_rank: int | None = None


class KvIndex:
    """The blocks of one server. As in llm-d, a block's key follows from its tokens and the key of its parent, and the
    server's hashes only connect events: a key is the tuple of all tokens up to the end of the block."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.keys: dict[int, tuple[int, ...]] = {}  # by hash

    def apply(self, batch: EventBatch) -> None:
        """Applies the events of a batch. A block must follow its parent, and must not be stored or removed twice."""
        for event in batch.events:
            if isinstance(event, ClearedEvent):
                self.keys = {}
            elif isinstance(event, RemovedEvent):
                for block in event.block_hashes:
                    key = self.keys.pop(block)
                    assert all(other[: len(key)] != key for other in self.keys.values()), "children are removed first"
            else:
                self._store(event)

    def _store(self, event: StoredEvent) -> None:
        size = event.block_size
        assert size == self.block_size and event.block_hashes and len(event.token_ids) == size * len(event.block_hashes)
        key = () if event.parent_block_hash is None else self.keys[event.parent_block_hash]
        for place, block in enumerate(event.block_hashes):
            key = (*key, *event.token_ids[place * size : (place + 1) * size])
            assert 0 < block < 2**64 and block not in self.keys and key not in self.keys.values()
            self.keys[block] = key

    def matched_tokens(self, tokens: Sequence[int]) -> int:
        """Number of leading tokens in blocks of the index."""
        known, size = set(self.keys.values()), self.block_size
        ends = range(size, len(tokens) + 1, size)
        return next((end - size for end in ends if tuple(tokens[:end]) not in known), len(tokens) // size * size)


class KvSubscriber:
    """Sockets of a subscriber. `number`: sequence number of the last live batch. Live batches that a replay has
    contained are skipped."""

    def __init__(self, endpoint: str, replay_endpoint: str | None = None, topic: bytes = b"") -> None:
        self._context, self._topic = zmq.Context(), topic
        self._socket = self._context.socket(zmq.SUB)
        self._socket.connect(endpoint)
        self._socket.subscribe(topic)
        self._replay_endpoint, self.number, self._replayed_until = replay_endpoint, -1, 0.0

    def receive(self, timeout_s: float = 30.0) -> EventBatch | None:
        """The next live batch; None if none arrives in time."""
        while self._socket.poll(round(timeout_s * 1e3)):
            topic, number, payload = self._socket.recv_multipart()
            assert topic.startswith(self._topic) and len(number) == 8
            self.number = int.from_bytes(number, "big")
            batch = msgspec.msgpack.decode(payload, type=EventBatch)
            if batch.ts > self._replayed_until:
                return batch
        return None

    def follow(self, index: KvIndex, quiet_s: float = 1.0) -> None:
        """Applies live batches to an index until none has arrived for a while."""
        while (batch := self.receive(quiet_s)) is not None:
            index.apply(batch)

    def replay(self, first: int = 0) -> list[tuple[int, EventBatch]]:
        """The batches from a sequence number on, as a DEALER socket requests them."""
        dealer, found = self._context.socket(zmq.DEALER), list[tuple[int, EventBatch]]()
        assert self._replay_endpoint is not None
        dealer.connect(self._replay_endpoint)
        dealer.send_multipart([b"", first.to_bytes(8, "big")])
        while dealer.poll(10_000):
            empty, topic, number, payload = dealer.recv_multipart()
            assert empty == b"" and topic.startswith(self._topic)
            if int.from_bytes(number, "big") == END_OF_REPLAY and payload == b"":
                dealer.close(0)
                return found
            found.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(payload, type=EventBatch)))
            self._replayed_until = found[-1][1].ts
        raise AssertionError("the replay did not end")

    def close(self) -> None:
        self._context.destroy(linger=0)
