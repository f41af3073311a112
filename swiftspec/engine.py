"""Builds the roles of this process from a plan and decodes one request at a time. Works on token ids, not on text."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from swiftspec.config import ModelConfig
from swiftspec.decode import Round, decode, decode_smc
from swiftspec.errors import UserError
from swiftspec.model.loader import load_model
from swiftspec.ops import host, reference
from swiftspec.params import Plan, SamplingParams
from swiftspec.worker.drafter import Drafter, Expendable, LocalDrafter, NoDrafter
from swiftspec.worker.runner import Runner
from swiftspec.worker.smc import SMC, Answer, check_sampling, region
from swiftspec.worker.verifier import LocalVerifier

Progress = Callable[[str, int, int], None]  # what is being done, step, steps


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens of one round, as the user may see them."""

    token_ids: tuple[int, ...]
    accepted: int  # the first so many were draft tokens; the target added the others
    finish_reason: str | None = None  # "stop" or "length" on the last chunk


@dataclass(slots=True)
class Stats:
    """What one request cost. Times in seconds on one monotonic clock; `histogram[j]` rounds accepted j draft tokens."""

    prompt_tokens: int = 0
    prompt_time: float = 0.0  # prefill of both models
    first_token_time: float = 0.0  # from the request to the first token
    decode_time: float = 0.0  # from the end of the prefill
    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    histogram: list[int] = field(default_factory=list)
    target_busy_time: float = 0.0  # the target's forwards while decoding
    draft_busy_time: float = 0.0
    drafter_lost: str | None = None
    population: Answer | None = None  # mode smc, at the end of the request

    def count(self, round_: Round) -> None:
        """Adds a round before anything is cut off it: acceptance is the algorithm's, not the stop condition's."""
        accepted = len(round_.tokens) - 1
        self.rounds += 1
        self.drafted += round_.drafted
        self.accepted += accepted
        self.histogram += [0] * (accepted + 1 - len(self.histogram))
        self.histogram[accepted] += 1


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer."""

    token_ids: list[int]
    finish_reason: str
    stats: Stats


class LLM:
    """A target model and perhaps a draft, decoding one request at a time.

    `vocab_size`: the base vocabulary that both tokenizers share; rows of the heads beyond it count as -inf. None takes
    the smaller of the two heads. `ops`: the fastest operators that fit, or plain torch. Raises UserError where a model
    cannot be loaded or the pair does not fit.
    """

    def __init__(
        self,
        target: str | Path,
        draft: str | Path | None = None,
        plan: Plan | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        max_model_len: int | None = None,
        vocab_size: int | None = None,
        ops: Literal["auto", "reference"] = "auto",
        progress: Progress | None = None,
    ) -> None:
        self.plan = plan if plan is not None else Plan(mode="serial" if draft is not None else "ar")
        if self.plan.mode != "ar" and draft is None:
            raise UserError(f"mode {self.plan.mode} needs a draft model: name one, or take mode ar")
        config = ModelConfig.from_dir(Path(target))
        self.max_model_len = max_model_len if max_model_len is not None else config.max_position_embeddings
        if not 2 <= self.max_model_len <= config.max_position_embeddings:
            limit = config.max_position_embeddings
            raise UserError(f"max_model_len must lie in 2..{limit} for this target, not {self.max_model_len}")
        self.eos_token_ids = config.eos_token_ids
        heads = [config.vocab_size]

        def runner(path: str | Path, tree_slots: int) -> Runner:
            context = self.max_model_len + self.plan.verify_batch  # a stop takes effect a round late
            shape = ModelConfig.from_dir(path)
            kind = dtype if dtype is not None else getattr(torch, shape.dtype)
            module = host if ops == "auto" and host.fits(shape, kind, device) else reference
            model = load_model(
                path, dtype=kind, device=device, ops=module, max_positions=context + tree_slots, progress=progress
            )
            return Runner(model, module, context=context, tree_slots=tree_slots)

        population = region(self.plan.population, self.max_model_len) if self.plan.mode == "smc" else None
        self._target = runner(target, population or self.plan.verify_batch)
        self._draft: Runner | None = None
        if self.plan.mode != "ar" and draft is not None:
            tree = 4 * self.plan.draft_leaves * self.plan.draft_steps + self.plan.draft_leaves
            self._draft = runner(draft, population or tree)
            heads.append(self._draft.model.config.vocab_size)
        self.vocab_size = min(heads) if vocab_size is None else vocab_size
        if self.vocab_size > min(heads):
            raise UserError(f"the tokenizer has {self.vocab_size} tokens, but a model's head only {min(heads)}")
        self.verifier = LocalVerifier(self._target, self.vocab_size)
        self.drafter: Drafter = NoDrafter()
        self.smc: SMC | None = None
        if self._draft is not None and population is not None:
            lag = 1 if self._target.model.device.type == "cuda" else 0  # a CPU does not run ahead of its host
            self.smc = SMC(
                self._target, self._draft, self.plan.population, self.vocab_size, longest=self.max_model_len, lag=lag
            )
        elif self._draft is not None:
            self.drafter = LocalDrafter(self._draft, self.plan, self.vocab_size)
        self._requests = 0
        self.stats = Stats()

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
            check_sampling(sampling)
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
        for name, ids in (("the prompt", prompt), ("logit_bias", sampling.logit_bias)):
            if not all(0 <= token < self.vocab_size for token in ids):
                raise UserError(f"{name} names a token outside 0..{self.vocab_size - 1}")

    def _stream(self, prompt: list[int], sampling: SamplingParams) -> Generator[Chunk]:
        self._requests += 1
        request = self._requests
        stats = self.stats = Stats(prompt_tokens=len(prompt))
        budget, stops = self._ends(prompt, sampling)
        drafter = Expendable(self.drafter)
        began = time.perf_counter()
        try:
            self.verifier.open(request, prompt, sampling, len(prompt))
            drafter.open(request, prompt, sampling, len(prompt))
            opened = time.perf_counter()
            stats.prompt_time = opened - began
            busy = self._busy()
            for round_ in decode(drafter, self.verifier):
                now = time.perf_counter()
                stats.first_token_time = stats.first_token_time or now - began
                stats.decode_time = now - opened
                stats.count(round_)
                stats.target_busy_time, stats.draft_busy_time = (b - a for a, b in zip(busy, self._busy(), strict=True))
                stats.drafter_lost = drafter.lost
                chunk = _cut(round_, budget - stats.tokens, stops)
                stats.tokens += len(chunk.token_ids)
                yield chunk
                if chunk.finish_reason is not None:
                    return
                if self._requests != request:
                    raise UserError("this request was ended by a later one: read a stream to its end before the next")
        finally:
            if self._requests == request:  # else the caches are a later request's
                drafter.close()
                self.verifier.close()

    def _stream_smc(self, smc: SMC, prompt: list[int], sampling: SamplingParams) -> Generator[Chunk]:
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
        try:
            for round_ in decode_smc(smc):
                now = time.perf_counter()
                if round_.tokens:
                    stats.first_token_time = stats.first_token_time or now - began
                stats.decode_time = now - opened
                stats.rounds = smc.rounds
                stats.drafted += round_.drafted
                stats.tokens += len(round_.tokens)
                stats.target_busy_time, stats.draft_busy_time = (b - a for a, b in zip(busy, self._busy(), strict=True))
                answer = smc.answer
                yield Chunk(round_.tokens, 0, None if answer is None else "stop" if answer.stopped else "length")
                if self._requests != request:
                    raise UserError("this request was ended by a later one: read a stream to its end before the next")
        finally:
            if self._requests == request:
                stats.population = smc.finish()
                smc.close()

    def _ends(self, prompt: list[int], sampling: SamplingParams) -> tuple[int, set[int]]:
        """What ends the text: so many tokens, or one of these."""
        budget = self.max_model_len - len(prompt)
        budget = budget if sampling.max_tokens is None else min(budget, sampling.max_tokens)
        return budget, {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self.eos_token_ids)}

    def _busy(self) -> tuple[float, float]:
        return self._target.busy, self._draft.busy if self._draft is not None else 0.0


def _cut(round_: Round, budget: int, stops: set[int]) -> Chunk:
    """Ends a round's tokens at the first stop token (which stays) or at the budget."""
    tokens = round_.tokens[:budget]
    reason = "length" if len(tokens) == budget else None
    stop = next((i for i, token in enumerate(tokens) if token in stops), None)
    if stop is not None:
        tokens, reason = tokens[: stop + 1], "stop"
    return Chunk(tokens, min(len(tokens), len(round_.tokens) - 1), reason)
