"""The application: its endpoints, and what goes around all of them."""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swiftspec import __version__
from swiftspec.serve.http import errors, page
from swiftspec.serve.http.api import chat, completions, info, messages, responses, tokens
from swiftspec.serve.http.app_context import Compile, Server, compile_here
from swiftspec.serve.http.engine_link.engine import Engine
from swiftspec.serve.text.codec import TextCodec

LOG = logging.getLogger("swiftspec.serve")
ID = "x-request-id"
PLAIN = re.compile(r"[\x21-\x7e]{1,128}")


class ErrorBody(BaseModel):
    """What went wrong, and with which field."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class Error(BaseModel):
    """Any answer that is not 200. Below /v1/messages it is {"type": "error", "error": {type, message}}."""

    error: ErrorBody


class Around:
    """Gives every answer the id that its request came with, or a new one. What nobody expected is logged under that id,
    and answered: uvicorn would drop the connection."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(ID, "")
        name = given if PLAIN.fullmatch(given) else secrets.token_hex(16)
        started = False

        async def sending(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)[ID] = name
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except Exception as error:
            LOG.error("request %s broke", name, exc_info=error)
            if started:
                raise
            await errors.response(errors.told(error), scope["path"])(scope, receive, sending)


def create_app(
    engine: Engine,
    codec: Callable[[], TextCodec | None],
    names: Sequence[str],
    *,
    compile: Compile = compile_here,
    every: float = 15.0,
    always_usage: bool = False,
) -> FastAPI:
    """The application around an engine. `codec` gives the target's tokenizer, None while it is not read; `names`: what
    clients may call the model, the first one first. `compile`: `grammar.grammar_of` in a place where it can be ended;
    it raises ValueError. `every`: seconds of silence after which a stream gets a comment. `always_usage`: also streams
    that do not ask for it say their usage."""
    server = Server(engine, codec, names, compile, every, always_usage)
    told: dict[int | str, dict[str, Any]] = {"default": {"model": Error, "description": "What went wrong."}}
    app = FastAPI(
        title="SwiftSpec", version=__version__, docs_url=None, redoc_url=None, responses=told,
        description="Requests decoded fast, one at a time or several. OpenAI's and Anthropic's endpoints.",
    )  # fmt: skip
    for part in (chat, completions, responses, messages, tokens, info):
        app.include_router(part.router(server))
    app.router.routes.extend(page.routes())
    errors.install(app)
    app.add_middleware(Around)  # what else goes around all endpoints (keys, limits, counters) is added likewise
    return app
