"""Endpoints /tokenize, /detokenize and /tokenizer_info: the target's tokenizer, in vLLM's schema."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field

from swiftspec.serve.api.generation import encode_conversation
from swiftspec.serve.app_context import AppContext, check_tokens
from swiftspec.serve.errors import ApiError
from swiftspec.serve.format.conversation import Message, TemplateFields, Tool
from swiftspec.serve.schema import Body, ShortText, Text, Token


class TokenizeRequest(TemplateFields):
    """Request of /tokenize, with either a text (`prompt`) or a conversation (`messages`)."""

    model: ShortText | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    model: ShortText | None = None
    tokens: Annotated[list[Token], Field(max_length=1 << 22)]


def tokens_router(context: AppContext) -> APIRouter:
    """Returns the router of /tokenize, /detokenize and /tokenizer_info."""
    router = APIRouter()

    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        info, codec = context.require_ready()
        context.resolve_model_name(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "prompt: specify either prompt or messages", "prompt")
        if body.prompt is not None:
            special = body.add_special_tokens is not False
            tokens = await context.run_in_tokenizer_thread(codec.encode, body.prompt, info.max_model_len, special)
        else:
            conversation = body.to_conversation(body.messages or (), body.tools)
            tokens = await encode_conversation(context, conversation)
        names = [codec.tokenizer.convert_ids_to_tokens(token) for token in tokens] if body.return_token_strs else None
        return {"count": len(tokens), "max_model_len": info.max_model_len, "tokens": tokens, "token_strs": names}

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        info, codec = context.require_ready()
        context.resolve_model_name(body.model)
        check_tokens(body.tokens, info, "tokens")
        return {"prompt": await context.run_in_tokenizer_thread(codec.token_text, body.tokens)}

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        _, codec = context.require_ready()
        return await context.run_in_tokenizer_thread(codec.tokenizer_info)

    return router
