"""Model runner: forwards of one model over a prefix and a tree, with its KV cache and the time spent in forwards."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swiftspec.backends.reference import Backend
from swiftspec.cache.delta import MAX_UNFOLDED_POSITIONS, DeltaCache
from swiftspec.cache.kv import KVCache
from swiftspec.cache.model_cache import ModelCache
from swiftspec.model.batch import Chain, ForwardOutput, HostBatch, Ints
from swiftspec.model.transformer import Transformer
from swiftspec.params import SamplingParams
from swiftspec.sampling.guidance import Guidance, guided_logits
from swiftspec.sampling.sampler import Sampler, ShardedVocab, TokenConstraint, read_tensors
from swiftspec.sampling.token_rules import TokenRules
from swiftspec.tree import mask as tree_mask

PREFILL_CHUNK_TOKENS = Backend.PREFILL_CHUNK_ROWS  # of chunks with logits; the backend sets the others
StepHook = Callable[[float, int], None]  # called after a step with its start time (perf_counter) and its rows


def delta_slots(context: int, tree_slots: int) -> int:
    """Returns the number of slots of a delta cache for one sequence. Parameters as in `Runner`."""
    return min(MAX_UNFOLDED_POSITIONS + PREFILL_CHUNK_TOKENS, context) + tree_slots


class Call(Protocol):
    """What a request asks of a model. Those of several requests can run as one (coroutines.py)."""

    result: Any  # set by `run`
    error: Exception | None  # why `run` has failed

    @property
    def key(self) -> object:
        """Calls with equal keys run as one."""
        ...

    @property
    def priority(self) -> int:
        """Calls with a lower number run first (coroutines.py)."""
        ...

    def run(self, others: Sequence[Any]) -> None:
        """Runs this call together with `others`, which have the same key, and sets the result of each."""


class Runner:
    """Model runner: runs one model over a prefix and a tree, and owns its cache.

    A guided request has two sequences, the conditional and the unconditional one, each with its own prefix and
    positions, and one tree: every row of the tree runs in both sequences, in one batch, and the two results are
    combined into the guided logits.

    The class is flat: verifier and drafters set single attributes for a request, such as `on_prompt_hidden` and
    `max_cached_tokens`.

    `hooks`: called after every step (forward), prefill chunks included; a hook may prolong the step.
    `busy`: seconds spent in steps.
    """

    def __init__(
        self,
        model: Transformer,
        ops: Backend,
        vocab: int,
        *,
        context: int,
        tree_slots: int,
        shard: ShardedVocab | None = None,
        cache: ModelCache | None = None,
    ) -> None:
        """`vocab`: size of the base vocabulary; further logits of the LM head are ignored.
        `context`: slots of the prefix region.
        `tree_slots`: slots of the tree region.
        `shard`: this rank's part of the vocabulary, in a tensor-parallel group.
        `cache`: None: a new one.
        """
        self.model, self.ops, self.vocab, self.shard, self.tree_slots = model, ops, vocab, shard, tree_slots
        self.cache = cache or _new_cache(model, ops, context, tree_slots)
        self.busy = 0.0
        self.hooks: list[StepHook] = []
        self.cancel_check: Callable[[], None] = lambda: None  # called before each prefill chunk; may raise Cancelled
        self.make_constraint: Callable[[str], TokenConstraint] | None = None  # compiles a grammar
        self.eos_token_ids: tuple[int, ...] = ()  # end-of-text tokens, which `min_tokens` excludes
        self.guidance: Guidance | None = None
        # receives the logits of the prompt's tokens, one prefill chunk at a time
        self.on_prompt_logits: Callable[[Tensor], None] | None = None
        # receives the hidden states of the prompt's tokens that are prefilled, one chunk at a time, after the position
        # of the first of them; with guidance those of the conditional prompt. A drafter that needs them has been opened
        # already, because `TreeDecoding.open` opens the drafter before the verifier
        self.on_prompt_hidden: Callable[[int, Tensor], None] | None = None
        # of a draft head: returns the hidden states [rows, hidden] that belong to a chain of verified tokens
        self.input_hidden: Callable[[HostBatch], Tensor] | None = None
        self.first_token = 0  # index of the first token of a request that the cache holds
        self.max_cached_tokens: int | None = None  # most tokens of the next request that the prefix cache may supply
        self.hidden: Tensor | None = None  # hidden states (`ForwardOutput`) of the last forward, until the next one

    @property
    def in_company(self) -> bool:
        """Whether other requests run on the model, so that their forwards are joint: not here (sequence_runner.py)."""
        return False

    def sampler(self, params: SamplingParams, prompt: Sequence[int]) -> Sampler:
        """Returns the sampler of one request for this model's logits."""
        constraint = None
        if params.grammar is not None and self.make_constraint is not None:
            constraint = self.make_constraint(params.grammar)
        if params.has_path_rules or (constraint is not None and params.excludes_tokens):
            constraint = TokenRules(params, self.vocab, self.eos_token_ids, constraint)
        made = Sampler(params, prompt, self.vocab, self.model.device, self.ops, shard=self.shard, constraint=constraint)
        made.read = self.read
        return made

    def read(self, *tensors: Tensor) -> list[NDArray[Any]]:
        """Returns the values of tensors on the model's device, and waits for them."""
        return read_tensors(*tensors)

    def open(
        self, tokens: Sequence[int], guidance: Guidance | None = None, max_cached: Sequence[int] | None = None
    ) -> int:
        """Starts a request: prefills all `tokens` but the last, which becomes the root, and likewise the unconditional
        sequence of `guidance`. Tokens that `match_prefix` finds in the cache are not prefilled. `max_cached`: largest
        number of cached tokens, per sequence. Returns the number of cached tokens of the first sequence."""
        sequences = [tokens] if guidance is None else [tokens, guidance.tokens]
        cached, self.guidance = self.match_prefix(sequences, max_cached), guidance
        for sequence, text in enumerate(sequences):
            self._prefill_sequence(text[cached[sequence] : -1], sequence)
        return cached[0]

    def match_prefix(self, texts: Sequence[Sequence[int]], max_cached: Sequence[int] | None) -> Sequence[int]:
        """Resets the KV cache for a request with these token sequences. Returns for each sequence the length of the
        prefix that the cache still holds: 0 here, without a prefix cache (see prefix_caching.py)."""
        self.cache.reset(len(texts))
        return [0] * len(texts)

    def cached_lengths(self, texts: Sequence[Sequence[int]], max_cached: Sequence[int] | None = None) -> list[int]:
        """Returns for each sequence of a request the number of its leading tokens that the cache holds, at most
        `max_cached`: 0 here, as for `match_prefix`. The last token, which is the root, never counts."""
        return [0] * len(texts)

    def observe(self, tokens: Sequence[int]) -> None:
        """Receives verified output tokens. Ignored here, without a prefix cache."""

    def close(self) -> None:
        """Ends a request: frees the tree region and keeps the prefix region."""
        self.cache.commit(())

    def reusable_texts(self) -> list[Sequence[int] | Ints]:
        """Returns the texts of which any prefix can be that of the next request: none here, without a prefix cache."""
        return []

    def prefill(self, tokens: Sequence[int], sequences: Sequence[int] | None = None) -> None:
        """Appends `tokens` to the prefix of the given `sequences` (None: of all), in chunks. The tree must be empty."""
        for sequence in range(len(self.cache.prefix_len)) if sequences is None else sequences:
            self._prefill_sequence(tokens, sequence)

    def _prefill_sequence(self, tokens: Sequence[int], sequence: int) -> None:
        rows = self.ops.PREFILL_CHUNK_ROWS if self.on_prompt_logits is None else PREFILL_CHUNK_TOKENS
        for start in range(0, len(tokens), rows):
            self.cancel_check()
            self._prefill_chunk(np.array(tokens[start : start + rows]), sequence)

    def _prefill_chunk(self, chunk: Ints, sequence: int) -> None:
        first = self.cache.append_prefix(len(chunk), sequence)
        batch = self._batch(chunk, None, {sequence: first}, 0, tree_mask.causal(len(chunk)))
        logits, hidden = self.run(batch, head=self.on_prompt_logits is not None)
        if logits is not None and self.on_prompt_logits is not None:
            self.on_prompt_logits(logits)
        if hidden is not None and self.on_prompt_hidden is not None and sequence == 0:
            self.on_prompt_hidden(first, hidden)

    def chain_batch(self, tokens: Sequence[int]) -> HostBatch:
        """Allocates the slots of `tokens` and returns their batch. The last token is the root and gets tree slot 0; the
        others are verified tokens without KV and get prefix slots."""
        starts = {s: self.cache.append_prefix(len(tokens) - 1, s) for s in range(len(self.cache.prefix_len))}
        self.cache.append_tree(1)
        return self._batch(np.array(tokens), None, starts, 0, tree_mask.causal(len(tokens)))

    def tree_batch(self, tokens: Ints, depths: Ints, mask: tree_mask.MaskRows) -> HostBatch:
        """Allocates tree slots for new rows and returns their batch. `tokens`, `depths` [rows]: depth 0 is the root.
        `mask` [rows, tree slots in use afterwards]: tree mask."""
        starts = dict(enumerate(self.cache.prefix_len))
        return self._batch(tokens, depths, starts, self.cache.append_tree(tokens.shape[0]), mask)

    def logits(self, batch: HostBatch) -> Tensor:
        """Runs a forward and returns its logits [rows, vocab]. With guidance the conditional and the unconditional row
        of each token are combined into one."""
        logits = self.run(batch).logits
        assert logits is not None
        return logits if self.guidance is None else guided_logits(logits, self.guidance.scale)

    def run(self, batch: HostBatch, *, head: bool = True) -> ForwardOutput:
        """Runs a forward, without the LM head if `head` is False, and waits for it."""
        device, began = self.model.device, time.perf_counter()
        if self.input_hidden is not None and batch.chain is not None:
            batch = replace(batch, hidden=self.input_hidden(batch))
        with self.translate_peer_errors():
            output = self.model.forward(batch.to(device), self.cache, head=head)
            if device.type == "cuda":
                # without this the measured time would be that of the launch, and inputs could be overwritten
                torch.cuda.current_stream(device).synchronize()
        self.record_step(began, len(batch))
        self.hidden = output.hidden
        return output

    def run_call(self, call: Call) -> Any:
        """Runs a call, which those of other requests may join, and returns its result."""
        call.run(())
        return call.result

    def record_step(self, began: float, rows: int, seconds: float | None = None) -> None:
        """Calls the hooks for a step that has just finished, and adds its duration to `busy`: the measured `seconds`,
        or the time since `began` (perf_counter) if `seconds` is None or a hook may have prolonged the step."""
        for hook in self.hooks:
            hook(began, rows)
        self.busy += time.perf_counter() - began if seconds is None or self.hooks else seconds

    @contextmanager
    def translate_peer_errors(self) -> Iterator[None]:
        """Returns a context manager that raises RankLost instead of a device error that a lost rank has caused."""
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
        """Returns a batch with the same rows in each sequence of `starts`, which maps a sequence to the slot `start` of
        its depth 0. Row i has slot `start + first + i` and position `start + depths[i]`, or without depths the position
        that equals its slot."""
        several = len(starts) > 1
        rows = [self._rows(sequence, start, tokens, depths, first) for sequence, start in starts.items()]
        token, position, slot, sequence = map(np.concatenate, zip(*rows, strict=True)) if several else rows[0]
        mask = np.tile(tree_mask.pad_left(mask), (len(rows), 1))
        kv_len = np.array(self.cache.buffer_kv_len())
        chain = None
        if depths is None and not several:
            chain = Chain(int(sequence[0]), int(kv_len[sequence[0]]))
        return HostBatch(
            tokens=token,
            positions=position,
            slots=slot,
            mask=mask,
            sequence=sequence,
            kv_len=kv_len,
            chain=chain,
            blocks=len(rows),
        )

    def _rows(
        self, sequence: int, start: int, tokens: Ints, depths: Ints | None, first: int
    ) -> tuple[Ints, Ints, Ints, Ints]:
        """Returns tokens, positions, slots and sequence indices of the rows of one sequence, [rows] each. Parameters as
        in `_batch`."""
        count = tokens.shape[0]
        slots = np.arange(start + first, start + first + count)
        positions = slots if depths is None else depths + start
        if sequence == 1 and self.guidance is not None:  # the two sequences may begin with different roots
            text = self.guidance.tokens
            tokens = np.where(positions == len(text) - 1, text[-1], tokens)
        return tokens, positions, slots, np.full(count, self.cache.buffers[sequence])


def _new_cache(model: Transformer, ops: Backend, context: int, tree_slots: int) -> ModelCache:
    """Returns the cache of a runner; parameters as in `Runner`."""
    kv, *further = (
        KVCache(*shape, context + tree_slots, ops.make_slot_mover, dtype=model.cache_dtype, device=model.device)
        for shape in model.cache_shapes
    )
    delta = None
    if model.delta_shape is not None:
        slots = delta_slots(context, tree_slots)
        delta = DeltaCache(model.delta_shape, slots, ops, dtype=model.stream_dtype, device=model.device)
    return ModelCache(kv, further=further, delta=delta)
