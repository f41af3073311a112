"""Metrics under vLLM's names: the same values as under ours, summed over labels that vLLM does not have."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from contextlib import aclosing
from typing import Any

import pytest
from msgspec import structs
from prometheus_client.parser import text_string_to_metric_families

from swiftspec.engine import Stats
from swiftspec.messages import NodeSource, VerifiedRound
from swiftspec.params import SamplingParams
from swiftspec.serve.link.engine_client import EngineRequest
from swiftspec.serve.metrics.prometheus import PrometheusMetrics
from swiftspec.serve.metrics.request_metrics import RequestRecorder
from tests.support.scripted_engine import (
    INFO,
    ScriptedEngine,
    TickingClock,
    collect_deltas,
    complete_frames,
    scripted_deltas,
)

# what vLLM's dashboard reads, and the labels, besides the model, that gateways read
READ_ELSEWHERE = {
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prompt_tokens_total",
    "generation_tokens_total", "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket",
    "e2e_request_latency_seconds_sum", "request_queue_time_seconds_count", "request_success_total",
    "prefix_cache_queries_total", "prefix_cache_hits_total", "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_accepted_tokens_per_pos_total",
}  # fmt: skip
READ_BY_GATEWAYS = {
    "llm-d's endpoint picker": {
        "num_requests_waiting": (), "num_requests_running": (), "kv_cache_usage_perc": (),
        "cache_config_info": ("block_size", "num_gpu_blocks"),
    },
    "Gateway API Inference Extension": {"num_requests_waiting": (), "gpu_cache_usage_perc": ()},
    "vLLM production stack": {
        "num_requests_running": (), "num_requests_waiting": (), "gpu_cache_usage_perc": (),
        "gpu_prefix_cache_hits_total": (), "gpu_prefix_cache_queries_total": (),
    },
}  # fmt: skip
EARLIER = ("gpu_cache_usage_perc", "gpu_prefix_cache_queries_total", "gpu_prefix_cache_hits_total")
Values = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def values(metrics: PrometheusMetrics, prefix: str) -> Values:
    """Values by name and labels, without the label `source`."""
    found: Values = defaultdict(float)
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            if sample.name.startswith(prefix) and not sample.name.endswith("_created"):
                labels = {name: value for name, value in sample.labels.items() if name not in ("source", "engine")}
                assert (sample.labels.get("engine") == "0") == (prefix == "vllm:")
                found[sample.name.removeprefix(prefix), (*sorted(labels.items()),)] += sample.value
    return found


def test_the_values_are_those_of_our_metrics() -> None:
    sources = NodeSource.ROOT, NodeSource.DRAFT_MODEL, NodeSource.SUFFIX, NodeSource.SUFFIX
    stats = Stats(
        prompt_tokens=3, cached_tokens=2, decode_time=1.0, rounds=1, drafted=3, accepted=2,
        verified=[VerifiedRound((-1, 0, 1, 0), (0, 1, 2), (), sources)],
    )  # fmt: skip
    engine = ScriptedEngine(complete_frames(stats, [2, 1]))
    metrics = PrometheusMetrics(engine, "m")
    recorder = RequestRecorder([metrics.record_request], TickingClock())
    asyncio.run(collect_deltas(engine, recorder, EngineRequest([1, 2, 3], SamplingParams())))
    ours, theirs = values(metrics, "swiftspec:"), values(metrics, "vllm:")
    assert {name for name, _ in theirs} >= READ_ELSEWHERE
    current = {key: value for key, value in theirs.items() if key[0] not in EARLIER}
    assert current == {key: value for key, value in ours.items() if key in current}
    for name in EARLIER:
        names = name, name.replace("gpu_cache", "kv_cache").removeprefix("gpu_")
        assert theirs[names[0], (("model_name", "m"),)] == theirs[names[1], (("model_name", "m"),)]
    model = (("model_name", "m"),)
    assert theirs["spec_decode_num_draft_tokens_total", model] == 3
    assert theirs["spec_decode_num_accepted_tokens_total", model] == 2
    assert theirs["prefix_cache_queries_total", model] == 3 and theirs["prefix_cache_hits_total", model] == 2


@pytest.mark.parametrize("gateway", READ_BY_GATEWAYS)
def test_what_gateways_read(gateway: str) -> None:
    engine = ScriptedEngine()
    engine.info = structs.replace(INFO, cache_tokens=100)
    families = text_string_to_metric_families(PrometheusMetrics(engine, "m", kv_block_size=32).render().decode())
    samples = {sample.name: sample.labels for family in families for sample in family.samples}
    for name, labels in READ_BY_GATEWAYS[gateway].items():
        assert {"model_name", *labels} <= {*samples[f"vllm:{name}"]}, name
    cache = samples["vllm:cache_config_info"]
    assert (cache["block_size"], cache["num_gpu_blocks"]) == ("32", "3")


def test_kv_cache_usage_follows_the_requests_that_run() -> None:
    frames: list[Any] = complete_frames(Stats(prompt_tokens=3), [2, 1])
    engine = ScriptedEngine(frames, frames)
    metrics = PrometheusMetrics(engine, "m")
    recorder = RequestRecorder([metrics.record_request], TickingClock())
    metrics.live_tokens = recorder.live_tokens

    def usage() -> float:
        return values(metrics, "vllm:")["kv_cache_usage_perc", (("model_name", "m"),)]

    async def request() -> list[float]:
        seen = [usage()]
        async with aclosing(scripted_deltas(engine, recorder, EngineRequest([1, 2, 3], SamplingParams()))) as deltas:
            async for _ in deltas:
                seen.append(usage())
        return [*seen, usage()]

    assert asyncio.run(request()) == [0, 0.05, 0.06, 0, 0]  # of 100 tokens

    async def cancelled() -> float:
        async with aclosing(scripted_deltas(engine, recorder, EngineRequest([1, 2, 3], SamplingParams()))) as deltas:
            await anext(deltas)
        return usage()

    assert asyncio.run(cancelled()) == 0
