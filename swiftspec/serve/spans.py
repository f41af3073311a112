"""OpenTelemetry: what one answer on workers has cost, as a span of the request with a child for each exchange with a
worker, and under that the worker's own part of it, on this machine's clock. No text goes along."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from swiftspec.observe.hops import Hop, Hops, Offset
from swiftspec.serve import collector

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

    from swiftspec.engine import Stats

TOGETHER = 512  # spans in one message


class RequestSpans(AbstractContextManager["RequestSpans"]):
    """Around a request: notes its exchanges, and sends the spans at its end."""

    def __init__(
        self, endpoint: str, model: str, hops: Hops | None, stats: Callable[[], Stats],
        exporter: Callable[[str], SpanExporter] | None = None,
    ) -> None:  # fmt: skip
        """`stats`: what it has cost, once it is over. Raises UserError, as `collector.check` does. `exporter`: as of
        `collector.sends_to`."""
        self._sends, self._provider = collector.sends_to(endpoint, exporter), collector.provider()
        self._model, self._hops, self._stats = model, hops or Hops(), stats
        self._known: list[Hop] = []

    def __enter__(self) -> RequestSpans:
        self._began = time.time_ns()
        self._hops.taken = self._known.append
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hops.taken = None
        tracer = self._provider.get_tracer("swiftspec")
        told = {"gen_ai.provider.name": "swiftspec", "gen_ai.request.model": self._model, **_cost(self._stats())}
        made = record(tracer, f"text_completion {self._model}", (self._began, time.time_ns()), told, self._known,
                      self._hops.clocks, error)  # fmt: skip
        self._send(made)
        self._provider.shutdown()

    def _send(self, spans: Sequence[ReadableSpan]) -> None:
        """Sends all of them, however long the answer was, until the collector does not take any."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        for start in range(0, len(spans), TOGETHER):
            if self._sends.export(spans[start : start + TOGETHER]) is not SpanExportResult.SUCCESS:
                break
        self._sends.shutdown()


def record(
    tracer: Any, name: str, span: tuple[int, int], told: Mapping[str, Any], hops: Iterable[Hop],
    clocks: Mapping[str, Offset], error: BaseException | None = None,
) -> list[ReadableSpan]:  # fmt: skip
    """The spans of a request, the outermost one last. A worker's part lies where its clock says, as far as that is
    known, and never outside of the exchange."""
    from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context

    request = tracer.start_span(name, kind=SpanKind.CLIENT, start_time=span[0], attributes=dict(told))
    made: list[ReadableSpan] = []
    for hop in hops:
        what = "verify" if hop.side == "target" else "draft"
        numbers = {"wall_ns": hop.wall, "queue_ns": hop.queue, "model_ns": hop.model}
        told = {"swiftspec.round": hop.round, **{f"swiftspec.worker.{key}": value for key, value in numbers.items()}}
        under = set_span_in_context(request)
        call = tracer.start_span(what, under, SpanKind.CLIENT, start_time=hop.asked, attributes=told)
        clock = clocks.get(hop.side)
        if clock is not None and hop.wall > 0:
            latest = max(hop.came - hop.wall, hop.asked)
            began = min(max(clock.here(hop.began), hop.asked), latest)
            told = {"swiftspec.worker.span": f"{hop.span:016x}", "swiftspec.clock.error_ns": clock.error}
            here = set_span_in_context(call)
            part = tracer.start_span(f"{hop.side} worker", here, SpanKind.SERVER, start_time=began, attributes=told)
            part.end(min(began + hop.wall, hop.came))
            made.append(part)
        call.end(hop.came)
        made.append(call)
    if error is not None:
        request.set_attribute("error.type", type(error).__name__)
        request.set_status(StatusCode.ERROR, str(error))
    request.end(span[1])
    return [*made, request]


def _cost(stats: Stats) -> dict[str, Any]:
    return {
        "gen_ai.usage.input_tokens": stats.prompt_tokens, "gen_ai.usage.output_tokens": stats.tokens,
        "swiftspec.num_spec_steps": stats.rounds, "swiftspec.decode_seconds": stats.decode_time,
    }  # fmt: skip
