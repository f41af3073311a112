"""One round of all groups on the device: K draft forwards, one target forward, weights, bonus token, resampling; no
host work.

A round has the same shape whatever it samples, and tensors on the device hold its state, so it never synchronises with
the host. Everything that it reads and writes stays at fixed addresses, so that a CUDA graph can capture it: one graph
per window width and number of groups.

The groups that take part are the first ones in every tensor, ordered by cache sequence. They form one flat batch,
ordered by group, then step, then particle. Each forward runs over the whole batch, and so does all later processing,
except where requests have different logits parameters: then each run of consecutive groups with equal parameters
(`GroupSpan`) is processed separately.

Shapes: `groups` is the number of groups that take part, `width` the number of tree slots in use (the window); N
particles per group, K draft tokens per round, V tokens in the vocabulary. Source: SMC-SD engine v0.1 section 3.3, v0.2
sections 3 to 5; smc/weights.py derives the distribution.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat

import torch
from torch import Tensor

from swiftspec.backends.reference import resampling
from swiftspec.backends.reference.resampling import Resample
from swiftspec.config import PopulationConfig
from swiftspec.model.batch import Batch
from swiftspec.params import SamplingParams
from swiftspec.runtime.executors.graph import logits_key
from swiftspec.runtime.runner import PREFILL_CHUNK_TOKENS, Runner
from swiftspec.smc.logits_processor import GroupSpan, LogitsProcessor, concatenate, group_spans, penalise_spans
from swiftspec.smc.noise_streams import ParticleStreams
from swiftspec.smc.particles import Particles
from swiftspec.smc.verification import DraftedTokens, RoundVerdict, verify_round


@dataclass(frozen=True, slots=True)
class RoundContext:
    """Inputs of a round, the same for all its steps."""

    particles: Particles  # the groups that take part
    spans: list[GroupSpan]
    width: int  # tree slots in use, rounded up to a mask width
    slots: Tensor  # [groups, N, K + 1], tree slots of the round's tokens
    kv_len: Tensor  # [sequences], cache slot at which each window ends; 0 if the group does not take part


@dataclass(frozen=True, slots=True)
class DraftChains:
    """The draft tokens of a round, one chain per particle, and what the verification needs of them."""

    tokens: Tensor  # [groups, N, K]
    log_q: Tensor  # [groups, N, K], log-probabilities of the tokens under q
    logits: list[list[Tensor]]  # per span: the draft's logits [rows, V] of each step that may be rejected
    keys: list[Tensor | None]  # noise keys [groups * N] of each step with coupled verification, else empty
    pending_slots: Tensor  # [groups, N], tree slots of the pending tokens
    views: list[Tensor]  # K + 1 tree masks [groups, N, width]: of the pending token, then of each draft token
    counts: list[Tensor]  # K + 1 token counts [groups, N, V] of the text up to each of them; empty without penalties


class PopulationRound:
    """Device side of a population: the tensors of all groups and their noise, and the operators of a round on both
    models."""

    def __init__(self, target: Runner, draft: Runner, config: PopulationConfig, max_tokens: int) -> None:
        vocab, groups, device = target.vocab, config.smc_groups, target.model.device
        self._target, self._draft, self._config, self._vocab = target, draft, config, vocab
        slots = min(target.tree_slots, draft.tree_slots)
        # optional operator: backends without it use the reference implementation
        resample: Resample = getattr(target.ops, "resample", resampling.resample)
        shape = groups, config.particles, config.smc_draft_tokens, slots, max_tokens
        self.particles = Particles(*shape, device, resample)
        self._by_count = [self.particles.first_groups(count) for count in range(groups + 1)]
        # every round adds at least one token, so there are at most max_tokens rounds
        self.streams = ParticleStreams(groups, config.particles, device, max_tokens)
        self._prefix = torch.zeros(groups, dtype=torch.int64, device=device)  # prefix lengths, equal in both caches
        self._sequences = torch.arange(groups, device=device)
        self._stops = torch.zeros(groups, vocab, dtype=torch.bool, device=device)
        self._prompts = torch.zeros_like(self._stops)  # the tokens of each prompt, for penalties
        self._processors: list[LogitsProcessor | None] = [None] * groups
        self._sampling_spans: dict[
            int, list[tuple[int, float, Tensor | None]]
        ] = {}  # cache of `sampling_spans`, by number of groups
        self._ticks = torch.arange(config.smc_draft_tokens + 1, device=device)
        self._no_kv_len = torch.zeros(groups, dtype=torch.int64, device=device)
        books = [self._prefix, self._sequences, self._stops]
        self._header_len = 3 + self.particles.tokens.shape[-1]
        self._tensors = [*self.particles.state, *self.streams.state, *books]

    def open(
        self, group: int, prompt: Sequence[int], sampling: SamplingParams, stops: Collection[int], limit: int
    ) -> None:
        """Starts a request in the group at position `group`: fans out N particles from `prompt`, whose tokens except
        the last are prefilled. `stops`: stop tokens. `limit`: maximum number of output tokens."""
        key = logits_key(sampling)
        alike = [processor for processor in self._processors if processor is not None and processor.key == key]
        # reuse an equal processor, since graphs have captured its tensors
        processor = alike[0] if alike else LogitsProcessor(sampling, self._vocab, self._stops.device, self._target.ops)
        self._processors[group] = processor
        self._sampling_spans.clear()
        self.streams.seed(group, sampling.seed)
        self._stops[group] = False
        known = torch.tensor([token for token in stops if token < self._vocab], dtype=torch.int64)
        self._stops[group, known.to(self._stops.device)] = True
        self._prompts[group] = False
        self._prompts[group, torch.tensor(prompt, device=self._prompts.device)] = True
        self._prefix[group].fill_(len(prompt) - 1)
        self.particles.fan_out(group, prompt[-1], len(prompt) - 1, limit)

    def rearrange(self, order: Sequence[int]) -> None:
        """Moves the group at position `order[i]` to position i, for every i."""
        moved = torch.tensor([pair for pair in enumerate(order) if pair[0] != pair[1]], device=self._prefix.device)
        for tensor in (*self.tensors, self._prompts):
            tensor.index_copy_(0, moved[:, 0], tensor.index_select(0, moved[:, 1]))
        self._processors = [self._processors[place] for place in order]
        self._sampling_spans.clear()

    def compact(self, group: int, path: Sequence[int], keep: Sequence[int]) -> None:
        """Updates the group at position `group` after `ModelCache.commit_sequence(path, keep)` in both caches."""
        self.particles.compact(group, path, keep)
        self._prefix[group] += len(path)

    def rejects(self, sampling: SamplingParams) -> bool:
        """Returns whether a round may reject draft tokens of a request with these parameters, so that its particles
        grow by fewer than K + 1 tokens."""
        return sampling.filtered or self._config.smc_exact > 0 or self._config.chains is not None

    @property
    def state(self) -> list[Tensor]:
        """The tensors that a round changes, except keys and values, which a repeated round overwrites."""
        return self.particles.state

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that a round without penalties reads or changes, except keys and values; their first dimension is
        the group."""
        return self._tensors

    @property
    def header_len(self) -> int:
        """Number of values per group in the result of a round, apart from one per slot of the window."""
        return self._header_len

    def sampling_spans(self, groups: int) -> list[tuple[int, float, Tensor | None]]:
        """Returns (number of groups, temperature, bias) for each run of consecutive groups with equal logits parameters
        among the first `groups` groups. These must have no filters and no penalties."""
        if groups not in self._sampling_spans:
            processors = [
                (span.groups.stop - span.groups.start, span.processor)
                for span in group_spans(self._processors[:groups])
            ]
            assert not any(processor.filtered or processor.penalised for _, processor in processors)
            self._sampling_spans[groups] = [
                (count, processor.temperature, processor.bias) for count, processor in processors
            ]
        return self._sampling_spans[groups]

    @property
    def key(self) -> Hashable:
        """Key of captured graphs: rounds with equal keys run the same operators on the same tensors."""
        return tuple((span.processor, span.groups.stop) for span in group_spans(self._processors))

    @torch.inference_mode()  # saves a microsecond per operator
    def __call__(self, width: int, groups: int) -> Tensor:
        """Runs one round of the first `groups` groups. Never synchronises with the host.

        `width`: number of tree slots in each group's window, including those that the round allocates.

        Returns [groups, header_len + width] int64, to be read by the host. Per group: length of the common prefix, or
        -1 if logits or weights are not finite; number of finished particles; number of accepted draft tokens of all
        particles; the tokens of row 0; the state of each slot of the window (`Particles.slot_states`).
        """
        p = self._by_count[groups]
        kv_len = self._no_kv_len.index_copy(0, self._sequences[:groups], self._prefix[:groups] + width)
        context = RoundContext(p, group_spans(self._processors[:groups]), width, p.new_slots(), kv_len)
        keys = self._keys(context)
        chains = self._draft_tokens(context, keys)
        verdict = self._verify(context, self._score(context, chains), chains, next(keys))
        broken = (verdict.bonus < 0).any(-1) | verdict.log_weight_increments.isnan().flatten(1).any(-1)
        p.append_round(
            chains.tokens,
            verdict.accepted,
            verdict.bonus.clamp_min(0),
            verdict.log_weight_increments,
            self._stops[:groups],
            width,
        )
        if self._config.chains is None:
            p.resample(self._config.ess_threshold, self.streams.resampling(p.rounds), width)
        books = torch.stack(
            (torch.where(broken, -1, p.common_lengths()), p.finished.sum(-1), verdict.accepted.sum(-1)), 1
        )
        return torch.cat((books, p.tokens[:, 0], p.slot_states(width)), 1)

    def _keys(self, context: RoundContext) -> Iterator[Tensor | None]:
        """Yields the noise keys [groups * N] of each draft step, then those of the token after the draft tokens. Chains
        with coupled verification get the keys of autoregressive decoding, so that the draft samples with the target's
        noise, or None if all requests are greedy."""
        p = context.particles
        if self._config.chains != "match":
            return self.streams.round_keys(p.clock[:, None] + self._ticks)
        if all(span.processor.greedy for span in context.spans):
            return repeat(None)
        return self.streams.target_keys(p.tail_positions[..., 1:] + 1 + self._ticks)

    def _draft_tokens(self, context: RoundContext, keys: Iterator[Tensor | None]) -> DraftChains:
        """Samples K draft tokens per row with K draft forwards, the first over the last two tokens of each row, which
        have no draft KV."""
        p, n = context.particles, context.particles.count
        tail, last, pending = self._tail(context)
        count, deferred = self._config.smc_draft_tokens, self._config.deferred_bonus
        m = 2 if deferred else 1  # 1: the KV of the last draft token was computed at the end of its round
        tails = p.tail_tokens, p.tail_positions, tail
        unread, at, slots = (each[..., -m:].transpose(1, 2).contiguous() for each in tails)
        logits = self._forward(self._draft, context, unread, at, slots, torch.stack((last, pending)[-m:], 1))
        logits = logits.view(p.groups, m, n, -1)[:, -1].flatten(0, 1)
        views, tokens, log_q = [pending], list[Tensor](), list[Tensor]()
        shaped: list[list[Tensor]] = [[] for _ in context.spans]
        drawn_by = list[Tensor | None]()
        counts = [p.counts(self._vocab)] if any(span.processor.penalised for span in context.spans) else []
        for step in range(count):
            if step > 0:
                at = p.tail_positions[..., 1] + step
                logits = self._forward(self._draft, context, tokens[-1], at, context.slots[..., step - 1], views[-1])
            if counts:
                logits = penalise_spans(context.spans, logits.view(p.groups, n, -1), self._prompts, counts[-1]).flatten(
                    0, 1
                )
            given, drawn, log = next(keys), list[Tensor](), list[Tensor]()
            if self._config.chains == "match":
                drawn_by.append(given)
            for span, kept in zip(context.spans, shaped, strict=True):
                mine = span.rows(n)
                token, log_of = self._draw(span.processor, logits[mine], None if given is None else given[mine])
                drawn.append(token)
                log.append(log_of)
                if self._keeps_logits(span.processor, step):
                    kept.append(span.processor.tempered(logits[mine]))
            tokens.append(concatenate(drawn).view(p.groups, n))
            log_q.append(concatenate(log).view(p.groups, n))
            views.append(views[-1].scatter(-1, context.slots[..., step : step + 1], True))
            if counts:
                counts.append(counts[-1].scatter_add(-1, tokens[-1][..., None], torch.ones_like(counts[-1][..., :1])))
        if not deferred:
            at = p.tail_positions[..., 1] + count
            self._forward(self._draft, context, tokens[-1], at, context.slots[..., count - 1], views[-1])
        log = torch.stack(log_q, -1).to(torch.float64)
        return DraftChains(torch.stack(tokens, -1), log, shaped, drawn_by, tail[..., 1], views, counts)

    def _draw(self, processor: LogitsProcessor, logits: Tensor, keys: Tensor | None) -> tuple[Tensor, Tensor]:
        """Samples a draft token from each row. Returns the tokens [rows] and their log-probabilities [rows], which are
        0 for coupled verification, where they are not used."""
        if self._config.chains == "match":
            tokens = processor.draw_autoregressive(logits, keys)
            tokens = tokens.clamp_min_(0)  # -1 marks logits that are not finite; any token is a valid proposal
            return tokens, torch.zeros_like(tokens, dtype=torch.float64)
        assert keys is not None
        tokens, log_probs = processor.draw(logits, keys)
        return tokens.clamp_min_(
            0
        ), log_probs  # -1 marks logits that are not finite: its weight is NaN, or it is rejected

    def _keeps_logits(self, processor: LogitsProcessor, step: int) -> bool:
        """Returns whether the verification of a draft step needs the draft's logits."""
        outside = processor.filtered and self._config.chains is None
        return outside or step < self._config.num_rejection_tokens

    def _tail(self, context: RoundContext) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the tree slots [groups, N, 2] of the last two tokens of each row, which have no draft KV, and the
        tree masks [groups, N, width] of the first and of the second of them.

        A finished row has freed its slots, so it writes to one of its new slots, which is never read.
        """
        p = context.particles
        window = p.mask[..., : context.width]
        tail = torch.where(p.finished[..., None], context.slots[..., -1:], p.tail_slots)
        last, pending = tail[..., :1], tail[..., 1:]
        # right after the fan-out both are the prompt's last token
        return tail, window.scatter(-1, pending, False).scatter(-1, last, True), window.scatter(-1, pending, True)

    def _score(self, context: RoundContext, chains: DraftChains) -> Tensor:
        """Runs the target over pending and draft tokens. Returns logits [groups, K + 1, N, at least V], with the
        penalties applied if a request has any."""
        p = context.particles
        logits = self._forward(
            self._target,
            context,
            torch.cat((p.tail_tokens[..., 1:], chains.tokens), -1).transpose(1, 2),
            p.tail_positions[:, None, :, 1] + self._ticks[:, None],
            torch.cat((chains.pending_slots[..., None], context.slots[..., :-1]), -1).transpose(1, 2),
            torch.stack(chains.views, 1),
        )
        logits = logits.view(p.groups, p.step, p.count, -1)
        if not chains.counts:
            return logits
        return penalise_spans(context.spans, logits, self._prompts, torch.stack(chains.counts, 1))

    def _verify(self, context: RoundContext, logits: Tensor, chains: DraftChains, last: Tensor | None) -> RoundVerdict:
        """Verifies the draft tokens, each span of groups with its own logits processor. `logits`: the target's. `last`:
        noise keys of the token after the draft tokens."""
        found: list[RoundVerdict] = []
        keys = [*chains.keys, last]
        for span, kept in zip(context.spans, chains.logits, strict=True):
            some = span.groups
            uniforms = partial(self._uniforms, context, some)
            rows = span.rows(context.particles.count)
            mine = [None if each is None else each[rows] for each in keys]
            drafted = DraftedTokens(chains.tokens[some], chains.log_q[some], kept, mine, uniforms)
            found.append(verify_round(span.processor, self._config, logits[some], drafted))
        if len(found) == 1:
            return found[0]
        names = ("accepted", "bonus", "log_weight_increments")
        return RoundVerdict(*(concatenate([getattr(each, name) for each in found]) for name in names))

    def _uniforms(self, context: RoundContext, groups: slice) -> Tensor:
        clock = context.particles.clock[:, None] + self._ticks[: self._config.num_rejection_tokens]
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
        began, groups = time.perf_counter(), context.particles.groups
        slots = slots.reshape(groups, -1)
        rows, m = slots.numel(), slots.shape[1]
        slots = (slots + self._prefix[:groups, None]).flatten()
        sequence = self._sequences[:groups].repeat_interleave(m)
        tokens, positions, mask = tokens.flatten(), positions.flatten(), mask.reshape(rows, context.width)
        parts: list[Tensor] = []
        group = runner.model.group
        for start in range(0, rows, PREFILL_CHUNK_TOKENS):
            some = slice(start, start + PREFILL_CHUNK_TOKENS)
            batch = Batch(tokens[some], positions[some], slots[some], mask[some], sequence[some], context.kv_len)
            logits = runner.model.forward(batch, runner.cache).logits
            assert logits is not None
            parts.append(logits if group is None else torch.cat(group.all_gather(logits).unbind(0), 1))
        runner.record_step(began, rows)
        return concatenate(parts)
