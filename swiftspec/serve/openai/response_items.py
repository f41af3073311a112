"""Items of the Responses API as OpenAI lists them: the input of a request, the conversation of a stored response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from swiftspec.serve.app_context import new_id
from swiftspec.serve.openai.response_store import StoredResponse
from swiftspec.serve.schema import Body

ID_PREFIXES = {"message": "msg_", "function_call": "fc_", "function_call_output": "fco_", "reasoning": "rs_"}


def listed_items(items: str | Sequence[Body]) -> list[dict[str, Any]]:
    """Returns the input of a request, a text or items, as items with an id, a status and a list of parts."""
    if isinstance(items, str):
        return [_listed({"role": "user", "content": items})]
    return [_listed(item.model_dump(exclude_none=True)) for item in items]


def _listed(item: dict[str, Any]) -> dict[str, Any]:
    kind = item.get("type", "message")
    listed = {"id": new_id(ID_PREFIXES.get(kind, "item_")), "type": kind, "status": "completed", **item}
    if kind == "reasoning":
        listed.setdefault("summary", [])
    content = item.get("content")
    if isinstance(content, str):
        listed["content"] = [_text_part(kind, item.get("role"), content)]
    for part in listed.get("content", ()):
        if part["type"] == "output_text":
            part.setdefault("annotations", [])
    return listed


def _text_part(kind: str, role: str | None, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    if role == "assistant":
        return {"type": "output_text", "text": text}
    return {"type": "input_text", "text": text}


def conversation_items(stored: StoredResponse) -> list[dict[str, Any]]:
    """Returns the items of a stored response, input and output, without log-probabilities."""
    items: list[dict[str, Any]] = msgspec.json.decode(stored.input_items)
    for item in msgspec.json.decode(stored.response)["output"]:
        for part in item.get("content", ()):
            part.pop("logprobs", None)
        items.append(item)
    return items
