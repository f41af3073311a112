"""The page at `/`: static files that come with the package. They hold nothing secret and need no key; what they show,
they ask the endpoints for, with the key that a person gives them."""

from __future__ import annotations

from pathlib import Path

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Message, Receive, Scope, Send

FILES = Path(__file__).resolve().parents[1] / "page"
POLICY = (  # nothing runs or is fetched but what this server gives; no style, script or handler inside the text
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:;"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin", "cache-control": "no-cache",
}  # fmt: skip


class Files(StaticFiles):
    """The files, with the headers that keep a page to itself."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it."""
        await super().__call__(scope, receive, guarded(send))


def guarded(send: Send) -> Send:
    """Adds HEADERS to an answer."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(HEADERS)
        await send(message)

    return sending


def routes() -> list[BaseRoute]:
    """`/` and what it is made of, below `/page/`."""

    async def index(request: Request) -> Response:
        return FileResponse(FILES / "index.html", headers=HEADERS)

    return [Route("/", index, methods=["GET"]), Mount("/page", Files(directory=FILES))]


def is_page(path: str) -> bool:
    """Whether a path is one of the page's."""
    return path == "/" or path.startswith("/page/")
