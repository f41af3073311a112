"""One kept process over all its lives, as its keeper sees it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from swiftspec.distributed.launch.supervision import LOST
from swiftspec.serve.supervisor import control_protocol
from swiftspec.serve.supervisor.restart_policy import Restarts

STARTING = 30.0  # seconds of silence before it is ready: imports of large libraries hold the interpreter
PIECE = 300.0  # seconds for one piece of work; a part of a prompt may take a slow machine a minute
SHARED = Path("/dev/shm")
BY_ITSELF = {0, 2, 128 + signal.SIGHUP, 128 + signal.SIGINT, 141, 128 + signal.SIGTERM}  # codes of a meant end


@dataclass(frozen=True, slots=True)
class Program:
    """What is kept.

    `command`: how it is started, by the number of its control socket's file and its life; `files`: what else it has
    open; `reads`: it has our standard input; `first`: what it is told first. `session`: it has a session of its own, so
    that a terminal's Ctrl-C reaches the keeper alone. `silence`: seconds without a heartbeat after which it counts as
    hanging; None: it may be silent. `again`: it is started again; `vital`: the job ends where that was too often.
    """

    name: str
    command: Callable[[int, int], Sequence[str]]
    variables: Mapping[str, str] = field(default_factory=dict)
    files: tuple[int, ...] = ()
    first: bytes = b""
    session: bool = True
    silence: float | None = 3.0
    again: bool = True
    vital: bool = True
    reads: bool = False


class Child:
    """Its present process, if there is one."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.life = -1
        self.due: float | None = None  # when it is to be started
        self.why = ""  # it was killed
        self.process: subprocess.Popen[bytes] | None = None
        self.control: socket.socket | None = None
        self._restarts = Restarts()
        self._data = b""
        self._heard = self._excused = 0.0
        self._since: float | None = None
        self._ready_at: float | None = None

    def start(self, now: float) -> None:
        """Its next life. Raises OSError where the machine has no room for a process."""
        program = self.program
        self.life, self.due, self.why, self._data = self.life + 1, None, "", b""
        self._heard = self._excused = now
        self._since = self._ready_at = None
        self.control, there = socket.socketpair()
        with there:
            try:
                self.process = subprocess.Popen(
                    program.command(there.fileno(), self.life), env={**os.environ, **program.variables},
                    pass_fds=(there.fileno(), *program.files), start_new_session=program.session,
                    stdin=None if program.reads else subprocess.DEVNULL,
                )  # fmt: skip
            except OSError:
                self._hang_up()
                raise
        with suppress(OSError):  # it may have ended by now
            self.control.sendall(control_protocol.first_message(program.first))
        self.control.setblocking(False)

    def hear(self, now: float) -> None:
        """What has come of heartbeats."""
        while self.control is not None:
            try:
                data = self.control.recv(1 << 12)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:  # it has ended, or is about to
                self._hang_up()
                return
            self._data += data
            whole = len(self._data) // control_protocol.BEAT.size * control_protocol.BEAT.size
            for at in range(
                0, whole, control_protocol.BEAT.size
            ):  # one that was begun before it was ready may come last
                ready, self._since = control_protocol.read_beat(self._data[at : at + control_protocol.BEAT.size])
                self._heard = now
                if ready and self._ready_at is None:
                    self._ready_at = now
            self._data = self._data[whole:]

    def excuse(self, now: float) -> None:
        """The keeper itself did not look for a while: silence and work count from now on."""
        self._heard = self._excused = now

    def watch(self, now: float) -> None:
        """Kills a process that hangs, or is stopped."""
        silence = self.program.silence
        if self.process is None or silence is None or self.why:
            return
        limit = silence if self._ready_at is not None else max(silence, STARTING)
        if now - self._heard > limit:
            self.why = f"gave no sign of life for {limit:g} s"
        elif self._ready_at is not None and self._since is not None and now - max(self._since, self._excused) > PIECE:
            self.why = f"has worked on one thing for {PIECE:g} s"
        if self.why:
            self.signal(signal.SIGKILL)

    def ended(self) -> int | None:
        """The exit code of a process that has ended since this was last asked: what it has left is tidied up."""
        if self.process is None or (code := self.process.poll()) is None:
            return None
        for file in SHARED.glob(f"swiftspec-{self.process.pid}-*"):
            with suppress(OSError):
                file.unlink()
        self._hang_up()
        self.process = None
        return code

    def for_good(self, code: int) -> bool:
        """Whether an end with this code is meant: as a command ends, or where it could not even begin."""
        began = self.life > 0 or self._ready_at is not None
        return not self.program.again or (code != LOST and (not began or code in BY_ITSELF))

    def plan(self, now: float) -> bool:
        """Has it started again in due time; False where that was too often."""
        delay = self._restarts.delay(now, 0.0 if self._ready_at is None else now - self._ready_at)
        self.due = None if delay is None else now + delay
        return delay is not None

    def signal(self, number: int) -> None:
        """Sends its process a signal, if there is one."""
        if self.process is not None:
            self.process.send_signal(number)

    def tell(self, word: bytes, file: socket.socket | None = None) -> None:
        """A word, with an open file perhaps. One that has just ended hears nothing, and its next life need not."""
        if self.control is not None:
            with suppress(OSError):
                socket.send_fds(self.control, [word], [] if file is None else [file.fileno()])

    def _hang_up(self) -> None:
        if self.control is not None:
            self.control.close()
            self.control = None
