"""The scheduler of sequence groups: the host side. smc/round.py is the device side.

A request is admitted when a cache sequence is free: its prompt is prefilled once, into that sequence, and the particles
of its group start from it. A group takes part in every round until all its particles have finished, and is then evicted
with an answer, which frees its sequence for the next request. A single request is a batch of one group.

The host launches rounds and counts tree slots, N (K + 1) per round and group, without reading from the device.
Everything else that it needs (which particles have finished, which slots are free, which tokens all of a group share)
it reads from an asynchronous copy, one round late if the device runs ahead.

Source: SMC-SD engine v0.1 sections 3.1, 3.2 and 3.5, v0.2 section 3.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

import numpy as np

from swiftspec.cache.prefix_cache import TokenText, common_prefix_len
from swiftspec.cache.sequence_prefixes import SequencePrefixes
from swiftspec.config import PopulationConfig
from swiftspec.errors import NonFiniteLogits
from swiftspec.messages import RequestStart
from swiftspec.params import SamplingParams
from swiftspec.runtime.runner import Runner
from swiftspec.smc import weights
from swiftspec.smc.executors import GraphPopulationExecutor, PopulationExecutor, RoundResult
from swiftspec.smc.group_result import GroupResult, Particle
from swiftspec.smc.particles import LIVE, SHARED
from swiftspec.smc.round import GroupRound
from swiftspec.smc.sequence_group import LaunchedGroup, RegionUsage, SequenceGroup

EITHER_MODEL = "the target's or the draft's"  # `whose` of NonFiniteLogits: a result does not show which one it is


class BatchScheduler:
    """Scheduler of sequence groups on models of this process: target, draft and up to `smc_groups` groups.

    In a tensor-parallel group each rank holds its shards of both models. The logits are gathered, so all ranks execute
    everything else identically.
    """

    def __init__(
        self,
        target: Runner,
        draft: Runner,
        executors: Sequence[PopulationExecutor],
        config: PopulationConfig,
        *,
        max_tokens: int,
        lag: int = 0,
        reuse_prefixes: bool = True,
    ) -> None:
        """`executors`: executors of rounds on these models, the fastest first.
        `max_tokens`: maximum length of an answer.
        `lag`: number of launched rounds whose results the host does not wait for.
        `reuse_prefixes`: whether the KV of earlier prompts with the same prefix is reused.
        """
        self.target, self.draft, self.config, self.executors, self.lag = target, draft, config, executors, lag
        if config.smc_groups > 1:
            for runner in (target, draft):
                runner.cache.reset(config.smc_groups)
        self.round = GroupRound(target, draft, config, max_tokens)
        self._slots = self.round.particles.mask.shape[-1]  # tree slots of each group
        self._prefixes = SequencePrefixes([target.cache, draft.cache], reuse_prefixes)
        self.groups: list[SequenceGroup] = []  # in order of admission
        self._in_flight: deque[tuple[list[LaunchedGroup], RoundResult]] = deque()

    @property
    def busy(self) -> tuple[float, float]:
        return self.target.busy, self.draft.busy

    @property
    def draft_tokens_per_round(self) -> int:
        """Draft tokens per group and round."""
        return self.config.particles * self.config.smc_draft_tokens

    @property
    def max_requests(self) -> int:
        """Maximum number of requests that are decoded concurrently."""
        return self.config.smc_groups

    @property
    def has_room(self) -> bool:
        """Whether a cache sequence is free to admit a request."""
        return len(self.groups) < self.max_requests

    @property
    def captured_graphs(self) -> int:
        """Number of CUDA graphs that the executors have captured."""
        return sum(each.graphs.captures for each in self.executors if isinstance(each, GraphPopulationExecutor))

    def captures(self) -> list[tuple[Runner, Callable[[], None]]]:
        """Returns functions that capture the CUDA graphs of usual rounds, each with the target's runner. They must be
        called without a request, and on all ranks of a group; see `run_captures`."""
        executor = self.executor
        if not isinstance(executor, GraphPopulationExecutor):
            return []
        found = executor.captures(self.round, self.max_requests, self._slots)
        return [(self.target, capture) for capture in found]

    def reusable_texts(self) -> list[TokenText]:
        """Returns the texts whose prefixes a request finds in the caches of both models."""
        if self.max_requests > 1:
            return self._prefixes.reusable_texts()
        texts = [np.asarray(text, np.int64) for text in self.target.reusable_texts()]
        others = [np.asarray(text, np.int64) for text in self.draft.reusable_texts()]
        return [text[: max((common_prefix_len(text, other) for other in others), default=0)] for text in texts]

    @property
    def executor(self) -> PopulationExecutor:
        """The fastest executor; each runs rounds of all requests."""
        return self.executors[0]

    def admit(self, start: RequestStart, stops: Collection[int], limit: int) -> SequenceGroup:
        """Prefills the prompt on both models and opens the particles of a group. Returns the group. Other groups are
        not affected.

        An answer ends at a token of `stops` or after `limit` tokens. Requires `has_room`, and parameters that mode smc
        supports.
        """
        assert self.has_room
        sequence, num_cached = self._prefill_prompt(start)
        self.round.open(self._place(sequence), start.tokens, start.sampling, stops, limit)
        # without rejections every particle grows by K + 1 tokens per round, so the number of rounds is known
        max_rounds = limit if self._may_reject(start.sampling) else -(-limit // (self.config.smc_draft_tokens + 1))
        group = SequenceGroup(
            sequence,
            RegionUsage(compact_at=2 * self.config.slots_per_round),
            prompt=start.tokens,
            num_cached_tokens=num_cached,
            committed_tokens=len(start.tokens) - 1,
            max_rounds=max_rounds,
        )
        self.groups.append(group)
        return group

    def _may_reject(self, sampling: SamplingParams) -> bool:
        """Returns whether a round may reject draft tokens of a request, so that its particles grow by fewer than K + 1
        tokens."""
        return sampling.filtered or self.config.smc_exact > 0

    def _place(self, sequence: int) -> int:
        """Returns the position of the group with this cache sequence in the tensors of the round."""
        return self.round.requests.order.index(sequence)

    def step(self) -> bool:
        """Launches a round and collects results. Returns what `launch` returns."""
        launched = self.launch()
        if launched:
            self.collect()
        return launched

    def launch(self) -> bool:
        """Launches a round of all groups that are not finished. Returns False if there is no such group, or if none of
        them has room for a round (`RegionUsage.full`)."""
        going = [group for group in self.groups if not group.is_finished and self._ensure_slots(group)]
        going = [group for group in going if not group.is_finished]  # `_ensure_slots` may have read new results
        if not going:
            return False
        requests = self.round.requests
        going.sort(key=lambda group: (requests.sampling_class(group.sequence), group.sequence))
        self._move_to_front([group.sequence for group in going])
        requests.num_running = len(going)
        for group in going:
            group.region.used_slots += self.config.slots_per_round
            group.rounds += 1
        executor = self.executor
        count = executor.groups(len(going), self.max_requests)
        if count > len(going):
            for group in self.groups:
                if group not in going:  # it has just finished: pick now, before this round runs over its position
                    with suppress(NonFiniteLogits):
                        self.finish(group)
            self.round.particles.reset_idle(slice(len(going), count))
        width = min(executor.window(max(group.region.used_slots for group in going)), self._slots)
        launched = [LaunchedGroup(group, group.region.used_slots, group.region.compactions) for group in going]
        self._in_flight.append((launched, executor.round(self.round, width, count)))
        return True

    def collect(self) -> None:
        """Reads the results of all launched rounds except the last `lag`."""
        while len(self._in_flight) > self.lag:
            self._read_result()

    def finish(self, group: SequenceGroup) -> GroupResult:
        """Returns the answer of a group; the first call picks it. Waits for the device. Raises NonFiniteLogits if the
        group's logits or weights are not finite."""
        self._read_results_of(group)
        if group.not_finite:
            raise NonFiniteLogits(EITHER_MODEL)
        if group.answer is None:
            group.answer = pick_answer(self.round, group, self._place(group.sequence))
        return group.answer

    def cancel(self, group: SequenceGroup) -> GroupResult | None:
        """Ends the request of a group before it has finished, and evicts it. Returns its answer so far, or None if its
        logits or weights are not finite."""
        with suppress(NonFiniteLogits):
            self.finish(group)
        self.evict_group(group)
        return group.answer

    def evict_group(self, group: SequenceGroup) -> None:
        """Removes a group, finished or not, and frees its cache sequence. The KV of its committed tokens stays in the
        cache for later prompts."""
        if group in self.groups:
            self._read_results_of(group)  # if its logits are not finite, its sequence must be wiped first
            self.groups.remove(group)
            self._prefixes.set_prefix(group.sequence, [*group.prompt, *group.tokens][: group.committed_tokens])
            self.round.particles.release(self._place(group.sequence))

    def _prefill_prompt(self, start: RequestStart) -> tuple[int, int]:
        """Prefills all prompt tokens except the last into a free sequence of both caches. Returns the index of the
        sequence and the number of cached prompt tokens."""
        tokens, runners = start.tokens, (self.target, self.draft)
        if self.max_requests == 1:
            return 0, min(runner.open(tokens, max_cached=start.num_cached_tokens) for runner in runners)
        sequence, num_cached = self._prefixes.acquire(tokens, [group.sequence for group in self.groups])
        for runner in runners:
            runner.prefill(tokens[num_cached:-1], [sequence])
        self._prefixes.set_prefix(sequence, tokens[:-1])
        return sequence, num_cached

    def _move_to_front(self, sequences: list[int]) -> None:
        """Moves the groups of these sequences, in this order, to the first positions of the tensors, because a
        round runs over the first groups."""
        order = [*self.round.requests.order]
        if order[: len(sequences)] != sequences:
            for place, sequence in enumerate(sequences):
                other = order.index(sequence)
                order[place], order[other] = sequence, order[place]
            self.round.rearrange([self._place(sequence) for sequence in order])

    def _ensure_slots(self, group: SequenceGroup) -> bool:
        """Compacts a group if that is due. Returns whether its tree region has room for another round; sets
        `RegionUsage.full` if not."""
        region, limit = group.region, self._slots - self.config.slots_per_round
        if region.used_slots >= region.compact_at:
            self._compact(group)
        if region.used_slots > limit:
            self._read_results_of(group)  # newer results may allow a larger compaction
            self._compact(group)
        region.full = region.used_slots > limit
        return not region.full

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
            common, finished = row[:2].tolist()
            if common < 0:
                group.not_finite = True
                self._wipe(group)
            elif not group.all_finished:  # one more round may have been launched before the host learned of the end
                group.tokens += row[2 + len(group.tokens) : 2 + common].tolist()
                group.all_finished = finished == self.config.particles
                if each.compactions == group.region.compactions:
                    group.region.slot_states = row[self.round.header_len :][: each.used_slots]

    def _wipe(self, group: SequenceGroup) -> None:
        """Zeroes a group's KV in both caches: NaN would propagate into later requests even where it is masked."""
        for runner in (self.target, self.draft):
            runner.cache.wipe(group.sequence, group.region.used_slots)

    def _compact(self, group: SequenceGroup) -> None:
        """Commits the slots that all live particles share to the prefix region and frees the dead ones.

        Uses the slot states of the last result read and does not wait; slots allocated since then stay. The next
        compaction is due after `max(slots that stay, slots of two rounds)` further slots have been allocated.
        """
        region = group.region
        if region.slot_states is None:
            return
        path = (region.slot_states == SHARED).nonzero()[0].tolist()
        keep = [
            *(region.slot_states == LIVE).nonzero()[0].tolist(),
            *range(len(region.slot_states), region.used_slots),
        ]
        region.compact_at = len(keep) + max(len(keep), 2 * self.config.slots_per_round)
        if len(path) + len(keep) == region.used_slots and not path:
            return  # nothing to gain
        for runner in (self.target, self.draft):
            runner.cache.commit_sequence(group.sequence, path, keep)
        self.executor.compact(self.round, self._place(group.sequence), path, keep)
        # the path may be longer than the shared tokens that the host has read; only these are known
        group.committed_tokens = min(group.committed_tokens + len(path), len(group.prompt) + len(group.tokens))
        region.used_slots, region.slot_states = len(keep), None
        region.compactions += 1
        region.moved_slots += sum(slot != place for place, slot in enumerate([*path, *keep]))


def pick_answer(round_: GroupRound, group: SequenceGroup, place: int) -> GroupResult:
    """Returns the answer of a group, the text of one of its particles, which is drawn by its weight. `place`: position
    of the group in the tensors of the round. Waits for the device."""
    p, rounds = round_.particles, max(group.rounds, 1)
    uniform, lengths = round_.streams.pick(place), p.length[place].tolist()
    picked, shares = weights.pick_particle(p.log_weights[place].tolist(), uniform)
    texts = zip(p.tokens[place, :, : max(lengths)].tolist(), lengths, strict=True)
    found = zip(texts, p.stopped[place].tolist(), shares, strict=True)
    particles = tuple(Particle(tuple(text[:n]), stopped, share) for (text, n), stopped, share in found)
    return GroupResult(
        tokens=[*particles[picked].tokens],
        stopped=particles[picked].stopped,
        full=group.region.full,
        compactions=group.region.compactions,
        moved_slots=group.region.moved_slots,
        coalesced_prefix=len(group.tokens),
        ess_mean=float(p.ess[place]) / rounds,
        resample_rate=int(p.resampled[place]) / rounds,
        log_z=float(p.log_evidence()[place]),
        particles=particles,
        uniform=uniform,
    )
