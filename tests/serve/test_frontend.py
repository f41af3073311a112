"""The front end's application: endpoints, metrics and middleware around an engine."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from swiftspec.serve.frontend import build_app
from swiftspec.serve.link.frames import FrontendConfig
from tests.support.http import Player


def responses(player: Player, keys: list[str], *requests: tuple[str, str, dict[str, Any]]) -> list[httpx.Response]:
    """The responses to successive (method, path, further arguments of httpx)."""
    limits = FrontendConfig(["toy"], keys, max_queue=8, request_timeout=30.0, drain_timeout=20.0)

    async def all_of_them() -> list[httpx.Response]:
        transport = httpx.ASGITransport(build_app(player, lambda: player.codec, limits))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost:8000") as client:
            return [await client.request(method, path, **more) for method, path, more in requests]

    return asyncio.run(all_of_them())


def test_refused_and_answered_requests_are_counted(player: Player) -> None:
    key = {"Authorization": "Bearer one", "X-Request-Id": "r-1"}
    completion: dict[str, Any] = {"headers": key, "json": {"prompt": "a", "stop": "add", "stream": True}}
    health, closed, models, cut, large, metrics = responses(
        player, ["one"],
        ("GET", "/health", {}),
        ("GET", "/metrics", {}),
        ("GET", "/v1/models", {"headers": key}),
        ("POST", "/v1/completions", completion),
        ("POST", "/v1/completions", {"headers": key, "content": b" " * (9 << 20)}),
        ("GET", "/metrics", {"headers": key}),
    )  # fmt: skip
    assert [health.status_code, closed.status_code, models.status_code, large.status_code] == [200, 401, 200, 413]
    assert models.headers.get_list("x-request-id") == large.headers.get_list("x-request-id") == ["r-1"]
    assert '"finish_reason":"stop"' in cut.text and player.stopped and not player.closed
    for line in (
        'requests_refused_total{model_name="toy",reason="unauthorized"} 1.0',
        'requests_refused_total{model_name="toy",reason="body_too_large"} 1.0',
        'request_success_total{finished_reason="stop",model_name="toy"} 1.0',  # by a stop string, not cancelled
        'prompt_tokens_total{model_name="toy"} 1.0',
        'spec_decode_num_draft_tokens_total{model_name="toy",source="draft_model"} 9.0',
    ):
        assert f"swiftspec:{line}" in metrics.text


def test_without_keys_only_this_machine_is_served(player: Player) -> None:
    foreign: dict[str, Any] = {"headers": {"Host": "evil.example"}}
    page: dict[str, Any] = {"headers": {"Origin": "http://evil.example", "Access-Control-Request-Method": "GET"}}
    local, stranger, preflight = responses(
        player, [], ("GET", "/v1/models", {}), ("GET", "/v1/models", foreign),
        ("OPTIONS", "/v1/models", page),
    )  # fmt: skip
    assert [local.status_code, stranger.status_code, preflight.status_code] == [200, 403, 403]
    assert "--allowed-origin http://evil.example" in preflight.json()["error"]["message"]
    assert not [name for name in preflight.headers if name.startswith("access-control")]
