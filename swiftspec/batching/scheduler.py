"""The scheduler of sequence groups: the host side. batching/round.py is the device side.

A request is admitted when a cache sequence is free: its prompt is prefilled once, into that sequence, and the rows of
its group start from it. A guided request owns a second one, its companion sequence, with the negative prompt. A group
takes part in every round until all its rows have finished, and is then evicted with an answer, which frees its
sequences for the next request. A single request is a batch of one group.

The host launches rounds and counts tree slots, N (K + 1) per round and group, without reading from the device.
Everything else that it needs (which rows have finished, which slots are free, which tokens all rows of a group share)
it reads from an asynchronous copy, one round late if the device runs ahead.

Source: SMC-SD engine v0.1 sections 3.1, 3.2 and 3.5, v0.2 section 3.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from swiftspec.batching.group_method import GroupMethod
from swiftspec.batching.round import GroupRound
from swiftspec.batching.rows import LIVE, SHARED
from swiftspec.batching.sequence_group import CompanionSequence, GroupAnswer, LaunchedGroup, SequenceGroup
from swiftspec.cache.prefix_cache import TokenText, common_prefix_len
from swiftspec.cache.prefix_reuse import SequencePrefixes
from swiftspec.errors import NonFiniteLogits
from swiftspec.messages import RequestStart
from swiftspec.params import SamplingParams
from swiftspec.runtime.executors import select_executor
from swiftspec.runtime.executors.population_rounds import PopulationExecutor, RoundResult
from swiftspec.runtime.runner import Runner
from swiftspec.sampling.guidance import Guidance

TARGET_ONLY, BOTH = 1, 2  # number of models whose cache holds a sequence, the target first
EITHER_MODEL = "the target's or the draft's"  # `whose` of NonFiniteLogits: a result does not show which one it is


class BatchScheduler:
    """Scheduler of sequence groups on models of this process: target, draft and up to `max_groups` groups.

    In a tensor-parallel group each rank holds its shards of both models. The logits are gathered, so all ranks execute
    everything else identically.
    """

    def __init__(
        self,
        target: Runner,
        draft: Runner,
        executors: Sequence[PopulationExecutor],
        method: GroupMethod[Any, Any],
        *,
        lag: int = 0,
        reuse_prefixes: bool = True,
    ) -> None:
        """`executors`: executors of rounds on these models, the fastest first.
        `method`: what a round does, and how an answer is picked.
        `lag`: number of launched rounds whose results the host does not wait for.
        `reuse_prefixes`: whether the KV of earlier prompts with the same prefix is reused.
        """
        self.target, self.draft, self.method, self.shape = target, draft, method, method.shape
        self.executors = executors
        self.lag = lag
        if self.shape.max_groups > 1:
            for runner in (target, draft):
                runner.cache.reset(self.shape.max_groups)
        self.round = GroupRound(target, draft, method)
        self._slots = method.rows.mask.shape[-1]  # tree slots of each group
        self._prefixes = SequencePrefixes([target.cache, draft.cache], reuse_prefixes)
        self.groups: list[SequenceGroup] = []  # in order of admission
        self._in_flight: deque[tuple[list[LaunchedGroup], RoundResult]] = deque()

    @property
    def busy(self) -> tuple[float, float]:
        return self.target.busy, self.draft.busy

    @property
    def draft_tokens_per_round(self) -> int:
        """Draft tokens per group and round."""
        return self.shape.rows * self.shape.draft_tokens

    @property
    def exact(self) -> bool:
        """Whether every output follows the target's distribution exactly."""
        return self.method.exact

    @property
    def max_requests(self) -> int:
        """Maximum number of requests that are decoded concurrently; a guided one counts twice."""
        return self.shape.max_groups

    def has_room(self, sampling: SamplingParams) -> bool:
        """Returns whether enough cache sequences are free to admit a request with these parameters."""
        return len(self._sequences_in_use()) + (2 if sampling.guided else 1) <= self.max_requests

    def _sequences_in_use(self) -> list[int]:
        return [sequence for group in self.groups for sequence in group.sequences]

    def reusable_texts(self) -> list[TokenText]:
        """Returns the texts whose prefixes a request without guidance finds in the caches of both models."""
        if self.max_requests > 1:
            return self._prefixes.reusable_texts()
        texts = [np.asarray(text, np.int64) for text in self.target.reusable_texts()]
        others = [np.asarray(text, np.int64) for text in self.draft.reusable_texts()]
        return [text[: max((common_prefix_len(text, other) for other in others), default=0)] for text in texts]

    def select_executor(self, start: RequestStart) -> PopulationExecutor:
        """Returns the executor for a request: the one that the leader has chosen, otherwise the fastest that supports
        it."""
        return select_executor(self.executors, start.sampling.features, start.executor)

    def admit(self, start: RequestStart, stops: Collection[int], limit: int) -> SequenceGroup:
        """Prefills the prompt on both models and opens the rows of a group. Returns the group. Other groups are not
        affected.

        An answer ends at a token of `stops` or after `limit` tokens. Requires `has_room`, and parameters
        that the method supports.
        """
        assert self.has_room(start.sampling)
        executor = self.select_executor(start)
        sequence, num_cached = self._prefill_prompt(start)
        companion = self._prefill_companion(start, sequence)
        self.round.open(self.round.order.index(sequence), start.tokens, start.sampling, stops, limit, companion)
        # without rejections every row grows by K + 1 tokens per round, so the number of rounds is known
        max_rounds = limit if self.method.may_reject(start.sampling) else -(-limit // self.method.rows.step)
        group = SequenceGroup(
            sequence,
            companion,
            executor=executor,
            prompt=start.tokens,
            num_cached_tokens=num_cached,
            committed_tokens=len(start.tokens) - 1,
            max_rounds=max_rounds,
            compact_at=2 * self.shape.slots_per_round,
        )
        self.groups.append(group)
        return group

    def step(self) -> bool:
        """Launches a round and collects results. Returns what `launch` returns."""
        launched = self.launch()
        if launched:
            self.collect()
        return launched

    def launch(self) -> bool:
        """Launches a round of all groups that are not finished. Returns False if there is no such group, or if none of
        them has room for a round (`SequenceGroup.full`)."""
        going = [group for group in self.groups if not group.is_finished and self._ensure_slots(group)]
        going = [group for group in going if not group.is_finished]  # `_ensure_slots` may have read new results
        if not going:
            return False
        going.sort(key=lambda group: group.sequence)
        self._move_to_front([group.sequence for group in going])
        for group in going:
            group.used_slots += self.shape.slots_per_round
            group.rounds += 1
        executor = max((group.executor for group in going), key=self.executors.index)
        count = executor.groups(len(going), self.shape.max_groups)
        if count > len(going):
            for group in self.groups:
                if group not in going:  # it has just finished: pick now, before this round runs over its position
                    with suppress(NonFiniteLogits):
                        self.finish(group)
            self.method.rows.reset_idle(slice(len(going), count))
        width = min(executor.window(max(group.used_slots for group in going)), self._slots)
        launched = [LaunchedGroup(group, group.used_slots, group.compactions) for group in going]
        self._in_flight.append((launched, executor.round(self.round, width, count)))
        return True

    def collect(self) -> None:
        """Reads the results of all launched rounds except the last `lag`."""
        while len(self._in_flight) > self.lag:
            self._read_result()

    def finish(self, group: SequenceGroup) -> GroupAnswer:
        """Returns the answer of a group; the first call picks it. Waits for the device. Raises NonFiniteLogits if the
        group's logits or weights are not finite."""
        self._read_results_of(group)
        if group.not_finite:
            raise NonFiniteLogits(EITHER_MODEL)
        if group.answer is None:
            group.answer = self.method.pick(group, self.round.order.index(group.sequence))
        return group.answer

    def cancel(self, group: SequenceGroup) -> GroupAnswer | None:
        """Ends the request of a group before it has finished, and evicts it. Returns its answer so far, or None if its
        logits or weights are not finite."""
        with suppress(NonFiniteLogits):
            self.finish(group)
        self.evict_group(group)
        return group.answer

    def evict_group(self, group: SequenceGroup) -> None:
        """Removes a group, finished or not, and frees its cache sequences. The KV of its committed tokens stays in the
        cache for later prompts."""
        if group in self.groups:
            self._read_results_of(group)  # if its logits are not finite, its sequence must be wiped first
            self.groups.remove(group)
            self._prefixes.set_prefix(group.sequence, [*group.prompt, *group.tokens][: group.committed_tokens], BOTH)
            if (companion := group.companion) is not None:
                text = [*companion.guidance.tokens, *group.tokens]
                self._prefixes.set_prefix(
                    companion.sequence, text[: group.committed_tokens + companion.offset], TARGET_ONLY
                )
            self.method.rows.release(self.round.order.index(group.sequence))

    def _prefill_prompt(self, start: RequestStart) -> tuple[int, int]:
        """Prefills all prompt tokens except the last into a free sequence of both caches. Returns the index of the
        sequence and the number of cached prompt tokens."""
        if self.max_requests == 1:
            runners, most = (self.target, self.draft), start.num_cached_tokens
            return 0, min(runner.open(start.tokens, max_cached=most) for runner in runners)
        return self._prefill(start.tokens, self._sequences_in_use(), BOTH)

    def _prefill_companion(self, start: RequestStart, sequence: int) -> CompanionSequence | None:
        """Prefills the negative prompt of a guided request into a free sequence of the target; the draft runs unguided.
        Returns None without guidance. `sequence`: that of the prompt."""
        guidance = Guidance.of(start.sampling, start.tokens, start.prompt_len)
        if guidance is None:
            return None
        companion, _ = self._prefill(guidance.tokens, [*self._sequences_in_use(), sequence], TARGET_ONLY)
        return CompanionSequence(companion, guidance, len(guidance.tokens) - len(start.tokens))

    def _prefill(self, tokens: Sequence[int], in_use: Sequence[int], models: int) -> tuple[int, int]:
        """Prefills all `tokens` except the last into a sequence that is not `in_use`, in the caches of the first
        `models` models. Returns the index of the sequence and the number of cached tokens."""
        sequence, num_cached = self._prefixes.acquire(tokens, in_use, models)
        for runner in (self.target, self.draft)[:models]:
            runner.prefill(tokens[num_cached:-1], [sequence])
        self._prefixes.set_prefix(sequence, tokens[:-1], models)
        return sequence, num_cached

    def _move_to_front(self, sequences: list[int]) -> None:
        """Moves the groups of these sequences, in this order, to the first positions of the tensors, because a
        round runs over the first groups."""
        if self.round.order[: len(sequences)] != sequences:
            order = [*self.round.order]
            for place, sequence in enumerate(sequences):
                other = order.index(sequence)
                order[place], order[other] = sequence, order[place]
            self.round.rearrange([self.round.order.index(sequence) for sequence in order])

    def _ensure_slots(self, group: SequenceGroup) -> bool:
        """Compacts a group if that is due. Returns whether its tree region has room for another round; sets
        `SequenceGroup.full` if not."""
        limit = self._slots - self.shape.slots_per_round
        if group.used_slots >= group.compact_at:
            self._compact(group)
        if group.used_slots > limit:
            self._read_results_of(group)  # newer results may allow a larger compaction
            self._compact(group)
        group.full = group.used_slots > limit
        return not group.full

    def _read_results_of(self, group: SequenceGroup) -> None:
        """Reads the results of all rounds of a group that are in flight. Waits for the device."""
        while any(each.group is group for launched, _ in self._in_flight for each in launched):
            self._read_result()

    def _read_result(self) -> None:
        """Reads the result of the oldest round in flight."""
        launched, result = self._in_flight.popleft()
        with self.target.translate_peer_errors():
            rows = result.read()
        for each, row in zip(launched, rows, strict=False):  # rows of idle groups follow
            group = each.group
            common, finished, accepted = row[:3].tolist()
            if common < 0:
                group.not_finite = True
                self._wipe(group)
            elif not group.all_finished:  # one more round may have been launched before the host learned of the end
                group.tokens += row[3 + len(group.tokens) : 3 + common].tolist()
                group.all_finished = finished == self.shape.rows
                group.accepted.append(accepted)
                if each.compactions == group.compactions:
                    group.slot_states = row[self.round.header_len :][: each.used_slots]

    def _wipe(self, group: SequenceGroup) -> None:
        """Zeroes a group's KV in both caches: NaN would propagate into later requests even where it is masked."""
        for cache in (self.target.cache, self.draft.cache):
            for sequence in group.sequences:
                cache.wipe(sequence, group.used_slots)

    def _compact(self, group: SequenceGroup) -> None:
        """Commits the slots that all live rows share to the prefix region and frees the dead ones.

        Uses the slot states of the last result read and does not wait; slots allocated since then stay. The next
        compaction is due after `max(slots that stay, slots of two rounds)` further slots have been allocated.
        """
        if group.slot_states is None:
            return
        path = (group.slot_states == SHARED).nonzero()[0].tolist()
        keep = [*(group.slot_states == LIVE).nonzero()[0].tolist(), *range(len(group.slot_states), group.used_slots)]
        group.compact_at = len(keep) + max(len(keep), 2 * self.shape.slots_per_round)
        if len(path) + len(keep) == group.used_slots and not path:
            return  # nothing to gain
        for runner in (self.target, self.draft):
            runner.cache.commit_sequence(group.sequence, path, keep)
        if group.companion is not None:
            self.target.cache.commit_sequence(group.companion.sequence, path, keep)
        group.executor.compact(self.round, self.round.order.index(group.sequence), path, keep)
        # the path may be longer than the shared tokens that the host has read; only these are known
        group.committed_tokens = min(group.committed_tokens + len(path), len(group.prompt) + len(group.tokens))
        group.used_slots, group.slot_states = len(keep), None
        group.compactions += 1
        group.moved_slots += sum(slot != place for place, slot in enumerate([*path, *keep]))
