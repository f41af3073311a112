"""Endpoints about the server: /v1/models, /health, /ready, /live, /health/generate, /ping, /load and /version."""

from __future__ import annotations

import contextlib
import time
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute

from swiftspec import __version__
from swiftspec.params import SamplingParams
from swiftspec.serve.app_context import RETRY_AFTER_S, AppContext
from swiftspec.serve.errors import ApiError, error_body, unavailable_error
from swiftspec.serve.link.engine_client import EngineRequest
from swiftspec.serve.link.frames import EngineInfo
from swiftspec.serve.sse import ENCODER, cancel_on_disconnect

GENERATE_PATH = "/health/generate"


def info_router(context: AppContext) -> APIRouter:
    """Returns the router of the endpoints about the server."""
    router = APIRouter()

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        data = [_model_card(context, name) for name in context.model_names]
        ends = {"first_id": context.model_names[0], "last_id": context.model_names[-1], "has_more": False}
        return {"object": "list", "data": data, **ends}

    @router.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        return _model_card(context, context.resolve_model_name(model)) if model else await models()

    @router.get("/health")
    @router.get("/ready")  # for readiness probes
    async def health() -> Response:
        return _health(context)

    @router.get("/live")
    async def live() -> dict[str, Any]:
        """Returns 200 unless only a restart of the server would help, for liveness probes: also while rank 0 is
        loading, restarting or draining."""
        state = context.engine.state
        if state.phase == "dead":
            raise unavailable_error(f"the engine has exited: {state.detail}", None)
        return {"status": state.phase}

    @router.get("/ping")
    @router.post("/ping")
    async def ping() -> Response:
        """As /health, for SageMaker."""
        return _health(context)

    @router.get("/load")
    async def load() -> dict[str, int]:
        """Returns the number of requests that run or wait."""
        state = context.engine.state
        return {"server_load": state.running + state.waiting}

    @router.get(GENERATE_PATH)
    async def health_generate(request: Request) -> dict[str, Any]:
        """Generates one token, which checks that the engine decodes. Refuses pages of other sites, which a browser lets
        send a GET request to a server without a key."""
        if request.headers.get("sec-fetch-site") in ("cross-site", "same-site"):
            raise ApiError(403, f"{GENERATE_PATH} does not answer pages of other sites")
        return await _generate_token(context, request)

    @router.get("/version")
    async def version() -> dict[str, Any]:
        return {"version": __version__}

    _add_head(router)
    return router


def _add_head(router: APIRouter) -> None:
    """Answers HEAD, which monitors send and FastAPI does not add, on all paths of GET but GENERATE_PATH."""
    for route in list(router.routes):
        if isinstance(route, APIRoute) and route.path != GENERATE_PATH and "GET" in (route.methods or ()):
            router.add_api_route(route.path, route.endpoint, methods=["HEAD"], include_in_schema=False)


async def _generate_token(context: AppContext, request: Request) -> dict[str, Any]:
    """Generates one token and returns how long it took."""
    info = _require_up(context)
    began = time.monotonic()
    prompt = [info.eos_token_ids[0] if info.eos_token_ids else 0]
    # The default temperature is 1, which every mode supports.
    engine_request = EngineRequest(prompt, SamplingParams(max_tokens=1, ignore_eos=True))
    await cancel_on_disconnect(request.receive, _run_to_end(context, engine_request))
    return {"status": "ok", "milliseconds": round((time.monotonic() - began) * 1e3, 3)}


def _model_card(context: AppContext, name: str) -> dict[str, Any]:
    """Returns the description of a model, with the fields of OpenAI's, Anthropic's and vLLM's API."""
    info, codec = context.engine.info, context.codec()
    length = info and info.plan.get("synthetic_acceptance_length")
    return {
        "id": name,
        "object": "model",
        "created": context.created,
        "owned_by": "swiftspec",
        "root": context.model_names[0],
        "parent": None,
        "max_model_len": info and info.max_model_len,
        "permission": [],
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(context.created, UTC).isoformat(timespec="seconds"),
        "chat_template": codec and codec.has_template,  # None while the tokenizer loads
        **({} if length is None else {"synthetic_acceptance_length": length}),
    }


def _require_up(context: AppContext) -> EngineInfo:
    """Returns the engine's info. Raises ApiError (503) while rank 0 is loading, restarting, draining or dead."""
    info, _ = context.require_ready()
    state = context.engine.state
    if state.phase == "recovering":
        raise unavailable_error(f"the engine is restarting: {state.detail}", RETRY_AFTER_S)
    return info


def _health(context: AppContext) -> Response:
    state = context.engine.state
    status = {"running": state.running, "waiting": state.waiting, "ranks": state.ranks}
    try:
        info = _require_up(context)
    except ApiError as error:
        phase = "loading" if state.phase == "ready" else state.phase  # the tokenizer still loads
        content = ENCODER.encode({"status": phase, **status, **error_body(error)})
        return Response(content, error.status, error.headers, media_type="application/json")
    summary = "ok" if state.all_ranks_up else "degraded"
    content = ENCODER.encode({"status": summary, "mode": info.plan.get("mode"), **status})
    return Response(content, media_type="application/json")


async def _run_to_end(context: AppContext, request: EngineRequest) -> None:
    with context.recorder.record([request]) as record:
        async with contextlib.aclosing(context.engine.stream_frames(request)) as frames:
            async for index, frame in frames:
                record.add_frame(index, frame)
