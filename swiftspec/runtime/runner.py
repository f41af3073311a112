"""Forwards of one model over a prefix and a tree, with its KV cache and its step statistics."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from swiftspec.model.batch import HostBatch, Ints
from swiftspec.model.transformer import Transformer
from swiftspec.params import SamplingParams
from swiftspec.runtime.kv_cache import KVCache, MoveSlots
from swiftspec.sampling import sampler
from swiftspec.sampling.guidance import Guidance
from swiftspec.sampling.sampler import Sampler, ShardedVocab, TokenConstraint
from swiftspec.tree import mask as tree_mask

PREFILL_CHUNK_TOKENS = 256  # large enough to be compute-bound, small enough to be interrupted
StepHook = Callable[[float, int], None]  # start time of a step (perf_counter) and its rows; called when it ends


class RunnerOps(sampler.SamplerOps, Protocol):
    """The operators that a runner needs in addition to those of the model."""

    def make_slot_mover(self, k: Tensor, v: Tensor, /) -> MoveSlots: ...


class Runner:
    """Runs one model over a prefix and a tree. Owns the KV cache and counts the time spent in steps.

    A guided request has two sequences, the conditional and the unconditional one, each with its own prefix and
    positions, and one tree: every row runs in both sequences, in one batch, and the result is the guided logits.

    `hooks` are called after every step, prefill chunks included; a hook may prolong the step. `busy` is the time spent
    in steps, in seconds.
    """

    def __init__(
        self,
        model: Transformer,
        ops: RunnerOps,
        vocab: int,
        *,
        context: int,
        tree_slots: int,
        shard: ShardedVocab | None = None,
    ) -> None:
        """`vocab`: size of the base vocabulary; logits of a longer head beyond it count as -inf.
        `context`: slots of the prefix region.
        `tree_slots`: slots of the tree region.
        `shard`: this rank's part of the vocabulary, in a tensor-parallel group.
        """
        config = model.config
        self.model, self.ops, self.vocab, self.shard, self.tree_slots = model, ops, vocab, shard, tree_slots
        shape = config.num_layers, model.kv_heads, config.head_dim, context + tree_slots
        self.cache = KVCache(*shape, ops.make_slot_mover, dtype=model.cache_dtype, device=model.device)
        self.busy = 0.0
        self.hooks: list[StepHook] = []
        self.cancel_check: Callable[[], None] = lambda: None  # called before each prefill chunk; may raise RequestEnds
        self.make_constraint: Callable[[str], TokenConstraint] | None = None  # compiles a grammar
        self.guidance: Guidance | None = None
        self.prefill_chunk_rows = PREFILL_CHUNK_TOKENS  # where no logits are needed
        # receives the logits of a prompt's tokens, one chunk at a time
        self.on_prompt_logits: Callable[[Tensor], None] | None = None

    def sampler(self, params: SamplingParams, prompt: Sequence[int]) -> Sampler:
        """The sampler of one request on this model's logits."""
        constraint = None
        if params.grammar is not None and self.make_constraint is not None:
            constraint = self.make_constraint(params.grammar)
        return Sampler(params, prompt, self.vocab, self.model.device, self.ops, self.shard, constraint)

    def open(
        self, tokens: Sequence[int], guidance: Guidance | None = None, max_cached: Sequence[int] | None = None
    ) -> int:
        """Starts a request whose last token is the root: the tokens before it, and those before the root of the
        unconditional sequence, become the prefixes. `max_cached` limits the cached tokens per sequence. Returns the
        number of tokens of the first sequence that `match_prefix` found in the cache."""
        sequences = [tokens] if guidance is None else [tokens, guidance.tokens]
        cached, self.guidance = self.match_prefix(sequences, max_cached), guidance
        for sequence, text in enumerate(sequences):
            self._prefill_sequence(text[cached[sequence] : -1], sequence)
        return cached[0]

    def match_prefix(self, texts: Sequence[Sequence[int]], max_cached: Sequence[int] | None) -> Sequence[int]:
        """Resets the cache, except for the prefix that each sequence shares with an earlier request, and returns the
        lengths of these prefixes: 0 here (see prefix_cache.py)."""
        self.cache.reset(len(texts))
        return [0] * len(texts)

    def observe(self, tokens: Sequence[int]) -> None:
        """Called with the verified tokens that follow the prompt. Does nothing here."""

    def prefill(self, tokens: Sequence[int], sequences: Sequence[int] | None = None) -> None:
        """Appends `tokens` to the prefix of the given sequences, or of all, in chunks and without logits. The tree must
        be empty."""
        for sequence in range(len(self.cache.prefix_len)) if sequences is None else sequences:
            self._prefill_sequence(tokens, sequence)

    def _prefill_sequence(self, tokens: Sequence[int], sequence: int) -> None:
        rows = self.prefill_chunk_rows if self.on_prompt_logits is None else PREFILL_CHUNK_TOKENS
        for start in range(0, len(tokens), rows):
            self.cancel_check()
            self._prefill_chunk(np.array(tokens[start : start + rows]), sequence)

    def _prefill_chunk(self, chunk: Ints, sequence: int) -> None:
        first = self.cache.append_prefix(len(chunk), sequence)
        batch = self._batch(chunk, None, {sequence: first}, 0, tree_mask.causal(len(chunk)))
        if (
            logits := self.run(batch, head=self.on_prompt_logits is not None)
        ) is not None and self.on_prompt_logits is not None:
            self.on_prompt_logits(logits)

    def chain_batch(self, tokens: Sequence[int]) -> HostBatch:
        """The batch of verified tokens that have no KV yet, followed by the root: the root becomes tree slot 0, the
        others join the prefix."""
        starts = {s: self.cache.append_prefix(len(tokens) - 1, s) for s in range(len(self.cache.prefix_len))}
        self.cache.append_tree(1)
        return self._batch(np.array(tokens), None, starts, 0, tree_mask.causal(len(tokens)))

    def tree_batch(self, tokens: Ints, depths: Ints, mask: tree_mask.MaskRows) -> HostBatch:
        """The batch of rows that join the tree: `tokens` and `depths` [n], `mask` [n, tree slots in use afterwards]."""
        starts = dict(enumerate(self.cache.prefix_len))
        return self._batch(tokens, depths, starts, self.cache.append_tree(tokens.shape[0]), mask)

    def logits(self, batch: HostBatch) -> Tensor:
        """Logits of a batch [n, vocab]. With guidance each pair of rows is combined into one."""
        logits = self.run(batch)
        assert logits is not None
        return logits if self.guidance is None else self.guidance.combine(logits)

    def run(self, batch: HostBatch, *, head: bool = True) -> Tensor | None:
        """The model's forward; waits for the result. Returns no logits if `head` is False."""
        device, began = self.model.device, time.perf_counter()
        with self.translate_peer_errors():
            logits = self.model.forward(batch.to(device), self.cache, head=head)
            if device.type == "cuda":
                # without this the measured time would be that of the launch, and inputs could be overwritten
                torch.cuda.current_stream(device).synchronize()
        self.record_step(began, len(batch))
        return logits

    def record_step(self, began: float, rows: int, seconds: float | None = None) -> None:
        """Records a step of `rows` rows that has just finished, and calls the hooks. `seconds`: measured model time;
        without it, or with hooks, the wall time since `began` is used."""
        for hook in self.hooks:
            hook(began, rows)
        self.busy += time.perf_counter() - began if seconds is None or self.hooks else seconds

    @contextmanager
    def translate_peer_errors(self) -> Iterator[None]:
        """Raises RankLost instead of a device error that was caused by a peer that did not respond."""
        try:
            yield
        except RuntimeError as error:
            group = self.model.group
            if group is not None and (lost := group.lost(error)) is not None:
                raise lost from None
            raise

    def _batch(
        self, tokens: Ints, depths: Ints | None, starts: dict[int, int], first: int, mask: tree_mask.MaskRows
    ) -> HostBatch:
        """The same rows in each of several sequences. `starts`: by sequence, the slot from which its rows are counted.
        Row i has slot start + `first` + i and position start + `depths[i]`; without depths the position is the slot."""
        several = len(starts) > 1
        rows = [self._rows(sequence, start, tokens, depths, first) for sequence, start in starts.items()]
        token, position, slot, sequence = map(np.concatenate, zip(*rows, strict=True)) if several else rows[0]
        mask = np.tile(tree_mask.pad_left(mask), (len(rows), 1))
        return HostBatch(token, position, slot, mask, sequence, np.array(self.cache.kv_len()))

    def _rows(
        self, sequence: int, start: int, tokens: Ints, depths: Ints | None, first: int
    ) -> tuple[Ints, Ints, Ints, Ints]:
        """Tokens, positions, slots and sequence indices of one sequence's rows, [n] each."""
        count = tokens.shape[0]
        slots = np.arange(start + first, start + first + count)
        positions = slots if depths is None else depths + start
        if sequence == 1 and self.guidance is not None:  # the two sequences may begin with different roots
            text = self.guidance.tokens
            tokens = np.where(positions == len(text) - 1, text[-1], tokens)
        return tokens, positions, slots, np.full(count, sequence)
