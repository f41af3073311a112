"""Spans that a collector receives for requests decoded on workers, and the RPCs in a trace."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from rich.console import Console

from swiftspec.cli.chat import Chat
from swiftspec.contrib.otel.spans import traced_session
from swiftspec.engine import Stats, TokenChunk
from swiftspec.observe.rpc_latency import ClockOffset, RpcLog, RpcRecord
from swiftspec.params import SamplingParams
from swiftspec.settings.settings import Settings
from swiftspec.startup.session import Session
from swiftspec.token_engine import TokenEngine
from tests.support.tiny_checkpoints import make_pair
from tests.support.workers import StartedWorker, client_on_workers, started

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPT = [5, 17, 3]
FLAGS: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "raw": True}
AT = Settings(otlp_endpoint="http://collector:4318", **FLAGS)


def session_on(running: Any) -> Session:
    """A session whose text is the tokens in decimal."""
    codec = SimpleNamespace(
        special=frozenset(), byte_tokens=frozenset(), has_template=False,
        encode=lambda text, room: [*map(int, text.split())], token_text=lambda tokens: "".join(f"{t} " for t in tokens),
    )  # fmt: skip
    return Session(running, codec, "m", "d", None, "float64", 1, {})  # type: ignore[arg-type]


def check_exchanges(spans: Sequence[Any]) -> Iterator[tuple[Any, list[Any]]]:
    """Checks each request's span and those of its RPCs, which contain the workers' spans."""
    by_id = {span.context.span_id: span for span in spans}
    for root in [span for span in spans if span.parent is None]:
        calls = [span for span in spans if span.parent is not None and span.parent.span_id == root.context.span_id]
        parts = [span for span in spans if span.parent is not None and by_id[span.parent.span_id] in calls]
        assert len(parts) == len(calls) > 0
        for part in parts:
            call = by_id[part.parent.span_id]
            times = root.start_time, call.start_time, part.start_time, part.end_time, call.end_time, root.end_time
            assert list(times) == sorted(times)
            assert 0 <= part.attributes["swiftspec.clock.error_ns"] < 1e9
        yield root, calls


def test_every_rpc_is_a_span_and_in_the_trace(tmp_path: Path) -> None:
    """The worker's part lies within the RPC, on this machine's clock."""
    models, exporter, file = make_pair(tmp_path), InMemorySpanExporter(), tmp_path / "trace.jsonl"
    with (
        started("target", models[0]) as target,
        started("draft", models[1]) as draft,
        client_on_workers(
            target.client_address(), draft.client_address(), mode="serial", draft_steps=2, trace=file
        ) as running,
    ):
        with traced_session(session_on(running), AT, lambda address: exporter) as session:
            list(session.answer(PROMPT, AT))
        rounds = running.stats.rounds
    ((root, calls),) = check_exchanges(exporter.get_finished_spans())
    assert root.attributes["gen_ai.usage.output_tokens"] == 12
    assert len([call for call in calls if call.name == "verify"]) == rounds + 1
    head, *lines = map(json.loads, file.read_text().splitlines())
    assert head["clocks"]["unix_ns"] > 0
    records = [rpc for line in lines for rpc in line.get("workers", ())]
    assert {rpc["side"] for rpc in records} == {"target", "draft"} and len(records) == len(calls)
    assert all(rpc["wall"] >= rpc["queue"] + rpc["model"] >= 0 for rpc in records if rpc["side"] == "target")
    assert all(0 <= rpc["clock"]["error"] < 1e9 for rpc in records)


def test_a_chat_exports_a_span_per_answer(tmp_path: Path) -> None:
    models, exporter = make_pair(tmp_path), InMemorySpanExporter()
    with (
        started("target", models[0]) as target,
        started("draft", models[1]) as draft,
        client_on_workers(target.client_address(), draft.client_address(), mode="serial", draft_steps=2) as running,
        traced_session(session_on(running), AT, lambda address: exporter) as session,
    ):
        chat = Chat(session, AT, Console(file=StringIO()), input)
        for line in ("5 17 3", "5 17 4"):
            chat.handle(line)
    sizes = [len(calls) for _, calls in check_exchanges(exporter.get_finished_spans())]
    assert len(sizes) == 2


def test_a_failed_request_reports_the_error() -> None:
    exporter, rpcs = InMemorySpanExporter(), RpcLog()

    def stream(prompt: Sequence[int], sampling: SamplingParams) -> Iterator[TokenChunk]:
        rpcs.add(RpcRecord("target", 0, 1, 2, 255, 3, 0, 0, 0), b"")
        yield TokenChunk((5,), 0)
        raise ValueError("no more")

    running = SimpleNamespace(stream=stream, stats=Stats(), roles=SimpleNamespace(rpc_log=rpcs))
    with (
        traced_session(session_on(running), AT, lambda address: exporter) as session,
        pytest.raises(ValueError, match="no more"),
    ):
        list(session.answer(PROMPT, AT))
    call, root = exporter.get_finished_spans()
    assert call.name == "verify" and root.status.description == "no more" and rpcs.on_record is None
    assert (root.attributes or {})["error.type"] == "ValueError"


def test_a_clock_offset_is_known_up_to_half_of_the_rpc_latency() -> None:
    assert (
        ClockOffset.of(asked=1000, clock=5600, came=1200) == ClockOffset(4500, 100)
        and ClockOffset(4500, 100).to_local(5600) == 1100
    )
    assert RpcRecord("draft", 0, 1, 2, 255, 3, 4, 5, 6).line()["span"] == "00000000000000ff"


SECOND = 10**9


def clock_of(
    rpcs: RpcLog, sent_at: int, began: int, received_at: int, wall: int, session: bytes = b"one"
) -> ClockOffset:
    rpcs.add(RpcRecord("draft", 0, sent_at, received_at, 255, began, wall, 0, 0), session)
    (rpc,) = rpcs.drain()
    assert rpc.clock is not None
    return rpc.clock


def test_the_fastest_rpc_determines_the_clock_offset_until_it_expires() -> None:
    rpcs = RpcLog()
    assert clock_of(rpcs, 0, 5500, 2000, 1000) == ClockOffset(5000, 500)
    assert clock_of(rpcs, 10_000, 16_000, 19_000, 1000) == ClockOffset(5000, 501), "the first one bounds it better"
    assert clock_of(rpcs, 20_000, 25_300, 20_700, 100) == ClockOffset(5000, 300)
    later = SECOND + 20_700
    assert clock_of(rpcs, later - 9000, later - 4000, later, 1000) == ClockOffset(1000, 4000), "it is old"
    later += SECOND
    assert clock_of(rpcs, later, later - SECOND, later + 8000, 0) == ClockOffset(-SECOND - 4000, 4000), "it was set"
    assert clock_of(rpcs, later, later + 50, later + 9000, 0, b"two") == ClockOffset(-4450, 4500), "of another machine"


def clocks_in(lines: Sequence[Any]) -> dict[str, list[float]]:
    """Clock offset in seconds of each worker in a trace, per RPC."""
    offsets: dict[str, list[float]] = {"target": [], "draft": []}
    for rpc in (rpc for line in lines for rpc in line.get("workers", ())):
        offsets[rpc["side"]].append(round(rpc["clock"]["ahead"] / SECOND))
    return offsets


class RemoteClock:
    """A worker on a machine whose clock is ahead by this number of seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ahead: dict[str, int]) -> None:
        from swiftspec.distributed.remote.worker import WorkerServer

        timed = WorkerServer._timed

        def shifted(server: Any, execute: Any) -> Any:
            answers: list[Any] = timed(server, execute)
            for answer in answers[:1]:
                began = answer.times.began + ahead[server._worker.side] * SECOND
                return [replace(answer, times=replace(answer.times, began=began)), *answers[1:]]
            return answers

        monkeypatch.setattr(WorkerServer, "_timed", shifted)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["serial", "async"])
def test_the_clock_offset_of_a_late_or_restarted_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """During a request, and between two requests."""
    models, file = make_pair(tmp_path), tmp_path / "trace.jsonl"
    ahead = {"target": 1000, "draft": 2000}
    RemoteClock(monkeypatch, ahead)
    late = StartedWorker("draft", models[1]).start()
    late.stop()
    target = StartedWorker("target", models[0]).start()
    with client_on_workers(
        target.client_address(), late.client_address(), mode=mode, draft_steps=2, trace=file
    ) as running:
        whole = [running.generate(PROMPT, GREEDY).token_ids]
        late.start()
        whole.append(until_it_drafts(running))
        target.stop()
        ahead["target"] = 3000
        target.start()
        whole.append(until_it_drafts(running))
        late.stop()
        ahead["draft"] = 4000
        late.start()
        whole.append(until_it_drafts(running))
    late.stop()
    target.stop()
    offsets = clocks_in([*map(json.loads, file.read_text().splitlines())])
    assert sorted({*offsets["target"]}) == [1000, 3000] and sorted({*offsets["draft"]}) == [2000, 4000]
    assert offsets == {side: sorted(values) for side, values in offsets.items()}
    assert all(text[:12] == whole[0] for text in whole)


def until_it_drafts(running: TokenEngine) -> list[int]:
    """The first answer for which the draft worker was used."""
    while True:
        text = running.generate(PROMPT, replace(GREEDY, max_tokens=60)).token_ids
        if running.stats.accepted > 0:
            return text


def test_all_spans_of_a_long_answer_are_sent_and_a_lost_collector_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.1")
    for address, exporter in (("http://collector:4318", InMemorySpanExporter()), ("http://127.0.0.1:1", None)):
        rpcs = RpcLog()

        def stream(prompt: Sequence[int], sampling: SamplingParams, rpcs: RpcLog = rpcs) -> Iterator[TokenChunk]:
            for number in range(3000):
                rpcs.add(RpcRecord("target", number, 1, 2, 255, 3, 0, 0, 0), b"")
            yield TokenChunk((5,), 0, "length")

        running = SimpleNamespace(stream=stream, stats=Stats(), roles=SimpleNamespace(rpc_log=rpcs))
        settings = AT.model_copy(update={"otlp_endpoint": address})
        with traced_session(
            session_on(running), settings, exporter and (lambda address, exporter=exporter: exporter)
        ) as session:
            list(session.answer(PROMPT, AT))
        if exporter is not None:
            assert len(exporter.get_finished_spans()) == 3001
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("swiftspec: spans cannot be exported to --otlp-endpoint")
