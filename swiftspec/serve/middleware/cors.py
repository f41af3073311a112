"""CORS middleware: lets web pages of allowed origins call the server, and refuses the preflights of other origins."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from swiftspec.serve import errors
from swiftspec.serve.errors import ApiError
from swiftspec.serve.middleware.security import ignore_refusal

METHODS = ("GET", "POST", "DELETE")
READABLE_HEADERS = ("x-request-id", "retry-after", "retry-after-ms", "x-should-retry")


class CorsMiddleware:
    """Middleware that answers CORS preflights, which contain no API key, and adds CORS headers to responses.

    `allowed_origins`: origins such as "https://example.com", or "*" for all.
    `on_refusal`: called with the reason of each refusal.
    """

    def __init__(
        self, app: ASGIApp, allowed_origins: Sequence[str] = (), on_refusal: Callable[[str], None] = ignore_refusal
    ) -> None:
        self._on_refusal = on_refusal
        self._cors = CORSMiddleware(
            app, allowed_origins, allow_methods=METHODS, allow_headers=["*"], expose_headers=READABLE_HEADERS
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles an ASGI event."""
        origin = _preflight_origin(scope)
        if origin is None or self._cors.is_allowed_origin(origin):
            await self._cors(scope, receive, send)
            return
        self._on_refusal("foreign_origin")
        message = f"the origin {origin[:100]!r} is not allowed: start the server with --allowed-origin {origin[:100]}"
        await errors.error_response(ApiError(403, message), scope)(scope, receive, send)


def _preflight_origin(scope: Scope) -> str | None:
    """Returns the origin of a CORS preflight, or None if the request is not a preflight."""
    if scope["type"] != "http" or scope["method"] != "OPTIONS":
        return None
    headers = Headers(scope=scope)
    return headers.get("origin") if "access-control-request-method" in headers else None
