"""Shared context of all endpoints: the engine, the tokenizer, the model names and the grammar compiler."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from starlette.concurrency import run_in_threadpool

from swiftspec import __version__
from swiftspec.serve.errors import ApiError, unavailable_error
from swiftspec.serve.format.template_format import TemplateFormat
from swiftspec.serve.link.engine_client import EngineClient
from swiftspec.serve.link.frames import EngineInfo
from swiftspec.serve.metrics.request_metrics import RequestRecorder
from swiftspec.text.codec import TextCodec

P = ParamSpec("P")
T = TypeVar("T")
CompileGrammar = Callable[[str, str], Awaitable[str]]
RETRY_AFTER_S = 2.0  # sent to clients while the server does not accept requests


@dataclass(frozen=True, slots=True)
class AppContext:
    """Shared state of the endpoints; see `app.create_app` for the parameters. `recorder`: measures their requests.
    `created`: start time of the server in seconds since 1970."""

    engine: EngineClient
    recorder: RequestRecorder
    codec: Callable[[], TextCodec | None]
    model_names: Sequence[str]
    compile: CompileGrammar
    keep_alive_s: float
    always_usage: bool
    template_formats: dict[str, TemplateFormat] = field(default_factory=dict)  # by source of the chat template
    created: int = field(default_factory=lambda: int(time.time()))
    _tokenizer_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def require_ready(self) -> tuple[EngineInfo, TextCodec]:
        """Returns the engine's info and the tokenizer. Raises ApiError (503) while the server is loading, draining or
        dead, or has lost the worker of its target. While rank 0 restarts (phase "recovering"), requests are accepted
        and wait in the queue."""
        state, info, codec = self.engine.state, self.engine.info, self.codec()
        if state.phase == "dead":
            raise unavailable_error(f"the engine has exited: {state.detail}", None)
        if state.phase == "draining":
            raise unavailable_error("the server is shutting down", RETRY_AFTER_S)
        if state.phase == "unavailable":
            raise unavailable_error(f"the target is unavailable: {state.detail}", RETRY_AFTER_S)
        if info is None or codec is None or state.phase not in ("ready", "recovering"):
            raise unavailable_error(
                f"Loading model: {state.detail}" if state.detail else "Loading model", RETRY_AFTER_S
            )
        return info, codec

    def system_fingerprint(self) -> str:
        """Returns OpenAI's `system_fingerprint`: an identifier of the version, the models and the plan, with which
        equal seeds give equal answers."""
        info, _ = self.require_ready()
        state = json.dumps([__version__, info.model, info.draft_model, info.plan], sort_keys=True, default=str)
        return f"fp_{hashlib.sha256(state.encode()).hexdigest()[:10]}"

    def resolve_model_name(self, requested: str | None) -> str:
        """Returns the requested model name, or the default one. Raises ApiError (404), in the words by which clients
        recognise it, if the name is not served."""
        if not requested or requested in self.model_names:
            return requested or self.model_names[0]
        served = ", ".join(self.model_names)
        name = repr(requested[:100])
        message, anthropic = f"The model {name} does not exist: use {served}", f"model: {name}; use {served}"
        raise ApiError(404, message, "model", "model_not_found", anthropic_message=anthropic)

    async def run_in_tokenizer_thread(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs `call` in a thread, one call at a time, since the tokenizer and the template renderer are not
        thread-safe."""
        async with self._tokenizer_lock:
            return await run_in_threadpool(call, *args, **kwargs)

    async def compile_grammar(self, requested: tuple[str, str, str]) -> str:
        """Compiles a grammar. Raises ApiError if the grammar is invalid.

        `requested`: kind and text of the grammar, and the request field that contained it.
        """
        kind, text, param = requested
        try:
            return await self.compile(kind, text)
        except ValueError as error:
            raise ApiError(400, f"{param}: {error}", param) from None


def new_id(prefix: str) -> str:
    """Returns a random id: `prefix` and 24 hexadecimal digits."""
    return f"{prefix}{secrets.token_hex(12)}"


def check_tokens(tokens: Sequence[int], info: EngineInfo, param: str) -> None:
    """Raises ApiError on a token id outside the vocabulary."""
    largest = max(tokens, default=0)
    if largest >= info.vocab_size:
        raise ApiError(400, f"{param}: token {largest} is outside the vocabulary of {info.vocab_size}", param)
