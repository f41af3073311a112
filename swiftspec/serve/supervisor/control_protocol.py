"""What a keeper and a process that it keeps say to each other, over a pair of Unix sockets. End of file there means
that the other one is gone.

Down goes a first message with its length before it, then single bytes: `WIRE`, with an open file, and `LEAVE`. Up go
heartbeats alone.
"""

from __future__ import annotations

import math
import socket
import struct

EVERY = 0.25  # seconds between two heartbeats
WIRE, LEAVE = b"w", b"l"
BEAT = struct.Struct("<?d")  # whether it is ready; when its piece of work began, by the machine's monotonic clock
LENGTH = 4  # bytes before the first message, big-endian


def beat(ready: bool, since: float | None) -> bytes:
    """A heartbeat as it travels."""
    return BEAT.pack(ready, math.nan if since is None else since)


def read_beat(data: bytes) -> tuple[bool, float | None]:
    """What a heartbeat says."""
    ready, since = BEAT.unpack(data)
    return ready, None if math.isnan(since) else since


def first_message(data: bytes) -> bytes:
    """A first message as it travels."""
    return len(data).to_bytes(LENGTH, "big") + data


def read_first(control: socket.socket) -> bytes:
    """The first message, waited for. Raises EOFError where the keeper is gone."""
    return _exactly(control, int.from_bytes(_exactly(control, LENGTH), "big"))


def _exactly(control: socket.socket, size: int) -> bytes:
    """So many bytes and none more: the next one may have an open file with it."""
    found = b""
    while len(found) < size:
        data = control.recv(size - len(found))
        if not data:
            raise EOFError("the keeper is gone")
        found += data
    return found
