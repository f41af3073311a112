"""Compiler for untrusted grammars: each grammar is compiled in a process with limits on time and memory."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import OrderedDict
from contextlib import suppress

from swiftspec.text import output_grammar

COMPILE_TIMEOUT_S = 5.0
COMPILE_MEMORY_BYTES = 4 << 30  # address space of one process
MAX_GRAMMAR_CHARS = 1 << 18
MAX_CACHED_GRAMMARS = 64
MAX_PROCESSES = 2


class SandboxedGrammarCompiler:
    """Grammar compiler that runs `output_grammar.build_grammar` in a process with limits, with an LRU cache of the
    results."""

    def __init__(self, timeout_s: float = COMPILE_TIMEOUT_S, memory_bytes: int = COMPILE_MEMORY_BYTES) -> None:
        self._timeout_s, self._memory_bytes = timeout_s, memory_bytes
        self._cache: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._semaphore = asyncio.Semaphore(MAX_PROCESSES)

    async def __call__(self, kind: str, text: str) -> str:
        """Compiles a grammar. Raises ValueError with a one-line message if the grammar is invalid or exceeds the
        limits."""
        key = kind, text
        if key not in self._cache:
            if len(text) > MAX_GRAMMAR_CHARS:
                raise ValueError(f"{len(text)} characters exceed the limit of {MAX_GRAMMAR_CHARS}")
            async with self._semaphore:
                self._cache[key] = await self._compile(kind, text)
            if len(self._cache) > MAX_CACHED_GRAMMARS:
                self._cache.popitem(last=False)
        self._cache.move_to_end(key)
        return self._cache[key]

    async def _compile(self, kind: str, text: str) -> str:
        limits = str(int(self._timeout_s) + 1), str(self._memory_bytes)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", output_grammar.__file__, *limits,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            async with asyncio.timeout(self._timeout_s):
                stdout, _ = await process.communicate(json.dumps({"kind": kind, "text": text}).encode())
            reply = json.loads(stdout)
        except TimeoutError:
            raise ValueError(f"compilation took longer than {self._timeout_s:g} s: simplify it") from None
        except ValueError:
            raise ValueError("compilation exceeded the limits on time and memory: simplify it") from None
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        if "error" in reply:
            raise ValueError(reply["error"])
        return reply["grammar"]
