"""Builds the roles of this process from a plan and decodes one request at a time. Works on token ids, not on text."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Unpack

from torch.distributed.rendezvous import rendezvous

from swiftspec.assemble import Models, Options
from swiftspec.control.controller import Controller, PolicyReport
from swiftspec.control.policy import Pace
from swiftspec.decode import Round, decode, decode_smc
from swiftspec.distributed.rank import Rank
from swiftspec.distributed.world import START_TIMEOUT, World, run_on
from swiftspec.errors import UserError
from swiftspec.model.config import ModelConfig
from swiftspec.observe.acceptance import Acceptance
from swiftspec.observe.trace import LaneDrafter, TracedDrafter, TracedPopulation, TracedVerifier, TraceLog
from swiftspec.params import EngineConfig, SamplingParams
from swiftspec.runtime.drafter import FallbackDrafter, NoDrafter, SteppedDrafter
from swiftspec.runtime.threaded import ThreadedVerifier
from swiftspec.runtime.verifier import Verifier
from swiftspec.smc.population import Answer, Population, check_sampling


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens of one round, as the user may see them."""

    token_ids: tuple[int, ...]
    accepted: int  # the first so many were draft tokens; the target added the others
    finish_reason: str | None = None  # "stop" or "length" on the last chunk


@dataclass(slots=True)
class Stats:
    """What one request cost. Times in seconds on one monotonic clock."""

    prompt_tokens: int = 0
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
    steering: PolicyReport | None = None  # at the end, where the plan leaves something to measurements
    population: Answer | None = None  # mode smc, at the end of the request
    _acceptance: Acceptance = field(default_factory=Acceptance)
    _uncounted: list[Round] = field(default_factory=list)

    def count(self, round_: Round) -> None:
        """Adds a round before anything is cut off it: acceptance is the algorithm's, not the stop condition's."""
        self.rounds += 1
        self.drafted += round_.drafted
        self.accepted += len(round_.tokens) - 1
        self._uncounted.append(round_)

    @property
    def acceptance(self) -> Acceptance:
        """Of all rounds so far. Counted when somebody asks, for between two rounds the target would wait for it."""
        for round_ in self._uncounted:
            self._acceptance.count(round_.parents, round_.path, round_.overlaps)
        self._uncounted.clear()
        return self._acceptance

    def clock(self, round_: Round, began: float, opened: float, busy: Sequence[float]) -> None:
        """Takes the time after a round. `busy`: what target and draft have spent in forwards since the prefill."""
        now = time.perf_counter()
        if round_.tokens:
            self.first_token_time = self.first_token_time or now - began
        self.decode_time = now - opened
        self.target_busy_time, self.draft_busy_time = busy


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer."""

    token_ids: list[int]
    finish_reason: str
    stats: Stats


def join_world() -> World | None:
    """The ranks that a launcher such as torchrun has started, this one among them; None if it is alone. Raises
    UserError where the launcher's variables make no sense."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return None
    try:
        local_rank = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
        host = os.environ["MASTER_ADDR"]
        store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=START_TIMEOUT)))
    except (KeyError, ValueError, RuntimeError) as error:  # the store's are RuntimeErrors
        reason = str(error).partition("\n")[0]
        raise UserError(f"WORLD_SIZE is set, but {reason}: start several ranks with torchrun") from None
    world = World(rank, size, local_rank, local_size, host, store)
    run_on(world.own_cores())  # before any thread is made; two ranks on one core would wait for each other
    return world


def serve_rank(
    world: World, target: str | Path, draft: str | Path | None, plan: EngineConfig, **options: Unpack[Options]
) -> None:
    """The life of any rank but 0, until rank 0 leaves. Raises RankLost when that, or a group's leader, is just gone."""
    models = Models.check(target, draft, plan, world, options)
    rank = Rank(world, plan, models, options.get("progress"))
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 hears the user, and says when to leave
    try:
        rank.follow()
    finally:
        signal.signal(signal.SIGINT, before)


class LLM:
    """A target model and perhaps a draft, decoding one request at a time.

    `verifier` and `drafter` do it, or `smc` alone in the mode of that name, which has no verifier. With a `world` this
    is its rank 0, and the other ranks run `serve_rank` with the same arguments. Raises UserError where a model cannot
    be loaded or the pair does not fit.
    """

    def __init__(
        self,
        target: str | Path,
        draft: str | Path | None = None,
        plan: EngineConfig | None = None,
        *,
        world: World | None = None,
        **options: Unpack[Options],
    ) -> None:
        self.plan = plan if plan is not None else EngineConfig(mode="serial" if draft is not None else "ar")
        models = Models.check(target, draft, self.plan, world, options)
        self.max_model_len, self.vocab_size = models.max_model_len, models.vocab_size
        self.eos_token_ids = ModelConfig.from_dir(models.target).eos_token_ids
        progress = options.get("progress")
        log = None if models.trace is None else TraceLog(models.trace)
        self._rank: Rank | None = None
        self._log, self._traced_smc = log, None
        self.verifier: Verifier
        self.drafter: SteppedDrafter = NoDrafter()
        self.smc: Population | None = None
        if world is not None:
            self._rank = Rank(world, self.plan, models, progress)
            if self.plan.mode == "smc":
                self.smc = self._rank.lead_population()
            else:
                self.verifier, self.drafter, self.plan = self._rank.lead(self.plan, log)
        elif self.plan.mode == "smc":
            self.smc = models.population(self.plan, progress=progress)
        else:
            verifier = models.verifier(self.plan, progress=progress)
            self.verifier = ThreadedVerifier(verifier) if self.plan.mode == "async" else verifier
            if self.plan.mode != "ar":
                drafter = models.drafter(self.plan, progress=progress)
                self.drafter = drafter if log is None else LaneDrafter(drafter, log.draft)
        if log is not None:
            log.head(models.described(self.plan))
            if self.smc is None:
                self.verifier, self.drafter = TracedVerifier(self.verifier, log), TracedDrafter(self.drafter, log)
            else:
                self._traced_smc = TracedPopulation(*self.smc.runners, log)
        self._requests = 0
        self._paces: dict[bool, Pace] = {}  # of guided requests and others, whose rounds take another time
        self.stats = Stats()

    def close(self) -> None:
        """Sends the other ranks home and closes the trace."""
        if self._rank is not None:
            self._rank.leave()
        if self._log is not None:
            self._log.close()

    def generate(self, prompt: Sequence[int], sampling: SamplingParams | None = None) -> Completion:
        """Decodes to the end. Raises UserError on a prompt that is empty or does not fit."""
        tokens: list[int] = []
        reason = "length"
        for chunk in self.stream(prompt, sampling):
            tokens += chunk.token_ids
            reason = chunk.finish_reason or reason
        return Completion(tokens, reason, self.stats)

    def stream(self, prompt: Sequence[int], sampling: SamplingParams | None = None) -> Generator[Chunk]:
        """Yields a chunk a round; the last one names the finish reason. Closing the iterator ends the request.

        There is one request at a time: beginning another ends this one, and asking it for more raises UserError. So
        does, before anything is computed, a prompt that is empty or does not fit. `self.stats` is that of the request
        begun last.
        """
        sampling = sampling if sampling is not None else SamplingParams()
        self._check(prompt, sampling)
        if self.smc is not None:
            return self._stream_smc(self.smc, list(prompt), sampling)
        return self._stream(list(prompt), sampling)

    def _check(self, prompt: Sequence[int], sampling: SamplingParams) -> None:
        if not prompt:
            raise UserError("the prompt is empty: give at least one token")
        if len(prompt) >= self.max_model_len:
            raise UserError(
                f"the prompt of {len(prompt)} tokens does not fit the context of {self.max_model_len} with room for an"
                " answer: shorten it or raise max_model_len"
            )
        if len(sampling.negative_prompt_ids) >= self.max_model_len:
            raise UserError(
                f"the negative prompt of {len(sampling.negative_prompt_ids)} tokens does not fit the context of"
                f" {self.max_model_len} with room for an answer: shorten it or raise max_model_len"
            )
        negative = ("the negative prompt", sampling.negative_prompt_ids)
        for name, ids in (("the prompt", prompt), negative, ("logit_bias", sampling.logit_bias)):
            if not all(0 <= token < self.vocab_size for token in ids):
                raise UserError(f"{name} names a token outside 0..{self.vocab_size - 1}")
        if sampling.top_k > self.vocab_size:
            raise UserError(f"top_k {sampling.top_k} is above the vocabulary of {self.vocab_size}: 0 turns it off")
        self.plan.check_request(sampling)
        if self.smc is not None:
            check_sampling(sampling)

    def _stream(self, prompt: list[int], sampling: SamplingParams) -> Generator[Chunk]:
        self._requests += 1
        request = self._requests
        stats = self.stats = Stats(prompt_tokens=len(prompt))
        budget, stops = self._ends(prompt, sampling)
        steered = self._steered(sampling)
        drafter = FallbackDrafter(steered or self.drafter)
        began = time.perf_counter()
        try:
            drafter.open(request, prompt, sampling, len(prompt))  # first: elsewhere it reads the prompt meanwhile
            self.verifier.open(request, prompt, sampling, len(prompt))
            opened = time.perf_counter()
            stats.prompt_time = opened - began
            busy = self._busy()
            for round_ in decode(drafter, self.verifier):
                stats.clock(round_, began, opened, self._busy(since=busy))
                stats.count(round_)
                stats.drafter_lost = drafter.lost
                chunk = _cut(round_, budget - stats.tokens, stops)
                stats.tokens += len(chunk.token_ids)
                yield chunk
                if chunk.finish_reason is not None:
                    return
                self._still(request)
        finally:
            stats.steering = None if steered is None else steered.report()
            if self._requests == request:  # else the caches are a later request's
                drafter.close()
                self.verifier.close()

    def _steered(self, sampling: SamplingParams) -> Controller | None:
        """What has the rounds of a request follow measurements, if the plan wants that."""
        if self.plan.mode == "ar" or not (self.plan.self_switch or self.plan.adapts):
            return None
        return Controller(self.drafter, self._paces.setdefault(sampling.guided, Pace.of(self.plan)))

    def _stream_smc(self, smc: Population, prompt: list[int], sampling: SamplingParams) -> Generator[Chunk]:
        """A chunk a round, often without a token: only what all particles share. The rest comes with the last."""
        self._requests += 1
        request = self._requests
        stats = self.stats = Stats(prompt_tokens=len(prompt))
        budget, stops = self._ends(prompt, sampling)
        began = time.perf_counter()
        smc.open(prompt, sampling, stops, budget)
        opened = time.perf_counter()
        stats.prompt_time = opened - began
        busy = self._busy()
        if self._traced_smc is not None:
            self._traced_smc.begin(request)
        try:
            for round_ in decode_smc(smc):
                if self._traced_smc is not None:
                    self._traced_smc.note(round_.tokens)
                stats.clock(round_, began, opened, self._busy(since=busy))
                stats.rounds = smc.rounds
                stats.drafted += round_.drafted
                stats.tokens += len(round_.tokens)
                answer = smc.answer
                yield Chunk(round_.tokens, 0, None if answer is None else "stop" if answer.stopped else "length")
                self._still(request)
        finally:
            if self._requests == request:  # else the population is a later request's
                stats.population = smc.finish()
                smc.close()
                if self._traced_smc is not None:
                    self._traced_smc.end()

    def _ends(self, prompt: list[int], sampling: SamplingParams) -> tuple[int, set[int]]:
        """What ends the text: so many tokens, or one of these."""
        negative = sampling.negative_prompt_ids if sampling.guided else ()
        budget = self.max_model_len - max(len(prompt), len(negative))
        budget = budget if sampling.max_tokens is None else min(budget, sampling.max_tokens)
        return budget, {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self.eos_token_ids)}

    def _still(self, request: int) -> None:
        if self._requests != request:
            raise UserError("this request was ended by a later one: read a stream to its end before the next")

    def _busy(self, since: tuple[float, float] = (0.0, 0.0)) -> tuple[float, float]:
        """Seconds that target and draft have spent in forwards."""
        target, draft = (self.verifier.busy, self.drafter.busy) if self.smc is None else self.smc.busy
        return target - since[0], draft - since[1]


def _cut(round_: Round, budget: int, stops: set[int]) -> Chunk:
    """Ends a round's tokens at the first stop token (which stays) or at the budget."""
    tokens = round_.tokens[:budget]
    reason = "length" if len(tokens) == budget else None
    if not stops.isdisjoint(tokens):
        tokens, reason = tokens[: next(i for i, token in enumerate(tokens, 1) if token in stops)], "stop"
    return Chunk(tokens, min(len(tokens), len(round_.tokens) - 1), reason)
