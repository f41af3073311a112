"""One round of all groups on the device: K draft forwards, one target forward, verification; no host work.

A round has the same shape whatever it samples, and tensors on the device hold its state, so it never synchronises with
the host. Everything that it reads and writes stays at fixed addresses, so that a CUDA graph can capture it: one graph
per window width and number of groups.

The groups that take part are the first ones in every tensor, ordered by cache sequence. They form one flat batch,
ordered by group, then step, then row. Each forward runs over the whole batch, and so does all later processing,
except where requests have different logits parameters: then each run of consecutive groups with equal parameters
(`GroupSpan`) is processed separately.

Shapes: `groups` is the number of groups that take part, `width` the number of tree slots in use (the window); N rows
per group, K draft tokens per round, V tokens in the vocabulary. Source: SMC-SD engine v0.1 section 3.3, v0.2 sections
3 to 5.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from swiftspec.batching.group_method import DraftedTokens, GroupMethod, RoundVerdict, join_verdicts
from swiftspec.batching.group_spans import GroupSpan, concatenate, group_spans, penalise_spans
from swiftspec.batching.rows import GroupRows
from swiftspec.batching.sequence_group import CompanionSequence
from swiftspec.model.batch import Batch
from swiftspec.params import SamplingParams
from swiftspec.runtime.executors.population_rounds import SamplingSpan
from swiftspec.runtime.runner import PREFILL_CHUNK_TOKENS, Runner
from swiftspec.sampling.guidance import guided_logits
from swiftspec.sampling.row_sampler import RowSampler, row_sampler_key


@dataclass(frozen=True, slots=True)
class RoundContext:
    """Inputs of a round, the same for all its steps."""

    rows: GroupRows  # of the groups that take part
    spans: list[GroupSpan]
    width: int  # tree slots in use, rounded up to a mask width
    slots: Tensor  # [groups, N, K + 1], tree slots of the round's tokens
    kv_len: Tensor  # [sequences], cache slot at which each window ends; 0 if the group does not take part


@dataclass(frozen=True, slots=True)
class DraftChains:
    """The draft tokens of a round, one chain per row, and what the verification needs of them."""

    tokens: Tensor  # [groups, N, K]
    log_q: Tensor  # [groups, N, K], log-probabilities of the tokens under q
    logits: list[list[Tensor]]  # per span: the draft's logits [rows, V] of each step that may be rejected
    keys: list[Tensor | None]  # noise keys [groups * N] of each step
    pending_slots: Tensor  # [groups, N], tree slots of the pending tokens
    views: list[Tensor]  # K + 1 tree masks [groups, N, width]: of the pending token, then of each draft token
    counts: list[Tensor]  # K + 1 token counts [groups, N, V] of the text up to each of them; empty without penalties


class GroupRound:
    """Device side of a scheduler: the tensors of all groups, and the operators of a round on both models."""

    def __init__(self, target: Runner, draft: Runner, method: GroupMethod[Any, Any]) -> None:
        vocab, shape, device = target.vocab, method.shape, target.model.device
        groups = shape.max_groups
        self._target, self._draft, self._method, self._vocab = target, draft, method, vocab
        self._by_count = [method.rows.first_groups(count) for count in range(groups + 1)]
        self._prefix = torch.zeros(groups, dtype=torch.int64, device=device)  # prefix lengths, equal in both caches
        self._sequences = torch.arange(groups, device=device)
        self._stops = torch.zeros(groups, vocab, dtype=torch.bool, device=device)
        self._prompts = torch.zeros_like(self._stops)  # the tokens of each prompt, for penalties
        self._suppressed = torch.zeros_like(self._stops)  # the tokens that `min_tokens` excludes
        self._samplers: list[RowSampler | None] = [None] * groups
        self._companions: list[CompanionSequence | None] = [None] * groups
        self.order = [*range(groups)]  # cache sequence of the group at each position of the tensors
        # cache of `sampling_spans`, by number of groups
        self._sampling_spans: dict[int, list[SamplingSpan]] = {}
        self._no_kv_len = torch.zeros(groups, dtype=torch.int64, device=device)
        self._header_len = 3 + method.rows.tokens.shape[-1]
        self._tensors = [
            *method.rows.state,
            *method.streams.state,
            self._prefix,
            self._sequences,
            self._stops,
            self._prompts,
            self._suppressed,
        ]

    def open(
        self,
        group: int,
        prompt: Sequence[int],
        sampling: SamplingParams,
        stops: Collection[int],
        limit: int,
        companion: CompanionSequence | None = None,
    ) -> None:
        """Starts a request in the group at position `group`: N rows from `prompt`, whose tokens except the last are
        prefilled. `stops`: stop tokens. `limit`: maximum number of output tokens. `companion`: the unconditional
        sequence of a guided request, which is prefilled too."""
        key = row_sampler_key(sampling)
        alike = (sampler for sampler in self._samplers if sampler is not None and sampler.key == key)
        # reuse an equal sampler, since graphs have captured its tensors
        self._samplers[group] = next(alike, None) or RowSampler(
            sampling, self._vocab, self._stops.device, self._target.ops
        )
        self._sampling_spans.clear()
        self._method.streams.seed(group, sampling.seed)
        for table, tokens in (
            (self._stops, stops),
            (self._suppressed, {*self._target.eos_token_ids, *sampling.stop_token_ids}),
        ):
            table[group] = False
            known = torch.tensor([token for token in tokens if token < self._vocab], dtype=torch.int64)
            table[group, known.to(table.device)] = True
        self._prompts[group] = False
        self._prompts[group, torch.tensor(prompt, device=self._prompts.device)] = True
        self._prefix[group].fill_(len(prompt) - 1)
        self._companions[group] = companion
        if companion is not None:
            self._prefix[self._place_of(companion)].fill_(len(companion.guidance.tokens) - 1)
        self._method.rows.open(group, prompt[-1], len(prompt) - 1, limit)

    def rearrange(self, order: Sequence[int]) -> None:
        """Moves the group at position `order[i]` to position i, for every i."""
        moved = torch.tensor([pair for pair in enumerate(order) if pair[0] != pair[1]], device=self._prefix.device)
        for tensor in self.tensors:
            tensor.index_copy_(0, moved[:, 0], tensor.index_select(0, moved[:, 1]))
        self._samplers = [self._samplers[place] for place in order]
        self._companions = [self._companions[place] for place in order]
        self.order = [self.order[place] for place in order]
        self._sampling_spans.clear()

    def compact(self, group: int, path: Sequence[int], keep: Sequence[int]) -> None:
        """Updates the group at position `group` after `ModelCache.commit_sequence(path, keep)` in the caches of its
        sequences."""
        self._method.rows.compact(group, path, keep)
        self._prefix[group] += len(path)
        companion = self._companions[group]
        if companion is not None:
            self._prefix[self._place_of(companion)] += len(path)

    def _place_of(self, companion: CompanionSequence) -> int:
        """Returns the position of a companion sequence in the tensors; no group has its rows there."""
        return self.order.index(companion.sequence)

    @property
    def state(self) -> list[Tensor]:
        """The tensors that a round changes, except keys and values, which a repeated round overwrites."""
        return self._method.rows.state

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that a round reads or changes, except keys and values; their first dimension is the group."""
        return self._tensors

    @property
    def header_len(self) -> int:
        """Number of values per group in the result of a round, apart from one per slot of the window."""
        return self._header_len

    def sampling_spans(self, groups: int) -> list[SamplingSpan]:
        """Returns the sampling parameters of each run of consecutive groups with equal ones among the first `groups`
        groups."""
        if groups not in self._sampling_spans:
            self._sampling_spans[groups] = [span.native() for span in group_spans(self._samplers[:groups])]
        return self._sampling_spans[groups]

    def buckets(self, width: int) -> Hashable:
        """Returns the `capture_bucket` of target and draft for a round over a window of `width` tree slots."""
        return tuple(each.ops.capture_bucket(_max_kv_len(each, width)) for each in (self._target, self._draft))

    @property
    def key(self) -> Hashable:
        """Key of captured graphs: rounds with equal keys run the same operators on the same tensors."""
        return tuple((span.sampler, span.groups.stop) for span in group_spans(self._samplers))

    @torch.inference_mode()  # saves a microsecond per operator
    def __call__(self, width: int, groups: int) -> Tensor:
        """Runs one round of the first `groups` groups. Never synchronises with the host.

        `width`: number of tree slots in each group's window, including those that the round allocates.

        Returns [groups, header_len + width] int64, to be read by the host. Per group: length of the common prefix, or
        -1 if logits or weights are not finite; number of finished rows; number of accepted draft tokens of all
        rows; the tokens of row 0; the state of each slot of the window (`GroupRows.slot_states`).
        """
        rows, method = self._by_count[groups], self._method
        spans = group_spans(self._samplers[:groups])
        context = RoundContext(rows, spans, width, rows.new_slots(), self._kv_len(slice(groups), width))
        keys = method.noise_keys(rows, spans)
        chains = self._draft_tokens(context, keys)
        verdict = self._verify(context, self._score(context, chains), chains, next(keys))
        not_finite = verdict.not_finite()
        method.append(rows, chains.tokens, verdict, self._stops[:groups], width)
        books = torch.stack(
            (torch.where(not_finite, -1, rows.common_lengths()), rows.finished.sum(-1), verdict.accepted.sum(-1)), 1
        )
        return torch.cat((books, rows.tokens[:, 0], rows.slot_states(width)), 1)

    def _kv_len(self, places: Tensor | slice, width: int) -> Tensor:
        """Returns for each cache sequence the slot at which its window ends, [sequences]; 0 for those that are not at
        `places` in the tensors."""
        return self._no_kv_len.index_copy(0, self._sequences[places], self._prefix[places] + width)

    def _draft_tokens(self, context: RoundContext, keys: Iterator[Tensor | None]) -> DraftChains:
        """Samples K draft tokens per row with K draft forwards, the first over the last two tokens of each row, which
        have no draft KV."""
        p, n = context.rows, context.rows.count
        tail, last, pending = self._tail(context)
        count, deferred = self._method.shape.draft_tokens, self._method.shape.deferred_bonus
        m = 2 if deferred else 1  # 1: the KV of the last draft token was computed at the end of its round
        tails = p.tail_tokens, p.tail_positions, tail
        unread, at, slots = (each[..., -m:].transpose(1, 2).contiguous() for each in tails)
        logits = self._forward(self._draft, context, unread, at, slots, torch.stack((last, pending)[-m:], 1))
        logits = logits.view(p.groups, m, n, -1)[:, -1].flatten(0, 1)
        views, tokens, log_q = [pending], list[Tensor](), list[Tensor]()
        shaped: list[list[Tensor]] = [[] for _ in context.spans]
        drawn_by = list[Tensor | None]()
        counts = [p.counts(self._vocab)] if any(span.sampler.penalised for span in context.spans) else []
        for step in range(count):
            if step > 0:
                at = p.tail_positions[..., 1] + step
                logits = self._forward(self._draft, context, tokens[-1], at, context.slots[..., step - 1], views[-1])
            if counts:
                rows = logits.view(p.groups, n, -1)
                logits = penalise_spans(context.spans, rows, self._prompts, counts[-1], self._suppressed).flatten(0, 1)
            given, drawn, log = next(keys), list[Tensor](), list[Tensor]()
            drawn_by.append(given)
            for span, kept in zip(context.spans, shaped, strict=True):
                mine = span.rows(n)
                noise = None if given is None else given[mine]
                token, log_of = self._method.draw(span.sampler, logits[mine], noise)
                drawn.append(token)
                log.append(log_of)
                if self._method.keeps_logits(span.sampler, step):
                    kept.append(span.sampler.tempered(logits[mine]))
            tokens.append(concatenate(drawn).view(p.groups, n))
            log_q.append(concatenate(log).view(p.groups, n))
            views.append(views[-1].scatter(-1, context.slots[..., step : step + 1], True))
            if counts:
                counts.append(counts[-1].scatter_add(-1, tokens[-1][..., None], torch.ones_like(counts[-1][..., :1])))
        if not deferred:
            at = p.tail_positions[..., 1] + count
            self._forward(self._draft, context, tokens[-1], at, context.slots[..., count - 1], views[-1])
        log = torch.stack(log_q, -1).to(torch.float64)
        return DraftChains(
            torch.stack(tokens, -1),
            log,
            logits=shaped,
            keys=drawn_by,
            pending_slots=tail[..., 1],
            views=views,
            counts=counts,
        )

    def _tail(self, context: RoundContext) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the tree slots [groups, N, 2] of the last two tokens of each row, which have no draft KV, and the
        tree masks [groups, N, width] of the first and of the second of them.

        A finished row has freed its slots, so it writes to one of its new slots, which is never read.
        """
        p = context.rows
        window = p.mask[..., : context.width]
        tail = torch.where(p.finished[..., None], context.slots[..., -1:], p.tail_slots)
        last, pending = tail[..., :1], tail[..., 1:]
        # right after the fan-out both are the prompt's last token
        return tail, window.scatter(-1, pending, False).scatter(-1, last, True), window.scatter(-1, pending, True)

    def _score(self, context: RoundContext, chains: DraftChains) -> Tensor:
        """Runs the target over pending and draft tokens. Returns logits [groups, K + 1, N, at least V], with the
        penalties applied if a request has any."""
        p = context.rows
        inputs = (
            torch.cat((p.tail_tokens[..., 1:], chains.tokens), -1).transpose(1, 2),
            p.tail_positions[:, None, :, 1] + p.steps[:, None],
            torch.cat((chains.pending_slots[..., None], context.slots[..., :-1]), -1).transpose(1, 2),
            torch.stack(chains.views, 1),
        )
        guided = {place: each for place, each in enumerate(self._companions[: p.groups]) if each is not None}
        if guided:
            logits = self._guided_logits(context, inputs, guided)
        else:
            logits = self._forward(self._target, context, *inputs).view(p.groups, p.step, p.count, -1)
        if not chains.counts:
            return logits
        return penalise_spans(context.spans, logits, self._prompts, torch.stack(chains.counts, 1), self._suppressed)

    def _guided_logits(
        self, context: RoundContext, inputs: tuple[Tensor, ...], guided: Mapping[int, CompanionSequence]
    ) -> Tensor:
        """Runs the target over the rows of all groups, and over those of the `guided` groups in their companion
        sequences too, in one batch. Returns logits [groups, K + 1, N, at least V], which are combined for guided
        groups. `inputs`: tokens, positions, tree slots and masks of the rows, [groups, K + 1, N, ...]."""
        groups, device = context.rows.groups, self._prefix.device

        def column(values: Iterable[int]) -> Tensor:
            return torch.tensor([*values], device=device)[:, None, None]

        companions = [*guided.values()]
        tokens, positions, slots, mask = (each[column(guided).flatten()] for each in inputs)
        positions = positions + column(each.offset for each in companions)
        # the two sequences may begin with different roots
        root_positions = column(len(each.guidance.tokens) - 1 for each in companions)
        roots = column(each.guidance.tokens[-1] for each in companions)
        tokens = torch.where(positions == root_positions, roots, tokens)
        places = torch.tensor([*range(groups), *map(self._place_of, companions)], device=device)
        both = [torch.cat(pair) for pair in zip(inputs, (tokens, positions, slots, mask), strict=True)]
        logits = self._forward(self._target, context, *both, places=places)
        logits = logits.view(len(places), context.rows.step, context.rows.count, -1)
        for row, (place, companion) in enumerate(guided.items(), groups):
            pair, scale = torch.stack((logits[place], logits[row])), companion.guidance.scale
            logits[place] = guided_logits(pair, scale).squeeze(0)
        return logits[:groups]

    def _verify(self, context: RoundContext, logits: Tensor, chains: DraftChains, last: Tensor | None) -> RoundVerdict:
        """Verifies the draft tokens, each span of groups with its own sampler. `logits`: the target's. `last`:
        noise keys of the token after the draft tokens."""
        found: list[RoundVerdict] = []
        keys = [*chains.keys, last]
        for span, kept in zip(context.spans, chains.logits, strict=True):
            some = span.groups
            uniforms = partial(self._uniforms, context, some)
            rows = span.rows(context.rows.count)
            mine = [None if each is None else each[rows] for each in keys]
            drafted = DraftedTokens(chains.tokens[some], chains.log_q[some], kept, mine, uniforms)
            found.append(self._method.verify(span.sampler, logits[some], drafted))
        return join_verdicts(found)

    def _uniforms(self, context: RoundContext, groups: slice, count: int) -> Tensor:
        clock = context.rows.clock[:, None] + context.rows.steps[:count]
        return self._method.streams.uniforms(clock)[groups]

    def _forward(
        self,
        runner: Runner,
        context: RoundContext,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        mask: Tensor,
        *,
        places: Tensor | None = None,
    ) -> Tensor:
        """Runs a model over rows of all groups, whose tree slots are allocated, and returns logits [rows, at least V].

        `tokens`, `positions`, `slots`: [groups, ...], equally many rows for every group.
        `mask`: [groups, ..., width], over the tree slots of the window.
        `places`: positions in the tensors of the cache sequences, [groups]; None: 0, 1, ...

        The rows of a group are in topological order, so they can be split into chunks. The window contains the tree
        slots 0..width - 1; slots in it that are not allocated are masked for all rows.
        """
        began, some, kv_len = time.perf_counter(), slice(context.rows.groups), context.kv_len
        if places is not None:
            some, kv_len = places, self._kv_len(places, context.width)
        slots = slots.reshape(len(tokens), -1)
        rows, m = slots.numel(), slots.shape[1]
        slots = (slots + self._prefix[some, None]).flatten()
        sequence = self._sequences[some].repeat_interleave(m)
        tokens, positions, mask = tokens.flatten(), positions.flatten(), mask.reshape(rows, context.width)
        parts: list[Tensor] = []
        group = runner.model.group
        for start in range(0, rows, PREFILL_CHUNK_TOKENS):
            chunk = slice(start, start + PREFILL_CHUNK_TOKENS)
            batch = Batch(
                tokens[chunk],
                positions[chunk],
                slots=slots[chunk],
                mask=mask[chunk],
                sequence=sequence[chunk],
                kv_len=kv_len,
                max_kv_len=_max_kv_len(runner, context.width),
            )
            logits = runner.model.forward(batch, runner.cache).logits
            assert logits is not None
            parts.append(logits if group is None else torch.cat(group.all_gather(logits).unbind(0), 1))
        runner.record_step(began, rows)
        return concatenate(parts)


def _max_kv_len(runner: Runner, width: int) -> int:
    """Returns the largest slot at which a window of `width` tree slots ends. When a round is launched, the prefixes of
    the cache are those of the tensors, since both change in the same calls."""
    return max(runner.cache.prefix_len) + width
