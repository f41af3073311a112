"""FastAPI application: endpoints, web page, error handlers and middleware."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from swiftspec import __version__
from swiftspec.errors import UserError
from swiftspec.serve import errors
from swiftspec.serve.anthropic import messages
from swiftspec.serve.api import events, info, tokens
from swiftspec.serve.app_context import AppContext, CompileGrammar
from swiftspec.serve.grammar_compiler import SandboxedGrammarCompiler
from swiftspec.serve.link.engine_client import EngineClient
from swiftspec.serve.metrics.prometheus import PrometheusMetrics, metrics_router
from swiftspec.serve.metrics.request_metrics import RequestRecord, RequestRecorder
from swiftspec.serve.middleware.request_id import UnexpectedErrorMiddleware
from swiftspec.serve.openai import chat, completions, render, responses, stored_response_routes
from swiftspec.serve.openai.response_store import ResponseStore
from swiftspec.serve.page_routes import page_routes
from swiftspec.text.codec import TextCodec, may_have_template
from swiftspec.text.template import TemplateRenderer


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
    engine: EngineClient,
    codec: Callable[[], TextCodec | None] | None = None,
    model_names: Sequence[str] = (),
    *,
    metrics: PrometheusMetrics | None = None,
    on_finished: Sequence[Callable[[RequestRecord], None]] = (),
    compile: CompileGrammar | None = None,
    keep_alive_s: float = 15.0,
    always_usage: bool = False,
) -> FastAPI:
    """Creates the FastAPI application that serves `engine`. Its requests need no API key; another ASGI application can
    mount it below a path. `engine` is not closed when the application shuts down.

    `codec`: returns the target's tokenizer, or None while it loads. By default the tokenizer is loaded here from the
        folder of the engine's model; raises UserError if that is not possible.
    `model_names`: names that clients can use for the model, the default first; by default the name of that folder.
    `metrics`: metrics that /metrics sends; None creates them.
    `on_finished`: callbacks that get the record of each request when it ends.
    `compile`: asynchronous version of `output_grammar.build_grammar`; raises ValueError on an invalid grammar. The
        default compiles in a process with limits on time and memory.
    `keep_alive_s`: seconds without output after which a stream sends a comment.
    `always_usage`: whether streams contain `usage` even if the request does not ask for it.
    """
    if codec is None:
        codec = _codec_of(_model_folder(engine))
    model_names = model_names or [_model_folder(engine).name]
    metrics = metrics or PrometheusMetrics(engine, model_names[0])
    recorder = RequestRecorder([metrics.record_request, *on_finished])
    metrics.live_tokens = recorder.live_tokens
    context = AppContext(
        engine=engine,
        recorder=recorder,
        codec=codec,
        model_names=model_names,
        compile=compile or SandboxedGrammarCompiler(),
        keep_alive_s=keep_alive_s,
        always_usage=always_usage,
    )
    error_schema: dict[int | str, dict[str, Any]] = {"default": {"model": Error, "description": "An error."}}
    app = FastAPI(
        title="SwiftSpec",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        responses=error_schema,
        description="Low-latency speculative decoding behind OpenAI's and Anthropic's endpoints.",
    )
    for create_router in (
        chat.chat_router,
        completions.completions_router,
        messages.messages_router,
        tokens.tokens_router,
        render.render_router,
        info.info_router,
    ):
        app.include_router(create_router(context))
    store = ResponseStore()
    app.include_router(responses.responses_router(context, store))
    app.include_router(stored_response_routes.stored_responses_router(store))
    app.include_router(events.trace_events_router(engine.events, codec, keep_alive_s))
    app.include_router(metrics_router(metrics))
    app.router.routes.extend(page_routes())
    errors.install_error_handlers(app)
    app.add_middleware(UnexpectedErrorMiddleware)
    return app


def _codec_of(folder: Path) -> Callable[[], TextCodec]:
    """Loads the tokenizer of a model folder. Returns a function that returns it."""
    renderer = TemplateRenderer(folder)
    if may_have_template(folder):
        renderer.start()  # starts the template process early: its imports take seconds
    codec = TextCodec(folder, renderer)
    return lambda: codec


def _model_folder(engine: EngineClient) -> Path:
    """Returns the folder of the engine's model. Raises UserError if the engine has not loaded its model yet."""
    if engine.info is None:
        raise UserError("the model is being loaded: pass `codec` and `model_names`")
    return Path(engine.info.model).resolve()
