"""An OpenTelemetry collector on the loopback interface."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass
class Collector:
    """The messages that were posted to `url`: path and body of each."""

    url: str
    got: list[tuple[str, bytes]] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """The names of all spans, in the order in which they ended."""
        messages = [ExportTraceServiceRequest.FromString(body) for _, body in self.got]
        scopes = [scope for each in messages for part in each.resource_spans for scope in part.scope_spans]
        return [span.name for scope in scopes for span in scope.spans]


@contextmanager
def collecting() -> Iterator[Collector]:
    """Runs a collector that accepts everything."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            found.got.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        found = Collector(f"http://127.0.0.1:{server.server_port}")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield found
        finally:
            server.shutdown()
