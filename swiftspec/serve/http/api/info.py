"""What the server says of itself: /v1/models, /health, /version."""

from __future__ import annotations

import contextlib
import time
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request, Response

from swiftspec import __version__
from swiftspec.serve.http.app_context import SOON, Server
from swiftspec.serve.http.engine_link.engine import Ask
from swiftspec.serve.http.engine_link.frames import Ready
from swiftspec.serve.http.errors import ApiError, body, unready
from swiftspec.serve.http.sse import ENCODER, unless_gone


def router(server: Server) -> APIRouter:
    """The endpoints."""
    made = APIRouter()

    def model_card(name: str) -> dict[str, Any]:
        """OpenAI's and Anthropic's fields beside each other."""
        about, codec = server.engine.about, server.codec()
        return {
            "id": name, "object": "model", "created": server.began, "owned_by": "swiftspec",
            "max_model_len": about and about.max_model_len, "type": "model", "display_name": name,
            "created_at": datetime.fromtimestamp(server.began, UTC).isoformat(timespec="seconds"),
            "chat_template": codec and codec.has_template,  # None while it is not known
        }  # fmt: skip

    @made.get("/v1/models")
    async def models() -> dict[str, Any]:
        data = [model_card(name) for name in server.names]
        ends = {"first_id": server.names[0], "last_id": server.names[-1], "has_more": False}
        return {"object": "list", "data": data, **ends}

    @made.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        return model_card(server.name(model))

    def up() -> Ready:
        """What rank 0 has said of itself. Raises ApiError while it would not begin with a request now."""
        about, _ = server.ready()
        state = server.engine.state
        if state.phase == "recovering":
            raise unready(f"the engine is being started again: {state.step}", SOON)
        return about

    @made.get("/health")
    async def health() -> Response:
        state = server.engine.state
        told = {"running": state.running, "waiting": state.waiting, "ranks": state.ranks}
        try:
            about = up()
        except ApiError as error:
            phase = "loading" if state.phase == "ready" else state.phase  # the tokenizer is still read
            content = ENCODER.encode({"status": phase, **told, **body(error, "/health")})
            return Response(content, error.status, error.headers, media_type="application/json")
        status = "ok" if state.whole else "degraded"
        content = ENCODER.encode({"status": status, "mode": about.plan.get("mode"), **told})
        return Response(content, media_type="application/json")

    @made.get("/health/generate")
    async def health_generate(request: Request) -> dict[str, Any]:
        about = up()
        began = time.monotonic()
        prompt = [about.eos_token_ids[0] if about.eos_token_ids else 0]
        ask = Ask(prompt, {"max_tokens": 1, "ignore_eos": True})  # at temperature 1, which every mode takes

        async def one() -> None:
            async with contextlib.aclosing(server.engine.answer(ask)) as frames:
                async for _ in frames:
                    pass

        await unless_gone(request.receive, one())
        return {"status": "ok", "milliseconds": round((time.monotonic() - began) * 1e3, 3)}

    @made.get("/version")
    async def version() -> dict[str, Any]:
        return {"version": __version__}

    return made
