"""Endpoints /v1/completions/render and /v1/chat/completions/render: the prompt tokens that a request would have, in
vLLM's schema. Prefix-aware endpoint pickers look these up among the blocks of KV events."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from swiftspec.serve.http.api.chat import ChatRequest, chat_to_conversation
from swiftspec.serve.http.api.completions import DEFAULT_MAX_TOKENS, CompletionRequest, encode_prompt, prompt_list
from swiftspec.serve.http.api.generation import encode_conversation
from swiftspec.serve.http.api.token_fields import prompt_truncation
from swiftspec.serve.http.app_context import AppContext


def render_router(context: AppContext) -> APIRouter:
    """Returns the router of both endpoints. They take the body of the request, of which they read what concerns the
    prompt."""
    router = APIRouter()

    @router.post("/v1/completions/render")
    async def render_completion(body: CompletionRequest) -> list[dict[str, Any]]:
        info, codec = context.require_ready()
        model = context.resolve_model_name(body.model)
        limit = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        prompts = [
            await encode_prompt(context, info, codec, body, prompt, limit) for prompt in prompt_list(body.prompt)
        ]
        return [{"model": model, "token_ids": tokens} for tokens in prompts]

    @router.post("/v1/chat/completions/render")
    async def render_chat(body: ChatRequest) -> dict[str, Any]:
        info, _ = context.require_ready()
        model = context.resolve_model_name(body.model)
        truncation = prompt_truncation(body, info, body.max_completion_tokens or body.max_tokens)
        tokens = await encode_conversation(context, chat_to_conversation(body), truncation)
        return {"model": model, "token_ids": tokens}

    return router
