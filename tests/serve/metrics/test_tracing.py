"""A span for each request: its parent and its attributes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from swiftspec.contrib.otel import exporter
from swiftspec.engine import Stats
from swiftspec.errors import UserError
from swiftspec.messages import VerifiedRound
from swiftspec.observe.rpc_latency import ClockOffset, RpcRecord
from swiftspec.params import SamplingParams
from swiftspec.serve.link.engine_client import EngineRequest, RequestRejectedError
from swiftspec.serve.link.frames import TokensFrame
from swiftspec.serve.metrics.request_metrics import REQUEST_CONTEXT, RequestContext, RequestRecorder
from swiftspec.serve.metrics.tracing import RequestTracing
from tests.support.collector import collecting
from tests.support.scripted_engine import ScriptedEngine, TickingClock, collect_deltas, complete_frames

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def spans(
    visit: RequestContext, ask: EngineRequest, *answers: Sequence[Any], num_choices: int = 1
) -> list[ReadableSpan]:
    """The spans of these requests; closing exports all of them."""
    memory, addresses = InMemorySpanExporter(), list[str]()

    def exporter(address: str) -> SpanExporter:
        addresses.append(address)
        return memory

    traced = RequestTracing("http://collector:4318", "m", exporter)
    engine, recorder = ScriptedEngine(*answers), RequestRecorder([traced.record], TickingClock())

    async def all_of_them() -> None:
        REQUEST_CONTEXT.set(visit)
        for _ in answers:
            with suppress(RequestRejectedError):
                await collect_deltas(engine, recorder, *[ask] * num_choices)

    asyncio.run(all_of_them())
    traced.close()
    assert addresses == ["http://collector:4318/v1/traces"]
    return list(memory.get_finished_spans())


def test_a_request_is_one_span_under_that_of_its_client() -> None:
    visit = RequestContext("/v1/chat/completions", "r1", PARENT, "a=b")
    ask = EngineRequest([1, 2, 3], SamplingParams(temperature=0.5, seed=2**64 - 1, stop_token_ids=(1,)))
    cost = Stats(
        prompt_tokens=3, cached_tokens=1, prompt_time=0.5, first_token_time=0.75, decode_time=2.0, rounds=1, drafted=3,
        accepted=1, verified=[VerifiedRound((-1, 0, 0, 0), (0, 1))], target_busy_time=1.0,
    )  # fmt: skip
    (span,) = spans(visit, ask, complete_frames(cost, [2, 1]))
    assert span.name == "chat m" and span.parent is not None and span.context is not None
    assert format(span.parent.span_id, "016x") == "b7ad6b7169203331"
    assert format(span.context.trace_id, "032x") == "0af7651916cd43dd8448eb211c80319c"
    assert span.start_time is not None and span.end_time == span.start_time + 3_000_000_000
    assert dict(span.attributes or {}) == {
        "gen_ai.operation.name": "chat", "gen_ai.provider.name": "swiftspec", "gen_ai.request.model": "m",
        "url.path": "/v1/chat/completions", "swiftspec.request.id": "r1", "gen_ai.request.temperature": 0.5,
        "gen_ai.request.seed": str(2**64 - 1), "gen_ai.usage.input_tokens": 3, "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 1, "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.response.time_to_first_chunk": 1.0, "swiftspec.queue_seconds": 0.75, "swiftspec.prefill_seconds": 0.5,
        "swiftspec.decode_seconds": 2.0, "swiftspec.mode": "serial", "swiftspec.target_busy": 0.5,
        "swiftspec.draft_busy": 0.0, "swiftspec.num_spec_steps": 1, "swiftspec.num_draft_tokens": 3,
        "swiftspec.num_accepted_draft_tokens": 1, "swiftspec.mean_acceptance_length": 2.0,
    }  # fmt: skip


def test_choices_share_the_span_of_their_request() -> None:
    one, two = VerifiedRound((-1, 0), (0, 1)), VerifiedRound((-1, 0, 1), (0, 1, 2))  # accepted tokens
    stats = Stats(prompt_tokens=3, decode_time=1.0, target_busy_time=1.0, rounds=1, accepted=1, verified=[one])
    first = complete_frames(stats, [2])
    stats = Stats(prompt_tokens=3, cached_tokens=2, decode_time=3.0, rounds=1, accepted=2, verified=[two])
    second = complete_frames(stats, [4])
    pairs = [*((0, frame) for frame in first), *((1, frame) for frame in second)]
    (span,) = spans(RequestContext(), EngineRequest([1, 2, 3], SamplingParams()), pairs, num_choices=2)
    attributes = dict(span.attributes or {})
    assert attributes["gen_ai.request.choice.count"] == 2
    assert attributes["gen_ai.response.finish_reasons"] == ("stop", "stop")
    assert (attributes["gen_ai.usage.input_tokens"], attributes["gen_ai.usage.output_tokens"]) == (6, 6)
    assert attributes["gen_ai.usage.cache_read.input_tokens"] == 2
    assert (attributes["swiftspec.decode_seconds"], attributes["swiftspec.target_busy"]) == (4.0, 0.25)
    assert (attributes["swiftspec.num_spec_steps"], attributes["swiftspec.mean_acceptance_length"]) == (2, 2.5)


def test_rpcs_are_child_spans_of_their_request() -> None:
    """Also those of a request that fails."""
    rpc_records = [RpcRecord("draft", at, at, at + 9, 255, 105 + at, 3, 0, 2, ClockOffset(100, 4)) for at in (-1, 0)]
    frames = [TokensFrame(1, [5], 0, None, None, [rpc]) for rpc in rpc_records]
    for answer in (complete_frames(Stats(), [1]), [RequestRejectedError("it is gone", 503, None)]):
        part, call, part_2, call_2, request = spans(
            RequestContext("/v1/completions"), EngineRequest([1], SamplingParams()), [*frames, *answer]
        )
        assert [each.name for each in (part, call, request)] == ["draft worker", "draft", "text_completion m"]
        assert call.parent is not None and call.parent == call_2.parent == request.context and request.parent is None
        assert part.parent == call.context and part_2.parent == call_2.context
        assert (call_2.start_time, part_2.start_time, part_2.end_time, call_2.end_time) == (0, 5, 8, 9)


def test_spans_are_exported_over_http() -> None:
    with collecting() as collector:
        traced = RequestTracing(collector.url, "m")
        asyncio.run(
            collect_deltas(
                ScriptedEngine(complete_frames(Stats(), [1])),
                RequestRecorder([traced.record]),
                EngineRequest([1], SamplingParams()),
            )
        )
        traced.close()
    ((path, body),) = collector.got
    (frames,) = ExportTraceServiceRequest.FromString(body).resource_spans
    assert path == "/v1/traces" and collector.names == ["text_completion m"]
    assert "swiftspec" in [item.value.string_value for item in frames.resource.attributes if item.key == "service.name"]


def test_standard_variables_name_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.version=7,deployment.environment.name=lab")
    provider = exporter.make_tracer_provider("http://collector:4318", lambda address: InMemorySpanExporter())
    provider.shutdown()
    attributes = provider.resource.attributes
    assert (attributes["service.name"], attributes["service.version"]) == ("mine", "7")
    assert attributes["deployment.environment.name"] == "lab"


@pytest.mark.parametrize("parent", ["", "00-zz-zz-01", "x" * 200])
def test_an_invalid_traceparent_is_ignored(parent: str) -> None:
    (span,) = spans(
        RequestContext("/v1/completions", "r", parent, "="),
        EngineRequest([1], SamplingParams()),
        complete_frames(Stats(), [1], "smc"),
    )
    assert span.parent is None and span.name == "text_completion m"


def test_a_refused_request_is_an_error_span() -> None:
    (span,) = spans(
        RequestContext("/v1/completions", "r", "", ""),
        EngineRequest([1], SamplingParams()),
        [RequestRejectedError("the queue is full", 429, 1.0)],
    )
    assert not span.status.is_ok and span.status.description == "the queue is full"
    assert (span.attributes or {})["error.type"] == "busy"
    assert "gen_ai.response.finish_reasons" not in (span.attributes or {})


@pytest.mark.parametrize("endpoint", ["", "collector:4318", "grpc://collector:4317", "http://"])
def test_an_invalid_address_is_refused(endpoint: str) -> None:
    with pytest.raises(UserError, match="--otlp-endpoint must be a URL such as"):
        exporter.check_otlp_endpoint(endpoint)


def test_addresses() -> None:
    for given in ("https://a/x", "https://a/x/", "https://a/x/v1/traces"):
        assert exporter.check_otlp_endpoint(given) == "https://a/x/v1/traces"


def test_without_the_extra_one_line_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk", None)
    with pytest.raises(UserError, match=r"run pip install '\.\[otel\]'"):
        RequestTracing("http://collector:4318", "m")
