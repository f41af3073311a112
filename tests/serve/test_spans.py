"""What a collector hears of a request that workers decode, and what a trace says of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from swiftspec.engine import Stats
from swiftspec.observe.hops import Hop, Hops, Offset
from swiftspec.params import SamplingParams
from swiftspec.serve.collector import hears_nothing
from swiftspec.serve.settings import Settings
from swiftspec.serve.spans import RequestSpans
from tests.support.tiny import make_pair
from tests.support.workers import on_workers, started

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def test_every_exchange_with_a_worker_is_a_span_and_in_the_trace(tmp_path: Path) -> None:
    """The worker's part lies inside of the exchange, on this machine's clock."""
    models, kept, file = make_pair(tmp_path), InMemorySpanExporter(), tmp_path / "trace.jsonl"
    with (
        started("target", models[0]) as target,
        started("draft", models[1]) as draft,
        on_workers(target.named(), draft.named(), mode="serial", draft_steps=2, trace=file) as running,
    ):
        hops = running.roles.hops
        with RequestSpans("http://collector:4318", "m", hops, lambda: running.stats, lambda address: kept):
            running.generate([5, 17, 3], GREEDY)
        rounds = running.stats.rounds
    found: Any = kept.get_finished_spans()
    spans = {span.context.span_id: span for span in found}
    (root,) = [span for span in spans.values() if span.parent is None]
    assert root.attributes["gen_ai.usage.output_tokens"] == 12
    calls = [span for span in spans.values() if span.parent is not None and span.parent.span_id == root.context.span_id]
    parts = [span for span in spans.values() if span is not root and span not in calls]
    assert len([call for call in calls if call.name == "verify"]) == rounds + 1 and len(parts) == len(calls)
    for part in parts:
        call = spans[part.parent.span_id]
        assert root.start_time <= call.start_time <= part.start_time <= part.end_time <= call.end_time <= root.end_time
        assert 0 <= part.attributes["swiftspec.clock.error_ns"] < 1e9
    head, *lines = map(json.loads, file.read_text().splitlines())
    clocks = head["clocks"]
    assert clocks["workers"].keys() == {"target", "draft"} and clocks["unix_ns"] > 0
    told = [hop for line in lines for hop in line.get("workers", ())]
    assert {hop["side"] for hop in told} == {"target", "draft"} and len(told) == len(calls)
    assert all(hop["wall"] >= hop["queue"] + hop["model"] >= 0 for hop in told if hop["side"] == "target")


def test_a_clock_is_known_up_to_half_the_round_trip() -> None:
    offset = Offset.of(asked=1000, clock=5600, came=1200)
    assert (offset.ahead, offset.error, offset.here(5600)) == (4500, 100, 1100)
    assert Hop("draft", 0, 1, 2, 255, 3, 4, 5, 6).line()["span"] == "00000000000000ff"


def test_all_spans_of_a_long_answer_go_and_a_collector_that_is_gone_is_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swiftspec.serve.collector.PATIENCE", 0.1)
    for address, kept in (("http://collector:4318", InMemorySpanExporter()), ("http://127.0.0.1:1", None)):
        hops = Hops()
        with RequestSpans(address, "m", hops, Stats, None if kept is None else lambda address, kept=kept: kept):
            for number in range(3000):
                hops.add(Hop("target", number, 1, 2, 255, 3, 0, 0, 0))
        if kept is not None:
            assert len(kept.get_finished_spans()) == 3001
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("swiftspec: spans do not reach --otlp-endpoint")


def test_a_collector_that_hears_nothing_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    hears_nothing(Settings())
    hears_nothing(Settings(otlp_endpoint="http://collector:4318"))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("swiftspec: --otlp-endpoint: ")
