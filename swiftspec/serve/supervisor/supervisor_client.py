"""A process that is kept, as it sees its keeper."""

from __future__ import annotations

import os
import select
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread

from swiftspec.distributed.launch.supervision import LOST, Keeping, Member, Pulse
from swiftspec.serve.supervisor import control_protocol


def nobody(members: Sequence[Member]) -> None:
    """Hears of the ranks where nobody asks."""


class Kept:
    """This process' end of the control socket. A thread sends heartbeats and hears the keeper; once that is gone, the
    process ends on the spot, whatever it does.

    `first`: what the keeper says first; `life`: how often it has started this process before; `arrived`: a file with a
    byte to read for every wire, and for the word to leave.
    """

    def __init__(self, end: socket.socket, life: int, *, beats: bool = True) -> None:
        """`beats`: the thread sends heartbeats. Else whoever can hang calls `beat` itself, every `control.EVERY` s."""
        end.set_inheritable(False)
        self.life, self.pulse = life, Pulse()
        self.first = control_protocol.read_first(end)
        self._end, self._beats, self._ready = end, beats, False
        self._wires: SimpleQueue[socket.socket | None] = SimpleQueue()
        self.arrived, self._told = os.pipe()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are to wake the main thread
        Thread(target=self._live, daemon=True, name="kept").start()  # with that mask from its first instruction on
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def keeping(self, changed: Callable[[Sequence[Member]], None] = nobody) -> Keeping:
        """What the ranks' own side is to know. `changed` hears on rank 0 what the ranks are like."""
        return Keeping(self.life, self.pulse, changed, self.ready)

    def ready(self) -> None:
        """The process does what it is there for: from now on it is started again when it fails."""
        self._ready = True
        self.beat()

    def beat(self) -> None:
        """A heartbeat. One that finds no room, since the keeper is stopped, is left out."""
        with suppress(OSError):
            self._end.send(control_protocol.beat(self._ready, self.pulse.since), socket.MSG_DONTWAIT)

    def wire(self, beside: int | None = None) -> socket.socket | None:
        """The next wire to the other side, waited for; None where the keeper says to leave, or the file `beside` has
        something to read."""
        files = [self.arrived, *([] if beside is None else [beside])]
        ready, _, _ = select.select(files, [], [])
        return None if beside in ready else self.next_wire()

    def next_wire(self) -> socket.socket | None:
        """The wire that `arrived` tells of; None: leave."""
        os.read(self.arrived, 1)
        return self._wires.get()

    def _live(self) -> None:
        poll = select.poll()
        poll.register(self._end, select.POLLIN)
        while True:
            if self._beats:
                self.beat()
            if poll.poll(control_protocol.EVERY * 1000):
                self._hear()

    def _hear(self) -> None:
        try:
            word, files, _, _ = socket.recv_fds(self._end, 1, 1)
        except OSError:
            word, files = b"", []
        if not word:
            os._exit(LOST)
        if word == control_protocol.WIRE:
            os.set_inheritable(files[0], False)
            self._wires.put(socket.socket(fileno=files[0]))
        else:
            self._wires.put(None)
        os.write(self._told, b".")
