"""OpenTelemetry tracing: a span per request with the `gen_ai` conventions, and child spans for RPCs to workers.

OpenTelemetry is an optional dependency, imported only with --otlp-endpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from swiftspec import __version__
from swiftspec.contrib.otel import exporter as otel_exporter
from swiftspec.contrib.otel.spans import add_rpc_spans
from swiftspec.params import SamplingParams
from swiftspec.serve.link.frames import DoneFrame
from swiftspec.serve.metrics.request_metrics import RequestContext, RequestRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

CHAT_PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
SAMPLING_ATTRIBUTES = ("temperature", "top_p", "top_k", "max_tokens", "frequency_penalty", "presence_penalty", "seed")


class RequestTracing:
    """Exporter of one span per request, in a background thread. `record` is an `on_finished` callback of
    `RequestRecorder`."""

    def __init__(self, endpoint: str, model_name: str, exporter: Callable[[str], SpanExporter] | None = None) -> None:
        """Raises UserError if OpenTelemetry is not installed or the endpoint is invalid.

        `endpoint`: URL of the OTLP collector.
        `exporter`: creates the span exporter for a URL; None uses OTLP over HTTP.
        """
        self._provider = otel_exporter.make_tracer_provider(endpoint, exporter)
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._name, self._propagator = model_name, TraceContextTextMapPropagator()
        self._tracer = self._provider.get_tracer("swiftspec", __version__)

    def record(self, record: RequestRecord) -> None:
        """Exports the span of a request that has ended, as a child of the span in the client's `traceparent` header.
        Spans contain neither prompts nor generated text."""
        from opentelemetry.trace import SpanKind, StatusCode

        context, now = record.context, time.time_ns()
        parent = self._propagator.extract({"traceparent": context.traceparent, "tracestate": context.tracestate})
        operation = "chat" if context.path in CHAT_PATHS else "text_completion"
        began = now - int(1e9 * (record.ended_at - record.started_at))
        span = self._tracer.start_span(
            f"{operation} {self._name}",
            parent,
            SpanKind.SERVER,
            start_time=began,
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "swiftspec",
                "gen_ai.request.model": self._name,
                **_context_attributes(context),
                **_sampling_attributes(record),
                **_outcome_attributes(record),
            },
        )
        add_rpc_spans(self._tracer, span, record.rpc_records)
        if record.error is not None:
            span.set_attribute("error.type", record.outcome)
            span.set_status(StatusCode.ERROR, str(record.error))
        span.end(now)

    def close(self) -> None:
        """Exports the remaining spans and shuts the exporter down."""
        self._provider.shutdown()


def _context_attributes(context: RequestContext) -> dict[str, str]:
    attributes = {"url.path": context.path, "swiftspec.request.id": context.id}
    return {name: value for name, value in attributes.items() if value}


def _sampling_attributes(record: RequestRecord) -> dict[str, Any]:
    """Returns the sampling parameters of the first choice that differ from their defaults, and the number of choices if
    there are several, as span attributes. A seed beyond OTLP's signed 64-bit integers becomes text."""
    defaults = SamplingParams().values_of(SAMPLING_ATTRIBUTES)
    values = record.choices[0].request.sampling.values_of(SAMPLING_ATTRIBUTES)
    attributes = {name: value for name, value in values.items() if value != defaults[name]}
    if len(record.choices) > 1:
        attributes["choice.count"] = len(record.choices)
    return {f"gen_ai.request.{name}": value if abs(value) < 2**63 else str(value) for name, value in attributes.items()}


def _outcome_attributes(record: RequestRecord) -> dict[str, Any]:
    """Returns token usage, times and statistics of a request as span attributes. Tokens and times are summed over the
    choices."""
    attributes: dict[str, Any] = {
        "gen_ai.usage.input_tokens": sum(len(choice.request.prompt) for choice in record.choices),
        "gen_ai.usage.output_tokens": sum(choice.num_output_tokens for choice in record.choices),
    }
    if record.accepted:
        reasons = [choice.finish_reason for choice in record.choices]
        attributes["gen_ai.response.finish_reasons"] = [record.outcome] if None in reasons else reasons
    if record.time_to_first_token_s is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = record.time_to_first_token_s
    if record.queue_time_s is not None:
        attributes["swiftspec.queue_seconds"] = record.queue_time_s
    done_frames = [choice.done for choice in record.choices if choice.done is not None]
    return attributes | (_engine_attributes(done_frames) if done_frames else {})


def _engine_attributes(done_frames: Sequence[DoneFrame]) -> dict[str, Any]:
    """Returns the engine's statistics of the completed choices as span attributes."""
    timings, metrics = [done.timings for done in done_frames], [done.metrics for done in done_frames]
    decode_ms = [each["predicted_ms"] for each in timings]
    attributes: dict[str, Any] = {
        "gen_ai.usage.cache_read.input_tokens": sum(each["cache_n"] for each in timings),
        "swiftspec.prefill_seconds": sum(each["prompt_ms"] for each in timings) / 1e3,
        "swiftspec.decode_seconds": sum(decode_ms) / 1e3,
        "swiftspec.mode": metrics[0]["mode"],
    }
    for name in ("target_busy", "draft_busy"):
        busy_ms = sum(each[name] * ms for each, ms in zip(metrics, decode_ms))
        attributes[f"swiftspec.{name}"] = busy_ms / sum(decode_ms) if sum(decode_ms) else 0.0
    specs = [each["speculative_decoding"] for each in metrics if each["speculative_decoding"]]
    if specs:
        counts: dict[str, float] = {
            name: sum(spec[name] for spec in specs)
            for name in ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
        }
        rounds = counts["num_spec_steps"]
        counts["mean_acceptance_length"] = 1 + counts["num_accepted_draft_tokens"] / rounds if rounds else 0.0
        attributes |= {f"swiftspec.{name}": value for name, value in counts.items()}
    return attributes
