"""Terminal: startup progress, Ctrl-C, colours, and replacement of control characters."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.status import Status
from rich.text import Text

from swiftspec.cli.word_wrap import WordWrap
from swiftspec.signals import SignalHandlers
from swiftspec.startup.reporter import DOWNLOAD

if TYPE_CHECKING:
    from swiftspec.engine import TokenChunk

ACCEPTED_STYLE = "underline green"
C0_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}  # control code -> its picture
VISIBLE_CONTROLS = C0_PICTURES | dict.fromkeys(range(0x7F, 0xA0), 0xFFFD)


def visible(text: str) -> str:
    """Replaces control characters, except newline and tab, by visible ones, so that they have no effect on the
    terminal."""
    return text.translate(VISIBLE_CONTROLS)


def line_reader() -> Callable[[], str]:
    """Returns a function that reads one message from the terminal. The function raises EOFError on Ctrl-D, and
    KeyboardInterrupt on Ctrl-C in an empty line."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("c-c")
    def _(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt, style="class:aborting")

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    def continuation(width: int, line: int, wrapped: int) -> str:
        return "" if wrapped else "... "  # a long line of input contains no newline

    session: PromptSession[str] = PromptSession(">>> ", key_bindings=keys, prompt_continuation=continuation)
    return session.prompt


def print_note(console: Console, text: str, style: str = "dim") -> None:
    """Prints a line that is not part of an answer; in a terminal it is wrapped between words."""
    console.print(Text(visible(text), style), soft_wrap=not console.is_terminal)


class Painter:
    """Output of one answer: accepted draft tokens are underlined and, unless NO_COLOR is set, coloured. In a terminal
    lines are wrapped between words."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._wrap = WordWrap() if console.is_terminal and not console.is_dumb_terminal else None
        with console.capture() as capture:  # the escape sequences for this terminal, as rich writes them
            console.print(Text("x", ACCEPTED_STYLE), end="")
        self._before, _, self._after = capture.get().partition("x")

    def write(self, text: str, accepted: bool) -> None:
        text = visible(text)
        segments = [(text, accepted)] if self._wrap is None else self._wrap.push(text, accepted, self._console.width)
        self._console.file.write("".join(self._styled(part) if marked else part for part, marked in segments))
        self._console.file.flush()

    def _styled(self, text: str) -> str:
        """Marks text as accepted, line by line: an underline must not continue past the end of a line."""
        return "\n".join(f"{self._before}{line}{self._after}" if line else "" for line in text.split("\n"))


class Interrupt(SignalHandlers):
    """Context manager in which Ctrl-C ends an answer after the current round. A Ctrl-C before the first token, or a
    second one, raises KeyboardInterrupt immediately."""

    def __init__(self) -> None:
        super().__init__(self._press, (signal.SIGINT,))
        self.pressed = False
        self._began = False

    def _press(self, number: int) -> None:
        if self.pressed or not self._began:
            raise KeyboardInterrupt
        self.pressed = True

    def until_pressed(self, chunks: Iterator[TokenChunk]) -> Iterator[TokenChunk]:
        """Yields the chunks until Ctrl-C is pressed, then closes their iterator."""
        try:
            for chunk in chunks:
                self._began = True
                yield chunk
                if self.pressed:
                    return
        finally:
            close = getattr(chunks, "close", None)
            if close is not None:
                close()


class EchoOffInterrupt(Interrupt):
    """Interrupt of an answer in a terminal, which does not echo keys meanwhile: neither `^C` nor typed text appears in
    the answer. Standard input must be the terminal."""

    DISABLED_MODES = termios.ECHO  # local modes of the terminal that are off during the answer

    def __enter__(self) -> Self:
        super().__enter__()
        self._terminal = termios.tcgetattr(0)
        modes = termios.tcgetattr(0)
        modes[3] &= ~self.DISABLED_MODES
        termios.tcsetattr(0, termios.TCSADRAIN, modes)
        return self

    def __exit__(self, *error: object) -> None:
        termios.tcsetattr(0, termios.TCSADRAIN, self._terminal)
        super().__exit__(*error)


class KeyInterrupt(EchoOffInterrupt):
    """Interrupt for a rank under a launcher such as torchrun, which would end all ranks on the terminal's SIGINT.
    During an answer the terminal delivers Ctrl-C as a character instead of a signal. It is read between two rounds;
    other keys are discarded."""

    DISABLED_MODES = termios.ISIG | termios.ICANON | termios.ECHO

    def until_pressed(self, chunks: Iterator[TokenChunk]) -> Iterator[TokenChunk]:
        for chunk in super().until_pressed(chunks):
            if select.select([0], [], [], 0)[0] and b"\x03" in os.read(0, 1024):
                self.pressed = True
            yield chunk


class StartupProgress:
    """Startup progress on stderr: in a terminal one line that is updated, else one line per phase; none if `quiet`."""

    def __init__(self, quiet: bool = False) -> None:
        self._began = self._phase_began = time.monotonic()
        self._done: list[str] = []
        self._phase: str | None = None
        self._status: Status | None = None
        self._lines = not quiet
        if self._lines and sys.stderr.isatty():
            self._status = Status("starting", console=Console(stderr=True))
            self._status.start()

    def begin(self, phase: str, step: str = "") -> None:
        """Begins `phase` if it is not the current one. `step`: progress within the phase, shown in a terminal only."""
        if phase != self._phase:
            self._end()
            self._phase, self._phase_began = phase, time.monotonic()
            if self._lines and self._status is None:
                print(f"swiftspec: {phase}", file=sys.stderr, flush=True)
        if self._status is not None and phase == DOWNLOAD:
            self._status.stop()  # leaves the terminal to the bars of the hub's client
        elif self._status is not None:
            self._status.start()
            self._status.update(f"{phase} {step}".rstrip())

    def warn(self, text: str) -> None:
        """Prints a warning, even if `quiet`."""
        print(f"swiftspec: warning: {text}", file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        """Prints a note, unless `quiet`."""
        if self._lines:
            print(f"swiftspec: {text}", file=sys.stderr, flush=True)

    def ready(self) -> None:
        """Ends the last phase and prints the duration of the startup and of each phase."""
        self._end()
        self.close()
        if self._lines:
            total = time.monotonic() - self._began
            print(f"swiftspec: ready in {total:.1f} s ({', '.join(self._done)})", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Removes the progress line from the terminal; also called after a failure."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def _end(self) -> None:
        if self._phase is not None:
            self._done.append(f"{self._phase} {time.monotonic() - self._phase_began:.1f}")
            self._phase = None
