"""Frames over a Unix socket: the end that rank 0 holds, which never waits while a request runs, and the front end's."""

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
from swiftspec.serve.http.engine_link.frames import LENGTH, MOST, Frame, FromEngine, ToEngine

PIECE = 1 << 18  # bytes that are taken off the socket at a time


class FrontEndLost(UserError):
    """The other end is gone, or says what is no frame."""


def packed(frame: Frame) -> bytes:
    """A frame as it travels."""
    data = msgspec.msgpack.encode(frame)
    return len(data).to_bytes(LENGTH, "big") + data


class Frames:
    """Frames out of bytes that come in any pieces."""

    def __init__(self, kind: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._bytes = bytearray()

    def push(self, data: bytes) -> list[Any]:
        """The frames that are whole by now. Raises ValueError on what is none of this kind."""
        self._bytes += data
        found, at = [], 0
        while len(self._bytes) - at >= LENGTH:
            size = int.from_bytes(self._bytes[at : at + LENGTH], "big")
            if size > MOST:
                raise ValueError("a frame is too long")
            if len(self._bytes) - at - LENGTH < size:
                break
            found.append(self._decoder.decode(self._bytes[at + LENGTH : at + LENGTH + size]))
            at += LENGTH + size
        del self._bytes[:at]
        return found


class Wire:
    """Rank 0's end, which it owns. `send` and `poll` never wait, however slowly the other end reads.

    A thread sends: a round's tokens go while the next round's first step computes, and so does the front end's work on
    them, which they wake. Sent by the decode loop itself they cost a round of 5 ms a twentieth (docs/results.md).
    Raises FrontEndLost where the front end is gone.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket, self._frames = end, Frames(ToEngine)
        self._readable = select.poll()  # asked after every round: an exception of recv costs more
        self._readable.register(end, select.POLLIN)
        self._in: deque[Any] = deque()
        self._out: SimpleQueue[Frame | Callable[[], Frame] | None] = SimpleQueue()
        self._lost: FrontEndLost | None = None
        self._sender = Thread(target=self._send, name="frames", daemon=True)
        self._sender.start()

    def send(self, frame: Frame | Callable[[], Frame]) -> None:
        """A frame for the front end; or what makes one, which the sending thread then calls."""
        if self._lost is not None:
            raise self._lost
        self._out.put(frame)

    def poll(self) -> ToEngine | None:
        """The next frame, if one has come."""
        if not self._in and self._readable.poll(0):
            self._read()
        return self._in.popleft() if self._in else None

    def wait(self, beside: int) -> ToEngine | None:
        """The next frame, waited for; None where the file `beside` has something to read."""
        while (frame := self.poll()) is None:
            ready, _, _ = select.select([self._socket, beside], [], [])
            if beside in ready:
                return None
        return frame

    def close(self, seconds: float) -> None:
        """Ends, once what was sent has left within this time."""
        self._out.put(None)
        self._sender.join(seconds)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # a sender that still waits ends, too
        self._socket.close()

    def _send(self) -> None:
        try:
            while (frame := self._out.get()) is not None:
                self._socket.sendall(packed(frame() if callable(frame) else frame))
        except OSError as error:
            self._lost = lost(error.strerror)

    def _read(self) -> None:
        try:
            while data := self._socket.recv(PIECE, socket.MSG_DONTWAIT):
                self._in += self._frames.push(data)
                if len(data) < PIECE:
                    return
        except BlockingIOError:
            return
        except (OSError, ValueError) as error:
            raise lost(error) from None
        raise lost("it hung up")


def lost(why: object) -> FrontEndLost:
    """What is said of a front end that is gone."""
    return FrontEndLost(f"the HTTP front end is gone ({why})")


class AsyncWire:
    """The front end's end, on an event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._frames = Frames(FromEngine)
        self._in: deque[Any] = deque()

    @staticmethod
    async def over(end: socket.socket) -> AsyncWire:
        """On a connected socket, which it takes over."""
        reader, writer = await asyncio.open_unix_connection(sock=end)
        return AsyncWire(reader, writer)

    def send(self, frame: Frame) -> None:
        """A frame for rank 0. One that is gone is noticed by `receive`."""
        self._writer.write(packed(frame))

    async def receive(self) -> FromEngine | None:
        """The next frame; None where rank 0 is gone, or says what is no frame."""
        while not self._in:
            try:
                data = await self._reader.read(PIECE)
                self._in += self._frames.push(data)
            except (OSError, ValueError):
                return None
            if not data:
                return None
        return self._in.popleft()

    async def close(self) -> None:
        """Sends what was said, and ends."""
        with suppress(OSError):
            await self._writer.drain()
        self._writer.close()
