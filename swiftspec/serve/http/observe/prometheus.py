"""What /metrics says, under vLLM's names where vLLM has one, with the prefix `swiftspec:`.

Everything is counted in the front end when a request has ended, from what it saw and from the engine's own `Done`: the
loop that decodes knows nothing of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Response
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from swiftspec.serve.http.engine_link.engine import Engine
from swiftspec.serve.http.engine_link.frames import RankState
from swiftspec.serve.http.observe.request_metrics import Seen

PREFIX = "swiftspec:"
LABEL = "model_name"
SHORT = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0)  # seconds of a round
LONG = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
PLAN = ("mode", "target_tp", "draft_tp", "verify_batch", "draft_leaves", "draft_steps", "verify", "proposal")


class Metrics:
    """Counts of one server. `engine` is asked for its state when they are read; `count` is told of requests (it is for
    `watch.Watched`), and `refuse` of those that came no further than the guard."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        self._engine, self._name = engine, model_name
        self._registry = CollectorRegistry()
        self._gauges()
        self._requests()
        self._speculation()

    def text(self) -> bytes:
        """All of them in Prometheus' text format."""
        state, about = self._engine.state, self._engine.about
        self._running.set(state.running)
        self._waiting.set(state.waiting)
        self._up.set(state.phase == "ready")
        self._tell_ranks(state.ranks)
        if about is not None:
            self._loading.set(about.load_ms / 1e3)
            draft = (about.draft_model or "").rpartition("/")[2]  # not where it lies
            self._info.labels(self._name, draft, *(_word(about.plan.get(name)) for name in PLAN)).set(1)
        return generate_latest(self._registry)

    def _tell_ranks(self, ranks: Sequence[RankState]) -> None:
        for role in {rank.role for rank in ranks}:
            up = sum(rank.state == "up" for rank in ranks if rank.role == role)
            self._ranks_up.labels(self._name, role).set(up)
        for rank in ranks:
            more = max(rank.restarts - self._lives.get(rank.rank, 0), 0)
            self._lives[rank.rank] = rank.restarts
            self._restarts.labels(self._name, rank.role).inc(more)

    def refuse(self, reason: str) -> None:
        """One request less to answer."""
        self._refused.labels(self._name, reason).inc()

    def count(self, seen: Seen) -> None:
        """A request that has ended."""
        if not seen.answered:
            self.refuse(seen.reason)
            return
        self._success.labels(self._name, seen.reason).inc()
        self._generated.inc(seen.tokens)
        self._whole.observe(seen.ended - seen.began)
        if seen.came:
            self._prompt.inc(len(seen.ask.prompt))
            self._first.observe(seen.came[0] - seen.began)
        for earlier, later in zip(seen.came, seen.came[1:]):
            self._between.observe(later - earlier)
        if seen.queued is not None:
            self._queue.observe(seen.queued)
        if seen.done is not None:
            self._take(seen.done.timings, seen.done.metrics)

    def _take(self, timings: dict[str, Any], metrics: dict[str, Any]) -> None:
        """What the engine says of a request that came to its end."""
        decoding = metrics["generation_time_ms"] / 1e3
        self._prefill.observe(timings["prompt_ms"] / 1e3)
        self._decode.observe(decoding)
        self._kept.inc(timings["cache_n"])
        verify, draft = (metrics[f"{model}_busy"] * decoding for model in ("target", "draft"))
        turns = 0.0 if metrics["mode"] == "async" else draft  # there it drafts while it verifies
        for phase, seconds in (("verify", verify), ("draft", draft), ("rest", max(decoding - verify - turns, 0.0))):
            self._rounds.labels(self._name, phase).inc(seconds)
        self._overlap.set(metrics["target_busy"])
        spec = metrics["speculative_decoding"]
        if spec is None:  # mode smc: nothing is accepted or rejected
            return
        drafted, accepted = spec["num_draft_tokens"], spec["num_accepted_draft_tokens"]
        self._drafts.inc(spec["num_spec_steps"])
        self._drafted.inc(drafted)
        self._accepted.inc(accepted)
        self._wasted.inc(drafted - accepted)
        for position, number in enumerate(spec["num_accepted_tokens_per_pos"]):
            self._by_position.labels(self._name, str(position)).inc(number)

    def _gauges(self) -> None:
        self._running = self._gauge("num_requests_running", "Requests that are decoded now.")
        self._waiting = self._gauge("num_requests_waiting", "Requests in the queue.")
        self._up = self._gauge("ready", "1 while rank 0 serves.")
        help = "Ranks that are up."
        self._ranks_up = Gauge(f"{PREFIX}ranks_up", help, [LABEL, "role"], registry=self._registry)
        self._restarts = self._labelled("rank_restarts", "How often ranks were started again.", ["role"])
        self._lives: dict[int, int] = {}  # by the rank: its restarts, as they were told last
        self._loading = self._gauge("loading_seconds", "What loading the models took.")
        self._overlap = self._gauge(
            "overlap_ratio", "Share of the decode time in the target's forwards, of the last whole answer."
        )
        help = "Always 1: the draft model, the mode and the plan as labels."
        self._info = Gauge(f"{PREFIX}plan_info", help, [LABEL, "draft", *PLAN], registry=self._registry)

    def _requests(self) -> None:
        self._prompt = self._counter("prompt_tokens", "Tokens of prompts.")
        self._kept = self._counter("prefix_cache_hits", "Of them, those that were kept from earlier requests.")
        self._generated = self._counter("generation_tokens", "Tokens that were generated.")
        self._success = self._labelled(
            "request_success", "Requests that were decoded, by how they ended.", ["finished_reason"]
        )
        self._refused = self._labelled("requests_refused", "Requests that were not, by the reason.", ["reason"])
        self._first = self._histogram("time_to_first_token_seconds", "From the request to its first tokens.", LONG)
        self._between = self._histogram(
            "inter_token_latency_seconds", "Between the tokens of one round and those of the next.", SHORT
        )
        self._whole = self._histogram("e2e_request_latency_seconds", "From the request to its end.", LONG)
        self._queue = self._histogram("request_queue_time_seconds", "From the request to its turn.", LONG)
        self._prefill = self._histogram("request_prefill_time_seconds", "For the prompt, of whole answers.", LONG)
        self._decode = self._histogram("request_decode_time_seconds", "For the rounds, of whole answers.", LONG)

    def _speculation(self) -> None:
        self._drafts = self._counter("spec_decode_num_drafts", "Rounds, of whole answers, as all of these.")
        self._drafted = self._counter("spec_decode_num_draft_tokens", "Nodes of draft trees that were verified.")
        self._accepted = self._counter("spec_decode_num_accepted_tokens", "Of them, those that were accepted.")
        self._by_position = self._labelled(
            "spec_decode_num_accepted_tokens_per_pos", "The same by the depth in the tree, from 0.", ["position"]
        )
        self._wasted = self._counter("draft_nodes_wasted", "Nodes that were verified and not accepted.")
        self._rounds = self._labelled(
            "round_seconds", "Decode time in the target's forwards (verify), in the draft's, and in neither.", ["phase"]
        )

    def _gauge(self, name: str, help: str) -> Gauge:
        return Gauge(PREFIX + name, help, [LABEL], registry=self._registry).labels(self._name)

    def _counter(self, name: str, help: str) -> Counter:
        return self._labelled(name, help, []).labels(self._name)

    def _labelled(self, name: str, help: str, labels: Sequence[str]) -> Counter:
        return Counter(PREFIX + name, help, [LABEL, *labels], registry=self._registry)

    def _histogram(self, name: str, help: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(PREFIX + name, help, [LABEL], registry=self._registry, buckets=buckets).labels(self._name)


def router(metrics: Metrics) -> APIRouter:
    """The endpoint."""
    made = APIRouter()

    @made.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def tell() -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    return made


def _word(value: object) -> str:
    return "" if value is None else str(value)
