"""Decoding of one request on token ids, from prompt to chunks: with a draft tree, or by another `Decoding`."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from swiftspec.decode import Observer, decode, no_observer
from swiftspec.errors import UserError
from swiftspec.messages import Proposal, RequestStart, SampledLogprob, VerifiedRound, VerifyResult, cut_rounds
from swiftspec.params import SamplingParams
from swiftspec.runtime.drafter import Drafter, NoDrafter
from swiftspec.runtime.verifier import Verifier


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """The output tokens of one round."""

    token_ids: tuple[int, ...]
    accepted: int  # number of leading tokens that the draft proposed; the target sampled the others
    finish_reason: str | None = None  # "stop" or "length" on the last chunk
    logprobs: tuple[SampledLogprob, ...] | None = None  # of `token_ids`, if requested
    prompt_logprobs: tuple[SampledLogprob, ...] | None = (
        None  # on the first chunk, if requested: of all prompt tokens except the first
    )


@dataclass(slots=True)
class Stats:
    """Statistics of one request. Times are durations in seconds. The class is flat because users read its fields in
    `CompletionOutput.stats`."""

    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens that the target's prefix cache supplied
    prompt_time: float = 0.0  # prefill of both models
    first_token_time: float = 0.0  # from the request to the first token
    decode_time: float = 0.0  # from the end of the prefill to the last round
    tokens: int = 0  # output tokens
    rounds: int = 0
    drafted: int = 0  # proposed draft tokens
    # output tokens except one per round, so tokens = rounds + accepted; 0 in mode smc
    accepted: int = 0
    target_busy_time: float = 0.0  # the target's forwards while decoding
    draft_busy_time: float = 0.0  # the same for the draft
    # CUDA graphs captured during the request, each of which takes a fraction of a second; one that is captured while a
    # batch runs counts for one of its requests
    graph_captures: int = 0
    drafter_lost: str | None = None  # why the drafter is lost; None while it is available
    # `Outage` objects (remote/failover.py): intervals during which a draft in another process was unavailable
    outages: Sequence[Any] = ()
    # mean tokens per round of synthetic acceptance, whose output is not the target's; None: the output is the target's
    synthetic_acceptance_length: float | None = None
    finish_reason: str | None = None  # as on the last chunk
    verified: list[VerifiedRound] = field(default_factory=list)  # one entry per round; empty in mode smc
    policy: Any = None  # `PolicyReport` at the end of the request (control/controller.py)
    population: Any = None  # mode smc: `GroupResult` at the end of the request (smc/group_result.py)

    def keep_tokens(self, tokens: int) -> None:
        """Counts only the first `tokens` output tokens and their rounds, of an output that ended before the engine. The
        times stay unchanged, and so do the counts of rounds in mode smc."""
        self.tokens = min(self.tokens, tokens)
        if self.verified:
            cut_rounds(self.verified, self.tokens)
            self.rounds = len(self.verified)
            self.drafted = sum(len(each.parents) - 1 for each in self.verified)
            self.accepted = sum(len(each.path) - 1 for each in self.verified)

    def record_times(self, produced_token: bool, began: float, opened: float, busy: Sequence[float]) -> None:
        """Updates the times after a round.

        `produced_token`: whether the round produced an output token.
        `began`, `opened`: start of the request and end of its prefill, in seconds of `time.perf_counter`.
        `busy`: seconds that target and draft have spent in forwards since the prefill.
        """
        now = time.perf_counter()
        if produced_token:
            self.first_token_time = self.first_token_time or now - began
        self.decode_time = now - opened
        self.target_busy_time, self.draft_busy_time = busy


@dataclass(frozen=True, slots=True)
class Completion:
    """The complete output of a request."""

    token_ids: list[int]
    finish_reason: str
    stats: Stats


@dataclass(frozen=True, slots=True)
class StopCriteria:
    """Token limit and stop token ids of a request."""

    max_tokens: int
    stop_token_ids: Collection[int]


class Decoding(Protocol):
    """Decoding strategy of the engine: a draft tree (`TreeDecoding`) or particles (`PopulationDecoding`)."""

    captured_graphs: Callable[[], int]  # returns the number of CUDA graphs that this process has captured

    @property
    def busy(self) -> tuple[float, float]:
        """Seconds that target and draft have spent in forwards, over all requests."""
        ...

    def open(self, start: RequestStart, stop_criteria: StopCriteria) -> int:
        """Begins a request and prefills its prompt. Returns the number of prompt tokens that the prefix cache
        supplied."""
        ...

    def chunks(self, stop_criteria: StopCriteria, stats: Stats) -> Iterator[TokenChunk]:
        """Decodes the request: yields one chunk per round and adds the round to `stats`. The last chunk has a finish
        reason."""
        ...

    def close(self, stats: Stats) -> None:
        """Ends the request and completes `stats`."""
        ...


class TreeDecoding:
    """Speculative decoding with a draft tree."""

    def __init__(
        self,
        drafter: Drafter,
        verifier: Verifier,
        notify: Observer = no_observer,
        policy_report: Callable[[], Any] = lambda: None,
        captured_graphs: Callable[[], int] = lambda: 0,
        outages: Callable[[], Sequence[Any]] = tuple,
    ) -> None:
        """`notify`: observer of the events of the decoding loop.
        `policy_report`: returns the report of the controller that wraps the drafter, or None without a controller.
        `captured_graphs`: returns the number of CUDA graphs that this process has captured.
        `outages`: returns the list of `Stats.outages` of the running request.
        """
        self.drafter, self.verifier = drafter, verifier
        self.active_drafter = drafter  # of the latest request; a `NoDrafter` if that request disables the draft
        self.synthetic_acceptance_length: float | None = None  # see `Stats`; of requests that use the draft
        self._notify, self._policy_report, self._outages = notify, policy_report, outages
        self.captured_graphs = captured_graphs

    @property
    def busy(self) -> tuple[float, float]:
        return self.verifier.busy, self.drafter.busy

    def open(self, start: RequestStart, stop_criteria: StopCriteria) -> int:
        self._notify("opening", start)
        self.active_drafter = NoDrafter() if start.sampling.verify_batch == 1 else self.drafter
        self.active_drafter.open(start)  # first, so that a draft on another device prefills concurrently
        self._notify("drafter opened")
        kept = self.verifier.open(start)
        self._notify("opened")
        return kept

    def chunks(self, stop_criteria: StopCriteria, stats: Stats) -> Iterator[TokenChunk]:
        if self.active_drafter is self.drafter:
            stats.synthetic_acceptance_length = self.synthetic_acceptance_length
            stats.outages = self._outages()
        for proposal, result in decode(self.active_drafter, self.verifier, self._notify):
            stats.drafter_lost = self.active_drafter.lost_reason
            chunk = _cut(result, stop_criteria.max_tokens - stats.tokens, stop_criteria.stop_token_ids)
            _count(stats, proposal, result, len(chunk.token_ids))
            stats.finish_reason = chunk.finish_reason
            yield chunk

    def close(self, stats: Stats) -> None:
        stats.policy = self._policy_report() if self.active_drafter is self.drafter else None
        self.active_drafter.close()
        self.verifier.close()
        self._notify("closed", stats)


def request_start(request: int, prompt: Sequence[int], sampling: SamplingParams) -> RequestStart:
    """Returns the start of a request. All tokens of a prompt whose log-probabilities are requested are prefilled."""
    afresh = (0, 0) if sampling.prompt_logprobs is not None else None
    return RequestStart(request, tuple(prompt), sampling, len(prompt), num_cached_tokens=afresh)


def decode_request(
    decoding: Decoding,
    start: RequestStart,
    stop_criteria: StopCriteria,
    stats: Stats,
    is_current: Callable[[], bool] = lambda: True,
) -> Generator[TokenChunk]:
    """Decodes a request from its prefill to its end: yields one chunk per round and completes `stats`. `is_current`:
    whether the caches still belong to this request; if not, the next chunk raises UserError."""
    began, captures = time.perf_counter(), decoding.captured_graphs()
    try:
        stats.cached_tokens = decoding.open(start, stop_criteria)
        opened = time.perf_counter()
        stats.prompt_time = opened - began
        target, draft = decoding.busy
        for chunk in decoding.chunks(stop_criteria, stats):
            now = decoding.busy
            stats.record_times(bool(chunk.token_ids), began, opened, (now[0] - target, now[1] - draft))
            yield chunk
            if chunk.finish_reason is not None:
                return
            if not is_current():
                raise UserError(
                    "this request was ended by a later one: read each stream to its end before starting another"
                )
    finally:
        stats.graph_captures = decoding.captured_graphs() - captures
        if is_current():
            decoding.close(stats)


def _count(stats: Stats, proposal: Proposal, result: VerifyResult, kept: int) -> None:
    """Adds a round to `stats`. `kept`: number of its tokens that are part of the output, at least 1."""
    stats.rounds += 1
    stats.tokens += kept
    stats.drafted += len(proposal.tokens) - 1
    stats.accepted += kept - 1
    is_cut = kept < len(result.tokens)
    stats.verified.append(
        VerifiedRound(proposal.parents, result.path[:kept], result.overlaps, proposal.sources, is_cut)
    )


def _cut(result: VerifyResult, budget: int, stops: Collection[int]) -> TokenChunk:
    """Cuts the tokens of a round after the first stop token, which is kept, or at the token limit. `budget`: output
    tokens left until that limit."""
    kept = result.tokens[:budget]
    reason = "length" if len(kept) == budget else None
    end = next((i for i, token in enumerate(kept, 1) if token in stops), None)
    if end is not None:
        kept, reason = kept[:end], "stop"
    likelihoods = result.logprobs and result.logprobs[: len(kept)]
    return TokenChunk(kept, min(len(kept), len(result.tokens) - 1), reason, likelihoods, result.prompt_logprobs)
