"""The target's tokenizer: /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field

from swiftspec.serve.http.api.generation import encode_talk
from swiftspec.serve.http.app_context import Server, check_tokens
from swiftspec.serve.http.errors import ApiError
from swiftspec.serve.http.format.conversation import Message, Talked, TemplateFields, Tool, talk_of
from swiftspec.serve.http.schema import Body, Text, Token, Word


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

    @made.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        about, codec = server.ready()
        server.name(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "prompt: give either prompt or messages", "prompt")
        if body.prompt is not None:
            special = body.add_special_tokens is not False
            tokens = await server.threaded(codec.encode, body.prompt, about.max_model_len, special)
        else:
            tools = [one.shown() for one in body.tools or ()]
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
