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

RENDER_TIMEOUT_S = 10.0
RENDER_MEMORY_BYTES = 512 << 20  # bytes beyond what the process has after its imports
STARTUP_TIMEOUT_S = 120.0  # seconds for the imports, which a busy machine may need
REPLY_OVERHEAD_BYTES = 1 << 20  # bytes of a reply around its text
MAX_JSON_BYTES_PER_BYTE = 6  # bytes of JSON for one of text, at most
ADVICE = "take another template, or continue plain text with --raw"


class PromptTooLong(UserError):
    """A text of which is certain that it does not fit the context, without tokenizing it."""


class TemplateRenderer:
    """Renders the chat template of one model, each time within `seconds` and with `memory` more bytes at most.

    The process is started by `start`, or by the first rendering; one that had to be ended is followed by another.
    """

    def __init__(
        self, model: Path, timeout_s: float = RENDER_TIMEOUT_S, memory_bytes: int = RENDER_MEMORY_BYTES
    ) -> None:
        self._model, self._timeout_s, self._memory_bytes = model, timeout_s, memory_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: Any = None
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
        self._finalizer = weakref.finalize(self, _kill, self._process)

    def close(self) -> None:
        """Ends the process. Another rendering would start one again."""
        if self._finalizer is not None:
            self._finalizer()
        self._process = self._finalizer = None

    def render(
        self,
        template: str,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        max_bytes: int,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
    ) -> str:
        """The text of a conversation, ready for the assistant's turn, or with `go_on` for more of its last message.
        `variables`: the special tokens by name, and whatever else the template is to know; `tools`: their schemas.
        Raises UserError where the template fails, or keeps to no limit; TooLong on more than `most` bytes of text."""
        request = {
            "template": template, "messages": [dict(message) for message in messages], "variables": dict(variables),
            "tools": None if tools is None else [dict(tool) for tool in tools], "go_on": continue_final_message,
            "most": max_bytes, "seconds": self._timeout_s, "memory": self._memory_bytes,
        }  # fmt: skip
        try:
            reply = self._exchange(
                json.dumps(request).encode(), REPLY_OVERHEAD_BYTES + MAX_JSON_BYTES_PER_BYTE * max_bytes
            )
            if not isinstance(reply.get("text"), str | None):
                raise ValueError
        except (OSError, ValueError):  # it is gone, or says what is no reply
            how = self._failure_reason()
            self.close()
            raise UserError(f"{self._model}: the chat template {how}: {ADVICE}") from None
        except BaseException:  # also Ctrl-C: what it would say later is not wanted
            self.close()
            raise
        if "text" in reply:
            return str(reply["text"])
        if "size" in reply:
            raise PromptTooLong(
                f"the prompt does not fit the context: {self._model}: the chat template makes {reply['size']} bytes of"
                f" it, and more than {max_bytes} are never so few tokens: shorten it or raise max_model_len"
            )
        if "memory" in reply:
            self.close()
            raise UserError(
                f"{self._model}: the chat template wants more memory than {self._memory_bytes >> 20} MiB: {ADVICE}"
            )
        words = " ".join(str(reply.get("error")).split())
        raise UserError(f"{self._model}: the chat template failed ({words[:297] + '...' * (len(words) > 297)})")

    def _exchange(self, data: bytes, max_bytes: int) -> dict[str, Any]:
        """Sends a frame and returns the one that answers it. Raises OSError or ValueError where none comes."""
        self.start()
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        request_fd, reply_fd = self._process.stdin.fileno(), self._process.stdout.fileno()
        if not self._ready:
            first = _receive(reply_fd, REPLY_OVERHEAD_BYTES, time.monotonic() + STARTUP_TIMEOUT_S)
            if "ready" not in first:
                raise UserError(f"chat templates cannot be rendered here: {first.get('error')}")
            self._ready = True
        deadline = time.monotonic() + self._timeout_s
        try:
            _send(request_fd, template_process.LENGTH.pack(len(data)) + data, deadline)
            return _receive(reply_fd, max_bytes, deadline)
        except TimeoutError:
            raise UserError(
                f"{self._model}: the chat template took longer than {self._timeout_s:g} s: {ADVICE}"
            ) from None

    def _failure_reason(self) -> str:
        """Of a process that says nothing any more."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        if self._process.returncode == -signal.SIGXCPU:
            return f"took longer than {self._timeout_s:g} s"
        return "ended the process that it ran in"


def _send(file: int, data: bytes, deadline: float) -> None:
    """Raises TimeoutError at that time of the monotonic clock, BrokenPipeError where nobody reads."""
    rest = memoryview(data)
    while rest:
        _wait(file, select.POLLOUT, deadline)
        rest = rest[os.write(file, rest[: select.PIPE_BUF]) :]  # so much fits without waiting


def _receive(file: int, max_bytes: int, deadline: float) -> dict[str, Any]:
    """A frame of at most so many bytes. Raises TimeoutError, or ValueError on what is none."""
    (length,) = template_process.LENGTH.unpack(_read(file, template_process.LENGTH.size, deadline))
    if length > max_bytes:
        raise ValueError("longer than asked for")
    reply = json.loads(_read(file, length, deadline).decode("utf-8", "surrogatepass"))
    if not isinstance(reply, dict):
        raise ValueError("no object")
    return reply


def _read(file: int, count: int, deadline: float) -> bytes:
    data = bytearray()
    while len(data) < count:
        _wait(file, select.POLLIN, deadline)
        piece = os.read(file, min(count - len(data), 1 << 20))
        if not piece:
            raise BrokenPipeError("it left")
        data += piece
    return bytes(data)


def _wait(file: int, event: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(file, event)
    left = deadline - time.monotonic()
    if left <= 0 or not poll.poll(left * 1000):
        raise TimeoutError


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Nothing of it is left behind, not even its entry in the table of processes."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
