"""/metrics: totals are the sums over the responses, and the dashboard queries existing metrics."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from swiftspec.engine import Stats
from swiftspec.messages import NodeSource, VerifiedRound
from swiftspec.params import SamplingParams
from swiftspec.serve.link.engine_client import (
    EngineRequest,
    EngineState,
    GenerationFailedError,
    RequestRejectedError,
)
from swiftspec.serve.link.frames import RankState
from swiftspec.serve.metrics.prometheus import PrometheusMetrics, metrics_router
from swiftspec.serve.metrics.request_metrics import RequestRecorder
from tests.support.cases import examples
from tests.support.proposals import LOOKUP
from tests.support.scripted_engine import ScriptedEngine, TickingClock, collect_deltas, complete_frames

ROOT = Path(__file__).parents[3]
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(metrics: PrometheusMetrics) -> Samples:
    """The values by name and labels, without the model's label."""
    found: Samples = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "m"
            if sample.name.startswith("vllm:"):
                assert labels.pop("engine") == "0"
                continue
            assert sample.name.startswith("swiftspec:")
            found[sample.name.removeprefix("swiftspec:"), tuple(sorted(labels.items()))] = sample.value
    return found


def after(*answers: Any, num_choices: int = 1) -> Samples:
    """The metrics after these requests."""
    engine = ScriptedEngine(*answers)
    metrics = PrometheusMetrics(engine, "m")
    recorder = RequestRecorder([metrics.record_request], TickingClock())

    async def all_of_them() -> None:
        for _ in answers:
            with suppress(RequestRejectedError, GenerationFailedError):
                await collect_deltas(engine, recorder, *[EngineRequest([1, 2, 3], SamplingParams())] * num_choices)

    asyncio.run(all_of_them())
    return samples(metrics)


def total(found: Samples, name: str, **labels: str) -> float:
    return found.get((name, tuple(sorted(labels.items()))), 0.0)


def any_sources(draw: st.DrawFn, nodes: int) -> tuple[NodeSource, ...]:
    """Each node except the root has one of two sources."""
    source = st.sampled_from([NodeSource.DRAFT_MODEL, LOOKUP])
    return NodeSource.ROOT, *draw(st.lists(source, min_size=nodes, max_size=nodes))


@st.composite
def costs(draw: st.DrawFn) -> Stats:
    """Statistics of a request: rounds over chains of nodes, each accepted up to some depth."""
    rounds = [(n, draw(st.integers(0, n))) for n in draw(st.lists(st.integers(0, 7), max_size=4))]
    times = [draw(st.floats(0, 3)) for _ in range(5)]
    return Stats(
        prompt_tokens=3, cached_tokens=draw(st.integers(0, 3)), prompt_time=times[0], first_token_time=times[1],
        decode_time=times[2], target_busy_time=times[3], draft_busy_time=times[4], rounds=len(rounds),
        drafted=sum(n for n, _ in rounds), accepted=sum(a for _, a in rounds),
        verified=[VerifiedRound((-1, *range(n)), tuple(range(a + 1)), (), any_sources(draw, n)) for n, a in rounds],
    )  # fmt: skip


@settings(max_examples=examples(40))
@given(st.lists(costs(), max_size=3))
def test_totals_are_the_sums_over_the_answers(stats: list[Stats]) -> None:
    answers = [complete_frames(one, [2, 1]) for one in stats]
    found = after(*answers)
    done_frames = [frames[-1] for frames in answers]
    spec = [one.metrics["speculative_decoding"] for one in done_frames]  # pyright: ignore[reportAttributeAccessIssue]
    assert total(found, "spec_decode_num_drafts_total") == sum(one["num_spec_steps"] for one in spec)
    for name in (drafted := "spec_decode_num_draft_tokens_total", accepted := "spec_decode_num_accepted_tokens_total"):
        field = name.removeprefix("spec_decode_").removesuffix("_total").replace("accepted", "accepted_draft")
        by_source = [total(found, name, source=source) for source in ("draft_model", "lookup")]
        assert sum(by_source) == sum(one[field] for one in spec)
        for source, number in zip(("draft_model", "lookup"), by_source, strict=True):
            none = {field: 0}
            assert number == sum(one["acceptance_by_source"].get(source, none)[field] for one in spec)
    for position in range(7):
        told_there = sum(one["num_accepted_tokens_per_pos"][position] for one in spec)
        name = "spec_decode_num_accepted_tokens_per_pos_total"
        assert total(found, name, position=str(position)) == told_there
    sums = [sum(total(found, name, source=each) for each in ("draft_model", "lookup")) for name in (drafted, accepted)]
    assert total(found, "draft_nodes_wasted_total") == sums[0] - sums[1]
    timings: list[dict[str, Any]] = [one.timings for one in done_frames]  # pyright: ignore[reportAttributeAccessIssue]
    assert total(found, "prompt_tokens_total") == sum(one["prompt_n"] + one["cache_n"] for one in timings)
    assert total(found, "prefix_cache_hits_total") == sum(one["cache_n"] for one in timings)
    assert total(found, "generation_tokens_total") == sum(one["predicted_n"] for one in timings)
    assert total(found, "request_success_total", finished_reason="stop") == len(stats)
    decoding = sum(one["predicted_ms"] for one in timings) / 1e3
    assert total(found, "request_decode_time_seconds_sum") == pytest.approx(decoding)
    assert total(found, "request_prefill_time_seconds_sum") == pytest.approx(sum(t["prompt_ms"] for t in timings) / 1e3)
    phases = [total(found, "round_seconds_total", phase=phase) for phase in ("verify", "draft", "rest")]
    assert all(seconds >= 0 for seconds in phases) and sum(phases) >= decoding - 1e-9
    assert total(found, "inter_token_latency_seconds_count") == len(stats)
    assert total(found, "time_to_first_token_seconds_sum") == len(stats)  # one tick each


def test_a_request_with_several_choices_counts_once_and_its_tokens_for_each() -> None:
    choices = [complete_frames(Stats(prompt_tokens=3, decode_time=1.0), [2, 1]) for _ in range(2)]
    found = after([(index, frame) for index, frames in enumerate(choices) for frame in frames], num_choices=2)
    assert total(found, "request_success_total", finished_reason="stop") == 1
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert total(found, f"{name}_count") == 1
    assert (total(found, "prompt_tokens_total"), total(found, "generation_tokens_total")) == (6, 6)
    assert total(found, "inter_token_latency_seconds_count") == 2
    assert total(found, "request_decode_time_seconds_sum") == 2


def test_the_rest_of_a_round_excludes_both_models() -> None:
    cost = Stats(decode_time=2.0, target_busy_time=1.0, draft_busy_time=0.5)
    for mode, rest in (("serial", 0.5), ("async", 1.0)):  # mode async drafts during the verification
        found = after(complete_frames(cost, [1], mode))
        assert [total(found, "round_seconds_total", phase=p) for p in ("verify", "draft", "rest")] == [1.0, 0.5, rest]
        assert total(found, "overlap_ratio") == 0.5


def test_refused_requests_are_counted_by_reason() -> None:
    found = after(
        [RequestRejectedError("full", 429, 1.0)],
        [RequestRejectedError("loading", 503, 1.0)],
        [GenerationFailedError("gone", "engine_error")],
    )
    assert total(found, "requests_refused_total", reason="busy") == 1
    assert total(found, "requests_refused_total", reason="unavailable") == 1
    assert total(found, "request_success_total", finished_reason="error") == 1
    assert total(found, "prompt_tokens_total") == 0 == total(found, "time_to_first_token_seconds_count")


def test_a_population_has_no_acceptance() -> None:
    found = after(complete_frames(Stats(decode_time=1.0, population=object()), [1], "smc"))
    assert total(found, "spec_decode_num_drafts_total") == 0 and total(found, "generation_tokens_total") == 1


def test_the_metrics_contain_state_and_plan() -> None:
    engine = ScriptedEngine()
    app = FastAPI()
    metrics = PrometheusMetrics(engine, "m")
    app.include_router(metrics_router(metrics))

    async def get() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
            return await client.get("/metrics")

    got = asyncio.run(get())
    assert got.status_code == 200 and got.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = samples(metrics)
    assert (total(found, "num_requests_running"), total(found, "num_requests_waiting")) == (1, 2)
    assert (total(found, "ready"), total(found, "loading_seconds")) == (1, 1.5)
    (plan,) = [dict(labels) for name, labels in found if name == "plan_info"]
    assert plan["mode"] == "serial" and plan["draft"] == "draft" and plan["draft_steps"] == ""
    engine.info = None  # pyright: ignore[reportAttributeAccessIssue]
    assert not [name for name, _ in samples(PrometheusMetrics(engine, "m")) if name == "plan_info"]


def test_ranks_that_are_up_and_their_restart_counts() -> None:
    engine = ScriptedEngine()
    metrics = PrometheusMetrics(engine, "m")
    up = [RankState(0, "target", 7, "up", 1), RankState(1, "target", 8, "up", 1), RankState(2, "draft", 9, "up", 2)]
    for ranks, drafts, incarnations in (
        (up, 1, 2), (up, 1, 2), ([*up[:2], RankState(2, "draft", 9, "lost", 2)], 0, 2), ([], 0, 2),
        ([*up[:2], RankState(2, "draft", 10, "up", 3)], 1, 3),
    ):  # fmt: skip
        engine.state = EngineState("ready", "", 0, 0, ranks)
        found = samples(metrics)
        assert (total(found, "ranks_up", role="target"), total(found, "ranks_up", role="draft")) == (2, drafts)
        assert total(found, "rank_restarts_total", role="target") == 2
        assert total(found, "rank_restarts_total", role="draft") == incarnations


def metric_names() -> set[str]:
    found = after(complete_frames(Stats(verified=[VerifiedRound((-1, 0), (0, 1))]), [1, 1]))
    return {re.sub(r"_bucket$", "", name) for name, _ in found}


def test_the_dashboard_queries_existing_metrics() -> None:
    board = json.loads((ROOT / "docs" / "grafana.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    queries += [variable["query"] for variable in board["templating"]["list"] if variable["type"] == "query"]
    queried = {re.sub(r"_bucket$", "", name) for query in queries for name in re.findall(r"swiftspec:(\w+)", query)}
    refused = {"requests_refused_total"}
    assert len(queried) > 15 and queried <= metric_names() | refused


def test_the_documented_table_has_every_metric() -> None:
    text = (ROOT / "docs" / "guides" / "serving.md").read_text()
    done_frames = {re.sub(r"_(count|sum|created)$", "", name) for name in metric_names()}
    assert {name for name in done_frames if f"`{name}" not in text and f"`{name}_total" not in text} == set()
