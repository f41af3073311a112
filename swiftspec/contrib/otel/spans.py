"""OpenTelemetry spans of an answer. The span of a request has a child span for each RPC to a worker, and that has a
child span for the worker's part, converted to this machine's clock. Spans contain no text."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from swiftspec.contrib.otel import exporter as otel_exporter
from swiftspec.observe.rpc_latency import RpcLog, RpcRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

    from swiftspec.engine import Stats, TokenChunk
    from swiftspec.settings.settings import Settings
    from swiftspec.startup.session import Session


@contextmanager
def traced_session(
    session: Session, settings: Settings, exporter: Callable[[str], SpanExporter] | None = None
) -> Iterator[Session]:
    """Yields the session; if --otlp-endpoint is set, exports the spans of its answers.

    `exporter`: see `make_tracer_provider`. Raises UserError, see `check_otlp_endpoint`.
    """
    if settings.otlp_endpoint is None:
        yield session
        return
    provider, llm = otel_exporter.make_tracer_provider(settings.otlp_endpoint, exporter), session.llm
    spans = RequestSpans(
        provider.get_tracer("swiftspec"), session.model, llm.roles.rpc_log or RpcLog(), lambda: llm.stats
    )
    try:
        yield replace(session, wrap_chunks=spans.trace_chunks)
    finally:
        provider.shutdown()


class RequestSpans:
    """Recorder of the spans of requests that this process decodes one after the other."""

    def __init__(self, tracer: Any, model: str, hops: RpcLog, stats: Callable[[], Stats]) -> None:
        """`hops`: the RPCs to workers. `stats`: returns the statistics of the last request."""
        self._tracer, self._model, self._hops, self._stats = tracer, model, hops, stats

    def trace_chunks(self, chunks: Iterator[TokenChunk]) -> Iterator[TokenChunk]:
        """Yields the chunks of a request and records the spans of the request at its end."""
        began, known, failed = time.time_ns(), list[RpcRecord](), None
        self._hops.on_record = known.append
        try:
            yield from chunks
        except Exception as error:
            failed = error
            raise
        finally:
            self._hops.on_record = None
            self._record(began, known, failed)

    def _record(self, began: int, hops: Iterable[RpcRecord], failed: Exception | None) -> None:
        from opentelemetry.trace import SpanKind, StatusCode

        attributes = {
            "gen_ai.provider.name": "swiftspec",
            "gen_ai.request.model": self._model,
            **_usage_attributes(self._stats()),
        }
        name = f"text_completion {self._model}"
        span = self._tracer.start_span(name, kind=SpanKind.CLIENT, start_time=began, attributes=attributes)
        add_rpc_spans(self._tracer, span, hops)
        if failed is not None:
            span.set_attribute("error.type", type(failed).__name__)
            span.set_status(StatusCode.ERROR, str(failed))
        span.end()


def add_rpc_spans(tracer: Any, request: Any, hops: Iterable[RpcRecord]) -> None:
    """Records a span for each RPC of `hops`, as a child of the request's span, and below it a span of the worker's
    part.

    The worker's part is converted to this machine's clock and clipped to the RPC; it is left out if the clock offset is
    unknown.
    """
    from opentelemetry.trace import SpanKind, set_span_in_context

    request_context = set_span_in_context(request)
    for hop in hops:
        what = "verify" if hop.side == "target" else "draft"
        numbers = {"wall_ns": hop.wall, "queue_ns": hop.queue, "model_ns": hop.model}
        attributes = {
            "swiftspec.round": hop.round,
            **{f"swiftspec.worker.{key}": value for key, value in numbers.items()},
        }
        call = tracer.start_span(what, request_context, SpanKind.CLIENT, start_time=hop.asked, attributes=attributes)
        if hop.clock is not None and hop.wall > 0:
            latest = max(hop.came - hop.wall, hop.asked)
            began = min(max(hop.clock.to_local(hop.began), hop.asked), latest)
            attributes = {"swiftspec.worker.span": f"{hop.span:016x}", "swiftspec.clock.error_ns": hop.clock.error}
            call_context = set_span_in_context(call)
            part = tracer.start_span(
                f"{hop.side} worker", call_context, SpanKind.SERVER, start_time=began, attributes=attributes
            )
            part.end(min(began + hop.wall, hop.came))
        call.end(hop.came)


def _usage_attributes(stats: Stats) -> dict[str, Any]:
    return {
        "gen_ai.usage.input_tokens": stats.prompt_tokens,
        "gen_ai.usage.output_tokens": stats.tokens,
        "swiftspec.num_spec_steps": stats.rounds,
        "swiftspec.decode_seconds": stats.decode_time,
    }
