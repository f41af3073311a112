"""Measurements of a sweep on one engine: speed, step times and timelines of rounds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

from swiftspec.builder.roles import TreeRoles
from swiftspec.control.step_times import CONTEXT_TOKENS, GREEDY, measure_verification_time
from swiftspec.distributed.remote.client import RemoteDrafter
from swiftspec.lab.round_costs import Trace, expanded_first
from swiftspec.llm_engine import LLMEngine
from swiftspec.messages import Proposal, RequestStart
from swiftspec.params import SamplingParams
from swiftspec.runtime.verifier import Verifier


class OutOfTime(Exception):
    """Raised when the time budget ends during a measurement."""


class RequestProgress(NamedTuple):
    """Progress of a request at one moment.

    `tokens`: output tokens.
    `seconds`: since the end of the prefill.
    `busy`: seconds that the target has spent in forwards since the prefill.
    """

    tokens: int = 0
    rounds: int = 0
    seconds: float = 0.0
    busy: float = 0.0

    @staticmethod
    def of(llm: LLMEngine) -> RequestProgress:
        """Returns the progress of the engine's most recent request."""
        stats = llm.stats
        return RequestProgress(stats.tokens, stats.rounds, stats.decode_time, stats.target_busy_time)


@dataclass(slots=True)
class Run:
    """Totals of one pass over a prompt set.

    `seconds`: decoding time, without prefill.
    `busy`: seconds of it that the target spent in forwards.
    `answers`: output tokens of each request.
    """

    tokens: int = 0
    rounds: int = 0
    seconds: float = 0.0
    busy: float = 0.0
    answers: list[list[int]] = field(default_factory=list)

    def add(self, first: RequestProgress, last: RequestProgress) -> None:
        """Adds a request, without its first round unless that is the only one. `first`, `last`: the progress after the
        first round and at the end.

        The first round is not typical: it waits for the draft, which is still prefilling the prompt, or still expanding
        the tree of the previous request, since there is no pause between requests.
        """
        if last.rounds == first.rounds:
            first = RequestProgress()
        self.tokens += last.tokens - first.tokens
        self.rounds += last.rounds - first.rounds
        self.seconds += last.seconds - first.seconds
        self.busy += last.busy - first.busy

    def join(self, other: Run) -> None:
        """Adds the totals of another pass."""
        self.tokens += other.tokens
        self.rounds += other.rounds
        self.seconds += other.seconds
        self.busy += other.busy
        self.answers += other.answers

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds

    @property
    def tokens_per_round(self) -> float:
        return self.tokens / max(self.rounds, 1)


def decode_all(
    llm: LLMEngine,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    deadline: float = float("inf"),
    sampling: SamplingParams = GREEDY,
) -> Run:
    """Decodes `max_tokens` tokens for every prompt and returns the totals. Mode smc does not support most sampling
    parameters, so it always decodes at temperature 1.

    Raises OutOfTime after the first round that ends later than `deadline`, a time of `time.monotonic`.
    """
    sampling = SamplingParams(temperature=1.0) if llm.config.mode == "smc" else sampling
    sampling = replace(sampling, max_tokens=max_tokens, ignore_eos=True)
    if llm.max_num_seqs > 1:
        return _decode_batch(llm, prompts, sampling, deadline)
    run = Run()
    for prompt in prompts:
        answer, first = [], None
        for chunk in llm.stream(prompt, sampling):
            answer += chunk.token_ids
            first = first or RequestProgress.of(llm)
            if time.monotonic() > deadline:
                raise OutOfTime
        run.add(first or RequestProgress(), RequestProgress.of(llm))
        run.answers.append(answer)
    return run


def decode_samplings(
    llm: LLMEngine,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    deadline: float,
    samplings: Sequence[SamplingParams],
) -> tuple[Run, Run | None]:
    """Decodes all prompts with each of `samplings`, the first of which is greedy; mode smc only once, see `decode_all`.

    Returns the totals of all requests, and those of the requests that are not greedy; None if there are none.
    """
    if llm.config.mode == "smc":
        return decode_all(llm, prompts, max_tokens, deadline), None
    whole = decode_all(llm, prompts, max_tokens, deadline, samplings[0])
    if len(samplings) == 1:
        return whole, None
    sampled = Run()
    for sampling in samplings[1:]:
        sampled.join(decode_all(llm, prompts, max_tokens, deadline, sampling))
    whole.join(sampled)
    return whole, sampled


def _decode_batch(llm: LLMEngine, prompts: Sequence[Sequence[int]], sampling: SamplingParams, deadline: float) -> Run:
    """Decodes at least twice as many requests as the engine decodes concurrently; repeats prompts with other seeds.

    `Run.seconds` is the duration of the whole batch without the prefills.
    """
    count = max(2 * llm.max_num_seqs, len(prompts))
    asked = [(prompts[i % len(prompts)], replace(sampling, seed=i)) for i in range(count)]
    run = Run(answers=[[] for _ in asked])
    requests, chunks = llm.batch([prompt for prompt, _ in asked], [each for _, each in asked])
    began, busy = time.perf_counter(), llm.roles.decoding.busy[0]
    with closing(chunks):
        for request, chunk in chunks:
            run.answers[request.number] += chunk.token_ids
            if time.monotonic() > deadline:
                raise OutOfTime
    run.seconds = time.perf_counter() - began - sum(request.stats.prompt_time for request in requests)
    run.busy = min(llm.roles.decoding.busy[0] - busy, run.seconds)  # the busy time includes prefill
    run.tokens, run.rounds = (sum(getattr(each.stats, name) for each in requests) for name in ("tokens", "rounds"))
    return run


def tree_roles(llm: LLMEngine) -> TreeRoles:
    """Returns the drafter and the verifier of an engine that decodes with a draft tree."""
    assert isinstance(llm.roles.inner_roles, TreeRoles)
    return llm.roles.inner_roles


def phase_times(llm: LLMEngine) -> tuple[float, float]:
    """Measures (seconds of a verification, seconds of an expansion) of an asynchronous engine, both concurrently, so
    that each includes the slowdown by the other."""
    roles, room = tree_roles(llm), llm.max_model_len - 1
    assert isinstance(roles.drafter, RemoteDrafter)
    roles.drafter.measure(room)
    return measure_verification_time(roles.verifier, llm.config.verify_batch, room), roles.drafter.times().expansion


def step_times(verifier: Verifier, rows: int, room: int, repeats: int) -> Iterator[float]:
    """Measures a forward over `rows` rows, sampling included, after one warm-up. Yields its seconds once per repeat.

    `room`: maximum number of context tokens.
    """
    text = (0,) * min(CONTEXT_TOKENS, room)
    chain = Proposal.from_draft_model(0, 0, len(text) - 1, (0,) * rows, range(-1, rows - 1), (0.0,) * rows)
    for repeat in range(repeats + 1):
        verifier.open(RequestStart(0, text, GREEDY, len(text)))
        began = time.perf_counter()
        verifier.submit(chain).wait()
        if repeat > 0:
            yield time.perf_counter() - began
    verifier.close()


def rounds_of(trace: Trace) -> list[tuple[int, int]]:
    """Returns (accepted draft tokens, expansions on the critical path before the proposal) of each verified round,
    without the first round of each request."""
    return [
        (len(line["path"]) - 1, len(expanded_first(line)))
        for before, line in pairwise(trace.rounds)
        if before["request"] == line["request"] and "path" in line
    ]


def round_timeline(line: dict[str, Any]) -> dict[str, Any]:
    """Returns a trace line without the draft tree and the token texts, as field `lanes` of a profile stores it."""
    draft = {name: part for name, part in line.get("draft", {}).items() if name != "tree"}
    return {name: draft if name == "draft" else part for name, part in line.items() if name != "texts"}


def overhead_times(trace: Trace) -> dict[str, float]:
    """Returns the mean seconds of host work and messages around the forwards of an asynchronous run.

    The keys are fields of `SimulatedTimes`. A field that the trace has no spans for is left out.
    """
    found: dict[str, list[float]] = {name: [] for name in ("verify", "settle", "expand", "answer", "link")}
    for this, after in trace.successive():
        if "observe" not in after.get("draft", {}) or "grow" not in this.get("draft", {}):
            continue
        verify, grow, answer = this["target"]["verify"], this["draft"]["grow"], after["draft"]
        growing = [f for f in this["draft"]["forwards"] if f[0] >= grow[0]]
        inside = sum(f[1] - f[0] for f in answer["forwards"] if f[0] < answer["propose"][1])
        found["verify"].append(verify[1] - verify[0] - this["target"]["forward"])
        found["settle"].append(after["wait"][0] - verify[1])
        if growing:
            found["expand"].append((grow[1] - grow[0] - sum(f[1] - f[0] for f in growing)) / len(growing))
        found["answer"].append(answer["propose"][1] - answer["observe"][0] - inside)
        found["link"].append(after["wait"][1] - answer["propose"][1])
    return {name: max(statistics.fmean(values), 0.0) for name, values in found.items() if values}
