"""One round of all groups on the device: K draft forwards, one target forward, verification; no host work.

A round has the same shape whatever it samples, and tensors on the device hold its state, so it never synchronises with
the host. Everything that it reads and writes stays at fixed addresses, so that a CUDA graph can capture it: one graph
per window width and number of groups.

The groups that take part are the first ones in every tensor, ordered by `SamplingClass` and cache sequence. They form
one flat batch, ordered by group, then step, then particle. Each forward runs over the whole batch, and so does all
later processing, except where logits go through different operators: the groups of each class (`GroupSpan`) are
processed separately.

Shapes: `groups` is the number of groups that take part, `width` the number of tree slots in use (the window); N
particles per group, K draft tokens per round, V tokens in the vocabulary. Source: SMC-SD engine v0.1 section 3.3, v0.2
sections 3 to 5.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from swiftspec.backends.reference import resampling
from swiftspec.config import PopulationConfig
from swiftspec.model.batch import Batch
from swiftspec.params import SamplingParams
from swiftspec.runtime.runner import PREFILL_CHUNK_TOKENS, Runner
from swiftspec.smc.group_requests import GroupRequests
from swiftspec.smc.group_spans import GroupSpan, concatenate, penalise_spans
from swiftspec.smc.noise_streams import ParticleStreams
from swiftspec.smc.particles import Particles
from swiftspec.smc.verification import DraftedTokens, WeightedVerdict, join_verdicts, keeps_logits, verify_particles


@dataclass(frozen=True, slots=True)
class RoundContext:
    """Inputs of a round, the same for all its steps."""

    particles: Particles  # of the groups that take part
    spans: list[GroupSpan]
    width: int  # tree slots in use, rounded up to a mask width
    slots: Tensor  # [groups, N, K + 1], tree slots of the round's tokens
    kv_len: Tensor  # [sequences], cache slot at which each window ends; 0 if the group does not take part


@dataclass(frozen=True, slots=True)
class DraftedRound:
    """The draft tokens of a round, and what the verification needs of them."""

    tokens: Tensor  # [groups, N, K]
    log_q: Tensor  # [groups, N, K], log-probabilities of the tokens under q
    logits: list[list[Tensor]]  # per span: the draft's logits [rows, V] of each step that may be rejected
    pending_slots: Tensor  # [groups, N], tree slots of the pending tokens
    views: list[Tensor]  # K + 1 tree masks [groups, N, width]: of the pending token, then of each draft token
    counts: list[Tensor]  # K + 1 token counts [groups, N, V] of the text up to each of them; empty without penalties


class GroupRound:
    """Device side of a scheduler: the tensors of all groups, and the operators of a round on both models."""

    def __init__(self, target: Runner, draft: Runner, config: PopulationConfig, max_tokens: int) -> None:
        """`max_tokens`: maximum length of an answer."""
        device, groups = target.model.device, config.smc_groups
        self._target, self._draft, self._config = target, draft, config
        slots, resample = min(target.tree_slots, draft.tree_slots), target.ops.resample or resampling.resample
        self.particles = Particles(config, slots, max_tokens, device, resample)
        # every round adds at least one token, so there are at most max_tokens rounds
        self.streams = ParticleStreams(groups, config.particles, device, max_tokens)
        self.requests = GroupRequests(target, groups)
        self._by_count = [self.particles.first_groups(count) for count in range(groups + 1)]
        self._no_kv_len = torch.zeros(groups, dtype=torch.int64, device=device)
        self.header_len = 2 + self.particles.tokens.shape[-1]  # values per group in a result, without its slot states
        # all that a round reads or changes, except keys and values; their first dimension is the group
        changed = [*self.particles.state, *self.streams.state]
        self.tensors = [*changed, *self.requests.tensors]
        self.native_tensors = [*changed, *self.requests.native_tensors]  # as native rounds take them

    def open(
        self, group: int, prompt: Sequence[int], sampling: SamplingParams, stops: Collection[int], limit: int
    ) -> None:
        """Starts a request in the group at position `group`: N particles from `prompt`, whose tokens except the last
        are prefilled. `stops`: stop tokens. `limit`: maximum number of output tokens."""
        self.requests.open(group, prompt, sampling, stops)
        self.streams.seed(group, sampling.seed)
        self.particles.open(group, prompt[-1], len(prompt) - 1, limit)

    def rearrange(self, order: Sequence[int]) -> None:
        """Moves the group at position `order[i]` to position i, for every i."""
        moved = torch.tensor([pair for pair in enumerate(order) if pair[0] != pair[1]], device=self._no_kv_len.device)
        for tensor in self.tensors:
            tensor.index_copy_(0, moved[:, 0], tensor.index_select(0, moved[:, 1]))
        self.requests.rearrange(order)

    def compact(self, group: int, path: Sequence[int], keep: Sequence[int]) -> None:
        """Updates the group at position `group` after `ModelCache.commit_sequence(path, keep)` in both caches."""
        self.particles.compact(group, path, keep)
        self.requests.prefix[group] += len(path)

    def graph_key(self, width: int, groups: int) -> Hashable:
        """Returns the key of a captured round: the window of `width` tree slots, the operators of the first `groups`
        groups, and the `capture_bucket` of target and draft, which a captured round holds by value."""
        buckets = (each.ops.capture_bucket(_max_kv_len(each, width)) for each in (self._target, self._draft))
        return width, self.requests.classes(groups), *buckets

    @torch.inference_mode()  # saves a microsecond per operator
    def __call__(self, width: int, groups: int) -> Tensor:
        """Runs one round of the first `groups` groups. Never synchronises with the host.

        `width`: number of tree slots in each group's window, including those that the round allocates.

        Returns [groups, header_len + width] int64, to be read by the host. Per group: length of the common prefix, or
        -1 if logits or weights are not finite; number of finished particles; the tokens of particle 0; the state of
        each slot of the window (`Particles.slot_states`).
        """
        particles, config = self._by_count[groups], self._config
        spans, kv_len = self.requests.spans(groups), self._kv_len(groups, width)
        context = RoundContext(particles, spans, width, particles.new_slots(), kv_len)
        keys = self.streams.round_keys(particles.clock[:, None] + particles.steps)
        drafted = self._draft_tokens(context, keys)
        verdict = self._verify(context, self._score(context, drafted), drafted, next(keys))
        terms, stops = verdict.log_weight_increments, self.requests.stops[:groups]
        particles.append_round(drafted.tokens, verdict.accepted, verdict.bonus.clamp_min(0), terms, stops, width)
        particles.resample(config.ess_threshold, self.streams.resampling(particles.rounds), width)
        common = torch.where(verdict.not_finite(), -1, particles.common_lengths())
        header = torch.stack((common, particles.finished.sum(-1)), 1)
        return torch.cat((header, particles.tokens[:, 0], particles.slot_states(width)), 1)

    def _kv_len(self, groups: int, width: int) -> Tensor:
        """Returns for each cache sequence the slot at which its window ends, [sequences]; 0 for those that do not take
        part."""
        requests = self.requests
        return self._no_kv_len.index_copy(0, requests.sequences[:groups], requests.prefix[:groups] + width)

    def _draft_tokens(self, context: RoundContext, keys: Iterator[Tensor]) -> DraftedRound:
        """Samples K draft tokens per particle with K draft forwards, the first over the last two tokens of each
        particle, which have no draft KV. `keys`: noise keys [groups * N] of each draft step."""
        p, n = context.particles, context.particles.count
        vocab = self._target.vocab
        tail, last, pending = self._tail(context)
        count, deferred = self._config.smc_draft_tokens, self._config.deferred_bonus
        m = 2 if deferred else 1  # 1: the KV of the last draft token was computed at the end of its round
        tails = p.tail_tokens, p.tail_positions, tail
        unread, at, slots = (each[..., -m:].transpose(1, 2).contiguous() for each in tails)
        logits = self._forward(self._draft, context, unread, at, slots, torch.stack((last, pending)[-m:], 1))
        logits = logits.view(p.groups, m, n, -1)[:, -1].flatten(0, 1)
        views, tokens, log_q = [pending], list[Tensor](), list[Tensor]()
        kept: list[list[Tensor]] = [[] for _ in context.spans]
        counts = [p.counts(vocab)] if any(span.sampler.penalised for span in context.spans) else []
        for step in range(count):
            if step > 0:
                at = p.tail_positions[..., 1] + step
                logits = self._forward(self._draft, context, tokens[-1], at, context.slots[..., step - 1], views[-1])
            if counts:
                rows = logits.view(p.groups, n, -1)
                logits = penalise_spans(context.spans, rows, counts[-1]).flatten(0, 1)
            drawn, log = self._draw(context, logits, next(keys), step, kept)
            tokens.append(drawn.view(p.groups, n))
            log_q.append(log.view(p.groups, n))
            views.append(views[-1].scatter(-1, context.slots[..., step : step + 1], True))
            if counts:
                counts.append(counts[-1].scatter_add(-1, tokens[-1][..., None], torch.ones_like(counts[-1][..., :1])))
        if not deferred:
            at = p.tail_positions[..., 1] + count
            self._forward(self._draft, context, tokens[-1], at, context.slots[..., count - 1], views[-1])
        return DraftedRound(
            torch.stack(tokens, -1),
            torch.stack(log_q, -1).to(torch.float64),
            logits=kept,
            pending_slots=tail[..., 1],
            views=views,
            counts=counts,
        )

    def _draw(
        self, context: RoundContext, logits: Tensor, keys: Tensor, step: int, kept: Sequence[list[Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Samples a draft token from each row of raw logits, each span of groups with its own sampler. Returns the
        tokens [rows] and their log-probabilities [rows]. `kept`: per span, receives the processed logits that the
        verification needs."""
        drawn, log = list[Tensor](), list[Tensor]()
        for span, mine in zip(context.spans, kept, strict=True):
            rows = span.rows(context.particles.count)
            tokens, log_probs = span.sampler.draw(logits[rows], keys[rows])
            drawn.append(tokens.clamp_min_(0))  # -1 marks logits that are not finite: the weight is NaN
            log.append(log_probs)
            if keeps_logits(span.sampler, self._config, step):
                mine.append(span.sampler.tempered(logits[rows]))
        return concatenate(drawn), concatenate(log)

    def _tail(self, context: RoundContext) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the tree slots [groups, N, 2] of the last two tokens of each particle, which have no draft KV, and
        the tree masks [groups, N, width] of the first and of the second of them.

        A finished particle has freed its slots, so it writes to one of its new slots, which is never read.
        """
        p = context.particles
        window = p.mask[..., : context.width]
        tail = torch.where(p.finished[..., None], context.slots[..., -1:], p.tail_slots)
        last, pending = tail[..., :1], tail[..., 1:]
        # right after the fan-out both are the prompt's last token
        return tail, window.scatter(-1, pending, False).scatter(-1, last, True), window.scatter(-1, pending, True)

    def _score(self, context: RoundContext, drafted: DraftedRound) -> Tensor:
        """Runs the target over pending and draft tokens. Returns logits [groups, K + 1, N, at least V], with the
        penalties applied if a request has any."""
        p = context.particles
        tokens = torch.cat((p.tail_tokens[..., 1:], drafted.tokens), -1).transpose(1, 2)
        positions = p.tail_positions[:, None, :, 1] + p.steps[:, None]
        slots = torch.cat((drafted.pending_slots[..., None], context.slots[..., :-1]), -1).transpose(1, 2)
        logits = self._forward(self._target, context, tokens, positions, slots, torch.stack(drafted.views, 1))
        logits = logits.view(p.groups, p.step, p.count, -1)
        return penalise_spans(context.spans, logits, torch.stack(drafted.counts, 1)) if drafted.counts else logits

    def _verify(
        self, context: RoundContext, logits: Tensor, drafted: DraftedRound, bonus_keys: Tensor
    ) -> WeightedVerdict:
        """Verifies the draft tokens, each span of groups with its own sampler. `logits`: the target's. `bonus_keys`:
        noise keys of the token after the draft tokens."""
        found: list[WeightedVerdict] = []
        for span, kept in zip(context.spans, drafted.logits, strict=True):
            some = span.groups
            mine = DraftedTokens(
                drafted.tokens[some],
                drafted.log_q[some],
                kept,
                bonus_keys[span.rows(context.particles.count)],
                partial(self._uniforms, context, some),
            )
            found.append(verify_particles(span.sampler, self._config, logits[some], mine))
        return join_verdicts(found)

    def _uniforms(self, context: RoundContext, groups: slice, count: int) -> Tensor:
        clock = context.particles.clock[:, None] + context.particles.steps[:count]
        return self.streams.uniforms(clock)[groups]

    def _forward(
        self, runner: Runner, context: RoundContext, tokens: Tensor, positions: Tensor, slots: Tensor, mask: Tensor
    ) -> Tensor:
        """Runs a model over rows of all groups, whose tree slots are allocated, and returns logits [rows, at least V].

        `tokens`, `positions`, `slots`: [groups, ...], equally many rows for every group.
        `mask`: [groups, ..., width], over the tree slots of the window.

        The rows of a group are in topological order, so they can be split into chunks. The window contains the tree
        slots 0..width - 1; slots in it that are not allocated are masked for all rows.
        """
        began, groups = time.perf_counter(), len(tokens)
        slots = slots.reshape(groups, -1)
        rows, m = slots.numel(), slots.shape[1]
        slots = (slots + self.requests.prefix[:groups, None]).flatten()
        sequence = self.requests.sequences[:groups].repeat_interleave(m)
        tokens, positions, mask = tokens.flatten(), positions.flatten(), mask.reshape(rows, context.width)
        parts: list[Tensor] = []
        ranks = runner.model.group
        for start in range(0, rows, PREFILL_CHUNK_TOKENS):
            chunk = slice(start, start + PREFILL_CHUNK_TOKENS)
            batch = Batch(
                tokens[chunk],
                positions[chunk],
                slots=slots[chunk],
                mask=mask[chunk],
                sequence=sequence[chunk],
                kv_len=context.kv_len,
                max_kv_len=_max_kv_len(runner, context.width),
            )
            logits = runner.model.forward(batch, runner.cache).logits
            assert logits is not None
            parts.append(logits if ranks is None else torch.cat(ranks.all_gather(logits).unbind(0), 1))
        runner.record_step(began, rows)
        return concatenate(parts)


def _max_kv_len(runner: Runner, width: int) -> int:
    """Returns the largest slot at which a window of `width` tree slots ends. When a round is launched, the prefixes of
    the cache are those of the tensors, since both change in the same calls."""
    return max(runner.cache.prefix_len) + width
