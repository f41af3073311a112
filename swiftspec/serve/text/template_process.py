"""The process that chat templates are rendered in: they are programs, and this one can be ended. See template.py.

Run as a file, so it imports nothing of the package. Both ways go frames: four bytes of length, then so much JSON. The
first one out says that the imports are done, or why they failed; then comes one for each that comes in. It leaves at
the end of its input, and a rendering that nobody waits for any more ends at its limit of CPU seconds.
"""

from __future__ import annotations

import json
import math
import os
import resource
import struct
from pathlib import Path
from typing import Any, BinaryIO

LENGTH = struct.Struct(">I")
MAX_ERROR_CHARS = 2000  # characters of an error that are told
MEMORY_BYTES_PER_REQUEST_BYTE = 8  # bytes of memory for each one of a request: as text, as a copy, in what is rendered


def main() -> None:
    """Renders until the input ends."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    for standard in (0, 1):  # whatever a library prints is not for the other side
        os.dup2(os.open(os.devnull, os.O_RDWR), standard)
    try:
        from transformers.utils.chat_template_utils import render_jinja_template

        render_jinja_template([[{"role": "user", "content": ""}]], chat_template="")  # it imports as it goes
    except Exception as error:
        _send(replies, {"error": _error_text(error)})
        return
    base_memory = _address_space()
    _send(replies, {"ready": True})
    while head := requests.read(LENGTH.size):
        _send(replies, _reply(requests, LENGTH.unpack(head)[0], base_memory, render_jinja_template))


def _reply(requests: BinaryIO, length: int, base_memory: int, render: Any) -> dict[str, Any]:
    """What is told of one request; `here`: bytes of memory that the imports took."""
    try:
        request = json.loads(requests.read(length))
        _limit(resource.RLIMIT_AS, base_memory + request["memory"] + MEMORY_BYTES_PER_REQUEST_BYTE * length)
        used = resource.getrusage(resource.RUSAGE_SELF)
        _limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime + request["seconds"]) + 1)
        texts, _ = render(
            conversations=[request["messages"]],
            chat_template=request["template"],
            tools=request["tools"],
            add_generation_prompt=not request["go_on"],
            continue_final_message=request["go_on"],
            **request["variables"],
        )
        size = len(texts[0].encode("utf-8", "surrogatepass"))
        return {"text": texts[0]} if size <= request["most"] else {"size": size}
    except MemoryError:
        return {"memory": True}
    except Exception as error:
        return {"error": _error_text(error)}


def _send(replies: BinaryIO, reply: dict[str, Any]) -> None:
    data = json.dumps(reply, ensure_ascii=False).encode("utf-8", "surrogatepass")
    replies.write(LENGTH.pack(len(data)) + data)
    replies.flush()


def _error_text(error: Exception) -> str:
    return str(error)[:MAX_ERROR_CHARS] or type(error).__name__


def _limit(what: int, soft: int) -> None:
    """Moves a limit of this process, as far as that one lets itself be moved."""
    hard = resource.getrlimit(what)[1]
    try:
        resource.setrlimit(what, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))
    except (OSError, ValueError):
        return


def _address_space() -> int:
    """Bytes that this process has mapped; where nobody says, none."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    except (OSError, ValueError):
        return 4 << 30


if __name__ == "__main__":
    main()
