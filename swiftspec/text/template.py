"""Rendering of chat templates in a separate process, with limits on time and memory.

A template is a program by the model's author, and its sandbox limits neither time nor memory. The process
(template_process.py) can be killed.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from swiftspec import file_io
from swiftspec.errors import UserError
from swiftspec.text import template_process

RENDER_TIMEOUT_S = 10.0  # CPU time
BUSY_FACTOR = 6  # times the limit on CPU time: longest wait for a reply, on a machine whose CPUs are taken
RENDER_MEMORY_BYTES = 512 << 20  # in addition to what the imports take
STARTUP_TIMEOUT_S = 120.0  # for the imports, on a busy machine
REPLY_OVERHEAD_BYTES = 1 << 20  # size limit of a reply, in addition to the rendered text
MAX_JSON_BYTES_PER_BYTE = 6  # longest JSON escape of one byte of text
ADVICE = "use another template, or --raw to continue plain text"


def read_template(file: Path) -> str:
    """Reads the file of --chat-template, a Jinja template. Raises UserError if it cannot be read or is empty."""
    name = f"--chat-template {file}"
    text = file_io.read_text(file, name, file_io.SMALL_FILE_BYTES)
    if not text.strip():
        raise UserError(f"{name} is empty: it must contain a Jinja template")
    return text


class PromptTooLong(UserError):
    """The prompt certainly does not fit the context. This is known from its length in bytes, without tokenizing it."""


class TemplateRenderer:
    """Renderer of one model's chat template, in a child process.

    `start`, or the first rendering, starts the process. After a timeout, a crash or a lack of memory the next rendering
    starts a new one.

    `model`: what messages name: the model, or the file of its template.
    `timeout_s`: limit on the CPU time of one rendering.
    `memory_bytes`: its memory limit, in addition to the memory of the imports.
    """

    def __init__(
        self, model: Path, timeout_s: float = RENDER_TIMEOUT_S, memory_bytes: int = RENDER_MEMORY_BYTES
    ) -> None:
        self.model, self._timeout_s, self._memory_bytes = model, timeout_s, memory_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: Any = None
        self._ready = False

    def start(self) -> None:
        """Starts the process in the background, unless one is running."""
        if self._process is not None:
            return
        self._connection, remote_end = socket.socketpair()
        with remote_end:
            self._process = subprocess.Popen(  # in its own session, so that Ctrl-C does not reach it
                [sys.executable, "-P", template_process.__file__],
                stdin=remote_end.fileno(),
                stdout=remote_end.fileno(),
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._replies = self._connection.makefile("rb")
        self._ready = False
        self._finalizer = weakref.finalize(self, _kill, self._process, self._connection, self._replies)

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
        add_generation_prompt: bool = True,
    ) -> str:
        """Renders a conversation.

        `variables`: the special tokens by name, and other variables of the template.
        `max_bytes`: limit of the result's length in bytes.
        `tools`: JSON schemas of the tools.
        `continue_final_message`: leave the last message open.
        `add_generation_prompt`: begin the assistant's turn.

        Raises UserError if the template fails or exceeds a limit, PromptTooLong if the result exceeds `max_bytes`.
        """
        request = {
            "template": template,
            "messages": [dict(message) for message in messages],
            "variables": dict(variables),
            "tools": None if tools is None else [dict(tool) for tool in tools],
            "continue_final_message": continue_final_message,
            "add_generation_prompt": add_generation_prompt,
            "max_bytes": max_bytes,
            "timeout_s": self._timeout_s,
            "memory_bytes": self._memory_bytes,
        }
        try:
            reply = self._exchange(
                json.dumps(request).encode(), REPLY_OVERHEAD_BYTES + MAX_JSON_BYTES_PER_BYTE * max_bytes
            )
            if not isinstance(reply.get("text"), str | None):
                raise ValueError
        except (OSError, ValueError):  # the process has exited, or sent an invalid reply
            how = self._failure_reason()
            self.close()
            raise UserError(f"{self.model}: the chat template {how}: {ADVICE}") from None
        except BaseException:  # also Ctrl-C: a late reply would be taken for the next one
            self.close()
            raise
        if "text" in reply:
            return str(reply["text"])
        if "size" in reply:
            raise PromptTooLong(
                f"the prompt does not fit the context: {self.model}: with the chat template it has {reply['size']}"
                f" bytes, and at most {max_bytes} fit: shorten it or raise max_model_len"
            )
        if "memory" in reply:
            self.close()
            raise UserError(
                f"{self.model}: the chat template needs more than {self._memory_bytes >> 20} MiB of memory: {ADVICE}"
            )
        words = " ".join(str(reply.get("error")).split())
        raise UserError(f"{self.model}: the chat template failed ({words[:297] + '...' * (len(words) > 297)})")

    def _exchange(self, data: bytes, max_bytes: int) -> dict[str, Any]:
        """Sends a request to the process, which is started if necessary, and returns the reply. Raises UserError on a
        timeout, and OSError or ValueError if no valid reply of at most `max_bytes` arrives."""
        self.start()
        if not self._ready:
            self._connection.settimeout(STARTUP_TIMEOUT_S)
            first = _receive(self._replies, REPLY_OVERHEAD_BYTES)
            if "ready" not in first:
                raise UserError(f"chat templates cannot be rendered: {first.get('error')}")
            self._ready = True
        self._connection.settimeout(BUSY_FACTOR * self._timeout_s)
        try:
            self._connection.sendall(template_process.LENGTH.pack(len(data)) + data)
            return _receive(self._replies, max_bytes)
        except TimeoutError:
            raise UserError(
                f"{self.model}: the chat template took longer than {self._timeout_s:g} s: {ADVICE}"
            ) from None

    def _failure_reason(self) -> str:
        """Returns why the process sent no valid reply, as a predicate of "the chat template"."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        if self._process.returncode == -signal.SIGXCPU:
            return f"took longer than {self._timeout_s:g} s"
        return "terminated the process that renders it"


def _receive(replies: BinaryIO, max_bytes: int) -> dict[str, Any]:
    """Reads a frame of at most `max_bytes`. Raises TimeoutError if none arrives in time, and ValueError if it is
    invalid or cut off."""
    length = int.from_bytes(replies.read(template_process.LENGTH.size), "big")
    if length > max_bytes:
        raise ValueError("frame too long")
    reply = json.loads(replies.read(length).decode("utf-8", "surrogatepass"))
    if not isinstance(reply, dict):
        raise ValueError("not a JSON object")
    return reply


def _kill(process: subprocess.Popen[bytes], connection: socket.socket, replies: BinaryIO) -> None:
    """Kills and reaps the process and closes the connection to it."""
    process.kill()
    process.wait()
    replies.close()
    connection.close()
