"""FastAPI application: endpoints, web page, error handlers and middleware."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from swiftspec import __version__
from swiftspec.serve.http import errors, page
from swiftspec.serve.http.api import chat, completions, info, messages, responses, tokens
from swiftspec.serve.http.app_context import AppContext, CompileGrammar, compile_in_thread
from swiftspec.serve.http.engine_link.async_engine import AsyncEngine
from swiftspec.serve.http.middleware.request_id import UnexpectedErrorMiddleware
from swiftspec.serve.text.codec import TextCodec


class ErrorBody(BaseModel):
    """Message, type, invalid request field (`param`) and code of an error."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class Error(BaseModel):
    """Body of an error response. Endpoints below /v1/messages return {"type": "error", "error": {type, message}}."""

    error: ErrorBody


def create_app(
    engine: AsyncEngine,
    codec: Callable[[], TextCodec | None],
    model_names: Sequence[str],
    *,
    compile: CompileGrammar = compile_in_thread,
    keep_alive_s: float = 15.0,
    always_usage: bool = False,
) -> FastAPI:
    """Creates the FastAPI application that serves `engine`.

    `codec`: returns the target's tokenizer, or None while it loads.
    `model_names`: names that clients can use for the model, the default first.
    `compile`: asynchronous version of `grammar.build_grammar`; raises ValueError on an invalid grammar. The default has
        no limits on time and memory, so it is for trusted clients only.
    `keep_alive_s`: seconds without output after which a stream sends a comment.
    `always_usage`: whether streams contain `usage` even if the request does not ask for it.
    """
    context = AppContext(engine, codec, model_names, compile, keep_alive_s, always_usage)
    error_schema: dict[int | str, dict[str, Any]] = {"default": {"model": Error, "description": "An error."}}
    app = FastAPI(
        title="SwiftSpec", version=__version__, docs_url=None, redoc_url=None, responses=error_schema,
        description="Low-latency speculative decoding behind OpenAI's and Anthropic's endpoints.",
    )  # fmt: skip
    for create_router in (
        chat.chat_router, completions.completions_router, responses.responses_router, messages.messages_router,
        tokens.tokens_router, info.info_router,
    ):  # fmt: skip
        app.include_router(create_router(context))
    app.router.routes.extend(page.page_routes())
    errors.install_error_handlers(app)
    app.add_middleware(UnexpectedErrorMiddleware)
    return app
