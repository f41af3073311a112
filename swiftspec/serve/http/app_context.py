"""What all endpoints need: the engine, the tokenizer, the served names, and how a grammar is compiled."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from starlette.concurrency import run_in_threadpool

from swiftspec.serve.http.engine_link.engine import Engine
from swiftspec.serve.http.engine_link.frames import Ready
from swiftspec.serve.http.errors import ApiError, unready
from swiftspec.serve.http.grammar import grammar_of
from swiftspec.serve.text.codec import TextCodec

P = ParamSpec("P")
T = TypeVar("T")
Compile = Callable[[str, str], Awaitable[str]]
SOON = 2.0  # seconds after which to ask again while the models load


async def compile_here(kind: str, text: str) -> str:
    """A grammar compiled in a thread of this process: for grammars that one trusts."""
    return await run_in_threadpool(grammar_of, kind, text)


@dataclass(frozen=True, slots=True)
class Server:
    """`codec` gives None while the tokenizer is not read. `compile` is `grammar_of`, wherever it runs: it raises
    ValueError on what is no grammar. `every`: seconds of silence after which a stream gets a comment."""

    engine: Engine
    codec: Callable[[], TextCodec | None]
    names: Sequence[str]
    compile: Compile = compile_here
    every: float = 15.0
    always_usage: bool = False
    began: int = field(default_factory=lambda: int(time.time()))
    _encoding: asyncio.Lock = field(default_factory=asyncio.Lock)

    def ready(self) -> tuple[Ready, TextCodec]:
        """What rank 0 has said of itself, and the tokenizer. Raises ApiError while no request can be taken; while it is
        recovering they can, and wait."""
        state, about, codec = self.engine.state, self.engine.about, self.codec()
        if state.phase == "dead":
            raise unready(f"the engine is gone: {state.step}", None)
        if state.phase == "draining":
            raise unready("the server is about to leave", SOON)
        if about is None or codec is None or state.phase not in ("ready", "recovering"):
            raise unready(f"Loading model: {state.step}" if state.step else "Loading model", SOON)
        return about, codec

    def name(self, asked: str | None) -> str:
        """The model's name as the client calls it. Raises ApiError on a model that is not served."""
        if not asked or asked in self.names:
            return asked or self.names[0]
        served = ", ".join(self.names)
        raise ApiError(
            404, f"the model {asked[:100]!r} is not served here: ask for {served}", "model", "model_not_found"
        )

    async def threaded(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Tokenizes or renders beside the event loop, one at a time: neither tokenizers nor the renderer take two."""
        async with self._encoding:
            return await run_in_threadpool(call, *args, **kwargs)

    async def grammar(self, asked: tuple[str, str, str]) -> str:
        """The grammar of (kind, text, field of the request). Raises ApiError on what makes none."""
        kind, text, param = asked
        try:
            return await self.compile(kind, text)
        except ValueError as error:
            raise ApiError(400, f"{param}: {error}", param) from None


def number(prefix: str) -> str:
    """An id that nobody else has."""
    return f"{prefix}{secrets.token_hex(12)}"


def check_tokens(tokens: Sequence[int], about: Ready, param: str) -> None:
    """Raises ApiError on a token that the model has not."""
    worst = max(tokens, default=0)
    if worst >= about.vocab_size:
        raise ApiError(400, f"{param}: token {worst} is none of the model's {about.vocab_size}", param)


def given(**values: Any) -> dict[str, Any]:
    """Without what is None."""
    return {name: value for name, value in values.items() if value is not None}
