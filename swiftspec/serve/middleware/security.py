"""Security middleware: API keys, allowed hosts, and limits on the size and nesting of requests.

The middleware wraps the whole application, so that no other code parses a request that it refuses.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable, Sequence

import numpy as np
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swiftspec.serve import errors
from swiftspec.serve.errors import ApiError
from swiftspec.serve.metrics.request_metrics import REQUEST_CONTEXT, RequestContext
from swiftspec.serve.middleware.request_id import request_id
from swiftspec.serve.page_routes import is_page_path

MAX_BODY_BYTES = 8 << 20
MAX_HEADERS = 100
MAX_HEADER_BYTES = 8 << 10  # one name and value; `request_timeout.MAX_HEAD_BYTES` limits all headers together
MAX_JSON_DEPTH = 64  # nested lists and objects; limited since parsers and validators are recursive
MAX_JSON_CONTAINERS = 100_000  # lists and objects; 8 MB of them take the event loop 1.5 s, mostly of garbage collection
PUBLIC_PATHS = {"/health", "/ready", "/live"}  # need no key, so that supervisors can probe the server

QUOTE = ord('"')
NON_STRUCTURAL_BYTES = bytes(set(range(256)) - set(b'"[]{}'))
DEPTH_CHANGE = np.zeros(256, np.int8)
DEPTH_CHANGE[list(b"[{")], DEPTH_CHANGE[list(b"]}")] = 1, -1


def ignore_refusal(reason: str) -> None:
    """Default `on_refusal` of `SecurityMiddleware`: does nothing."""


class SecurityMiddleware:
    """Middleware that passes a valid request to `app` and answers any other request with an error.

    `api_keys`: a request needs one of these keys, as `Authorization: Bearer KEY` or `x-api-key: KEY`, except for
        /health and the files of the web page. If empty, no key is needed.
    `allowed_hosts`: accepted values of the `Host` header, without port; None accepts all. They protect a server without
        API keys from DNS rebinding by a web page in a browser.
    `on_refusal`: called with the reason of each refusal, a label such as "unauthorized".
    `max_body_bytes`: largest accepted request body.
    `public_metrics`: whether /metrics needs no key either.
    """

    def __init__(
        self,
        app: ASGIApp,
        api_keys: Sequence[str] = (),
        allowed_hosts: frozenset[str] | None = None,
        on_refusal: Callable[[str], None] = ignore_refusal,
        max_body_bytes: int = MAX_BODY_BYTES,
        public_metrics: bool = False,
    ) -> None:
        self._public_paths = PUBLIC_PATHS | {"/metrics"} if public_metrics else PUBLIC_PATHS
        self._app, self._allowed_hosts = app, allowed_hosts
        self._on_refusal, self._max_body_bytes = on_refusal, max_body_bytes
        self._keys = [key.encode() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles an ASGI event; only HTTP requests are checked."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, path = Headers(scope=scope), errors.route_path(scope)
        api_key = self._find_key(headers)
        try:
            self._check_headers(path, headers, api_key)
            body = await _read_body(headers, receive, self._max_body_bytes)
            if body is None:  # the client disconnected
                return
            _check_body(body)
        except _Refusal as refusal:
            self._on_refusal(refusal.reason)
            await errors.error_response(refusal.error, scope)(scope, receive, send)
            return
        trace_headers = headers.get("traceparent", ""), headers.get("tracestate", "")
        REQUEST_CONTEXT.set(RequestContext(path, request_id(scope), *trace_headers, api_key))
        await self._app(scope, _replay_body(body, receive), send)

    def _check_headers(self, path: str, headers: Headers, api_key: int | None) -> None:
        """Validates the headers: number, sizes, host and API key. Raises _Refusal if one is not accepted. `api_key`:
        see `_find_key`."""
        if len(headers.raw) > MAX_HEADERS or any(
            len(name) + len(value) > MAX_HEADER_BYTES for name, value in headers.raw
        ):
            message = f"at most {MAX_HEADERS} headers of {MAX_HEADER_BYTES} bytes each are accepted"
            raise _Refusal("headers_too_large", 431, message)
        if self._allowed_hosts is not None:
            for host in headers.getlist("host"):
                if _without_port(host) not in self._allowed_hosts:
                    raise _Refusal(
                        "foreign_host",
                        403,
                        f"the host {host[:100]!r} is not allowed: use localhost or 127.0.0.1, or"
                        " start the server with --api-key, which allows any name",
                    )
        if self._keys and path not in self._public_paths and not is_page_path(path) and api_key is None:
            raise _Refusal(
                "unauthorized",
                401,
                "missing or wrong API key: send one as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
                {"WWW-Authenticate": "Bearer"},
                "invalid_api_key",
            )

    def _find_key(self, headers: Headers) -> int | None:
        """Returns the index of the request's API key, or None if it has no valid key. Compares in constant time, which
        reveals no key."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        candidates = [token.strip() if scheme.lower() == "bearer" else "", headers.get("x-api-key", "")]
        encoded = [candidate.encode("latin-1") for candidate in candidates]
        matches = [[hmac.compare_digest(key, candidate) for candidate in encoded] for key in self._keys]
        return next((index for index, of_key in enumerate(matches) if any(of_key)), None)


class _Refusal(Exception):
    def __init__(
        self, reason: str, status: int, message: str, headers: dict[str, str] | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.reason, self.error = reason, ApiError(status, message, code=code, headers=headers)


def json_containers(data: bytes) -> tuple[int, int]:
    """Returns the nesting depth and the number of lists and objects in JSON text. For malformed JSON both are at least
    those at which a parser detects the error."""
    structural = data.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, NON_STRUCTURAL_BYTES)
    signs = np.frombuffer(structural, np.uint8)
    outside = np.cumsum(signs == QUOTE, dtype=np.int32) % 2 == 0
    changes = DEPTH_CHANGE[signs] * outside
    return int(np.cumsum(changes, dtype=np.int32).max(initial=0)), int((changes > 0).sum())


async def _read_body(headers: Headers, receive: Receive, max_bytes: int) -> bytes | None:
    """Returns the body, or None if the client disconnected. Raises _Refusal as soon as the body exceeds `max_bytes`."""
    too_large = _Refusal(
        "body_too_large", 413, f"the body exceeds the limit of {max_bytes} bytes", {"Connection": "close"}
    )
    length = headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > max_bytes:
        raise too_large
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if len(body) > max_bytes:
            raise too_large
        if not message.get("more_body", False):
            return bytes(body)


def _check_body(body: bytes) -> None:
    """Raises _Refusal if the body contains a zero byte, is nested too deeply or has too many lists and objects."""
    if b"\0" in body:  # parsers accept UTF-16 and UTF-32 too, in which `json_containers` would find no bracket
        raise _Refusal("malformed", 400, "the body must be JSON in UTF-8 without null bytes")
    depth, count = json_containers(body)
    if count > MAX_JSON_CONTAINERS:
        message = f"the body has more than {MAX_JSON_CONTAINERS} lists and objects: divide it into several requests"
        raise _Refusal("malformed", 400, message)
    if depth > MAX_JSON_DEPTH:
        raise _Refusal(
            "malformed",
            400,
            f"{errors.NESTED_TOO_DEEPLY}: at most {MAX_JSON_DEPTH} nested lists and objects are accepted",
        )


def _replay_body(body: bytes, receive: Receive) -> Receive:
    """Returns an ASGI `receive` that yields the buffered body as one message, then forwards to `receive`."""
    sent = False

    async def receive_again() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_again


def _without_port(host: str) -> str:
    """Returns a host in lower case without port: `localhost:80` -> `localhost`, `[::1]:80` -> `[::1]`."""
    return re.sub(r":[0-9]*$", "", host).lower()
