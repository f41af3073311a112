"""Compiler for untrusted grammars: each is compiled in a process with limits, `sampling/grammar_process.py`."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from contextlib import suppress

from swiftspec.sampling import grammar_process

MAX_GRAMMAR_CHARS = 1 << 18
MAX_CACHED_GRAMMARS = 64
MAX_PROCESSES = 2


class SandboxedGrammarCompiler:
    """Grammar compiler that runs `grammar_process` for each grammar, with an LRU cache of the results."""

    def __init__(self) -> None:
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
        process = await asyncio.create_subprocess_exec(
            *grammar_process.COMMAND,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            async with asyncio.timeout(grammar_process.TIMEOUT_S):
                reply, _ = await process.communicate(grammar_process.encode_request(kind, text))
        except TimeoutError:
            raise ValueError(grammar_process.TIMEOUT_MESSAGE) from None
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        return grammar_process.decode_reply(reply)
