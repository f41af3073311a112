"""Request ids: one id per request, in the request scope, in the response, and in the log of unexpected errors."""

from __future__ import annotations

import logging
import re
import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swiftspec.serve import errors

LOG = logging.getLogger("swiftspec.serve")
REQUEST_ID_HEADER = "x-request-id"
VALID_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class RequestIdMiddleware:
    """Middleware that assigns an id to each request: the client's `x-request-id` if it is valid, else a random one.

    It is the outermost middleware. The id is written to the request headers in the ASGI scope, where `request_id` reads
    it, and to the response headers.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles an ASGI event; only HTTP requests get an id."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = MutableHeaders(scope=scope)
        client_id = headers.get(REQUEST_ID_HEADER, "")
        headers[REQUEST_ID_HEADER] = client_id if VALID_REQUEST_ID.fullmatch(client_id) else secrets.token_hex(16)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = headers[REQUEST_ID_HEADER]
            await send(message)

        await self._app(scope, receive, send_with_id)


class UnexpectedErrorMiddleware:
    """Middleware that logs an unexpected exception with the request id and responds with status 500, since uvicorn
    would only drop the connection. If the response has already started, the exception is logged and raised again."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles an ASGI event."""
        started = False

        async def track_start(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, track_start)
        except Exception as error:
            if scope["type"] != "http":
                raise
            LOG.error("request %s failed", request_id(scope), exc_info=error)
            if started:
                raise
            await errors.error_response(errors.to_api_error(error), scope)(scope, receive, send)


def request_id(scope: Scope) -> str:
    """Returns the id that `RequestIdMiddleware` assigned to a request, or "" if there is none."""
    return Headers(scope=scope).get(REQUEST_ID_HEADER, "")
