"""Frames over a Unix socket: the end that rank 0 holds, which never waits while a request runs, and the front end's."""

from __future__ import annotations

import asyncio
import select
import socket
from collections import deque
from contextlib import suppress
from typing import Any

import msgspec

from swiftspec.errors import UserError
from swiftspec.serve.http.frames import LENGTH, MOST, Frame, FromEngine, ToEngine

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
    """Rank 0's end. `send` and `poll` never wait: what the socket does not take is kept and goes with a later call.
    Raises FrontEndLost where the front end is gone."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket, self._frames = end, Frames(ToEngine)
        self._readable = select.poll()  # asked after every round: an exception of recv costs more
        self._readable.register(end, select.POLLIN)
        self._in: deque[Any] = deque()
        self._out = bytearray()

    def send(self, frame: Frame) -> None:
        """A frame for the front end."""
        self._out += packed(frame)
        self._write()

    def poll(self) -> ToEngine | None:
        """The next frame, if one has come."""
        self._write()
        if not self._in and self._readable.poll(0):
            self._read()
        return self._in.popleft() if self._in else None

    def wait(self, beside: int) -> ToEngine | None:
        """The next frame, waited for; None where the file `beside` has something to read."""
        while (frame := self.poll()) is None:
            writing = [self._socket] if self._out else []
            ready, _, _ = select.select([self._socket, beside], writing, [])
            if beside in ready:
                return None
        return frame

    def flush(self, seconds: float) -> None:
        """Sends what is kept, within this time."""
        while self._out and select.select([], [self._socket], [], seconds)[1]:
            self._write()

    def _write(self) -> None:
        while self._out:
            try:
                sent = self._socket.send(self._out)
            except BlockingIOError:
                return
            except OSError as error:
                raise FrontEndLost(f"the HTTP front end is gone ({error.strerror})") from None
            del self._out[:sent]

    def _read(self) -> None:
        try:
            while data := self._socket.recv(PIECE):
                self._in += self._frames.push(data)
                if len(data) < PIECE:
                    return
        except BlockingIOError:
            return
        except (OSError, ValueError) as error:
            raise FrontEndLost(f"the HTTP front end is gone ({error})") from None
        raise FrontEndLost("the HTTP front end is gone")


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
