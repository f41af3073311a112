"""Endpoints below /v1/responses/{response_id}: reads and deletes stored responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Query, Response

from swiftspec.serve.errors import ApiError
from swiftspec.serve.metrics.request_metrics import REQUEST_CONTEXT
from swiftspec.serve.openai.response_store import ResponseStore, StoredResponse

MAX_LISTED_ITEMS = 100
NOT_FOUND = "not found: it was not stored, it was deleted or evicted, or the server was restarted"


def find_response(store: ResponseStore, response_id: str) -> StoredResponse:
    """Returns a stored response of the client's API key. Raises ApiError (404) if there is none."""
    stored = store.get(response_id, REQUEST_CONTEXT.get().api_key)
    if stored is None:
        raise ApiError(404, f"Response with id {response_id[:100]!r} {NOT_FOUND}", "response_id")
    return stored


def stored_responses_router(store: ResponseStore) -> APIRouter:
    """Returns the router of the endpoints of stored responses."""
    router = APIRouter(prefix="/v1/responses")

    @router.get("/{response_id}")
    async def retrieve_response(response_id: str) -> Response:
        return Response(find_response(store, response_id).response, media_type="application/json")

    @router.get("/{response_id}/input_items")
    async def list_input_items(
        response_id: str,
        limit: Annotated[int, Query(ge=1, le=MAX_LISTED_ITEMS)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: Annotated[str, Query(max_length=256)] | None = None,
    ) -> dict[str, Any]:
        items = msgspec.json.decode(find_response(store, response_id).input_items)
        return _page(items if order == "asc" else items[::-1], limit, after)

    @router.delete("/{response_id}")
    async def delete_response(response_id: str) -> dict[str, Any]:
        store.delete(find_response(store, response_id).id)
        return {"id": response_id, "object": "response", "deleted": True}

    return router


def _page(items: list[dict[str, Any]], limit: int, after: str | None) -> dict[str, Any]:
    """Returns up to `limit` items that follow the item with the id `after`. Raises ApiError if there is no such
    item."""
    start = 0
    if after is not None:
        start = next((index + 1 for index, item in enumerate(items) if item["id"] == after), 0)
        if start == 0:
            raise ApiError(400, f"after: there is no item {after[:100]!r}", "after")
    page = items[start : start + limit]
    ids = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return {"object": "list", "data": page, **ids, "has_more": start + limit < len(items)}
