"""SecurityMiddleware: what it passes to the application, and how it refuses the rest."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swiftspec.serve.link.frontend_process import local_host_names
from swiftspec.serve.metrics.request_metrics import REQUEST_CONTEXT
from swiftspec.serve.middleware.request_id import RequestIdMiddleware
from swiftspec.serve.middleware.security import (
    MAX_HEADERS,
    MAX_JSON_CONTAINERS,
    MAX_JSON_DEPTH,
    SecurityMiddleware,
    json_containers,
)

Answer = tuple[int, dict[str, str], Any]


class Inside:
    """An application that records its requests."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.visit = REQUEST_CONTEXT.get()
        self.headers = dict(scope["headers"])
        self.bodies.append((await receive())["body"])
        self.later = await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})


def ask(
    guard: SecurityMiddleware, path: str = "/v1/models", headers: Iterable[tuple[str, str]] = (), body:
    Iterable[bytes] = (b"",),
    method: str = "POST",
) -> Answer:  # fmt: skip
    """Sends one request in pieces, beyond which the middleware must not read. Returns status, headers and JSON."""
    pieces = list(body)
    messages: list[Any] = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
    messages[-1]["more_body"] = False
    messages.append({"type": "http.disconnect"})
    sent: list[Any] = []

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    raw = [(name.lower().encode(), value.encode()) for name, value in headers]
    scope = {"type": "http", "method": method, "path": path, "headers": raw, "query_string": b""}
    asyncio.run(RequestIdMiddleware(guard)(scope, receive, send))
    start, *rest = sent
    response_headers = {name.decode(): value.decode() for name, value in start["headers"]}
    return start["status"], response_headers, json.loads(b"".join(part["body"] for part in rest))


def test_a_key_is_needed_everywhere_except_for_health_and_the_page() -> None:
    inside, reasons = Inside(), list[str]()
    guard = SecurityMiddleware(inside, ["one", "zwö"], on_refusal=reasons.append)
    paths = (
        "/v1/models", "/metrics", "/health/generate", "/health/", "/openapi.json", "//health", "//", "/page", "/pages",
    )  # fmt: skip
    for path in paths:
        for method in ("GET", "OPTIONS"):
            status, headers, body = ask(guard, path, method=method)
            assert status == 401 and headers["www-authenticate"] == "Bearer"
            assert body["error"]["type"] == "authentication_error" and body["error"]["code"] == "invalid_api_key"
    assert not inside.bodies and set(reasons) == {"unauthorized"}
    for headers in (
        ("Authorization", "Bearer one"), ("authorization", "bearer zwö"), ("X-Api-Key", "one"),
    ):  # fmt: skip
        assert ask(guard, headers=[headers])[0] == 200
    for path in ("/health", "/", "/page/app.js"):
        assert ask(guard, path)[0] == 200


def test_public_metrics_need_no_key() -> None:
    guard = SecurityMiddleware(Inside(), ["one"], public_metrics=True)
    assert [ask(guard, path)[0] for path in ("/metrics", "/metrics/", "/v1/models")] == [200, 401, 401]


@pytest.mark.parametrize("value", ["", "Bearer", "Bearer ", "Bearer on", "Bearer onee", "Basic one", "one"])
def test_a_wrong_key_is_refused(value: str) -> None:
    assert ask(SecurityMiddleware(Inside(), ["one"]), headers=[("Authorization", value)])[0] == 401


def test_an_anthropic_client_receives_an_anthropic_error() -> None:
    _, _, body = ask(SecurityMiddleware(Inside(), ["one"]), "/v1/messages")
    assert body["type"] == "error" and body["error"]["type"] == "authentication_error"


def test_without_a_key_only_local_host_names_are_served() -> None:
    guard = SecurityMiddleware(Inside(), allowed_hosts=local_host_names("127.0.0.1"))
    for host in ("localhost", "127.0.0.1:8000", "[::1]:8000", "LocalHost:1"):
        assert ask(guard, headers=[("Host", host)])[0] == 200
    for host in (
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "",
        "10.0.0.1",
    ):
        status, _, body = ask(guard, headers=[("Host", host)])
        assert status == 403 and "--api-key" in body["error"]["message"]
    assert ask(guard, headers=[("Host", "localhost"), ("Host", "evil.example")])[0] == 403


def test_a_body_that_is_too_large_is_not_read_completely() -> None:
    inside, reasons = Inside(), list[str]()
    guard = SecurityMiddleware(inside, on_refusal=reasons.append, max_body_bytes=10)
    assert ask(guard, body=[b"12345", b"67890"])[0] == 200 and inside.bodies == [b"1234567890"]
    assert inside.later == {"type": "http.disconnect"}
    cases: list[tuple[list[tuple[str, str]], list[bytes]]] = [
        ([("Content-Length", "11")], []), ([("Content-Length", "9" * 5000)], []), ([], [b"12345", b"678901"]),
    ]  # fmt: skip
    for headers, read in cases:
        status, answered, body = ask(guard, headers=headers, body=[*read, b"never read"])
        assert status == 413 and answered["connection"] == "close" and "10 bytes" in body["error"]["message"]
    assert len(inside.bodies) == 1 and reasons == ["body_too_large"] * 3


def test_too_many_headers_are_refused() -> None:
    guard = SecurityMiddleware(Inside())
    assert ask(guard, headers=[("a", "b")] * (MAX_HEADERS - 1))[0] == 200  # the request id is one more
    for headers in ([("a", "b")] * (MAX_HEADERS + 1), [("a", "b" * 9000)]):
        assert ask(guard, headers=headers)[0] == 431


def test_a_response_has_the_clients_request_id_or_a_new_one() -> None:
    inside = Inside()
    guard = SecurityMiddleware(inside, ["one"])
    for path in ("/health", "/v1/models"):
        assert ask(guard, path, [("X-Request-Id", "mine-1")])[1]["x-request-id"] == "mine-1"
        for bad in ("", "two words", "x" * 129, "zwö"):
            made = ask(guard, path, [("X-Request-Id", bad)])[1]["x-request-id"]
            assert len(made) == 32
    ask(guard, "/health", [("X-Request-Id", "no good"), ("traceparent", "00-a-b-01")])
    assert inside.visit.id.encode() == inside.headers[b"x-request-id"]
    assert (inside.visit.path, inside.visit.traceparent, inside.visit.tracestate) == ("/health", "00-a-b-01", "")


@pytest.mark.parametrize("opened", ["[", '{"a":'])
def test_deep_json_is_refused_and_deep_text_is_not(opened: str) -> None:
    guard = SecurityMiddleware(Inside())
    closed = "]" if opened == "[" else "}"
    for deep, status in ((MAX_JSON_DEPTH, 200), (MAX_JSON_DEPTH + 1, 400), (100_000, 400)):
        body = opened * deep + "1" + closed * deep
        assert ask(guard, body=[body.encode()])[0] == status
    assert ask(guard, body=[(opened * 1000).encode()])[0] == 400  # incomplete
    assert ask(guard, body=[json.dumps({"text": "[" * 1000 + '\\"' + "{" * 1000}).encode()])[0] == 200


@pytest.mark.parametrize("container", ["[]", "{}"])
def test_many_lists_and_objects_are_refused_and_brackets_in_text_are_not(container: str) -> None:
    """Since the garbage collector makes them slow to parse on the event loop."""
    guard = SecurityMiddleware(Inside())
    for number, status in ((MAX_JSON_CONTAINERS - 1, 200), (MAX_JSON_CONTAINERS, 400)):
        assert ask(guard, body=[f"[{','.join([container] * number)}]".encode()])[0] == status
    assert ask(guard, body=[json.dumps(container * MAX_JSON_CONTAINERS).encode()])[0] == 200


def test_json_in_utf16_is_refused() -> None:
    assert ask(SecurityMiddleware(Inside()), body=["[1]".encode("utf-16-le")])[0] == 400


def test_a_client_that_disconnects_during_its_body_starts_no_request() -> None:
    inside = Inside()
    messages = [{"type": "http.request", "body": b"[", "more_body": True}, {"type": "http.disconnect"}]

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        raise AssertionError

    scope = {"type": "http", "method": "POST", "path": "/", "headers": [], "query_string": b""}
    asyncio.run(SecurityMiddleware(inside)(scope, receive, send))
    assert not inside.bodies


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('[]{}"\\a\u00e4\u5b22\n', max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('[]{}"\\', max_size=4), inner, max_size=3),
    max_leaves=20,
)


def deepest(value: Any) -> int:
    return 1 + max(map(deepest, parts(value)), default=0) if isinstance(value, dict | list) else 0


def number_of_containers(value: Any) -> int:
    return 1 + sum(map(number_of_containers, parts(value))) if isinstance(value, dict | list) else 0


def parts(value: dict[str, Any] | list[Any]) -> list[Any]:
    return [*value.values()] if isinstance(value, dict) else value


@given(JSON, st.booleans())
def test_depth_and_number_of_the_lists_and_objects_in_json(value: Any, ascii_only: bool) -> None:
    data = json.dumps(value, ensure_ascii=ascii_only).encode()
    assert json_containers(data) == (deepest(value), number_of_containers(value))


@given(st.text('[]{}"\\,:1 ', max_size=30))
def test_the_depth_is_an_upper_bound_for_any_prefix(text: str) -> None:
    """A prefix of `text` that can be completed to valid JSON is not deeper than that of `text`."""
    seen, _ = json_containers(text.encode())
    for end in range(len(text) + 1):
        for closing in ("", '"', "1", '":1'):
            prefix = text[:end] + closing
            try:
                value = json.loads(prefix + closers(prefix))
            except ValueError:
                continue
            assert deepest(value) <= seen


def closers(text: str) -> str:
    """The brackets that close the open ones."""
    stack, inside, escaped = list[str](), False, False
    for char in text:
        if escaped:
            escaped = False
        elif inside:
            inside, escaped = char != '"', char == "\\"
        elif char == '"':
            inside = True
        elif char in "[{":
            stack.append("]" if char == "[" else "}")
        elif char in "]}" and stack:
            stack.pop()
    return "".join(reversed(stack))
