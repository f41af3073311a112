"""Process that renders chat templates. A template is a program, so template.py lets it run in this process and can kill
it.

This file is run by its path and imports nothing of the package. Requests and replies are frames: four bytes of length,
then JSON. The first reply reports that the imports are done, or why they failed; after that there is one reply per
request. The process exits at the end of its input. A limit of CPU seconds ends a rendering even if the client has
exited.
"""

from __future__ import annotations

import copy
import json
import math
import os
import resource
import struct
from pathlib import Path
from typing import Any, BinaryIO

LENGTH = struct.Struct(">I")
MAX_ERROR_CHARS = 2000  # longer error messages are cut
MEMORY_BYTES_PER_REQUEST_BYTE = 8  # for the request's text, its parsed copy, and the rendered result


def main() -> None:
    """Renders requests until the input ends."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    for standard in (0, 1):  # output of a library must not get into the stream of replies
        os.dup2(os.open(os.devnull, os.O_RDWR), standard)
    try:
        import jinja2.sandbox

        # Some templates (Kimi K2) append to lists, which transformers forbids. They change only this process.
        jinja2.sandbox.ImmutableSandboxedEnvironment = jinja2.sandbox.SandboxedEnvironment
        from transformers.utils.chat_template_utils import render_jinja_template

        render_jinja_template([[{"role": "user", "content": ""}]], chat_template="")  # triggers its lazy imports
    except Exception as error:
        _send(replies, {"error": _error_text(error)})
        return
    base_memory = _address_space()
    _send(replies, {"ready": True})
    while head := requests.read(LENGTH.size):
        _send(replies, _reply(requests, LENGTH.unpack(head)[0], base_memory, render_jinja_template))


def _reply(requests: BinaryIO, length: int, base_memory: int, render: Any) -> dict[str, Any]:
    """Renders one request and returns the reply. `base_memory`: address space in bytes after the imports."""
    try:
        request = json.loads(requests.read(length))
        _limit(resource.RLIMIT_AS, base_memory + request["memory_bytes"] + MEMORY_BYTES_PER_REQUEST_BYTE * length)
        used = resource.getrusage(resource.RUSAGE_SELF)
        _limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime + request["timeout_s"]) + 1)
        text = _render(render, request)
        size = len(text.encode("utf-8", "surrogatepass"))
        return {"text": text} if size <= request["max_bytes"] else {"size": size}
    except MemoryError:
        return {"memory": True}
    except Exception as error:
        return {"error": _error_text(error)}


def _render(render: Any, request: dict[str, Any]) -> str:
    """Renders a request. Most templates expect the arguments of tool calls as objects; one that concatenates them with
    text raises TypeError, and then gets their JSON."""

    def rendered(messages: list[dict[str, Any]]) -> str:
        texts, _ = render(
            conversations=[copy.deepcopy(messages)],  # a template can change lists
            chat_template=request["template"],
            tools=request["tools"],
            add_generation_prompt=request["add_generation_prompt"],
            continue_final_message=request["continue_final_message"],
            **request["variables"],
        )
        return str(texts[0])

    try:
        return rendered(request["messages"])
    except TypeError:
        with_json = [_with_json_arguments(message) for message in request["messages"]]
        if with_json == request["messages"]:
            raise
        return rendered(with_json)


def _with_json_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message in which the arguments of tool calls are JSON."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    functions = [call["function"] for call in calls]
    arguments = [json.dumps(function["arguments"], ensure_ascii=False) for function in functions]
    changed = [
        {**call, "function": {**function, "arguments": text}}
        for call, function, text in zip(calls, functions, arguments)
    ]
    return {**message, "tool_calls": changed}


def _send(replies: BinaryIO, reply: dict[str, Any]) -> None:
    data = json.dumps(reply, ensure_ascii=False).encode("utf-8", "surrogatepass")
    replies.write(LENGTH.pack(len(data)) + data)
    replies.flush()


def _error_text(error: Exception) -> str:
    return str(error)[:MAX_ERROR_CHARS] or type(error).__name__


def _limit(what: int, soft: int) -> None:
    """Sets a soft resource limit of this process, at most the hard limit. Does nothing if the system refuses."""
    hard = resource.getrlimit(what)[1]
    try:
        resource.setrlimit(what, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))
    except (OSError, ValueError):
        return


def _address_space() -> int:
    """Returns the bytes of address space that this process has mapped; 4 GiB if /proc does not report it."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    except (OSError, ValueError):
        return 4 << 30


if __name__ == "__main__":
    main()
