"""CorsMiddleware: preflights of allowed origins, and of others, which are refused with the reason."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from swiftspec.serve.middleware.cors import CorsMiddleware
from swiftspec.serve.middleware.security import SecurityMiddleware
from tests.support.http import Player, application

ORIGIN = "https://example.com"
PREFLIGHT = {
    "Origin": ORIGIN, "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}  # fmt: skip


def ask(player: Player, allowed: list[str], method: str, path: str, headers: dict[str, str]) -> httpx.Response:
    """The response of a server that requires a key."""
    app = CorsMiddleware(SecurityMiddleware(application(player), ["key"]), allowed)

    async def main() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return await client.request(method, path, headers=headers)

    return asyncio.run(main())


@pytest.mark.parametrize("allowed", [[ORIGIN], ["*"]])
def test_a_preflight_of_an_allowed_origin_needs_no_key(player: Player, allowed: list[str]) -> None:
    answer = ask(player, allowed, "OPTIONS", "/v1/chat/completions", PREFLIGHT)
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] in (ORIGIN, "*")
    assert answer.headers["access-control-allow-headers"] == PREFLIGHT["Access-Control-Request-Headers"]
    assert "DELETE" in answer.headers["access-control-allow-methods"]
    for headers, status in (({}, 401), ({"x-api-key": "key"}, 200)):
        answer = ask(player, allowed, "GET", "/v1/models", {"Origin": ORIGIN, **headers})
        assert answer.status_code == status and answer.headers["access-control-allow-origin"] in (ORIGIN, "*")
        assert "x-request-id" in answer.headers["access-control-expose-headers"]


@pytest.mark.parametrize("allowed", [[], ["https://example.com:8000"]])
def test_a_preflight_of_another_origin_is_refused(player: Player, allowed: list[str]) -> None:
    answer = ask(player, allowed, "OPTIONS", "/v1/chat/completions", PREFLIGHT)
    message = f"the origin '{ORIGIN}' is not allowed: start the server with --allowed-origin {ORIGIN}"
    assert answer.status_code == 403 and answer.json()["error"]["message"] == message
    answer = ask(player, allowed, "GET", "/v1/models", {"Origin": ORIGIN, "x-api-key": "key"})
    assert answer.status_code == 200 and "access-control-allow-origin" not in answer.headers
