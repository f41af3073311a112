"""`python -m swiftspec.serve replay FILE`: the page without a model. It plays the rounds of a trace."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from swiftspec.observe import trace_file
from swiftspec.serve.cli.arguments import Parser
from swiftspec.serve.http import page
from swiftspec.serve.http.engine_link import frontend_process
from swiftspec.serve.http.engine_link.address import names_of
from swiftspec.serve.http.middleware.security import Guard
from swiftspec.serve.settings.settings import UsageError

ABOUT = "Serve the page that shows the draft tree, without a model: it plays a trace, as --trace or the page writes it."
MOST = 256 << 20  # bytes of a trace that a browser still takes


def main(argv: Sequence[str]) -> int:
    """Runs the command until it is interrupted. Raises UserError on a file that is no trace, or an address that is
    taken."""
    parser = Parser(prog="swiftspec", usage="python -m swiftspec.serve replay FILE [flags]", description=ABOUT)
    parser.add_argument("file", metavar="FILE", help="The trace: one JSON object a line.")
    parser.add_argument("--host", default="127.0.0.1", metavar="TEXT", help="Address to listen at [%(default)s].")
    parser.add_argument("--port", default="8000", metavar="N", help="Port; 0 takes a free one [%(default)s].")
    asked = parser.parse_args(argv)
    if not (asked.port.isdecimal() and int(asked.port) < 1 << 16):
        raise UsageError(f"--port {asked.port}: needs a whole number from 0 to 65535")
    file = Path(asked.file)
    check(file)
    with frontend_process.listen(asked.host, int(asked.port)) as listening:
        print(
            f"swiftspec: replaying {file.name}, listening on {frontend_process.address(listening)}",
            file=sys.stderr,
            flush=True,
        )
        app = Guard(application(file), hosts=names_of(asked.host))
        server = uvicorn.Server(
            uvicorn.Config(app, ws="none", lifespan="off", log_level="warning", access_log=False, server_header=False)
        )
        asyncio.run(server.serve(sockets=[listening]))
    return 0


def check(file: Path) -> None:
    """Raises UserError on what is no trace, with the line that is wrong."""
    for _ in trace_file.read(file, MOST):
        pass


def application(file: Path) -> Starlette:
    """The page, the trace, and a /health that says which of the two kinds of server this is."""

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "replay", "trace": file.name}, headers=page.HEADERS)

    async def trace(request: Request) -> Response:
        return FileResponse(file, media_type="application/jsonl", headers=page.HEADERS)

    async def missing(request: Request, error: Exception) -> Response:
        said = "this server replays a trace and has no model: start one with `python -m swiftspec.serve --port 8000`"
        return JSONResponse({"error": {"message": said, "type": "not_found_error"}}, 404)

    plays = [Route("/health", health), Route("/replay.jsonl", trace)]
    return Starlette(routes=[*page.routes(), *plays], exception_handlers={HTTPException: missing})
