"""One round of a population on the device: K draft steps, one target score, weights, bonus, resampling, and no host.

A round has one shape whatever it draws, so it waits for nothing: tensors on the device tell it where it is. Everything
that it reads and writes stays where it is from round to round, which is what a captured graph needs: one for each width
of the window. Letters: N particles, K draft tokens a round, W tree slots that a round looks at, V tokens.
Source: SMC-SD engine v0.2, sections 3 to 5; the law is in smc/weights.py.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from swiftspec.backends.reference import Scores
from swiftspec.backends.reference.sampling import best
from swiftspec.config import PopulationConfig
from swiftspec.model.batch import Batch
from swiftspec.params import SamplingParams
from swiftspec.runtime.runner import PREFILL_CHUNK, Runner
from swiftspec.runtime.steps.graph import shaping
from swiftspec.sampling import filters
from swiftspec.sampling.sampler import Sampler
from swiftspec.smc import weights
from swiftspec.smc.particles import Particles
from swiftspec.smc.streams import Streams


class Shaper:
    """Shapes logits after one request's parameters, without a look at their values."""

    def __init__(self, sampling: SamplingParams, vocab: int, device: torch.device) -> None:
        self._top_p = sampling.top_p
        self._sampler = Sampler(replace(sampling, top_p=1.0), (), vocab, device)

    def __call__(self, logits: Tensor) -> Tensor:
        """[n, >= V] raw -> [n, V] tempered, biased and filtered."""
        shaped = self._sampler.shape(logits, None)
        return filters.top_p(shaped, self._top_p, head=shaped.shape[-1]) if self._top_p < 1 else shaped


@dataclass(frozen=True, slots=True)
class Drafted:
    """What the draft made of a round. `logits` [N, V] each: of the steps that may be rejected."""

    tokens: Tensor  # [N, K]
    log_q: Tensor  # [N, K]
    logits: list[Tensor]
    pending_slots: Tensor  # [N]
    views: list[Tensor]  # K + 1 of [N, W]: what the pending token and then each draft token sees


class SMCRound:
    """Both models, one population and its noise."""

    def __init__(self, target: Runner, draft: Runner, config: PopulationConfig, longest: int) -> None:
        vocab = target.vocab
        self._target, self._draft, self._config, self._vocab = target, draft, config, vocab
        device = target.model.device
        self._ops = target.ops
        slots = min(target.tree_slots, draft.tree_slots)
        self.particles = Particles(config.particles, config.smc_draft_tokens, slots, longest, device)
        self.prefix = torch.zeros(1, dtype=torch.int64, device=device)  # slots before the tree's, in both caches
        self._sequence = torch.zeros(PREFILL_CHUNK, dtype=torch.int64, device=device)
        self._stops = torch.zeros(vocab, dtype=torch.bool, device=device)
        self._ticks = torch.arange(config.smc_draft_tokens + 1, device=device)
        self._rows = torch.arange(config.particles, device=device)
        # every round adds a token at least, so there are no more of them than tokens
        self.streams = Streams(0, config.particles, vocab, device, self._ops.gumbel_keyed, longest)
        self.shaping = ""  # what of a request its rounds have by value
        # of logits, as the operators give them
        self._dtype = torch.float64 if target.model.dtype == torch.float64 else torch.float32

    def open(self, prompt: Sequence[int], sampling: SamplingParams, stops: Collection[int], limit: int) -> None:
        """Fans out from a prompt that is prefilled but for its last token, which has tree slot 0."""
        if shaping(sampling) != self.shaping:  # else the tensors that graphs have captured stay
            self.shaping = shaping(sampling)
            unfiltered = replace(sampling, top_k=0, top_p=1.0, min_p=0.0)  # the draft must reach what the target does
            self._filtered = sampling.filtered
            self._shape = Shaper(sampling, self._vocab, self._stops.device)
            self._sampler = Sampler(unfiltered, (), self._vocab, self._stops.device)
        self.streams.seed(sampling.seed)
        self._stops.zero_()
        self._stops[torch.tensor([token for token in stops if token < self._vocab], dtype=torch.int64)] = True
        self.prefix.fill_(len(prompt) - 1)
        self.particles.fan_out(prompt[-1], len(prompt) - 1, limit)

    @property
    def rejects(self) -> bool:
        """Whether a particle may grow by fewer than K + 1 tokens."""
        return self._filtered or self._config.smc_exact > 0

    @torch.inference_mode()  # saves a microsecond an operator
    def __call__(self, width: int) -> Tensor:
        """One round over the first `width` tree slots, of which its own are handed out. Touches the host nowhere.

        Returns what the host shall read, [2 + L] int64: length of the common prefix, or -1 where logits or weights are
        no numbers; number of finished particles; row 0's tokens.
        """
        p = self.particles
        slots = p.new_slots()
        noise = self.streams.round(p.clock + self._ticks, self._dtype)
        drafted = self._draft_tokens(slots, width, noise)
        judge = self._judge_in_part if self.rejects else self._judge
        kept, extra, terms = judge(self._score(drafted, slots), drafted, next(noise))
        broken = (extra < 0).any() | terms.isnan().any()
        p.take(drafted.tokens, kept, extra.clamp_min(0), terms, self._stops, width)
        p.resample(self._config.ess_threshold, self.streams.resampling(p.rounds), width)
        return torch.cat((torch.where(broken, -1, p.common())[None], p.finished.sum()[None], p.tokens[0]))

    def _draft_tokens(self, slots: Tensor, width: int, noise: Iterator[Tensor]) -> Drafted:
        """K forwards of the draft, the first over the two tokens of each row that it has no KV of."""
        p = self.particles
        tail, last, pending = self._tail(slots, width)
        views, tokens, log_q, kept = [pending], [], [], []
        both = (p.tail_tokens.t().flatten(), p.tail_positions.t().flatten(), tail.t().flatten())
        logits = self._forward(self._draft, *both, torch.cat((last, pending)))[p.count :]
        for step in range(self._config.smc_draft_tokens):
            if step > 0:
                at = p.tail_positions[:, 1] + step
                logits = self._forward(self._draft, tokens[-1], at, slots[:, step - 1], views[-1])
            scores = self._scores(1.0, next(noise), self._rows)
            tokens.append(self._ops.draw(logits, self._vocab, scores).clamp_min_(0))  # -1: its weight tells
            log_q.append(self._ops.log_probs(logits, self._vocab, tokens[-1], scores))
            views.append(views[-1].scatter(1, slots[:, step : step + 1], True))
            if self._filtered or step < self._config.smc_exact:
                kept.append(self._sampler.shape(logits, None))
        return Drafted(torch.stack(tokens, 1), torch.stack(log_q, 1).to(torch.float64), kept, tail[:, 1], views)

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

    def _score(self, drafted: Drafted, slots: Tensor) -> Tensor:
        """The target's forward over pending and draft tokens, step by step: logits [(K + 1) N, >= V]."""
        p = self.particles
        return self._forward(
            self._target,
            torch.cat((p.tail_tokens[:, 1:], drafted.tokens), 1).t().flatten(),
            (p.tail_positions[:, 1] + self._ticks[:, None]).flatten(),
            torch.cat((drafted.pending_slots[:, None], slots[:, :-1]), 1).t().flatten(),
            torch.cat(drafted.views),
        )

    def _scores(self, power: float = 1.0, noise: Tensor | None = None, rows: Tensor | None = None) -> Scores:
        """What the operators make of raw logits; of the request's distribution to that power."""
        return Scores(self._sampler.params.temperature / power, self._sampler.bias, noise, rows)

    def _judge(self, logits: Tensor, drafted: Drafted, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """How many draft tokens stay [N], here all; the token after them [N]; the log-weights by place [N, K + 1].
        `logits` [(K + 1) N, >= V]: the target's, step by step."""
        p, power = self.particles, self._config.power
        ahead, last = logits[: -p.count], logits[-p.count :]
        scores = self._scores()
        log_p = self._ops.log_probs(ahead, self._vocab, drafted.tokens.t().reshape(-1), scores).view(-1, p.count).t()
        extra = self._ops.draw(last, self._vocab, self._scores(power, noise, self._rows))
        norm = torch.zeros_like(drafted.log_q[:, 0])
        if power != 1:
            shaped = self._sampler.shape(last, None)
            norm = weights.log_normaliser(shaped, shaped.logsumexp(-1), power)
        kept = torch.full_like(extra, self._config.smc_draft_tokens)
        return kept, extra, torch.cat((power * log_p - drafted.log_q, norm[:, None]), 1)

    def _judge_in_part(self, logits: Tensor, drafted: Drafted, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same where draft tokens may be rejected."""
        p, power, exact = self.particles, self._config.power, self._config.smc_exact
        logits = self._shape(logits).view(p.step, p.count, -1).transpose(0, 1)
        whole = logits.logsumexp(-1)
        norms = weights.log_normaliser(logits, whole, power)
        terms = power * weights.log_prob(logits[:, :-1], whole[:, :-1], drafted.tokens) - drafted.log_q
        draft = torch.stack(drafted.logits, 1)
        if self._filtered:
            terms = terms + weights.inside(logits[:, :-1], draft)
        kept, scores = self._reject(logits, draft, drafted.tokens)
        terms = torch.cat((norms[:, :exact], terms[:, exact:], norms[:, -1:]), 1)
        terms = terms.scatter(1, kept[:, None], norms.gather(1, kept[:, None]))
        return kept, best(scores + noise), terms

    def _reject(self, logits: Tensor, draft: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """How many leading draft tokens stay [N], and the scores [N, V] of the token after them.

        The first `smc_exact` tokens are verified; the others must only be inside the target's filters.
        """
        power, exact = self._config.power, self._config.smc_exact
        stays = logits[:, :-1].gather(-1, tokens.unsqueeze(-1)).squeeze(-1) > filters.NEG_INF
        if exact:
            coins = self.streams.coins(self.particles.clock + self._ticks[:exact])
            verified = weights.accept(logits[:, :exact], draft[:, :exact], tokens[:, :exact], coins, power)
            stays = torch.cat((verified, stays[:, exact:]), 1)
        kept = stays.cumprod(1).sum(1)
        here = kept[:, None, None].expand(-1, 1, logits.shape[-1])
        target = logits.gather(1, here).squeeze(1)
        if not exact:
            return kept, power * target
        rest = weights.residual(target, draft.gather(1, here.clamp_max(draft.shape[1] - 1)).squeeze(1), power)
        return kept, torch.where((kept < exact)[:, None], rest, power * target)

    def _forward(self, runner: Runner, tokens: Tensor, positions: Tensor, slots: Tensor, mask: Tensor) -> Tensor:
        """Rows whose tree slots are handed out: all [n], `mask` [n, W] over tree slots 0..W-1. Logits [n, >= V].

        Rows come in topological order, so they may go in chunks. The window ends at slot W - 1; those of its slots that
        nobody has are masked for everyone.
        """
        began = time.perf_counter()
        kv_len = self.prefix + mask.shape[1]
        parts: list[Tensor] = []
        group = runner.model.group
        for start in range(0, tokens.shape[0], PREFILL_CHUNK):
            part = slice(start, start + PREFILL_CHUNK)
            sequence = self._sequence[: tokens[part].shape[0]]
            batch = Batch(tokens[part], positions[part], slots[part] + self.prefix, mask[part], sequence, kv_len)
            logits = runner.model.forward(batch, runner.cache)
            assert logits is not None
            parts.append(logits if group is None else torch.cat(group.all_gather(logits).unbind(0), 1))
        runner.note(began, tokens.shape[0])
        return parts[0] if len(parts) == 1 else torch.cat(parts)
