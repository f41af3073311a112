"""Control socket between a supervisor and a supervised process, a pair of Unix sockets. End of file means that the
other process has exited.

The supervisor sends one length-prefixed first message, then single bytes: `LINK`, with an open file descriptor, and
`SHUTDOWN`. The process sends only heartbeats.
"""

from __future__ import annotations

import math
import os
import select
import signal
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue

from swiftspec.distributed.launch.supervisor_link import EXIT_PEER_LOST, Heartbeat, RankInfo, SupervisorLink

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


def ignore_rank_changes(infos: Sequence[RankInfo]) -> None:
    """Default for `on_ranks_changed`: does nothing."""


class SupervisorClient:
    """Client of the supervisor. A thread sends heartbeats and receives messages; it exits the process immediately when
    the supervisor is gone.

    `first_message`: payload of the supervisor's first message.
    `incarnation`: how often the supervisor has restarted this process.
    `heartbeat`: records when the current operation began.
    `link_fd`: file descriptor from which one byte can be read for each engine link and for the shutdown message.
    """

    def __init__(self, control: socket.socket, incarnation: int, *, send_heartbeats: bool = True) -> None:
        """`control`: this process's end of the control socket.
        `send_heartbeats`: whether the thread sends heartbeats. If not, the code that may block calls `send_heartbeat`
        itself, every `HEARTBEAT_INTERVAL_S`.
        """
        control.set_inheritable(False)
        self.incarnation, self.heartbeat = incarnation, Heartbeat()
        self.first_message = read_first_message(control)
        self._control, self._send_heartbeats, self._ready = control, send_heartbeats, False
        self._links: SimpleQueue[socket.socket | None] = SimpleQueue()
        self.link_fd, self._link_notify_fd = os.pipe()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # signals must wake the main thread
        threading.Thread(target=self._run, daemon=True, name="supervisor client").start()  # inherits that mask
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def supervision(
        self, on_ranks_changed: Callable[[Sequence[RankInfo]], None] = ignore_rank_changes
    ) -> SupervisorLink:
        """Returns what a rank shares with the supervisor. `on_ranks_changed`: called on rank 0 with the state of all
        ranks after each change."""
        return SupervisorLink(self.incarnation, self.heartbeat, on_ranks_changed, self.set_ready)

    def set_ready(self) -> None:
        """Reports that startup is complete: from now on the process is restarted when it fails."""
        self._ready = True
        self.send_heartbeat()

    def send_heartbeat(self) -> None:
        """Sends a heartbeat, or drops it if the socket is full because the supervisor is stopped."""
        with suppress(OSError):
            self._control.send(encode_heartbeat(self._ready, self.heartbeat.busy_since), socket.MSG_DONTWAIT)

    def wait_for_link(self, interrupt_fd: int | None = None) -> socket.socket | None:
        """Blocks until the next engine link arrives. Returns None on shutdown or when `interrupt_fd` is readable."""
        files = [self.link_fd, *([] if interrupt_fd is None else [interrupt_fd])]
        ready, _, _ = select.select(files, [], [])
        return None if interrupt_fd in ready else self.next_link()

    def next_link(self) -> socket.socket | None:
        """Returns the engine link that `link_fd` announced, or None for a shutdown. Blocks until there is one."""
        os.read(self.link_fd, 1)
        return self._links.get()

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        while True:
            if self._send_heartbeats:
                self.send_heartbeat()
            if poll.poll(HEARTBEAT_INTERVAL_S * 1000):
                self._receive()

    def _receive(self) -> None:
        try:
            message, files, _, _ = socket.recv_fds(self._control, 1, 1)
        except OSError:
            message, files = b"", []
        if not message:
            os._exit(EXIT_PEER_LOST)
        if message == LINK:
            os.set_inheritable(files[0], False)
            self._links.put(socket.socket(fileno=files[0]))
        else:
            self._links.put(None)
        os.write(self._link_notify_fd, b".")
