"""Messages between a supervisor and a supervised process, over a pair of Unix sockets. End of file means that the
other process has exited.

The supervisor sends one length-prefixed first message, then single bytes: `LINK`, with an open file descriptor, and
`SHUTDOWN`. The process sends only heartbeats.
"""

from __future__ import annotations

import math
import socket
import struct
import threading

HEARTBEAT_INTERVAL_S = 0.25
LINK, SHUTDOWN = b"w", b"l"
# ready flag; start of the current operation on the monotonic clock, NaN when idle; id of the thread that sends it
HEARTBEAT = struct.Struct("<?dI")
LENGTH_BYTES = 4  # bytes before the first message, big-endian


def encode_heartbeat(ready: bool, busy_since: float | None) -> bytes:
    """Encodes a heartbeat of this thread. `busy_since`: start of the current operation (monotonic clock); None when
    idle."""
    return HEARTBEAT.pack(ready, math.nan if busy_since is None else busy_since, threading.get_native_id())


def decode_heartbeat(data: bytes) -> tuple[bool, float | None, int]:
    """Decodes a heartbeat into (ready, busy_since, thread id)."""
    ready, busy_since, thread = HEARTBEAT.unpack(data)
    return ready, None if math.isnan(busy_since) else busy_since, thread


def encode_first_message(data: bytes) -> bytes:
    """Encodes the first message: length prefix and payload."""
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


def read_first_message(control: socket.socket) -> bytes:
    """Blocks until the first message has arrived and returns its payload. Raises EOFError if the supervisor has
    exited."""
    return _read_exactly(control, int.from_bytes(_read_exactly(control, LENGTH_BYTES), "big"))


def _read_exactly(control: socket.socket, size: int) -> bytes:
    """Reads exactly `size` bytes. The byte after them may carry a file descriptor, so it must not be read here."""
    received = b""
    while len(received) < size:
        data = control.recv(size - len(received))
        if not data:
            raise EOFError("the supervisor has exited")
        received += data
    return received
