"""Decodes one request as a population of particles: K draft steps, one target score, weights, resampling, no host.

A round has one shape whatever it draws, so it waits for nothing: tensors on the device tell it where it is, and what the
host wants to know (who has finished, which slots are free, what all particles share) it reads from a copy, a round late
where the device runs ahead. The host counts slots alone, which needs no reading: N (K + 1) a round.

Letters: N particles, K draft tokens a round, W tree slots that a round looks at, V tokens of the base vocabulary.
Source: SMC-SD engine v0.1 and v0.2.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from swiftspec.batch import Batch
from swiftspec.errors import UserError
from swiftspec.params import PopulationPlan, SamplingParams
from swiftspec.spec import weights
from swiftspec.spec.mask import WIDTHS
from swiftspec.spec.particles import LIVE, SHARED, Particles
from swiftspec.spec.sampler import Sampler
from swiftspec.spec.streams import Purpose, Streams
from swiftspec.worker.runner import PREFILL_CHUNK, Runner

REGION = 32768  # tree slots at most


def region(plan: PopulationPlan, context: int) -> int:
    """Tree slots for a population: all that N texts of `context` tokens could need, if that is not too many. A
    multiple of the widest window. Raises UserError where two rounds would not fit."""
    widest = WIDTHS[-1]
    slots = min(plan.particles * context + 2 * plan.slots, REGION)
    most = (REGION - 1) // (2 * (plan.smc_draft_tokens + 1))
    if plan.particles > most:
        raise UserError(
            f"{plan.particles} particles with {plan.smc_draft_tokens} draft tokens do not fit the cache of {REGION}"
            f" slots: at most {most} particles do"
        )
    return -(-slots // widest) * widest


def check_sampling(sampling: SamplingParams) -> None:
    """Refuses what a population cannot follow."""
    if sampling.greedy:
        raise UserError("mode smc samples, and temperature 0 leaves nothing to sample: raise it, or take mode serial")
    if sampling.penalised:
        raise UserError("mode smc knows no penalties: set repetition, presence and frequency back, or take mode serial")


class Target:
    """Shapes logits after one request's parameters, without a look at their values."""

    def __init__(self, sampling: SamplingParams, vocab: int, device: torch.device) -> None:
        self._top_p = sampling.top_p
        self._sampler = Sampler(replace(sampling, top_p=1.0), (), vocab, device)

    def __call__(self, logits: Tensor) -> Tensor:
        """[n, >= V] raw -> [n, V] tempered, biased and filtered."""
        shaped = self._sampler.shape(logits, None)
        if self._top_p == 1:
            return shaped
        ranked, tokens = shaped.sort(-1, descending=True)
        mass = ranked.softmax(-1)
        ranked = ranked.masked_fill(mass.cumsum(-1) - mass >= self._top_p, weights.NEG_INF)
        return torch.empty_like(shaped).scatter_(-1, tokens, ranked)


@dataclass(frozen=True, slots=True)
class Report:
    """What the host reads of a round. `tokens`: the common prefix of all particles."""

    tokens: list[int]
    done: bool  # every particle has finished


@dataclass(frozen=True, slots=True)
class Answer:
    """The particle that was picked, and what became of the population."""

    tokens: list[int]
    stopped: bool  # by a stop token
    coalesced_prefix: int  # tokens that all particles shared in the end
    ess_mean: float  # particles' worth of weight, mean over the rounds
    resample_rate: float  # share of the rounds
    log_z: float  # estimate of the power target's log-normaliser
    full: bool  # the cache had no room for another round
    compactions: int
    moved_slots: int  # by compactions; fan-out and resampling move none


class _Mail:
    """Tensors on their way to the host."""

    def __init__(self, tensors: Sequence[Tensor], slots: int, layout: int) -> None:
        self.slots, self.layout = slots, layout  # tree slots handed out then, and compactions before
        if tensors[0].device.type != "cuda":
            self._tensors, self._event = [tensor.clone() for tensor in tensors], None
            return
        self._tensors = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
        for mine, theirs in zip(self._tensors, tensors, strict=True):
            mine.copy_(theirs, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def read(self) -> list[Tensor]:
        if self._event is not None:
            self._event.synchronize()
        return self._tensors


class SMC:
    """The worker of mode smc: both models, one population. `lag`: rounds that the host is behind the device."""

    def __init__(
        self, target: Runner, draft: Runner, plan: PopulationPlan, vocab: int, *, longest: int, lag: int = 0
    ) -> None:
        self.target, self.draft, self.plan = target, draft, plan
        self._vocab, self._lag = vocab, lag
        device = target.model.device
        slots = min(target.tree_slots, draft.tree_slots)
        self.particles = Particles(plan.particles, plan.smc_draft_tokens, slots, longest, device)
        self._prefix = torch.zeros(1, dtype=torch.int64, device=device)  # verified tokens, the same in both caches
        self._sequence = torch.zeros(PREFILL_CHUNK, dtype=torch.int64, device=device)
        self._stops = torch.zeros(vocab, dtype=torch.bool, device=device)

    def open(self, prompt: Sequence[int], sampling: SamplingParams, stops: Collection[int], limit: int) -> None:
        """Prefills the parent once on both models and fans out. Texts end at a token of `stops` or after `limit`."""
        check_sampling(sampling)
        device = self._stops.device
        self._shape_target = Target(sampling, self._vocab, device)
        # the draft must reach whatever the target reaches, so nothing is filtered from it (spec/weights.py)
        self._shape_draft = Target(replace(sampling, top_k=0, top_p=1.0, min_p=0.0), self._vocab, device)
        self._streams = Streams(sampling.seed, self.plan.particles, self._vocab, device)
        self._stops.zero_()
        self._stops[torch.tensor([token for token in stops if token < self._vocab], dtype=torch.int64)] = True
        for runner in (self.target, self.draft):
            runner.reset()
            runner.prefill(prompt[:-1])
            runner.cache.append_tree(1)
        self._prefix.fill_(len(prompt) - 1)
        self.particles.fan_out(prompt[-1], len(prompt) - 1, limit)
        self.rounds = self.compactions = self.moved_slots = 0
        self.full = self._done = False
        self._mail: deque[_Mail] = deque()
        # without rejections every particle grows by K + 1 tokens a round, so that the last round is known beforehand
        self._last = -(-limit // self.particles.step) if self.plan.smc_exact == 0 else limit
        self.report = Report([], False)

    def close(self) -> None:
        for runner in (self.target, self.draft):
            runner.reset()

    def launch(self) -> bool:
        """Starts a round. False where none is needed, or none fits (`full`)."""
        while self._room() < self.plan.slots and self._mail:
            self._read()
        if self._done or self.rounds == self._last:
            return False
        self.full = self._room() < self.plan.slots
        if self.full:
            return False
        for runner in (self.target, self.draft):
            runner.cache.append_tree(self.plan.slots)
        slots = self.target.cache.tree_len
        self._mail.append(_Mail(self.round(self._width(slots)), slots, self.compactions))
        self.rounds += 1
        return True

    def collect(self) -> Report:
        """What is known by now: the last round's outcome, or of the one `lag` rounds before."""
        while len(self._mail) > self._lag:
            self._read()
        return self.report

    def finish(self) -> Answer:
        """Picks one particle. Waits for the device."""
        p, rounds = self.particles, max(self.rounds, 1)
        row = int(p.pick(self._streams.pick(p.clock)))
        return Answer(
            tokens=p.tokens[row, : int(p.length[row])].tolist(),
            stopped=bool(p.stopped[row]),
            coalesced_prefix=int(p.common()),
            ess_mean=float(p.ess) / rounds,
            resample_rate=int(p.resampled) / rounds,
            log_z=float(p.evidence()),
            full=self.full,
            compactions=self.compactions,
            moved_slots=self.moved_slots,
        )

    def round(self, width: int) -> list[Tensor]:
        """One round over the first `width` tree slots, of which its own are handed out. Touches the host nowhere.

        Returns what the host shall read: [2 + longest + K + 1] int64 (length of the common prefix, number of finished
        particles, row 0's tokens) and the state of the tree slots [W] uint8.
        """
        p, plan = self.particles, self.plan
        slots = p.new_slots()
        drafts, log_q, draft_logits, views = self._draft_tokens(slots, width)
        logits = self._shape_target(self._score(drafts, slots, views))
        logits = logits.view(plan.smc_draft_tokens + 1, plan.particles, -1).transpose(0, 1)
        kept, extra, terms = self._judge(logits, drafts, log_q, draft_logits)
        p.take(drafts, kept, extra, terms, self._stops, width)
        p.resample(plan.ess_threshold, self._streams.resampling(p.clock), width)
        head = torch.cat((p.common()[None], p.finished.sum()[None], p.tokens[0]))
        return [head, p.columns(width)]

    def _tail(self, slots: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """The two tokens of each row without draft KV: their slots [N, 2], and what each of them sees [N, W].

        A finished row has given its slots back, so it writes into its own new one, which nobody else ever reads.
        """
        p = self.particles
        window = p.mask[:, :width]
        tail = torch.where(p.finished[:, None], slots[:, -1:], p.tail_slots)
        last, pending = tail[:, :1], tail[:, 1:]
        # at the fan-out both are the prompt's last token
        return tail, window.scatter(1, pending, False).scatter(1, last, True), window.scatter(1, pending, True)

    def _draft_tokens(self, slots: Tensor, width: int) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
        """K draft forwards: tokens [N, K], log q [N, K], the shaped logits that exact verification needs (a list of
        [N, V]), and what the pending token and each draft token see (K + 1 of [N, W])."""
        p, plan = self.particles, self.plan
        tail, last, pending = self._tail(slots, width)
        self._pending_slots = tail[:, 1]
        views, tokens, log_q, kept = [pending], [], [], []
        logits = self._forward(
            self.draft, p.tail_tokens.t().flatten(), p.tail_positions.t().flatten(), tail.t().flatten(),
            torch.cat((last, pending)),
        )[plan.particles :]  # fmt: skip
        for step in range(plan.smc_draft_tokens):
            if step > 0:
                at = p.tail_positions[:, 1] + step
                logits = self._forward(self.draft, tokens[-1], at, slots[:, step - 1], views[-1])
            shaped = self._shape_draft(logits)
            noise = self._streams.gumbel(Purpose.DRAFT, p.clock + step, shaped.dtype)
            tokens.append(weights.draw(shaped, noise))
            log_q.append(weights.log_prob(shaped, tokens[-1]))
            views.append(views[-1].scatter(1, slots[:, step : step + 1], True))
            if step < plan.smc_exact:
                kept.append(shaped)
        return torch.stack(tokens, 1), torch.stack(log_q, 1), kept, views

    def _score(self, drafts: Tensor, slots: Tensor, views: list[Tensor]) -> Tensor:
        """The target's forward over pending and draft tokens, step by step: logits [(K + 1) N, >= V]."""
        p = self.particles
        steps = torch.arange(p.step, device=drafts.device)[:, None]
        return self._forward(
            self.target,
            torch.cat((p.tail_tokens[:, 1:], drafts), 1).t().flatten(),
            (p.tail_positions[:, 1] + steps).flatten(),
            torch.cat((self._pending_slots[:, None], slots[:, :-1]), 1).t().flatten(),
            torch.cat(views),
        )

    def _judge(
        self, logits: Tensor, drafts: Tensor, log_q: Tensor, draft_logits: list[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """How many draft tokens stay [N], the token after them [N], and the log-weights by place [N, K + 1]
        (spec/weights.py has the law). `logits` [N, K + 1, V]."""
        p, power, exact = self.particles, self.plan.power, self.plan.smc_exact
        norms = weights.log_normaliser(logits, power)
        terms = power * weights.log_prob(logits[:, :-1], drafts) - log_q
        terms = torch.cat((norms[:, :exact], terms[:, exact:], norms[:, -1:]), 1)
        kept = torch.full_like(drafts[:, 0], self.plan.smc_draft_tokens)
        scores = power * logits[:, -1]
        if exact:
            coins = self._streams.coins(p.clock + torch.arange(exact, device=drafts.device))
            accepted, residual, rejected = weights.reject(
                logits[:, :exact], torch.stack(draft_logits, 1), drafts[:, :exact], coins, power=power
            )
            kept = torch.where(rejected, accepted, kept)
            scores = torch.where(rejected[:, None], residual, scores)
        noise = self._streams.gumbel(Purpose.EXTRA, p.clock + self.plan.smc_draft_tokens, scores.dtype)
        return kept, weights.draw(scores, noise), terms

    def _forward(self, runner: Runner, tokens: Tensor, positions: Tensor, slots: Tensor, mask: Tensor) -> Tensor:
        """Rows whose tree slots are handed out: all [n], `mask` [n, W] over tree slots 0..W-1. Logits [n, >= V].

        Rows come in topological order, so they may go in chunks. The window ends at slot W - 1; those of its slots that
        nobody has are masked for everyone.
        """
        began = time.perf_counter()
        kv_len = self._prefix + mask.shape[1]
        parts = []
        for start in range(0, tokens.shape[0], PREFILL_CHUNK):
            part = slice(start, start + PREFILL_CHUNK)
            rows = tokens[part].shape[0]
            batch = Batch(
                tokens[part], positions[part], slots[part] + self._prefix, mask[part], self._sequence[:rows], kv_len
            )
            parts.append(runner.model.forward(batch, runner.cache))
        runner.busy += time.perf_counter() - began
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _width(self, slots: int) -> int:
        """The window that covers `slots` tree slots: few widths, so that few graphs serve every round."""
        fixed = next((w for w in WIDTHS if w >= slots), -(-slots // WIDTHS[-1]) * WIDTHS[-1])
        return min(fixed, self.particles.mask.shape[1])

    def _room(self) -> int:
        return self.particles.mask.shape[1] - self.target.cache.tree_len

    def _read(self) -> None:
        """Takes in the oldest mail, and compacts where that frees half of the region's used part."""
        mail = self._mail.popleft()
        head, columns = mail.read()
        common, finished, *tokens = head.tolist()
        self.report = Report(tokens[:common], finished == self.plan.particles)
        self._done = self.report.done
        if mail.layout != self.compactions or self._done:
            return  # the columns have other numbers by now
        state = columns[: mail.slots]
        live = int((state == LIVE).sum()) + self.target.cache.tree_len - mail.slots
        if 2 * live <= self.target.cache.tree_len or self._room() < self.plan.slots:
            self._compact(state, mail.slots)

    def _compact(self, state: Tensor, known: int) -> None:
        """Promotes the slots that all live rows share to the prefix and drops those that nobody holds."""
        path = (state == SHARED).nonzero().flatten().tolist()
        keep = (state == LIVE).nonzero().flatten().tolist()
        keep += range(known, self.target.cache.tree_len)  # of a round still unread: taken as live
        for runner in (self.target, self.draft):
            runner.cache.commit(path, keep)
        self.particles.compact(path, keep)
        self._prefix += len(path)
        self.compactions += 1
        self.moved_slots += sum(slot != place for place, slot in enumerate([*path, *keep]))
