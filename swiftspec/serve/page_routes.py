"""Web page at `/`: static files of the package.

Its URLs are relative, so that it works below the path at which the application is mounted. The files contain no secrets
and need no API key. The page requests its data from the endpoints with the API key that the user enters.
"""

from __future__ import annotations

from pathlib import Path

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Message, Receive, Scope, Send

PAGE_FOLDER = Path(__file__).resolve().parent / "page"
CONTENT_SECURITY_POLICY = (  # only files of this server; no inline styles, scripts or handlers
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:;"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
PAGE_HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}


class PageFiles(StaticFiles):
    """Static files of the web page, sent with PAGE_HEADERS."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles an ASGI request."""
        await super().__call__(scope, receive, with_page_headers(send))


def with_page_headers(send: Send) -> Send:
    """Returns an ASGI `send` that adds PAGE_HEADERS to the response."""

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(PAGE_HEADERS)
        await send(message)

    return send_with_headers


def page_routes() -> list[BaseRoute]:
    """Returns the routes of the web page: `/` and its files below `/page/`."""

    async def index(request: Request) -> Response:
        return FileResponse(PAGE_FOLDER / "index.html", headers=PAGE_HEADERS)

    return [Route("/", index, methods=["GET"]), Mount("/page", PageFiles(directory=PAGE_FOLDER))]


def is_page_path(path: str) -> bool:
    """Returns whether a URL path belongs to the web page."""
    return path == "/" or path.startswith("/page/")
