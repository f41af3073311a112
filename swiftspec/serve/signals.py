"""Termination by a signal: the exit code is 128 + the signal's number, even if other code replaces or suppresses the
exception that the signal raises."""

from __future__ import annotations

import os
import select
import signal
import termios
import threading
from contextlib import suppress
from types import FrameType
from typing import Any

SIGNAL_GRACE_S = 10.0  # time for a process to clean up after a signal
TERMINATION_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class TerminationGuard:
    """Context manager in which a termination signal raises KeyboardInterrupt or SystemExit in the main thread, and sets
    `exit_code`.

    `exit_code` is that of the first signal, or None. Callers use it instead of the exception, which native code may
    turn into another one and other code may suppress.

    A process that still runs `grace_s` seconds after a signal is ended immediately, by a thread. The interpreter's C
    handler notifies that thread through a file descriptor, so it works even if the main thread never returns from a
    native call. Signals that were ignored before stay ignored.
    """

    def __init__(self, grace_s: float = SIGNAL_GRACE_S, signals: tuple[int, ...] = TERMINATION_SIGNALS) -> None:
        self.exit_code: int | None = None
        self._grace_s, self._signals = grace_s, signals
        self._previous_handlers: dict[int, Any] = {}
        self._finished = False

    def __enter__(self) -> TerminationGuard:
        self._terminal_state = _read_terminal_state()
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)
        self._previous_wakeup_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, daemon=True, name="signals").start()
        for number in self._signals:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous_handlers[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        self._finished = True
        for number, handler in self._previous_handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._previous_wakeup_fd)
        os.close(self._write_fd)
        if self.exit_code is not None:
            _restore_terminal(self._terminal_state)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.exit_code = self.exit_code or 128 + number
        with suppress(BlockingIOError):
            os.write(self._write_fd, bytes([number]))  # asyncio may have replaced the wakeup descriptor
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(self.exit_code)

    def _watch(self) -> None:
        try:
            while numbers := os.read(self._read_fd, 64):
                for number in numbers:  # a signal counts only if no other handler is installed at the moment
                    if number in self._previous_handlers and signal.getsignal(number) == self._handle:
                        self._exit_after_grace(128 + number)
                        return
        finally:
            os.close(self._read_fd)

    def _exit_after_grace(self, code: int) -> None:
        """Waits until the context is left. If that takes longer than the grace period, ends the process, with exit code
        `code` if the Python handler has not run."""
        poll = select.poll()
        poll.register(self._read_fd, 0)  # poll reports POLLHUP, a closed writing end, without being asked
        poll.poll(self._grace_s * 1000)
        if not self._finished:
            _restore_terminal(self._terminal_state)
            os._exit(self.exit_code or code)


def _read_terminal_state() -> list[Any] | None:
    """Returns the settings of the terminal on standard input; None if that is not a terminal."""
    try:
        return termios.tcgetattr(0)
    except termios.error:
        return None


def _restore_terminal(state: list[Any] | None) -> None:
    """Restores the terminal's settings and shows the cursor, also from a background process group. Does nothing if
    `state` is None."""
    if state is None:
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
    with suppress(OSError, termios.error):
        termios.tcsetattr(0, termios.TCSANOW, state)
        if os.isatty(2):
            os.write(2, b"\x1b[?25h")
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
