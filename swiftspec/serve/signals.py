"""How a command ends by a signal: always with that signal's exit code, whatever became of the exception on its way."""

from __future__ import annotations

import os
import select
import signal
import termios
import threading
from contextlib import suppress
from types import FrameType
from typing import Any

GRACE = 10.0  # seconds in which a process puts all in order
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Ending:
    """While it is open, a signal raises KeyboardInterrupt or SystemExit in the main thread, as ever. But native code
    makes another exception of that, and some code goes on after any exception; so `code` remembers the signal, as the
    exit code that it asks for. A process that still runs `grace` seconds later is ended on the spot.

    A thread watches over that. It hears of a signal from the interpreter's own handler, in C, so that a main thread
    which never comes back from a native call is ended too. Signals that were ignored at the start stay ignored.
    """

    def __init__(self, grace: float = GRACE, numbers: tuple[int, ...] = SIGNALS) -> None:
        self.code: int | None = None
        self._grace, self._numbers = grace, numbers
        self._before: dict[int, Any] = {}
        self._over = False

    def __enter__(self) -> Ending:
        self._terminal = _terminal()
        self._heard, self._told = os.pipe()
        os.set_blocking(self._told, False)
        self._wakeup = signal.set_wakeup_fd(self._told, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, daemon=True, name="signals").start()
        for number in self._numbers:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, *error: object) -> None:
        self._over = True
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._told)
        if self.code is not None:
            _restore(self._terminal)

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.code = self.code or 128 + number
        with suppress(BlockingIOError):
            os.write(self._told, bytes([number]))  # asyncio may have put its own file in place of ours
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(self.code)

    def _watch(self) -> None:
        try:
            while heard := os.read(self._heard, 64):
                for number in heard:  # some other handler may have Ctrl-C at the time
                    if number in self._before and signal.getsignal(number) == self._take:
                        self._wait(128 + number)
                        return
        finally:
            os.close(self._heard)

    def _wait(self, code: int) -> None:
        """Until the command is over, or has had its time."""
        poll = select.poll()
        poll.register(self._heard, 0)  # of the other end's close it tells anyway
        poll.poll(self._grace * 1000)
        if not self._over:
            _restore(self._terminal)
            os._exit(self.code or code)


def _terminal() -> list[Any] | None:
    """How the terminal is set, if there is one."""
    try:
        return termios.tcgetattr(0)
    except termios.error:
        return None


def _restore(state: list[Any] | None) -> None:
    """Sets the terminal as it was, shows the cursor; also from the background."""
    if state is None:
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
    with suppress(OSError, termios.error):
        termios.tcsetattr(0, termios.TCSANOW, state)
        if os.isatty(2):
            os.write(2, b"\x1b[?25h")
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
