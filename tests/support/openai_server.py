"""An OpenAI-compatible server with scripted responses, in a thread of this process."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Script = Callable[[dict[str, Any]], tuple[int, bytes]]
LISTED = {"/v1/models": json.dumps({"data": [{"id": "toy"}]})}


def event(data: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def chat_stream(texts: Sequence[str], *last: Mapping[str, Any]) -> bytes:
    """The stream of a chat completion: the role, a chunk for each text, further chunks, and the end."""
    deltas = [{"role": "assistant", "content": None}, *({"content": text} for text in texts)]
    chunks = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    return b"".join(map(event, [*chunks, *last])) + b"data: [DONE]\n\n"


@dataclass
class OpenAIServer:
    """What the server answers and received. `script`: status and body of the response to the body of a POST. `pages`:
    bodies of GET requests by path; another path returns 404."""

    script: Script
    pages: dict[str, str] = field(default_factory=lambda: dict(LISTED))
    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    url: str = ""


@contextmanager
def openai_server(script: Script) -> Iterator[OpenAIServer]:
    served = OpenAIServer(script)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            page = served.pages.get(self.path)
            self.reply(404 if page is None else 200, (page or "{}").encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            served.requests.append((self.path, body))
            served.keys.append(self.headers["Authorization"])
            self.reply(*served.script(body))

        def reply(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        server.block_on_close = False  # a client may keep its connection
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        served.url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield served
        finally:
            server.shutdown()
            thread.join(10)
