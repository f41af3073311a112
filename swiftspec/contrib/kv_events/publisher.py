"""Publisher of KV events over ZeroMQ, with vLLM's messages: [topic, sequence number, batch]."""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from threading import Thread

import msgspec
import zmq

from swiftspec.cache.prefix_cache import TokenText
from swiftspec.contrib.kv_events.events import AllBlocksCleared, KvEvent, KvEventBatch
from swiftspec.contrib.kv_events.reusable_blocks import ReusableBlocks
from swiftspec.errors import UserError
from swiftspec.settings.kv_events_config import KvEventsConfig
from swiftspec.stdio import warn

MAX_REPLAY_BATCHES = 10_000  # vLLM's default
MAX_REPLAY_BYTES = 64 << 20
SUBSCRIBER_QUEUE = 100_000  # batches for a slow subscriber, vLLM's default; ZeroMQ drops further ones
MAX_REQUEST_BYTES = 1024  # of a subscriber that asks for a replay, which sends one number
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
LINGER_MS = 500  # time at the end for the last batch
MAX_TERM_MS = 2000  # for ZeroMQ's threads to end, after which they end with the process


class ReplayBuffer:
    """The latest batches, encoded, with their sequence numbers: at most `max_batches` and `max_bytes`."""

    def __init__(self, max_batches: int = MAX_REPLAY_BATCHES, max_bytes: int = MAX_REPLAY_BYTES) -> None:
        self._batches = deque[tuple[int, bytes]]()
        self._max_batches, self._max_bytes, self._bytes = max_batches, max_bytes, 0

    def append(self, number: int, batch: bytes) -> None:
        """Adds a batch and drops the oldest ones beyond the limits."""
        self._batches.append((number, batch))
        self._bytes += len(batch)
        while len(self._batches) > self._max_batches or self._bytes > self._max_bytes:
            self._bytes -= len(self._batches.popleft()[1])

    def since(self, number: int) -> list[tuple[int, bytes]]:
        """Returns the batches from `number` on, or those that are left of them."""
        return [each for each in self._batches if each[0] >= number]


class KvEventPublisher:
    """Publishes the changes of the reusable texts. A thread compares, encodes and sends, so that the decoding loop only
    passes the texts on. If several changes wait, the thread publishes their sum.

    Raises UserError if an address is in use or invalid.
    """

    def __init__(self, config: KvEventsConfig, model_name: str) -> None:
        """`model_name`: see `ReusableBlocks`."""
        self._blocks, self._topic = ReusableBlocks(config.block_size, model_name), config.topic.encode()
        self._next_number, self._buffer = 0, ReplayBuffer()
        self._pending = deque[Sequence[TokenText]](maxlen=1)  # the latest texts that are not published
        self._closing = False
        self._wakeup, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self._context = zmq.Context()
        try:
            self._publisher = self._open(zmq.PUB, config.endpoint, "--kv-events-config.endpoint", binds=config.binds)
            self._replay: zmq.Socket[bytes] | None = None
            if config.replay_endpoint is not None:
                self._replay = self._open(
                    zmq.ROUTER, config.replay_endpoint, "--kv-events-config.replay_endpoint", binds=True
                )
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._thread = Thread(target=self._run, name="swiftspec KV events", daemon=True)
        self._thread.start()

    def publish(self, texts: Sequence[TokenText]) -> None:
        """Publishes that the prefixes of `texts` are the ones that can be reused. Does not block. `texts`: must not
        change later."""
        self._pending.append(texts)
        self._wake()

    def close(self) -> None:
        """Publishes that nothing can be reused any more, and closes the sockets."""
        self._closing = True
        self._wake()
        self._thread.join()
        for opened in (self._publisher, self._replay):
            if opened is not None:
                opened.close(linger=LINGER_MS)
        # ZeroMQ waits without a limit for peers that disconnect in the middle of a handshake.
        ending = Thread(target=self._context.term, name="swiftspec KV events end", daemon=True)
        ending.start()
        ending.join(MAX_TERM_MS / 1e3)
        self._wakeup.close()
        self._waker.close()

    def _open(self, kind: int, address: str, flag: str, *, binds: bool) -> zmq.Socket[bytes]:
        opened = self._context.socket(kind)
        opened.set(zmq.SNDHWM, SUBSCRIBER_QUEUE)
        opened.set(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        opened.set(zmq.IPV6, int("[" in address))
        try:
            if binds:
                opened.bind(address)
            else:
                opened.connect(address)
        except zmq.ZMQError as error:
            raise UserError(
                f"{flag}: cannot {'bind' if binds else 'connect to'} {address}: {zmq.strerror(error.errno or 0)}"
            ) from None
        return opened

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # the thread has not read earlier bytes yet
            self._waker.send(b"\0")

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wakeup, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        while not self._closing:
            ready = dict(poller.poll())
            if self._wakeup.fileno() in ready:
                self._wakeup.recv(4096)
            try:
                if self._pending:
                    self._send(self._blocks.update(self._pending.popleft()))
                if self._replay is not None and self._replay in ready:
                    self._answer_replay(self._replay)
            except zmq.ZMQError as error:
                warn(f"KV events are lost: {zmq.strerror(error.errno or 0)}")
        with suppress(zmq.ZMQError):
            self._send([AllBlocksCleared()])

    def _send(self, events: Sequence[KvEvent]) -> None:
        """Sends a batch, unless it is empty, and keeps it for replays."""
        if not events:
            return
        batch, number = msgspec.msgpack.encode(KvEventBatch(time.time(), [*events])), self._next_number
        self._next_number += 1
        self._buffer.append(number, batch)
        self._publisher.send_multipart([self._topic, number.to_bytes(8, "big"), batch])

    def _answer_replay(self, router: zmq.Socket[bytes]) -> None:
        """Sends the batches from the requested number on, then an end mark. The request is [identity, empty, number],
        as a REQ socket or a DEALER socket sends it; anything else is ignored."""
        request = router.recv_multipart()
        if len(request) != 3 or request[1] != b"" or len(request[2]) != 8:
            return
        for number, batch in self._buffer.since(int.from_bytes(request[2], "big")):
            router.send_multipart([request[0], b"", self._topic, number.to_bytes(8, "big"), batch])
        router.send_multipart([request[0], b"", self._topic, END_OF_REPLAY, b""])
