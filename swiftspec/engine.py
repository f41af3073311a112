"""Decodes one request at a time on roles that it is handed. Works on token ids, not on text."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from swiftspec.decode import Observer, decode, no_observer
from swiftspec.errors import UserError
from swiftspec.messages import Logprob, Proposal, RequestStart, VerifyResult
from swiftspec.params import SamplingParams
from swiftspec.runtime.drafter import Drafter, NoDrafter
from swiftspec.runtime.verifier import Verifier

Verified = tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]  # a proposal's parents; a result's path, overlaps


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """The tokens of one round, as the user may see them."""

    token_ids: tuple[int, ...]
    accepted: int  # the first so many were draft tokens; the target added the others
    finish_reason: str | None = None  # "stop" or "length" on the last chunk
    logprobs: tuple[Logprob, ...] | None = None  # of the tokens, where asked for
    prompt_logprobs: tuple[Logprob, ...] | None = (
        None  # on the first chunk, where asked for: of all but its first token
    )


@dataclass(slots=True)
class Stats:
    """What one request cost. Times in seconds on one monotonic clock."""

    prompt_tokens: int = 0
    cached_tokens: int = 0  # of them, those that the target had read for an earlier request
    prompt_time: float = 0.0  # prefill of both models
    first_token_time: float = 0.0  # from the request to the first token
    decode_time: float = 0.0  # from the end of the prefill
    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    target_busy_time: float = 0.0  # the target's forwards while decoding
    draft_busy_time: float = 0.0
    drafter_lost: str | None = None
    finish_reason: str | None = None  # as on the last chunk
    verified: list[Verified] = field(default_factory=list)  # round by round, before anything was cut off
    policy: Any = None  # what a controller decided, at the end (control/controller.py)
    population: Any = None  # mode smc: what became of it, at the end (smc/population.py)

    def record_times(self, produced_token: bool, began: float, opened: float, busy: Sequence[float]) -> None:
        """Takes the time after a round. `got`: it gave a token; `busy`: what target and draft have spent in forwards
        since the prefill."""
        now = time.perf_counter()
        if produced_token:
            self.first_token_time = self.first_token_time or now - began
        self.decode_time = now - opened
        self.target_busy_time, self.draft_busy_time = busy


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer."""

    token_ids: list[int]
    finish_reason: str
    stats: Stats


@dataclass(frozen=True, slots=True)
class StopCriteria:
    """What ends a text: so many tokens, or one of these."""

    max_tokens: int
    stop_token_ids: Collection[int]


class Decoding(Protocol):
    """One of the two ways to decode a request, on its roles."""

    @property
    def busy(self) -> tuple[float, float]:
        """Seconds that target and draft have spent in forwards."""
        ...

    def open(self, opening: RequestStart, stop_criteria: StopCriteria) -> int:
        """Begins a request. Returns how many of its tokens were kept from earlier ones."""
        ...

    def chunks(self, stop_criteria: StopCriteria, stats: Stats) -> Iterator[TokenChunk]:
        """A chunk a round, counted in `stats`; the last one says why it is the last."""
        ...

    def close(self, stats: Stats) -> None:
        """Ends the request."""
        ...


class TreeDecoding:
    """A draft tree and its verification."""

    def __init__(
        self, drafter: Drafter, verifier: Verifier, notify: Observer = no_observer,
        drafter_loss: Callable[[], str | None] = lambda: None, policy_report: Callable[[], Any] = lambda: None,
    ) -> None:  # fmt: skip
        """`lost` says why the drafter is gone, should it be, and `report` what a controller around it has decided."""
        self.drafter, self.verifier = drafter, verifier
        self.active_drafter = drafter  # in the request begun last
        self._notify, self._drafter_loss, self._policy_report = notify, drafter_loss, policy_report

    @property
    def busy(self) -> tuple[float, float]:
        return self.verifier.busy, self.drafter.busy

    def open(self, opening: RequestStart, stop_criteria: StopCriteria) -> int:
        self._notify("opening", opening)
        self.active_drafter = NoDrafter() if opening.sampling.verify_batch == 1 else self.drafter
        self.active_drafter.open(opening)  # first: elsewhere it reads the prompt meanwhile
        self._notify("drafter opened")
        kept = self.verifier.open(opening)
        self._notify("opened")
        return kept

    def chunks(self, stop_criteria: StopCriteria, stats: Stats) -> Iterator[TokenChunk]:
        for proposal, result in decode(self.active_drafter, self.verifier, self._notify):
            _count(stats, proposal, result)
            stats.drafter_lost = self._drafter_loss() if self.active_drafter is self.drafter else None
            chunk = _cut(result, stop_criteria.max_tokens - stats.tokens, stop_criteria.stop_token_ids)
            stats.tokens += len(chunk.token_ids)
            stats.finish_reason = chunk.finish_reason
            yield chunk

    def close(self, stats: Stats) -> None:
        stats.policy = self._policy_report() if self.active_drafter is self.drafter else None
        self.active_drafter.close()
        self.verifier.close()
        self._notify("closed", stats)


class RequestLimits(Protocol):
    """What a request must keep to."""

    @property
    def max_model_len(self) -> int: ...  # tokens of prompt and answer
    @property
    def eos_token_ids(self) -> Collection[int]: ...
    def check(self, prompt: Sequence[int], sampling: SamplingParams, /) -> None:
        """Raises UserError on a request that cannot be served."""
        ...


class Engine:
    """Decodes one request at a time. `stats` is that of the request begun last."""

    def __init__(self, decoding: Decoding, limits: RequestLimits) -> None:
        self.decoding, self.limits = decoding, limits
        self.stats = Stats()
        self._requests = 0

    def generate(self, prompt: Sequence[int], sampling: SamplingParams | None = None) -> Completion:
        """Decodes to the end. Raises UserError on a prompt that is empty or does not fit."""
        tokens = [token for chunk in self.stream(prompt, sampling) for token in chunk.token_ids]
        return Completion(tokens, self.stats.finish_reason or "length", self.stats)

    def stream(self, prompt: Sequence[int], sampling: SamplingParams | None = None) -> Generator[TokenChunk]:
        """Yields a chunk a round; the last one names the finish reason. Closing the iterator ends the request.

        There is one request at a time: beginning another ends this one, and asking it for more raises UserError. So
        does, before anything is computed, a prompt that is empty or does not fit.
        """
        sampling = sampling if sampling is not None else SamplingParams()
        self.limits.check(prompt, sampling)
        return self._stream(tuple(prompt), sampling)

    def _stream(self, prompt: tuple[int, ...], sampling: SamplingParams) -> Generator[TokenChunk]:
        self._requests += 1
        request = self._requests
        stats = self.stats = Stats(prompt_tokens=len(prompt))
        stop_criteria, decoding = self._stop_criteria(prompt, sampling), self.decoding
        began = time.perf_counter()
        try:
            afresh = (0, 0) if sampling.prompt_logprobs is not None else None
            stats.cached_tokens = decoding.open(
                RequestStart(request, prompt, sampling, len(prompt), num_cached_tokens=afresh), stop_criteria
            )
            opened = time.perf_counter()
            stats.prompt_time = opened - began
            target, draft = decoding.busy
            for chunk in decoding.chunks(stop_criteria, stats):
                now = decoding.busy
                stats.record_times(bool(chunk.token_ids), began, opened, (now[0] - target, now[1] - draft))
                yield chunk
                if chunk.finish_reason is not None:
                    return
                if self._requests != request:
                    raise UserError("this request was ended by a later one: read a stream to its end before the next")
        finally:
            if self._requests == request:  # else the caches are a later request's
                decoding.close(stats)

    def _stop_criteria(self, prompt: Sequence[int], sampling: SamplingParams) -> StopCriteria:
        negative = sampling.negative_prompt_ids if sampling.guided else ()
        budget = self.limits.max_model_len - max(len(prompt), len(negative))
        budget = budget if sampling.max_tokens is None else min(budget, sampling.max_tokens)
        eos = self.limits.eos_token_ids if sampling.grammar is not None or not sampling.ignore_eos else ()
        return StopCriteria(budget, {*sampling.stop_token_ids, *eos})


def _count(stats: Stats, proposal: Proposal, result: VerifyResult) -> None:
    """Adds a round before anything is cut off it: acceptance is the algorithm's, not the stop condition's."""
    stats.rounds += 1
    stats.drafted += len(proposal.tokens) - 1
    stats.accepted += len(result.tokens) - 1
    stats.verified.append((proposal.parents, result.path, result.overlaps))


def _cut(result: VerifyResult, budget: int, stops: Collection[int]) -> TokenChunk:
    """Ends a round's tokens at the first stop token (which stays) or at the budget."""
    kept = result.tokens[:budget]
    reason = "length" if len(kept) == budget else None
    end = next((i for i, token in enumerate(kept, 1) if token in stops), None)
    if end is not None:
        kept, reason = kept[:end], "stop"
    likelihoods = result.logprobs and result.logprobs[: len(kept)]
    return TokenChunk(kept, min(len(kept), len(result.tokens) - 1), reason, likelihoods, result.prompt_logprobs)
