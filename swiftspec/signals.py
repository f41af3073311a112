"""Signal handlers: what a termination signal does, and the exit code 128 + the signal's number."""

from __future__ import annotations

import os
import select
import signal
import termios
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any, Self

SIGNAL_GRACE_S = 10.0  # time for a process to clean up after a signal
DRAIN_TIMEOUT_S = 20.0  # time for running requests to finish after a signal; a second one ends them immediately
TERMINATION_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def ignore_signals(numbers: Sequence[int] = TERMINATION_SIGNALS) -> None:
    """Ignores these signals from here on."""
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)


class SignalHandlers:
    """Context manager in which `handle` is called with the number of each of these signals. At its end the previous
    handlers are restored. Termination signals that were ignored before stay ignored.

    With `wakeup`, the interpreter's C handler writes the number to the pipe `wakeup_fd`, even while the main thread is
    in a native call and runs no Python handler.
    """

    def __init__(
        self, handle: Callable[[int], None], numbers: Sequence[int] = TERMINATION_SIGNALS, *, wakeup: bool = False
    ) -> None:
        self._call_handle, self._numbers, self._wakeup = handle, numbers, wakeup
        self._previous_handlers: dict[int, Any] = {}
        self._previous_wakeup_fd: int | None = None

    def __enter__(self) -> Self:
        if self._wakeup:
            self.wakeup_fd, self._notify_fd = os.pipe()
            os.set_blocking(self._notify_fd, False)
            self._previous_wakeup_fd = signal.set_wakeup_fd(self._notify_fd, warn_on_full_buffer=False)
        for number in self._numbers:
            if number not in TERMINATION_SIGNALS or signal.getsignal(number) is not signal.SIG_IGN:
                self._previous_handlers[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()
        if self._wakeup:
            os.close(self._notify_fd)
            os.close(self.wakeup_fd)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._call_handle(number)

    def _restore(self) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous_handlers.clear()
        if self._previous_wakeup_fd is not None:
            signal.set_wakeup_fd(self._previous_wakeup_fd)
            self._previous_wakeup_fd = None


class GracefulStop(SignalHandlers):
    """Signal handlers that request a graceful stop. The first termination signal sets `requested`, makes `wakeup_fd`
    readable and calls `on_first`, but interrupts nothing. A second one is handled as before the context.

    `on_first`: called in the main thread, at any moment.
    """

    def __init__(self, on_first: Callable[[int], None] = lambda number: None) -> None:
        super().__init__(self._stop, wakeup=True)
        self.requested = False
        self._on_first = on_first

    def _stop(self, number: int) -> None:
        if self.requested:
            self._restore()
            os.kill(os.getpid(), number)
        else:
            self.requested = True
            self._on_first(number)


class TerminationGuard(SignalHandlers):
    """Signal handlers that end the command: a termination signal raises KeyboardInterrupt or SystemExit in the main
    thread, and sets `exit_code`.

    `exit_code` is that of the first signal, or None. Callers use it instead of the exception, which native code may
    turn into another one and other code may suppress.

    A process that still runs `grace_s` seconds after a signal is ended immediately, by a thread that reads `wakeup_fd`,
    so it works even if the main thread never returns from a native call.
    """

    def __init__(self, grace_s: float = SIGNAL_GRACE_S, numbers: Sequence[int] = TERMINATION_SIGNALS) -> None:
        super().__init__(self._raise, numbers, wakeup=True)
        self.exit_code: int | None = None
        self._grace_s = grace_s
        self._finished = False

    def __enter__(self) -> Self:
        self._terminal_state = _read_terminal_state()
        super().__enter__()
        threading.Thread(target=self._watch, args=(os.dup(self.wakeup_fd),), daemon=True, name="signals").start()
        return self

    def __exit__(self, *error: object) -> None:
        self._finished = True
        super().__exit__()
        if self.exit_code is not None:
            _restore_terminal(self._terminal_state)

    def _raise(self, number: int) -> None:
        self.exit_code = self.exit_code or 128 + number
        with suppress(BlockingIOError):
            os.write(self._notify_fd, bytes([number]))  # asyncio may have replaced the wakeup descriptor
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(self.exit_code)

    def _watch(self, wakeup_fd: int) -> None:
        try:
            while numbers := os.read(wakeup_fd, 64):
                for number in numbers:  # a signal counts only if no other handler is installed at the moment
                    if number in self._previous_handlers and signal.getsignal(number) == self._on_signal:
                        self._exit_after_grace(wakeup_fd, 128 + number)
                        return
        finally:
            os.close(wakeup_fd)

    def _exit_after_grace(self, wakeup_fd: int, code: int) -> None:
        """Waits until the context is left. If that takes longer than the grace period, ends the process, with exit code
        `code` if the Python handler has not run."""
        poll = select.poll()
        poll.register(wakeup_fd, 0)  # poll reports POLLHUP, a closed writing end, without being asked
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
