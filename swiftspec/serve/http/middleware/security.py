"""What stands before every endpoint: who may come in, and how large and how deep a request may be.

It is plain ASGI and the outermost layer: what it refuses, no other code of the server has read.
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Callable, Sequence

import numpy as np
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swiftspec.serve.http import errors
from swiftspec.serve.http.errors import ApiError
from swiftspec.serve.http.observe.request_metrics import VISIT, Visit
from swiftspec.serve.http.page import is_page

MOST_BODY = 8 << 20  # bytes
MOST_HEADERS = 100
MOST_HEADER = 8 << 10  # bytes of a name and its value; `protocol.HEAD_BYTES` bounds all of them
DEEPEST = 64  # brackets of JSON in each other: parsers and validators are recursive
OPEN = {"/health"}  # what needs no key: whoever starts the server may ask whether it lives
PLAIN = re.compile(r"[\x21-\x7e]{1,128}")

QUOTE = ord('"')
OTHERS = bytes(set(range(256)) - set(b'"[]{}'))
STEPS = np.zeros(256, np.int8)
STEPS[list(b"[{")], STEPS[list(b"]}")] = 1, -1


def nobody(reason: str) -> None:
    """Counts nothing."""


class Guard:
    """Lets a request through to `app` or answers it with an error. Every answer has an `x-request-id`: the client's own
    where it is plain, else a new one.

    `keys`: a request must bring one of them, as `Authorization: Bearer KEY` or `x-api-key: KEY`, but for /health and
    the page's files; none: nothing is asked. `hosts`: what its `Host` may be, with any port, lest a page in a browser
    reach a server without keys under a name of its own (DNS rebinding); None: anything. `refused` hears the reason of
    every refusal in one word.
    """

    def __init__(
        self, app: ASGIApp, keys: Sequence[str] = (), hosts: frozenset[str] | None = None,
        refused: Callable[[str], None] = nobody, most_body: int = MOST_BODY,
    ) -> None:  # fmt: skip
        self._app, self._hosts, self._refused, self._most = app, hosts, refused, most_body
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = MutableHeaders(scope=scope)
        given = headers.get("x-request-id", "")
        name = given if PLAIN.fullmatch(given) else secrets.token_hex(16)
        headers["x-request-id"] = name  # in the scope, too: whoever is asked further in says the same

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = name
            await send(message)

        try:
            self._admit(scope["path"], headers)
            body = await _read(headers, receive, self._most)
            if body is None:  # the client left
                return
            _check(body)
        except _Refusal as refusal:
            self._refused(refusal.reason)
            await errors.response(refusal.error, scope["path"])(scope, receive, named)
            return
        VISIT.set(Visit(scope["path"], name, headers.get("traceparent", ""), headers.get("tracestate", "")))
        await self._app(scope, _replayed(body, receive), named)

    def _admit(self, path: str, headers: Headers) -> None:
        """Raises _Refusal on a request that is none of ours."""
        if len(headers.raw) > MOST_HEADERS or any(len(name) + len(value) > MOST_HEADER for name, value in headers.raw):
            most = f"at most {MOST_HEADERS} headers of {MOST_HEADER} bytes each are taken"
            raise _Refusal("headers_too_large", 431, most)
        if self._hosts is not None:
            for host in headers.getlist("host"):
                if _without_port(host) not in self._hosts:
                    raise _Refusal(
                        "foreign_host", 403, f"this server has no name {host[:100]!r}: ask for localhost or 127.0.0.1,"
                        " or start it with --api-key, and then it is served under any name",
                    )  # fmt: skip
        if self._keys and path not in OPEN and not is_page(path) and not self._known(headers):
            raise _Refusal(
                "unauthorized", 401, "no key of this server: send one as 'Authorization: Bearer KEY' or 'x-api-key:"
                " KEY'", {"WWW-Authenticate": "Bearer"}, "invalid_api_key",
            )  # fmt: skip

    def _known(self, headers: Headers) -> bool:
        """Whether it brings a key. Takes the same time for every key that is not right: none is compared less."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        brought = [token.strip() if scheme.lower() == "bearer" else "", headers.get("x-api-key", "")]
        as_sent = [one.encode("latin-1") for one in brought]
        same = [hmac.compare_digest(key, one) for key in self._keys for one in as_sent]
        return any(same)


class _Refusal(Exception):
    def __init__(
        self, reason: str, status: int, message: str, headers: dict[str, str] | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.reason, self.error = reason, ApiError(status, message, code=code, headers=headers)


def depth(data: bytes) -> int:
    """How deep JSON's brackets are nested, not counting those in strings. Of what is no JSON at least as deep as a
    parser comes before it sees that."""
    rest = data.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, OTHERS)
    signs = np.frombuffer(rest, np.uint8)
    outside = np.cumsum(signs == QUOTE, dtype=np.int32) % 2 == 0
    return int(np.cumsum(STEPS[signs] * outside, dtype=np.int32).max(initial=0))


async def _read(headers: Headers, receive: Receive, most: int) -> bytes | None:
    """The body; None where the client left before its end. Raises _Refusal as soon as it is too large."""
    too_large = _Refusal(
        "body_too_large", 413, f"the body is larger than {most} bytes, the most that is taken", {"Connection": "close"}
    )
    length = headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > most:
        raise too_large
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if len(body) > most:
            raise too_large
        if not message.get("more_body", False):
            return bytes(body)


def _check(body: bytes) -> None:
    """Raises _Refusal on a body that no parser should see."""
    if b"\0" in body:  # JSON in UTF-16 or UTF-32, which parsers take too, would hide its brackets from us
        raise _Refusal("malformed", 400, "the body must be JSON in UTF-8, which has no byte 0")
    if depth(body) > DEEPEST:
        raise _Refusal("malformed", 400, f"{errors.DEEP}: at most {DEEPEST} lists and objects in each other are taken")


def _replayed(body: bytes, receive: Receive) -> Receive:
    """The body in one piece, then what comes after it."""
    told = False

    async def again() -> Message:
        nonlocal told
        if told:
            return await receive()
        told = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def _without_port(host: str) -> str:
    """`localhost:80` -> `localhost`, `[::1]:80` -> `[::1]`."""
    return re.sub(r":[0-9]*$", "", host).lower()
