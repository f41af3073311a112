"""Grammars of strangers: each is compiled in a process of its own, with a bound on its time and memory."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import OrderedDict
from contextlib import suppress

from swiftspec.serve.http import grammar

SECONDS = 5.0
MEMORY = 4 << 30  # bytes of address space
LONGEST = 1 << 18  # characters of a schema
KNOWN = 64  # grammars that are kept
AT_ONCE = 2  # processes


class Compiler:
    """`grammar.grammar_of`, for anybody. The grammars asked for last are kept."""

    def __init__(self, seconds: float = SECONDS, memory: int = MEMORY) -> None:
        self._seconds, self._memory = seconds, memory
        self._known: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._room = asyncio.Semaphore(AT_ONCE)

    async def __call__(self, kind: str, text: str) -> str:
        """Raises ValueError, in one line, on what is no grammar, or is one that takes too long or too much."""
        asked = kind, text
        if asked not in self._known:
            if len(text) > LONGEST:
                raise ValueError(f"{len(text)} characters are above the limit of {LONGEST}")
            async with self._room:
                self._known[asked] = await self._compile(kind, text)
            if len(self._known) > KNOWN:
                self._known.popitem(last=False)
        self._known.move_to_end(asked)
        return self._known[asked]

    async def _compile(self, kind: str, text: str) -> str:
        limits = str(int(self._seconds) + 1), str(self._memory)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", grammar.__file__, *limits,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            async with asyncio.timeout(self._seconds):
                told, _ = await process.communicate(json.dumps({"kind": kind, "text": text}).encode())
            reply = json.loads(told)
        except TimeoutError:
            raise ValueError(f"it takes longer than {self._seconds:g} s to compile: make it simpler") from None
        except ValueError:
            raise ValueError("it cannot be compiled within the limits of time and memory: make it simpler") from None
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        if "error" in reply:
            raise ValueError(reply["error"])
        return reply["grammar"]
