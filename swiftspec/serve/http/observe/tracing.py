"""OpenTelemetry: a span for each request, with the conventions of `gen_ai`, and under it the exchanges with workers,
where they decode. An extra: without --otlp-endpoint nothing of it is imported."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from swiftspec import __version__
from swiftspec.serve.http.observe.request_metrics import Seen, Visit
from swiftspec.serve.otel import exporter as otel_exporter
from swiftspec.serve.otel.spans import exchanges

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

CHATS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
ASKED = ("temperature", "top_p", "top_k", "max_tokens", "frequency_penalty", "presence_penalty", "seed")


class Tracing:
    """Sends spans to a collector, in a thread of its own. `record` is for `watch.Watched`."""

    def __init__(self, endpoint: str, model_name: str, exporter: Callable[[str], SpanExporter] | None = None) -> None:
        """Raises UserError, as `collector.check` does. `exporter`: as of `collector.provider`."""
        self._provider = otel_exporter.provider(endpoint, exporter)
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._name, self._propagator = model_name, TraceContextTextMapPropagator()
        self._tracer = self._provider.get_tracer("swiftspec", __version__)

    def record(self, seen: Seen) -> None:
        """A request that has ended. Its parent is what the `traceparent` of its client says. No text goes along."""
        from opentelemetry.trace import SpanKind, StatusCode

        visit, now = seen.visit, time.time_ns()
        parent = self._propagator.extract({"traceparent": visit.traceparent, "tracestate": visit.tracestate})
        operation = "chat" if visit.path in CHATS else "text_completion"
        span = self._tracer.start_span(
            f"{operation} {self._name}", parent, SpanKind.SERVER, start_time=now - int(1e9 * (seen.ended - seen.began)),
            attributes={
                "gen_ai.operation.name": operation, "gen_ai.provider.name": "swiftspec",
                "gen_ai.request.model": self._name, **_visited(visit), **_asked(seen.ask.sampling), **_seen(seen),
            },
        )  # fmt: skip
        exchanges(self._tracer, span, seen.hops)
        if seen.error is not None:
            span.set_attribute("error.type", seen.reason)
            span.set_status(StatusCode.ERROR, str(seen.error))
        span.end(now)

    def close(self) -> None:
        """Sends what is left."""
        self._provider.shutdown()


def _visited(visit: Visit) -> dict[str, str]:
    told = {"url.path": visit.path, "swiftspec.request.id": visit.id}
    return {name: value for name, value in told.items() if value}


def _asked(sampling: dict[str, Any]) -> dict[str, Any]:
    """What was asked of the answer. A seed may be larger than an integer of OTLP's: then it is text."""
    told = {name: sampling[name] for name in ASKED if sampling.get(name) is not None}
    return {f"gen_ai.request.{name}": value if abs(value) < 2**63 else str(value) for name, value in told.items()}


def _seen(seen: Seen) -> dict[str, Any]:
    """What came of it."""
    told: dict[str, Any] = {
        "gen_ai.usage.input_tokens": len(seen.ask.prompt), "gen_ai.usage.output_tokens": seen.tokens,
    }  # fmt: skip
    if seen.answered:
        told["gen_ai.response.finish_reasons"] = [seen.reason]
    if seen.came:
        told["gen_ai.response.time_to_first_chunk"] = seen.came[0] - seen.began
    if seen.queued is not None:
        told["swiftspec.queue_seconds"] = seen.queued
    if seen.done is None:
        return told
    timings, metrics = seen.done.timings, seen.done.metrics
    told["gen_ai.usage.cache_read.input_tokens"] = timings["cache_n"]
    told["swiftspec.prefill_seconds"] = timings["prompt_ms"] / 1e3
    told["swiftspec.decode_seconds"] = timings["predicted_ms"] / 1e3
    told |= {f"swiftspec.{name}": metrics[name] for name in ("mode", "target_busy", "draft_busy")}
    spec = metrics["speculative_decoding"] or {}
    return told | {
        f"swiftspec.{name}": spec[name]
        for name in ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens", "mean_acceptance_length")
        if name in spec
    }
