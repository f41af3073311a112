"""A keeper: it starts the processes of a job, or of one rank of it, watches them, and starts them again. It imports
nothing heavy, so that nothing but a signal can end it."""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from swiftspec.distributed.launch.supervision import LOST
from swiftspec.serve.signals import SIGNALS
from swiftspec.serve.supervisor import control_protocol
from swiftspec.serve.supervisor.supervised_process import Child, Program
from swiftspec.serve.supervisor.supervisor_link import Link

TICK = 0.25  # seconds between two looks at most
LATE = 1.0  # seconds by which a look was late, and the keeper itself stopped
HOME = 5.0  # seconds in which whoever was sent home has left
TERM = 2.0  # seconds after SIGTERM


class Keeper:
    """Keeps `ranks`, the first of which leads: its end is the end of all. `front`: what rank 0 has a wire to, and which
    is told to leave then. `say` hears a line about whatever ends. `shares_terminal`: the first rank hears Ctrl-C
    itself.
    """

    def __init__(
        self,
        ranks: Sequence[Program],
        front: Program | None = None,
        *,
        say: Callable[[str], None],
        link: Link | None = None,
        shares_terminal: bool = False,
    ) -> None:
        self._ranks = [Child(program) for program in ranks]
        self._lead = self._ranks[0]
        self._front = None if front is None else Child(front)
        self._children = [*([] if self._front is None else [self._front]), *self._ranks]
        self._say, self._link, self._shares_terminal = say, link, shares_terminal
        self._heard: list[int] = []  # signals
        self._signal: int | None = None  # the first that asks for an end
        self._code: int | None = None  # of the job, once the first rank has ended for good
        self._sent_home = False  # the others, by rank 0
        self._looked = 0.0  # when it last did

    def run(self) -> int:
        """Until the first rank has ended for good, and all others with it. Returns the exit code."""
        with Listening(self._heard) as wakeup:
            try:
                self._looked = time.monotonic()
                for child in self._children:
                    self._start(child, self._looked)
                while self._code is None:
                    self._turn(wakeup)
                self._dismiss(wakeup)
                return self._code
            finally:
                for child in self._children:
                    child.signal(signal.SIGKILL)
                if self._link is not None:
                    self._link.close(1 if self._code is None else self._code)

    def _turn(self, wakeup: int) -> None:
        """Waits for the next event, and sees to what has happened."""
        now = self._wait(wakeup)
        self._pass_on()
        over = None if self._link is None else self._link.look()
        if over is not None and self._code is None:
            self._code, self._sent_home = over, True
        for child in self._children:
            code = child.ended()
            if code is not None:
                self._ended(child, code, now)
            child.watch(now)
            if child.due is not None and now >= child.due and self._code is None:
                self._start(child, now)

    def _wait(self, wakeup: int) -> float:
        """Until something comes or is due, and notes heartbeats. Returns the time."""
        poll = select.poll()
        poll.register(wakeup, select.POLLIN)
        for child in self._children:
            if child.control is not None:
                poll.register(child.control, select.POLLIN)
        dues = [child.due - time.monotonic() for child in self._children if child.due is not None]
        seconds = max(min([TICK, *dues]), 0.0)
        if any(file == wakeup for file, _ in poll.poll(seconds * 1000 + 1)):
            os.read(wakeup, 1 << 10)
        now = time.monotonic()
        for child in self._children:
            child.hear(now)
            if now - self._looked > TICK + LATE:
                child.excuse(now)
        self._looked = now
        return now

    def _start(self, child: Child, now: float) -> None:
        """Its next life; and a wire between the front end and rank 0 whenever one of them is new."""
        try:
            child.start(now)
        except OSError as error:
            child.why = f"could not be started ({error.strerror})"
            if child.life == 0:
                self._say(f"{child.program.name} {child.why}")
            self._ended(child, 1, now)
            return
        front = self._front
        if front is not None and child in (front, self._lead) and front.control and self._lead.control:
            here, there = socket.socketpair()
            with here, there:
                front.tell(control_protocol.WIRE, here)
                self._lead.tell(control_protocol.WIRE, there)

    def _ended(self, child: Child, code: int, now: float) -> None:
        """A process has ended: its next life, or the end of the job."""
        if self._code is not None or (child is self._front and code == 0):
            return
        if self._signal is not None or child.for_good(code):
            if code < 0 and self._signal is None:  # else it has said itself why
                self._say(f"{child.program.name} {child.why or _end(code)}")
            if child is self._lead or (code != 0 and self._signal is None):
                self._code = self._as_exit(code)
                self._sent_home = self._code == 0
        elif child.plan(now):
            self._say(f"{child.program.name} {child.why or _end(code)}: it is started again")
        else:
            self._say(f"{child.program.name} {child.why or _end(code)}, too often: it stays lost")
            if child.program.vital or child is self._lead:
                self._code = int(child.program.vital)

    def _as_exit(self, code: int) -> int:
        if code == LOST:
            return 1 if self._signal is None else 128 + self._signal
        return code if code >= 0 else 128 - code

    def _pass_on(self) -> None:
        """Signals go to the first rank, one to one. Where there is none now, they end the job."""
        while self._heard:
            number = self._heard.pop(0)
            if number == signal.SIGINT and self._shares_terminal:
                continue
            self._signal = self._signal or number
            for child in self._children:
                child.due = None
            if self._lead.process is not None:
                self._lead.signal(number)
            elif self._code is None:
                self._code = 128 + number

    def _dismiss(self, wakeup: int) -> None:
        """Sees to it that all have ended. Those that the first rank has sent home leave by themselves."""
        if self._front is not None:
            self._front.tell(control_protocol.LEAVE)
        ranks = [child for child in self._children if child is not self._front]
        if self._sent_home:
            self._leave(wakeup, self._children, HOME)
        for rank in ranks:
            rank.signal(signal.SIGTERM)
        self._leave(wakeup, ranks, TERM)
        for rank in ranks:
            rank.signal(signal.SIGKILL)
        self._leave(wakeup, self._children, HOME)

    def _leave(self, wakeup: int, children: Sequence[Child], seconds: float) -> None:
        """Waits so long until they have ended, or for another signal."""
        end = time.monotonic() + seconds
        while any(child.process is not None for child in children) and time.monotonic() < end and not self._heard:
            now = self._wait(wakeup)
            for child in self._children:
                child.ended()
                child.watch(now)


def _end(code: int) -> str:
    """How a process ended."""
    if code == LOST:
        return "has lost another rank"
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


class Listening:
    """While it is open, signals are put into a list, and one or a child's end wakes whoever polls the file. Signals
    that were ignored at the start stay ignored."""

    def __init__(self, heard: list[int]) -> None:
        self._heard = heard
        self._before: dict[int, Any] = {}

    def __enter__(self) -> int:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._take)
        self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda number, frame: None)
        return self._read

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._read)
        os.close(self._write)

    def _take(self, number: int, frame: FrameType | None) -> None:
        self._heard.append(number)
