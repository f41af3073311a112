"""Command `python -m swiftspec.serve replay FILE`: serves the web page without a model, to replay a trace."""

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

from swiftspec.cli.arguments import CommandParser
from swiftspec.observe import trace_file
from swiftspec.serve.link import frontend_process
from swiftspec.serve.link.frontend_process import local_host_names
from swiftspec.serve.middleware.request_id import RequestIdMiddleware
from swiftspec.serve.middleware.security import SecurityMiddleware
from swiftspec.serve.page_routes import PAGE_HEADERS, page_routes
from swiftspec.settings.settings import UsageError

DESCRIPTION = (
    "Serve the page that shows the draft tree, without a model: it plays a trace written by --trace or by the page."
)
MAX_TRACE_BYTES = 256 << 20  # the browser keeps the whole trace in memory


def replay_main(argv: Sequence[str]) -> int:
    """Runs the command until it is interrupted, then returns the exit code 0. Raises UserError if the file is not a
    trace or the address is in use."""
    parser = CommandParser(prog="swiftspec", usage="swiftspec replay FILE [flags]", description=DESCRIPTION)
    parser.add_argument("file", metavar="FILE", help="The trace: one JSON object per line.")
    parser.add_argument("--host", default="127.0.0.1", metavar="TEXT", help="Address to listen on [%(default)s].")
    parser.add_argument("--port", default="8000", metavar="N", help="Port; 0 chooses a free one [%(default)s].")
    args = parser.parse_args(argv)
    if not (args.port.isdecimal() and int(args.port) < 1 << 16):
        raise UsageError(f"--port must be a whole number in 0..65535, not {args.port}")
    file = Path(args.file)
    check_trace(file)
    with frontend_process.open_listener(args.host, int(args.port)) as listener:
        print(
            f"swiftspec: replaying {file.name}, listening on {frontend_process.listener_url(listener)}",
            file=sys.stderr,
            flush=True,
        )
        app = RequestIdMiddleware(SecurityMiddleware(replay_app(file), allowed_hosts=local_host_names(args.host)))
        server = uvicorn.Server(
            uvicorn.Config(app, ws="none", lifespan="off", log_level="warning", access_log=False, server_header=False)
        )
        asyncio.run(server.serve(sockets=[listener]))
    return 0


def check_trace(file: Path) -> None:
    """Raises UserError if the file is not a valid trace, with the line number of the first error."""
    for _ in trace_file.read_trace(file, MAX_TRACE_BYTES):
        pass


def replay_app(file: Path) -> Starlette:
    """Returns an application that serves the web page, the trace, and a /health that marks it as a replay server."""

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "replay", "trace": file.name}, headers=PAGE_HEADERS)

    async def trace(request: Request) -> Response:
        return FileResponse(file, media_type="application/jsonl", headers=PAGE_HEADERS)

    async def not_found(request: Request, error: Exception) -> Response:
        message = "this server replays a trace and has no model: start one with `python -m swiftspec.serve --port 8000`"
        return JSONResponse({"error": {"message": message, "type": "not_found_error"}}, 404)

    trace_routes = [Route("/health", health), Route("/replay.jsonl", trace)]
    return Starlette(routes=[*page_routes(), *trace_routes], exception_handlers={HTTPException: not_found})
