"""One model with its cache and its books: runs forwards over a prefix and a tree."""

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

PREFILL_CHUNK_TOKENS = 256  # rows: large enough to be bound by compute, small enough to be interrupted
StepHook = Callable[[float, int], None]  # when a step began (perf_counter) and its rows; called as it ends


class RunnerOps(sampler.SamplerOps, Protocol):
    """What a round needs of the operators that the model was built with."""

    def mover(self, k: Tensor, v: Tensor, /) -> MoveSlots: ...


class Runner:
    """Runs one model over a prefix and a tree, and keeps its books: slots and busy time.

    A guided request has two sequences, the conditional and the unconditional one, each with its own prefix and
    positions, under one tree: every row runs in both, in one batch, and what comes out are the guided logits.

    `hooks` look at every step of the model, prompt chunks too, or make it last longer. `busy` are the seconds that were
    spent in steps.
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
        """`vocab`: the base vocabulary; of a longer head the rows beyond count as -inf. `shard`: this rank's part."""
        config = model.config
        self.model, self.ops, self.vocab, self.shard, self.tree_slots = model, ops, vocab, shard, tree_slots
        shape = config.num_layers, model.kv_heads, config.head_dim, context + tree_slots
        self.cache = KVCache(*shape, ops.mover, dtype=model.cache_dtype, device=model.device)
        self.busy = 0.0
        self.hooks: list[StepHook] = []
        self.cancel_check: Callable[[], None] = lambda: (
            None
        )  # called before each chunk of a prompt; may raise RequestEnds
        self.make_constraint: Callable[[str], TokenConstraint] | None = None  # what makes a grammar's
        self.guidance: Guidance | None = None
        self.prefill_chunk_rows = PREFILL_CHUNK_TOKENS  # at a time, where nobody reads their logits
        self.on_prompt_logits: Callable[[Tensor], None] | None = (
            None  # takes the logits of a prompt's tokens, a chunk at a time
        )

    def sampler(self, params: SamplingParams, prompt: Sequence[int]) -> Sampler:
        """What makes tokens of this model's logits for one request."""
        make_constraint = (
            None if params.grammar is None or self.make_constraint is None else self.make_constraint(params.grammar)
        )
        return Sampler(params, prompt, self.vocab, self.model.device, self.ops, self.shard, make_constraint)

    def open(
        self, tokens: Sequence[int], guidance: Guidance | None = None, max_cached: Sequence[int] | None = None
    ) -> int:
        """Starts over from a text whose last token is the root. What stands before it, and before the root of the
        unconditional text, becomes the prefixes. Returns how many of the text's tokens `match_prefix` has kept."""
        texts = [tokens] if guidance is None else [tokens, guidance.tokens]
        kept, self.guidance = self.match_prefix(texts, max_cached), guidance
        for sequence, text in enumerate(texts):
            self._prefill_sequence(text[kept[sequence] : -1], sequence)
        return kept[0]

    def match_prefix(self, texts: Sequence[Sequence[int]], max_cached: Sequence[int] | None) -> Sequence[int]:
        """Empties the cache but for what it keeps of each text from earlier ones: of none here (see prefixes.py)."""
        self.cache.reset(len(texts))
        return [0] * len(texts)

    def observe(self, tokens: Sequence[int]) -> None:
        """Told of the verified tokens that follow."""

    def prefill(self, tokens: Sequence[int], sequences: Sequence[int] | None = None) -> None:
        """Appends `tokens` to the prefix of these sequences, or of all, whose tree is empty: in chunks, no logits."""
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
        """The rows of verified tokens without KV and the root after them: the root becomes tree slot 0, the others join
        the prefix."""
        starts = {s: self.cache.append_prefix(len(tokens) - 1, s) for s in range(len(self.cache.prefix_len))}
        self.cache.append_tree(1)
        return self._batch(np.array(tokens), None, starts, 0, tree_mask.causal(len(tokens)))

    def tree_batch(self, tokens: Ints, depths: Ints, mask: tree_mask.MaskRows) -> HostBatch:
        """Rows that join the tree: `tokens` and `depths` [n], `mask` [n, tree slots in use after it]."""
        starts = dict(enumerate(self.cache.prefix_len))
        return self._batch(tokens, depths, starts, self.cache.append_tree(tokens.shape[0]), mask)

    def logits(self, batch: HostBatch) -> Tensor:
        """Logits of a batch [n, vocab]; guided, where there are two sequences, of each pair of rows one."""
        logits = self.run(batch)
        assert logits is not None
        return logits if self.guidance is None else self.guidance.combine(logits)

    def run(self, batch: HostBatch, *, head: bool = True) -> Tensor | None:
        """The model's forward, waited for. Without `head` it gives no logits."""
        device, began = self.model.device, time.perf_counter()
        with self.translate_peer_errors():
            logits = self.model.forward(batch.to(device), self.cache, head=head)
            if device.type == "cuda":
                # the result is read at once; without this the time would be the launch's, and inputs be overwritten
                torch.cuda.current_stream(device).synchronize()
        self.record_step(began, len(batch))
        return logits

    def record_step(self, began: float, rows: int, seconds: float | None = None) -> None:
        """Books a step over so many rows that ends now. `seconds`: how long the model was at work in it, where that is
        known and no hook has a say in it."""
        for hook in self.hooks:
            hook(began, rows)
        self.busy += time.perf_counter() - began if seconds is None or self.hooks else seconds

    @contextmanager
    def translate_peer_errors(self) -> Iterator[None]:
        """Raises RankLost where a peer that did not come is why the device reports an error."""
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
        """The same rows in some sequences, all counted from a slot `starts` of each: row i has slot `first` + i and
        position `depths[i]`, without these the slot's."""
        several = len(starts) > 1
        rows = [self._rows(sequence, start, tokens, depths, first) for sequence, start in starts.items()]
        token, position, slot, sequence = map(np.concatenate, zip(*rows, strict=True)) if several else rows[0]
        mask = np.tile(tree_mask.pad_left(mask), (len(rows), 1))
        return HostBatch(token, position, slot, mask, sequence, np.array(self.cache.kv_len()))

    def _rows(
        self, sequence: int, start: int, tokens: Ints, depths: Ints | None, first: int
    ) -> tuple[Ints, Ints, Ints, Ints]:
        """Tokens, positions, slots and sequence of one sequence's rows, [n] each."""
        count = tokens.shape[0]
        slots = np.arange(start + first, start + first + count)
        positions = slots if depths is None else depths + start
        if sequence == 1 and self.guidance is not None:  # the two texts may differ in their root at the start
            text = self.guidance.tokens
            tokens = np.where(positions == len(text) - 1, text[-1], tokens)
        return tokens, positions, slots, np.full(count, sequence)
