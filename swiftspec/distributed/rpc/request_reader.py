"""Reader of the request stream of a gRPC call, which can be polled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from queue import Empty, Full, Queue
from threading import Thread
from typing import Any

import grpc

MAX_BUFFERED_REQUESTS = 16  # requests read ahead; beyond that, the client blocks
POLL_S = 1.0  # seconds between two checks whether the call has ended


class RequestReader:
    """Reads requests in a background thread until the stream or the call ends. `ended`: whether `next` has reached the
    end of the stream."""

    def __init__(self, requests: Iterator[bytes], context: Any) -> None:
        self.ended = False
        self._requests, self._context = requests, context
        self._read: Queue[bytes | None] = Queue(MAX_BUFFERED_REQUESTS)
        Thread(target=self._run, name="requests", daemon=True).start()

    def next(self, *, wait: bool) -> bytes | None:
        """Returns the next request, or None if the stream has ended. With `wait=False` it does not block, and returns
        None also if no request has arrived yet."""
        try:
            data = self._read.get(wait)
        except Empty:
            return None
        self.ended = data is None
        return data

    def _run(self) -> None:
        with suppress(grpc.RpcError):  # the call was cancelled or the connection lost
            for data in self._requests:
                self._put(data)
        self._put(None)

    def _put(self, data: bytes | None) -> None:
        while True:
            try:
                self._read.put(data, timeout=POLL_S)
                return
            except Full:
                if not self._context.is_active():
                    return
