"""Endpoints /v1/completions/render and /v1/chat/completions/render: prompt tokens and sampling parameters that a
request would have, in vLLM's schema. Prefix-aware endpoint pickers look the tokens up among the blocks of KV events."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from swiftspec.serve.api.generation import encode_conversation
from swiftspec.serve.api.sampling import sampling_params, stop_list
from swiftspec.serve.api.token_fields import prompt_truncation
from swiftspec.serve.app_context import AppContext, new_id
from swiftspec.serve.link.frames import EngineInfo
from swiftspec.serve.middleware.request_id import VALID_REQUEST_ID, request_id
from swiftspec.serve.openai.chat import ChatRequest, chat_to_conversation
from swiftspec.serve.openai.completions import DEFAULT_MAX_TOKENS, CompletionRequest, encode_prompt, prompt_list


def render_router(context: AppContext) -> APIRouter:
    """Returns the router of both endpoints. They take the body of the request; nothing is decoded."""
    router = APIRouter()

    @router.post("/v1/completions/render")
    async def render_completion(body: CompletionRequest, request: Request) -> list[dict[str, Any]]:
        info, codec = context.require_ready()
        model = context.resolve_model_name(body.model)
        limit = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        prompts = [
            await encode_prompt(context, info, codec, body, prompt, limit) for prompt in prompt_list(body.prompt)
        ]
        base_id = _request_id(request, body, "cmpl-")
        ids = [base_id] if len(prompts) == 1 else [f"{base_id}-{index}" for index in range(len(prompts))]
        return [
            {"request_id": id, "model": model, **_rendered(body, info, tokens, limit)}
            for id, tokens in zip(ids, prompts, strict=True)
        ]

    @router.post("/v1/chat/completions/render")
    async def render_chat(body: ChatRequest, request: Request) -> dict[str, Any]:
        info, _ = context.require_ready()
        model = context.resolve_model_name(body.model)
        limit = body.max_completion_tokens or body.max_tokens
        tokens = await encode_conversation(context, chat_to_conversation(body), prompt_truncation(body, info, limit))
        rendered = _rendered(body, info, tokens, limit)
        return {"request_id": _request_id(request, body, "chatcmpl-"), "model": model, **rendered}

    return router


def _rendered(
    body: ChatRequest | CompletionRequest, info: EngineInfo, tokens: list[int], limit: int | None
) -> dict[str, Any]:
    """Returns the fields of one prompt. The seed is that of the request: without one each request gets its own."""
    sampling = sampling_params(body, info, tokens, None, limit)
    return {
        "token_ids": tokens,
        "sampling_params": {**sampling, "seed": body.seed, "stop": stop_list(body.stop)},
        "stream": bool(body.stream),
        "stream_options": body.stream_options,
    }


def _request_id(request: Request, body: ChatRequest | CompletionRequest, prefix: str) -> str:
    """Returns the field `request_id` of the body, else the id of the HTTP request, after a prefix."""
    given = (body.model_extra or {}).get("request_id")
    if isinstance(given, str) and VALID_REQUEST_ID.fullmatch(given):
        return prefix + given
    sent = request_id(request.scope)
    return prefix + sent if sent else new_id(prefix)
