"""Prometheus metrics at /metrics, with the prefix `swiftspec:` and vLLM's names where vLLM has the metric. Those are
repeated with the prefix `vllm:` (vllm_names.py).

The front end updates the metrics when a request ends, from its own timestamps and from the statistics in `DoneFrame`.
The decoding loop in rank 0 does no work for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fastapi import APIRouter, Response
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from swiftspec.messages import NodeSource
from swiftspec.observe.draft_monitor import DraftMonitor
from swiftspec.serve.link.engine_client import EngineClient
from swiftspec.serve.link.frames import RankState
from swiftspec.serve.metrics.request_metrics import ChoiceRecord, RequestRecord
from swiftspec.serve.metrics.vllm_names import VllmNames

PREFIX = "swiftspec:"
MODEL_LABEL = "model_name"
SHORT_BUCKETS_S = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0)  # for each round
LONG_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
PLAN_LABELS = ("mode", "target_tp", "draft_tp", "verify_batch", "draft_leaves", "draft_steps", "verify", "proposal")


class PrometheusMetrics:
    """Prometheus metrics of one server.

    `render` reads the gauges from `engine`. `record_request` is an `on_finished` callback of `RequestRecorder`, and
    `record_refusal` the `on_refusal` callback of `SecurityMiddleware`. `kv_block_size`: tokens per block in
    `cache_config_info`.
    """

    def __init__(self, engine: EngineClient, model_name: str, kv_block_size: int = 16) -> None:
        self._engine, self._model_name, self._kv_block_size = engine, model_name, kv_block_size
        self.live_tokens: Callable[[], int] = lambda: 0  # tokens of the requests that are being decoded
        self._registry, self._vllm_registry = CollectorRegistry(), CollectorRegistry()
        self._vllm_registry.register(VllmNames(self._registry, PREFIX, MODEL_LABEL))
        self._create_gauges()
        self._create_request_metrics()
        self._create_speculation_metrics()

    def render(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        state, info = self._engine.state, self._engine.info
        self._running.set(state.running)
        self._waiting.set(state.waiting)
        self._up.set(state.phase == "ready")
        self._low_acceptance.set(self._draft_monitor.is_low)
        self._update_ranks(state.ranks)
        if info is not None:
            self._loading.set(info.load_ms / 1e3)
            self._kv_usage.set(min(self.live_tokens() / (info.max_model_len * info.max_num_seqs), 1.0))
            if info.cache_tokens > 0:
                size = self._kv_block_size
                self._cache_config.clear()  # a restarted rank 0 may have another context
                self._cache_config.labels(self._model_name, str(size), str(info.cache_tokens // size)).set(1)
            draft = (info.draft_model or "").rpartition("/")[2]  # its name without the folder
            self._info.labels(
                self._model_name, draft, *(_label_value(info.plan.get(name)) for name in PLAN_LABELS)
            ).set(1)
        return generate_latest(self._registry) + generate_latest(self._vllm_registry)

    def _update_ranks(self, ranks: Sequence[RankState]) -> None:
        for role in {rank.role for rank in ranks}:
            up = sum(rank.state == "up" for rank in ranks if rank.role == role)
            self._ranks_up.labels(self._model_name, role).set(up)
        for rank in ranks:
            more = max(rank.restarts - self._known_restarts.get(rank.rank, 0), 0)
            self._known_restarts[rank.rank] = rank.restarts
            self._restarts.labels(self._model_name, rank.role).inc(more)

    def record_refusal(self, reason: str) -> None:
        """Counts a refused request. `reason`: label such as "unauthorized"."""
        self._refused.labels(self._model_name, reason).inc()

    def record_request(self, record: RequestRecord) -> None:
        """Updates the metrics with a request that has ended."""
        if not record.accepted:
            self.record_refusal(record.outcome)
            return
        self._success.labels(self._model_name, record.outcome).inc()
        self._e2e.observe(record.ended_at - record.started_at)
        if record.time_to_first_token_s is not None:
            self._ttft.observe(record.time_to_first_token_s)
        if record.queue_time_s is not None:
            self._queue.observe(record.queue_time_s)
        for choice in record.choices:
            self._record_choice(choice)

    def _record_choice(self, choice: ChoiceRecord) -> None:
        """Updates the metrics with one choice of a request that has ended."""
        self._generated_tokens.inc(choice.num_output_tokens)
        if choice.token_times:
            self._prompt_tokens.inc(len(choice.request.prompt))
            if choice.done is not None:
                self._queried_tokens.inc(len(choice.request.prompt))
        for earlier, later in zip(choice.token_times, choice.token_times[1:]):
            self._inter_token.observe(later - earlier)
        if choice.done is not None:
            self._record_engine_stats(choice.done.timings, choice.done.metrics)

    def _record_engine_stats(self, timings: dict[str, Any], metrics: dict[str, Any]) -> None:
        """Updates the metrics with the statistics in the `DoneFrame` of a completed request."""
        decode_s = metrics["generation_time_ms"] / 1e3
        self._prefill.observe(timings["prompt_ms"] / 1e3)
        self._decode.observe(decode_s)
        self._cached_tokens.inc(timings["cache_n"])
        self._graph_captures.inc(metrics["graph_captures"])
        verify, draft = (metrics[f"{model}_busy"] * decode_s for model in ("target", "draft"))
        exclusive_draft = 0.0 if metrics["mode"] == "async" else draft  # mode async drafts during verification
        for phase, seconds in (
            ("verify", verify),
            ("draft", draft),
            ("rest", max(decode_s - verify - exclusive_draft, 0.0)),
        ):
            self._round_seconds.labels(self._model_name, phase).inc(seconds)
        self._overlap.set(metrics["target_busy"])
        spec = metrics["speculative_decoding"]
        if spec is None:  # mode smc: nothing is accepted or rejected
            return
        self._num_drafts.inc(spec["num_spec_steps"])
        self._wasted_nodes.inc(spec["num_draft_tokens"] - spec["num_accepted_draft_tokens"])
        for source, numbers in spec["acceptance_by_source"].items():
            self._draft_tokens.labels(self._model_name, source).inc(numbers["num_draft_tokens"])
            self._accepted_tokens.labels(self._model_name, source).inc(numbers["num_accepted_draft_tokens"])
        if spec["num_chances_per_pos"]:
            self._draft_monitor.add(spec["num_chances_per_pos"][0], spec["num_accepted_tokens_per_pos"][0])
        for position, number in enumerate(spec["num_accepted_tokens_per_pos"]):
            self._accepted_by_position.labels(self._model_name, str(position)).inc(number)

    def _create_gauges(self) -> None:
        self._running = self._gauge("num_requests_running", "Requests that are being decoded.")
        self._waiting = self._gauge("num_requests_waiting", "Requests in the queue.")
        self._up = self._gauge("ready", "1 while rank 0 serves.")
        self._kv_usage = self._gauge(
            "kv_cache_usage_perc", "Share of the KV cache that the running requests use; 1 is all of it."
        )
        self._low_acceptance = self._gauge(
            "draft_acceptance_low", "1 if hardly any round accepts a token of the draft: check the draft model."
        )
        self._draft_monitor = DraftMonitor()
        help = "Ranks that are up."
        self._ranks_up = Gauge(f"{PREFIX}ranks_up", help, [MODEL_LABEL, "role"], registry=self._registry)
        self._restarts = self._labelled("rank_restarts", "Restarts of ranks.", ["role"])
        self._known_restarts: dict[int, int] = {}  # restarts by rank, at the last update
        self._loading = self._gauge("loading_seconds", "Time to load the models.")
        self._overlap = self._gauge(
            "overlap_ratio", "Share of the decode time in the target's forwards, of the last completed request."
        )
        help = "Always 1: tokens per block, and blocks that the KV cache and the prefix cache hold, as labels."
        labels = [MODEL_LABEL, "block_size", "num_gpu_blocks"]
        self._cache_config = Gauge(f"{PREFIX}cache_config_info", help, labels, registry=self._registry)
        help = "Always 1: the draft model, the mode and the plan as labels."
        self._info = Gauge(f"{PREFIX}plan_info", help, [MODEL_LABEL, "draft", *PLAN_LABELS], registry=self._registry)

    def _create_request_metrics(self) -> None:
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens.")
        self._queried_tokens = self._counter("prefix_cache_queries", "Prompt tokens of completed requests.")
        self._cached_tokens = self._counter("prefix_cache_hits", "Prompt tokens supplied by the prefix cache.")
        self._graph_captures = self._counter(
            "graph_captures", "CUDA graphs captured during requests; each capture interrupts the GPU."
        )
        self._generated_tokens = self._counter("generation_tokens", "Generated tokens.")
        self._success = self._labelled(
            "request_success", "Requests that were decoded, by finish reason.", ["finished_reason"]
        )
        self._refused = self._labelled("requests_refused", "Requests that were refused, by reason.", ["reason"])
        self._ttft = self._histogram(
            "time_to_first_token_seconds", "From the arrival of the request to its first tokens.", LONG_BUCKETS_S
        )
        self._inter_token = self._histogram(
            "inter_token_latency_seconds", "Time between the tokens of successive rounds.", SHORT_BUCKETS_S
        )
        self._e2e = self._histogram(
            "e2e_request_latency_seconds", "From the arrival of the request to its end.", LONG_BUCKETS_S
        )
        self._queue = self._histogram(
            "request_queue_time_seconds", "From the arrival of the request to its start.", LONG_BUCKETS_S
        )
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "Prefill time, of completed requests.", LONG_BUCKETS_S
        )
        self._decode = self._histogram(
            "request_decode_time_seconds", "Decode time, of completed requests.", LONG_BUCKETS_S
        )

    def _create_speculation_metrics(self) -> None:
        self._num_drafts = self._counter("spec_decode_num_drafts", "Rounds of completed requests.")
        self._draft_tokens = self._labelled(
            "spec_decode_num_draft_tokens", "Proposed nodes that were verified, by source.", ["source"]
        )
        self._accepted_tokens = self._labelled(
            "spec_decode_num_accepted_tokens", "Verified nodes that were accepted, by source.", ["source"]
        )
        for counter in (self._draft_tokens, self._accepted_tokens):
            counter.labels(self._model_name, NodeSource.DRAFT_MODEL.label)  # exported as 0 before the first request
        self._accepted_by_position = self._labelled(
            "spec_decode_num_accepted_tokens_per_pos", "Accepted nodes by depth in the tree, from 0.", ["position"]
        )
        self._wasted_nodes = self._counter("draft_nodes_wasted", "Verified nodes that were not accepted.")
        self._round_seconds = self._labelled(
            "round_seconds", "Decode time in the target's forwards (verify), in the draft's, and in neither.", ["phase"]
        )

    def _gauge(self, name: str, help: str) -> Gauge:
        return Gauge(PREFIX + name, help, [MODEL_LABEL], registry=self._registry).labels(self._model_name)

    def _counter(self, name: str, help: str) -> Counter:
        return self._labelled(name, help, []).labels(self._model_name)

    def _labelled(self, name: str, help: str, labels: Sequence[str]) -> Counter:
        return Counter(PREFIX + name, help, [MODEL_LABEL, *labels], registry=self._registry)

    def _histogram(self, name: str, help: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(PREFIX + name, help, [MODEL_LABEL], registry=self._registry, buckets=buckets).labels(
            self._model_name
        )


def metrics_router(metrics: PrometheusMetrics) -> APIRouter:
    """Returns the router of /metrics."""
    router = APIRouter()

    @router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics_text() -> Response:
        return Response(metrics.render(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    return router


def _label_value(value: object) -> str:
    return "" if value is None else str(value)
