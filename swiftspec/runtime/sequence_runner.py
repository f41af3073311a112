"""Runners of concurrent requests: each has its own sequences of one cache, and their forwards run as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swiftspec.cache.model_cache import SequenceView
from swiftspec.cache.prefix_cache import (
    MIN_CACHED_TOKENS,
    CachedPrefix,
    PrefixCache,
    Tokens,
    TokenText,
    common_prefix_len,
)
from swiftspec.cache.sequence_prefixes import SequencePrefixes
from swiftspec.model.batch import ForwardOutput, HostBatch, Ints, merge_batches
from swiftspec.runtime.coroutines import PREFILL, READ, CallQueue
from swiftspec.runtime.executors.eager import EagerExecutor
from swiftspec.runtime.runner import Call, Runner
from swiftspec.sampling.guidance import Guidance

MAX_CATCH_UP_ROWS = 64  # verified tokens of the rounds since the last forward of a draft head


class SequencePool:
    """The sequences of the cache of one model, which concurrent requests take and give back.

    A sequence keeps the text of its last request. Texts that others are about to replace are copied into a prefix
    cache, as those of a single request are (prefix_caching.py).

    `runner`: of the joint forwards; its cache gets `sequences` sequences.
    `executor`: runs the joint forwards, except prefill chunks.
    `calls`: of the requests.
    `priority`: of the forwards of trees (runtime/coroutines.py).
    `prefix_tokens`: budget of the prefix cache in tokens; 0: every prompt is prefilled from its first token.
    `snapshot_tokens`: size of a snapshot in tokens (`ModelCache.num_snapshots`).
    """

    def __init__(
        self,
        runner: Runner,
        sequences: int,
        calls: CallQueue,
        priority: int,
        *,
        prefix_tokens: int = 0,
        snapshot_tokens: int = 0,
    ) -> None:
        runner.cache.reset(sequences)
        self._snapshot_tokens = snapshot_tokens
        self.runner, self.calls, self.priority = runner, calls, priority
        self.executor = EagerExecutor(runner)
        self.prefix_cache = PrefixCache(prefix_tokens, MIN_CACHED_TOKENS)
        self._prefixes = SequencePrefixes([runner.cache], prefix_tokens > 0)
        self._in_use: set[int] = set()

    @property
    def reuses_prefixes(self) -> bool:
        """Whether a prompt begins with the states of earlier ones."""
        return self.prefix_cache.budget > 0

    @property
    def num_free(self) -> int:
        """Number of sequences that no request has taken."""
        return len(self.runner.cache.prefix_len) - len(self._in_use)

    def take(self, text: Sequence[int]) -> tuple[int, int]:
        """Takes a free sequence for a text, and fills it with the longest prefix of the text that any sequence or the
        prefix cache holds; the last token is never part of it. Returns the sequence and the length of that prefix."""
        sequence, source, saved, cached = self._find(text)
        held = self._prefixes.cached(sequence)
        stays = cached if saved is None and source == sequence else 0
        new = self._copied(sequence, held) if len(held) - stays >= MIN_CACHED_TOKENS else []
        self.prefix_cache.update(new, [] if saved is None else [(saved, cached)])
        if saved is None:
            self._prefixes.acquire(text, self._in_use)
        else:
            self.runner.cache.load_prefix(sequence, saved.states, cached)
            self._prefixes.set_prefix(sequence, text[:cached])
        self._in_use.add(sequence)
        return sequence, cached

    def cached_len(self, text: Sequence[int]) -> int:
        """Returns the length of the prefix that `take` would find."""
        return self._find(text)[-1]

    def _find(self, text: Sequence[int]) -> tuple[int, int, CachedPrefix | None, int]:
        """Returns the sequence that a text takes, the sequence that holds its longest prefix, the entry of the prefix
        cache that holds a longer one, if there is any, and the length of the longest."""
        sequence, source, cached = self._prefixes.select(text, self._in_use)
        wanted, saved = np.array(text[:-1], np.int64), None
        for entry in self.prefix_cache.entries:
            if (found := entry.reusable_len(wanted)) > cached:
                saved, cached = entry, found
        return sequence, source, saved, cached

    def _copied(self, sequence: int, text: Tokens) -> list[CachedPrefix]:
        """Returns a copy of the text that a sequence holds, or nothing if that does not fit the prefix cache or memory,
        or another copy or sequence has it."""
        others = set(range(len(self.runner.cache.prefix_len))) - {sequence}
        known = self.prefix_cache.contains(text) or any(
            common_prefix_len(self._prefixes.cached(other), text) == len(text) for other in others
        )
        size = len(text) + self._snapshot_tokens * self.runner.cache.num_snapshots(sequence, len(text))
        if known or not self.prefix_cache.fits(text, size):
            return []
        try:
            states = self.runner.cache.save_prefix(sequence, len(text))
        except (MemoryError, RuntimeError):
            self.prefix_cache.entries = []
            if self.runner.model.group is not None:  # other ranks may have their copies; the caches must not diverge
                raise
            return []
        return [CachedPrefix(text, states, partial(self.runner.cache.saved_len, states), size)]

    def record(self, view: SequenceView, texts: Sequence[Sequence[int]]) -> None:
        """Records the verified tokens whose states the sequences of a request hold. `texts`: begin with them."""
        for index, text, count in zip(view.buffers, texts, view.prefix_len, strict=True):
            self.runner.cache.prefix_len[index] = count
            self._prefixes.set_prefix(index, text[:count])

    def give_back(self, view: SequenceView) -> None:
        """Takes the sequences of a request back. Their recorded tokens stay for later prompts."""
        self._in_use.difference_update(view.buffers)
        view.view([])

    def reusable_texts(self) -> list[TokenText]:
        """See `SequencePrefixes.reusable_texts`; the texts of the prefix cache are among them."""
        saved = [entry.tokens[: entry.saved_len(len(entry.tokens))] for entry in self.prefix_cache.entries]
        return [*self._prefixes.reusable_texts(), *saved]


class SequenceRunner(Runner):
    """Runner of one of several concurrent requests, on sequences that it takes from a pool for each request."""

    def __init__(self, pool: SequencePool) -> None:
        base = pool.runner
        self._view = SequenceView(base.cache)
        sizes = {"context": 0, "tree_slots": base.tree_slots}
        super().__init__(base.model, base.ops, base.vocab, **sizes, shard=base.shard, cache=self._view)
        self.pool = pool
        self.make_constraint, self.cancel_check = base.make_constraint, base.cancel_check
        self.eos_token_ids = base.eos_token_ids
        self._texts: list[list[int]] = []  # the verified tokens of each sequence
        self._incomplete = False  # whether prefix slots were allocated whose states are not computed yet
        self._prefilling = False  # whether a prefill chunk is running

    def match_prefix(self, texts: Sequence[Sequence[int]], max_cached: Sequence[int] | None) -> Sequence[int]:
        """Takes a sequence for each text, filled with the longest prefix that any sequence holds. Returns the lengths
        of these prefixes."""
        self.close()
        taken = [self.pool.take(text) for text in self._reusable(texts, max_cached)]
        self._view.view([sequence for sequence, _ in taken])
        self._texts = [list(text) for text in texts]
        return [cached for _, cached in taken]

    def cached_lengths(self, texts: Sequence[Sequence[int]], max_cached: Sequence[int] | None = None) -> list[int]:
        """As `Runner.cached_lengths`; those of a guided request are for each of its sequences alone."""
        return [self.pool.cached_len(text) for text in self._reusable(texts, max_cached)]

    def _reusable(self, texts: Sequence[Sequence[int]], max_cached: Sequence[int] | None) -> list[Sequence[int]]:
        """Returns the part of each text whose tokens, except the last one, may come from the cache."""
        counts = [len(text) for text in texts]
        if max_cached is not None:
            counts = [max_cached[s] if s < len(max_cached) else 0 for s in range(len(texts))]
        most = self.max_cached_tokens
        return [text[: 1 + (count if most is None else min(count, most))] for text, count in zip(texts, counts)]

    def open(
        self, tokens: Sequence[int], guidance: Guidance | None = None, max_cached: Sequence[int] | None = None
    ) -> int:
        cached = super().open(tokens, guidance, max_cached)
        self.pool.record(self._view, self._texts)  # now, so that other requests can begin with this prompt
        return cached

    def reusable_texts(self) -> list[TokenText]:
        """Returns the texts whose prefixes the next request finds in the cache."""
        return self.pool.reusable_texts()

    def observe(self, tokens: Sequence[int]) -> None:
        for text in self._texts:
            text += tokens

    @property
    def in_company(self) -> bool:
        """Whether other requests run, so that their forwards are joint."""
        return self.pool.calls.company

    def close(self) -> None:
        if self._view.buffers:
            self.pool.record(self._view, [[]] * len(self._texts) if self._incomplete else self._texts)
            self.pool.give_back(self._view)
        self._texts, self._incomplete, self._prefilling = [], False, False

    def chain_batch(self, tokens: Sequence[int]) -> HostBatch:
        self._incomplete = True
        return super().chain_batch(tokens)

    def _prefill_chunk(self, chunk: Ints, sequence: int) -> None:
        self._incomplete = self._prefilling = True
        super()._prefill_chunk(chunk, sequence)
        self._prefilling = False

    def run(self, batch: HostBatch, *, head: bool = True) -> ForwardOutput:
        if self.input_hidden is not None and batch.chain is not None:
            batch = replace(batch, hidden=self.input_hidden(batch))
        # what a head reads after each round is no prompt: the rounds of other requests need not wait for it
        catches_up = batch.hidden is not None and len(batch) <= MAX_CATCH_UP_ROWS
        priority = PREFILL if self._prefilling and not catches_up else self.pool.priority
        output = self.run_call(ForwardCall(self.pool.executor, batch, head, priority))
        self.hidden = output.hidden
        return output

    def run_call(self, call: Call) -> Any:
        result = self.pool.calls.wait(call)
        self._step_done()
        return result

    def read(self, *tensors: Tensor) -> list[NDArray[Any]]:
        if self.shard is None:
            values = self.pool.calls.wait(ReadCall(self.pool, tensors))
        else:  # every call that suspends is also broadcast to the ranks of the group
            values = super().read(*tensors)
            self.pool.executor.finish()
        self._step_done()
        return values

    def record_step(self, began: float, rows: int, seconds: float | None = None) -> None:
        self.pool.runner.record_step(began, rows, seconds)
        self._step_done()

    def _step_done(self) -> None:
        self.busy, self._incomplete = self.pool.runner.busy, False


@dataclass(eq=False, slots=True)
class ForwardCall:
    """A forward of the rows of one request. `executor`: runs it together with those of the other requests."""

    executor: EagerExecutor
    batch: HostBatch
    head: bool
    priority: int
    result: Any = None
    error: Exception | None = None

    @property
    def key(self) -> object:
        return self.executor, self.batch.hidden is None

    def run(self, others: Sequence[ForwardCall]) -> None:
        """Runs the rows of all calls in one forward."""
        calls, runner = [self, *others], self.executor.runner
        batch = merge_batches([call.batch for call in calls])
        if self.priority == PREFILL or not self.head:
            output = runner.run(batch, head=self.head)
        else:
            output = ForwardOutput(self.executor.forward(batch), runner.hidden)
        if not others:
            self.result = output
            return
        start = 0
        for call in calls:
            rows, drafted = slice(start, start := start + len(call.batch)), call.batch.num_logits
            logits, hidden = (None if part is None else part[rows] for part in output)
            if logits is not None and drafted is not None:
                logits = logits[1 : 1 + drafted]
            call.result = ForwardOutput(logits, hidden)


@dataclass(eq=False, slots=True)
class ReadCall:
    """A copy of the results of one request to the host, together with those of the other requests."""

    pool: SequencePool
    tensors: Sequence[Tensor]
    priority: int = READ
    result: Any = None
    error: Exception | None = None

    @property
    def key(self) -> object:
        return self.pool

    def run(self, others: Sequence[ReadCall]) -> None:
        """Copies the results of all calls at once."""
        parts = [part.contiguous().view(-1).view(torch.uint8) for call in (self, *others) for part in call.tensors]
        found, start = torch.cat(parts).cpu(), 0
        for call in (self, *others):
            call.result = list[NDArray[Any]]()
            for part in call.tensors:
                values = found[start : start + part.nbytes].clone()  # aligned
                call.result.append(values.view(part.dtype).view(part.shape).numpy())
                start += part.nbytes
        self.pool.executor.finish()
