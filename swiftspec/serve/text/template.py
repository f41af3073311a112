"""Chat templates. A template is a program of the model's author, and the sandbox that it runs in knows no end of time
and memory; so it is rendered in a process of its own (render.py), which can be ended."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from swiftspec.errors import UserError
from swiftspec.serve.text import template_process

SECONDS = 10.0
MEMORY = 512 << 20  # bytes beyond what the process has after its imports
START = 120.0  # seconds for the imports, which a busy machine may need
REPLY = 1 << 20  # bytes of a reply around its text
ESCAPED = 6  # bytes of JSON for one of text, at most
INSTEAD = "take another template, or continue plain text with --raw"


class TooLong(UserError):
    """A text of which is certain that it does not fit the context, without tokenizing it."""


class Renderer:
    """Renders the chat template of one model, each time within `seconds` and with `memory` more bytes at most.

    The process is started by `start`, or by the first rendering; one that had to be ended is followed by another.
    """

    def __init__(self, model: Path, seconds: float = SECONDS, memory: int = MEMORY) -> None:
        self._model, self._seconds, self._memory = model, seconds, memory
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Any = None
        self._ready = False

    def start(self) -> None:
        """Starts the process, unless one runs. It gets ready meanwhile."""
        if self._process is not None:
            return
        self._process = subprocess.Popen(  # in a session of its own: Ctrl-C is for us
            [sys.executable, "-P", template_process.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, start_new_session=True, bufsize=0,
        )  # fmt: skip
        self._ready = False
        self._end = weakref.finalize(self, _end, self._process)

    def close(self) -> None:
        """Ends the process. Another rendering would start one again."""
        if self._end is not None:
            self._end()
        self._process = self._end = None

    def render(
        self,
        template: str,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        most: int,
        tools: Sequence[Mapping[str, Any]] | None = None,
        go_on: bool = False,
    ) -> str:
        """The text of a conversation, ready for the assistant's turn, or with `go_on` for more of its last message.
        `variables`: the special tokens by name, and whatever else the template is to know; `tools`: their schemas.
        Raises UserError where the template fails, or keeps to no limit; TooLong on more than `most` bytes of text."""
        asked = {
            "template": template, "messages": [dict(message) for message in messages], "variables": dict(variables),
            "tools": None if tools is None else [dict(tool) for tool in tools], "go_on": go_on,
            "most": most, "seconds": self._seconds, "memory": self._memory,
        }  # fmt: skip
        try:
            reply = self._ask(json.dumps(asked).encode(), REPLY + ESCAPED * most)
            if not isinstance(reply.get("text"), str | None):
                raise ValueError
        except (OSError, ValueError):  # it is gone, or says what is no reply
            how = self._how_it_went()
            self.close()
            raise UserError(f"{self._model}: the chat template {how}: {INSTEAD}") from None
        except BaseException:  # also Ctrl-C: what it would say later is not wanted
            self.close()
            raise
        if "text" in reply:
            return str(reply["text"])
        if "size" in reply:
            raise TooLong(
                f"the prompt does not fit the context: {self._model}: the chat template makes {reply['size']} bytes of"
                f" it, and more than {most} are never so few tokens: shorten it or raise max_model_len"
            )
        if "memory" in reply:
            self.close()
            raise UserError(
                f"{self._model}: the chat template wants more memory than {self._memory >> 20} MiB: {INSTEAD}"
            )
        words = " ".join(str(reply.get("error")).split())
        raise UserError(f"{self._model}: the chat template failed ({words[:297] + '...' * (len(words) > 297)})")

    def _ask(self, data: bytes, most: int) -> dict[str, Any]:
        """Sends a frame and returns the one that answers it. Raises OSError or ValueError where none comes."""
        self.start()
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        there, here = self._process.stdin.fileno(), self._process.stdout.fileno()
        if not self._ready:
            first = _receive(here, REPLY, time.monotonic() + START)
            if "ready" not in first:
                raise UserError(f"chat templates cannot be rendered here: {first.get('error')}")
            self._ready = True
        until = time.monotonic() + self._seconds
        try:
            _send(there, template_process.LENGTH.pack(len(data)) + data, until)
            return _receive(here, most, until)
        except TimeoutError:
            raise UserError(
                f"{self._model}: the chat template took longer than {self._seconds:g} s: {INSTEAD}"
            ) from None

    def _how_it_went(self) -> str:
        """Of a process that says nothing any more."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        if self._process.returncode == -signal.SIGXCPU:
            return f"took longer than {self._seconds:g} s"
        return "ended the process that it ran in"


def _send(file: int, data: bytes, until: float) -> None:
    """Raises TimeoutError at that time of the monotonic clock, BrokenPipeError where nobody reads."""
    rest = memoryview(data)
    while rest:
        _wait(file, select.POLLOUT, until)
        rest = rest[os.write(file, rest[: select.PIPE_BUF]) :]  # so much fits without waiting


def _receive(file: int, most: int, until: float) -> dict[str, Any]:
    """A frame of at most so many bytes. Raises TimeoutError, or ValueError on what is none."""
    (length,) = template_process.LENGTH.unpack(_read(file, template_process.LENGTH.size, until))
    if length > most:
        raise ValueError("longer than asked for")
    reply = json.loads(_read(file, length, until).decode("utf-8", "surrogatepass"))
    if not isinstance(reply, dict):
        raise ValueError("no object")
    return reply


def _read(file: int, count: int, until: float) -> bytes:
    data = bytearray()
    while len(data) < count:
        _wait(file, select.POLLIN, until)
        piece = os.read(file, min(count - len(data), 1 << 20))
        if not piece:
            raise BrokenPipeError("it left")
        data += piece
    return bytes(data)


def _wait(file: int, event: int, until: float) -> None:
    poll = select.poll()
    poll.register(file, event)
    left = until - time.monotonic()
    if left <= 0 or not poll.poll(left * 1000):
        raise TimeoutError


def _end(process: subprocess.Popen[bytes]) -> None:
    """Nothing of it is left behind, not even its entry in the table of processes."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
