"""Sockets of the engine link, a Unix socket that transfers frames: for rank 0 and for the front end."""

from __future__ import annotations

import asyncio
import select
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from typing import Any

import msgspec

from swiftspec.errors import UserError
from swiftspec.serve.link.frames import (
    LENGTH_PREFIX_BYTES,
    MAX_FRAME_BYTES,
    Frame,
    FromEngine,
    FrontEndLost,
    ToEngine,
)

RECV_BYTES = 1 << 18


def encode_frame(frame: Frame) -> bytes:
    """Encodes a frame with its length prefix."""
    data = msgspec.msgpack.encode(frame)
    return len(data).to_bytes(LENGTH_PREFIX_BYTES, "big") + data


class FrameDecoder:
    """Decoder of length-prefixed frames in a byte stream. `frame_type`: union of the accepted frame classes."""

    def __init__(self, frame_type: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(frame_type)
        self._bytes = bytearray()

    def push(self, data: bytes) -> list[Any]:
        """Adds bytes and returns the frames that are now complete. Raises ValueError on an invalid frame."""
        self._bytes += data
        found, at = [], 0
        while len(self._bytes) - at >= LENGTH_PREFIX_BYTES:
            size = int.from_bytes(self._bytes[at : at + LENGTH_PREFIX_BYTES], "big")
            if size > MAX_FRAME_BYTES:
                raise ValueError("a frame is too long")
            if len(self._bytes) - at - LENGTH_PREFIX_BYTES < size:
                break
            begin, at = at + LENGTH_PREFIX_BYTES, at + LENGTH_PREFIX_BYTES + size
            try:
                found.append(self._decoder.decode(self._bytes[begin:at]))
            except UserError as error:  # sampling parameters that the sender should have refused
                raise ValueError(str(error)) from None
        del self._bytes[:at]
        return found


class FrameSocket:
    """Rank 0's socket of the engine link. `send` and `poll` never block, however slowly the front end reads.

    A thread encodes and sends the frames. The tokens of a round are thus sent, and processed by the front end, while
    the next forward computes, instead of delaying it (measured in docs/decisions/serving-http.md).

    `connected`: connected Unix socket, which this object closes.
    `send`, `poll` and `wait` raise FrontEndLost if the front end has closed the link or sent an invalid frame.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket, self._frames = connected, FrameDecoder(ToEngine)
        self._poll = select.poll()  # polled after every round; cheaper than a BlockingIOError of recv
        self._poll.register(connected, select.POLLIN)
        self._received: deque[Any] = deque()
        self._to_send: SimpleQueue[Frame | Callable[[], Frame] | None] = SimpleQueue()
        self._error: FrontEndLost | None = None
        self._sender = Thread(target=self._run_sender, name="frames", daemon=True)
        self._sender.start()

    def send(self, frame: Frame | Callable[[], Frame]) -> None:
        """Queues a frame for the sending thread. If `frame` is a function, that thread calls it to create the frame."""
        if self._error is not None:
            raise self._error
        self._to_send.put(frame)

    def poll(self) -> ToEngine | None:
        """Returns the next frame, or None if no frame has arrived."""
        if not self._received and self._poll.poll(0):
            self._read()
        return self._received.popleft() if self._received else None

    def wait(self, wakeup_fd: int) -> ToEngine | None:
        """Blocks until the next frame and returns it. Returns None if `wakeup_fd` becomes readable first."""
        while (frame := self.poll()) is None:
            ready, _, _ = select.select([self._socket, wakeup_fd], [], [])
            if wakeup_fd in ready:
                return None
        return frame

    def close(self, timeout_s: float) -> None:
        """Waits up to `timeout_s` until the queued frames are sent, then closes the socket."""
        self._to_send.put(None)
        self._sender.join(timeout_s)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # unblocks the sending thread
        self._socket.close()

    def _run_sender(self) -> None:
        try:
            while (frame := self._to_send.get()) is not None:
                self._socket.sendall(encode_frame(frame() if callable(frame) else frame))
        except OSError as error:
            self._error = frontend_lost(error.strerror)

    def _read(self) -> None:
        try:
            while data := self._socket.recv(RECV_BYTES, socket.MSG_DONTWAIT):
                self._received += self._frames.push(data)
                if len(data) < RECV_BYTES:
                    return
        except BlockingIOError:
            return
        except (OSError, ValueError) as error:
            raise frontend_lost(error) from None
        raise frontend_lost("connection closed")


def frontend_lost(why: object) -> FrontEndLost:
    """Returns the exception for a lost front end. `why`: the reason."""
    return FrontEndLost(f"the HTTP front end disconnected ({why})")


class AsyncFrameSocket:
    """The front end's asyncio socket of the engine link."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._frames = FrameDecoder(FromEngine)
        self._received: deque[Any] = deque()

    @staticmethod
    async def from_socket(connected: socket.socket) -> AsyncFrameSocket:
        """Creates an AsyncFrameSocket that owns a connected Unix socket."""
        reader, writer = await asyncio.open_unix_connection(sock=connected)
        return AsyncFrameSocket(reader, writer)

    def send(self, frame: Frame) -> None:
        """Queues a frame for rank 0. Never raises if rank 0 is lost; `receive` then returns None."""
        self._writer.write(encode_frame(frame))

    async def receive(self) -> FromEngine | None:
        """Returns the next frame, or None if rank 0 has closed the connection or sent an invalid frame."""
        while not self._received:
            try:
                data = await self._reader.read(RECV_BYTES)
                self._received += self._frames.push(data)
            except (OSError, ValueError):
                return None
            if not data:
                return None
        return self._received.popleft()

    async def close(self) -> None:
        """Flushes and closes the connection."""
        with suppress(OSError):
            await self._writer.drain()
        self._writer.close()
