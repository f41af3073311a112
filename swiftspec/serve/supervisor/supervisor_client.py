"""The supervised process's end of the control socket."""

from __future__ import annotations

import os
import select
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread

from swiftspec.distributed.launch.supervision import EXIT_PEER_LOST, Heartbeat, RankInfo, SupervisorLink
from swiftspec.serve.supervisor import control_protocol


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
        self.first_message = control_protocol.read_first_message(control)
        self._control, self._send_heartbeats, self._ready = control, send_heartbeats, False
        self._links: SimpleQueue[socket.socket | None] = SimpleQueue()
        self.link_fd, self._link_notify_fd = os.pipe()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # signals must wake the main thread
        Thread(target=self._run, daemon=True, name="supervisor client").start()  # inherits that mask
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
            self._control.send(
                control_protocol.encode_heartbeat(self._ready, self.heartbeat.busy_since), socket.MSG_DONTWAIT
            )

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
            if poll.poll(control_protocol.HEARTBEAT_INTERVAL_S * 1000):
                self._receive()

    def _receive(self) -> None:
        try:
            message, files, _, _ = socket.recv_fds(self._control, 1, 1)
        except OSError:
            message, files = b"", []
        if not message:
            os._exit(EXIT_PEER_LOST)
        if message == control_protocol.LINK:
            os.set_inheritable(files[0], False)
            self._links.put(socket.socket(fileno=files[0]))
        else:
            self._links.put(None)
        os.write(self._link_notify_fd, b".")
