"""What the server says of itself, and its tokenizer: /v1/models, /health, /version, /tokenize, /detokenize."""

from __future__ import annotations

import contextlib
import time
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field

from swiftspec import __version__
from swiftspec.serve.http.engine import Ask
from swiftspec.serve.http.errors import ApiError
from swiftspec.serve.http.jobs import encode_talk
from swiftspec.serve.http.schema import Body, Text, Token, Word
from swiftspec.serve.http.server import Server, check_tokens
from swiftspec.serve.http.sse import unless_gone
from swiftspec.serve.http.talk import Message, Talked, TemplateFields, Tool, talk_of, tool_of


class TokenizeRequest(TemplateFields):
    """Text, or a conversation."""

    model: Word | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    model: Word | None = None
    tokens: Annotated[list[Token], Field(max_length=1 << 22)]


def router(server: Server) -> APIRouter:
    """The endpoints."""
    made = APIRouter()

    def model_card(name: str) -> dict[str, Any]:
        """OpenAI's and Anthropic's fields beside each other."""
        about = server.engine.about
        return {
            "id": name, "object": "model", "created": server.began, "owned_by": "swiftspec",
            "max_model_len": about and about.max_model_len, "type": "model", "display_name": name,
            "created_at": datetime.fromtimestamp(server.began, UTC).isoformat(timespec="seconds"),
        }  # fmt: skip

    @made.get("/v1/models")
    async def models() -> dict[str, Any]:
        data = [model_card(name) for name in server.names]
        ends = {"first_id": server.names[0], "last_id": server.names[-1], "has_more": False}
        return {"object": "list", "data": data, **ends}

    @made.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        return model_card(server.name(model))

    @made.get("/health")
    async def health() -> dict[str, Any]:
        about, _ = server.ready()
        state = server.engine.state
        return {
            "status": "ok", "mode": about.plan.get("mode"), "running": state.running, "waiting": state.waiting
        }  # fmt: skip

    @made.get("/health/generate")
    async def health_generate(request: Request) -> dict[str, Any]:
        about, _ = server.ready()
        began = time.monotonic()
        prompt = [about.eos_token_ids[0] if about.eos_token_ids else 0]
        ask = Ask(prompt, {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True})

        async def one() -> None:
            async with contextlib.aclosing(server.engine.answer(ask)) as frames:
                async for _ in frames:
                    pass

        await unless_gone(request.receive, one())
        return {"status": "ok", "milliseconds": round((time.monotonic() - began) * 1e3, 3)}

    @made.get("/version")
    async def version() -> dict[str, Any]:
        return {"version": __version__}

    @made.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        about, codec = server.ready()
        server.name(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "prompt: give either prompt or messages", "prompt")
        if body.prompt is not None:
            special = body.add_special_tokens is not False
            tokens = await server.threaded(codec.encode, body.prompt, None, special)
        else:
            tools = [
                tool_of(one.function.name, one.function.description, one.function.parameters)
                for one in body.tools or ()
            ]
            goes_on = bool(body.continue_final_message)
            talked = Talked(talk_of(body.messages or ()), tools, "auto", body.variables(), goes_on)
            tokens = await encode_talk(server, talked)
        names = [codec.tokenizer.convert_ids_to_tokens(token) for token in tokens] if body.return_token_strs else None
        return {"count": len(tokens), "max_model_len": about.max_model_len, "tokens": tokens, "token_strs": names}

    @made.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        about, codec = server.ready()
        server.name(body.model)
        check_tokens(body.tokens, about, "tokens")
        return {"prompt": await server.threaded(codec.spell, body.tokens)}

    return made
