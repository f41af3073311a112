"""OpenTelemetry tracer provider that exports spans to a collector (extra `otel`). The OpenTelemetry packages are
imported only if --otlp-endpoint is set. OpenTelemetry's environment variables apply, such as OTEL_SERVICE_NAME and
OTEL_EXPORTER_OTLP_HEADERS."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from swiftspec import __version__
from swiftspec.errors import UserError, truncated_repr
from swiftspec.extras import require_extra

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

EXPORT_TIMEOUT_S = 2.0  # timeout of one request to the collector, unless one of TIMEOUT_VARIABLES is set
TIMEOUT_VARIABLES = ("OTEL_EXPORTER_OTLP_TIMEOUT", "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT")
RETRY_AFTER_S = 5.0  # pause of the export after a failure
MAX_QUEUED_SPANS = 1 << 16  # the oldest ones are dropped if more are queued
TRACES_PATH = "/v1/traces"
MAX_LOG_CHARS = 200  # longer log messages of OpenTelemetry are cut


def check_otlp_endpoint(endpoint: str) -> str:
    """Returns the URL that spans are sent to. Raises UserError if `endpoint` is not an http(s) URL or the extra is not
    installed."""
    address = urlsplit(endpoint)
    if address.scheme not in ("http", "https") or not address.netloc:
        raise UserError(f"--otlp-endpoint must be a URL such as http://localhost:4318, not {truncated_repr(endpoint)}")
    require_extra("otel", "--otlp-endpoint")
    return endpoint if address.path.endswith(TRACES_PATH) else endpoint.rstrip("/") + TRACES_PATH


def make_tracer_provider(endpoint: str, exporter: Callable[[str], SpanExporter] | None = None) -> TracerProvider:
    """Creates a tracer provider that exports spans in a background thread. Its method `shutdown` exports the remaining
    spans.

    `exporter`: creates the span exporter for a URL; OTLP over HTTP by default. Raises UserError, see
    `check_otlp_endpoint`.
    """
    address = check_otlp_endpoint(endpoint)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    log = logging.getLogger("opentelemetry")
    if not any(isinstance(handler, FirstErrorHandler) for handler in log.handlers):
        log.addHandler(FirstErrorHandler())
        log.propagate = False
    resource = Resource.create({"service.name": "swiftspec", "service.version": __version__})
    resource = resource.merge(OTELResourceDetector().detect())  # the user's OTEL_SERVICE_NAME wins
    made = TracerProvider(resource=resource, shutdown_on_exit=False)
    timeout = None if any(name in os.environ for name in TIMEOUT_VARIABLES) else EXPORT_TIMEOUT_S
    sends: Any = BackoffExporter(OTLPSpanExporter(address, timeout=timeout) if exporter is None else exporter(address))
    made.add_span_processor(BatchSpanProcessor(sends, MAX_QUEUED_SPANS))
    return made


class BackoffExporter:
    """Span exporter that drops spans for RETRY_AFTER_S after a failed export. Without this pause, the shutdown after a
    long answer would wait for the timeout of each batch."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter, self._until = exporter, 0.0

    def export(self, spans: Sequence[ReadableSpan]) -> None:
        """Exports spans with the wrapped exporter, or drops them during the pause."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        now = time.monotonic()
        if now >= self._until and self._exporter.export(spans) is not SpanExportResult.SUCCESS:
            self._until = now + RETRY_AFTER_S

    def shutdown(self) -> None:
        """Shuts down the wrapped exporter."""
        self._exporter.shutdown()


class FirstErrorHandler(logging.Handler):
    """Log handler that prints the first export error as one line and ignores all others."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._logged = False

    def emit(self, record: logging.LogRecord) -> None:
        if not self._logged:
            self._logged = True
            what = " ".join(record.getMessage().split())[:MAX_LOG_CHARS]
            print(f"swiftspec: spans cannot be exported to --otlp-endpoint: {what}", file=sys.stderr, flush=True)
