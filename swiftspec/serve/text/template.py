"""Rendering of chat templates in a separate process, with limits on time and memory.

A template is a program by the model's author, and its sandbox limits neither time nor memory. The process
(template_process.py) can be killed.
"""

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
RENDER_MEMORY_BYTES = 512 << 20  # in addition to what the imports take
STARTUP_TIMEOUT_S = 120.0  # for the imports, on a busy machine
REPLY_OVERHEAD_BYTES = 1 << 20  # size limit of a reply, in addition to the rendered text
MAX_JSON_BYTES_PER_BYTE = 6  # longest JSON escape of one byte of text
ADVICE = "use another template, or --raw to continue plain text"


class PromptTooLong(UserError):
    """The prompt certainly does not fit the context. This is known from its length in bytes, without tokenizing it."""


class TemplateRenderer:
    """Renderer of one model's chat template, in a child process.

    `start`, or the first rendering, starts the process. After a timeout, a crash or a lack of memory the next rendering
    starts a new one.

    `timeout_s`: time limit of one rendering. `memory_bytes`: its memory limit, in addition to the memory of the
    imports.
    """

    def __init__(
        self, model: Path, timeout_s: float = RENDER_TIMEOUT_S, memory_bytes: int = RENDER_MEMORY_BYTES
    ) -> None:
        self._model, self._timeout_s, self._memory_bytes = model, timeout_s, memory_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: Any = None
        self._ready = False

    def start(self) -> None:
        """Starts the process in the background, unless one is running."""
        if self._process is not None:
            return
        self._process = subprocess.Popen(  # in its own session, so that Ctrl-C does not reach it
            [sys.executable, "-P", template_process.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, start_new_session=True, bufsize=0,
        )  # fmt: skip
        self._ready = False
        self._finalizer = weakref.finalize(self, _kill, self._process)

    def close(self) -> None:
        """Kills the process. The next rendering starts a new one."""
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
        """Renders a conversation.

        `variables`: the special tokens by name, and other variables of the template.
        `max_bytes`: limit of the result's length in bytes.
        `tools`: JSON schemas of the tools.
        `continue_final_message`: leave the last message open, instead of beginning the assistant's turn.

        Raises UserError if the template fails or exceeds a limit, PromptTooLong if the result exceeds `max_bytes`.
        """
        request = {
            "template": template, "messages": [dict(message) for message in messages], "variables": dict(variables),
            "tools": None if tools is None else [dict(tool) for tool in tools],
            "continue_final_message": continue_final_message, "max_bytes": max_bytes, "timeout_s": self._timeout_s,
            "memory_bytes": self._memory_bytes,
        }  # fmt: skip
        try:
            reply = self._exchange(
                json.dumps(request).encode(), REPLY_OVERHEAD_BYTES + MAX_JSON_BYTES_PER_BYTE * max_bytes
            )
            if not isinstance(reply.get("text"), str | None):
                raise ValueError
        except (OSError, ValueError):  # the process has exited, or sent an invalid reply
            how = self._failure_reason()
            self.close()
            raise UserError(f"{self._model}: the chat template {how}: {ADVICE}") from None
        except BaseException:  # also Ctrl-C: a late reply would be taken for the next one
            self.close()
            raise
        if "text" in reply:
            return str(reply["text"])
        if "size" in reply:
            raise PromptTooLong(
                f"the prompt does not fit the context: {self._model}: with the chat template it has {reply['size']}"
                f" bytes, and at most {max_bytes} fit: shorten it or raise max_model_len"
            )
        if "memory" in reply:
            self.close()
            raise UserError(
                f"{self._model}: the chat template needs more than {self._memory_bytes >> 20} MiB of memory: {ADVICE}"
            )
        words = " ".join(str(reply.get("error")).split())
        raise UserError(f"{self._model}: the chat template failed ({words[:297] + '...' * (len(words) > 297)})")

    def _exchange(self, data: bytes, max_bytes: int) -> dict[str, Any]:
        """Sends a request to the process, which is started if necessary, and returns the reply. Raises UserError on a
        timeout, and OSError or ValueError if no valid reply of at most `max_bytes` arrives."""
        self.start()
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        request_fd, reply_fd = self._process.stdin.fileno(), self._process.stdout.fileno()
        if not self._ready:
            first = _receive(reply_fd, REPLY_OVERHEAD_BYTES, time.monotonic() + STARTUP_TIMEOUT_S)
            if "ready" not in first:
                raise UserError(f"chat templates cannot be rendered: {first.get('error')}")
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
        """Returns why the process sent no valid reply, as a predicate of "the chat template"."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        if self._process.returncode == -signal.SIGXCPU:
            return f"took longer than {self._timeout_s:g} s"
        return "terminated the process that renders it"


def _send(file: int, data: bytes, deadline: float) -> None:
    """Writes all data. Raises TimeoutError at `deadline` (monotonic clock), BrokenPipeError if the reader exits."""
    rest = memoryview(data)
    while rest:
        _wait(file, select.POLLOUT, deadline)
        rest = rest[os.write(file, rest[: select.PIPE_BUF]) :]  # PIPE_BUF bytes fit without blocking


def _receive(file: int, max_bytes: int, deadline: float) -> dict[str, Any]:
    """Reads a frame of at most `max_bytes`. Raises TimeoutError at `deadline` (monotonic clock), BrokenPipeError if the
    writer exits, and ValueError if the frame is invalid."""
    (length,) = template_process.LENGTH.unpack(_read(file, template_process.LENGTH.size, deadline))
    if length > max_bytes:
        raise ValueError("frame too long")
    reply = json.loads(_read(file, length, deadline).decode("utf-8", "surrogatepass"))
    if not isinstance(reply, dict):
        raise ValueError("not a JSON object")
    return reply


def _read(file: int, count: int, deadline: float) -> bytes:
    data = bytearray()
    while len(data) < count:
        _wait(file, select.POLLIN, deadline)
        piece = os.read(file, min(count - len(data), 1 << 20))
        if not piece:
            raise BrokenPipeError("end of file")
        data += piece
    return bytes(data)


def _wait(file: int, event: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(file, event)
    left = deadline - time.monotonic()
    if left <= 0 or not poll.poll(left * 1000):
        raise TimeoutError


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kills and reaps the process and closes its pipes."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
