"""Populations of particles: the host side. smc/round.py is the device side.

A request is admitted when a cache sequence is free: its prompt is prefilled once, into that sequence, and N particles
fan out from it. It takes part in every round until all its particles have finished, and is then released with a result,
which frees its sequence for the next request. A single request is a batch of one group.

The host launches rounds and counts tree slots, N (K + 1) per round and group, without reading from the device.
Everything else that it needs (which particles have finished, which slots are free, which tokens all particles of a
group share) it reads from an asynchronous copy, one round late if the device runs ahead.

Source: SMC-SD engine v0.1 sections 3.1, 3.2 and 3.5, v0.2 section 3.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from numpy.typing import NDArray

from swiftspec.config import PopulationConfig
from swiftspec.errors import NonFiniteLogits
from swiftspec.messages import RequestStart
from swiftspec.runtime.executors import features_of, select_executor
from swiftspec.runtime.executors.population_rounds import PopulationExecutor, RoundResult
from swiftspec.runtime.runner import Runner
from swiftspec.smc import weights
from swiftspec.smc.group_result import GroupResult, Particle
from swiftspec.smc.particles import LIVE, SHARED
from swiftspec.smc.prefix_reuse import SequencePrefixes
from swiftspec.smc.round import PopulationRound

EITHER_MODEL = "the target's or the draft's"  # `whose` of NonFiniteLogits: a result does not show which one it is


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """The particles of one request: host-side state from admission to result."""

    sequence: int  # index of its cache sequence, exclusive until it is released
    executor: PopulationExecutor  # the fastest one that supports the request; slower ones support it too
    prompt: Sequence[int]
    num_cached_tokens: int  # prompt tokens whose KV an earlier request has computed
    committed_tokens: int  # tokens of prompt and answer that are known to be in the cache's prefix region
    max_rounds: int
    compact_at: int  # tree slots in use at which the next compaction is due
    used_slots: int = 1  # number of tree slots allocated
    rounds: int = 0
    tokens: list[int] = field(default_factory=list)  # shared by all particles, as of the last result read
    all_finished: bool = False  # every particle has finished
    slot_states: NDArray | None = None  # state of each tree slot in the last result read; None after a compaction
    full: bool = False  # its tree region has no room for another round
    not_finite: bool = False  # its logits or weights are not finite
    accepted: list[int] = field(default_factory=list)  # accepted draft tokens, per round
    compactions: int = 0  # number of compactions
    moved_slots: int = 0  # slots whose KV compactions moved
    answer: GroupResult | None = None  # set once a particle is picked

    @property
    def is_finished(self) -> bool:
        """Whether the group takes part in no further round."""
        return self.all_finished or self.full or self.not_finite or self.rounds == self.max_rounds


@dataclass(frozen=True, slots=True)
class LaunchedGroup:
    """A group in a launched round, with its tree slots in use and its compaction count at the launch."""

    group: SequenceGroup
    used_slots: int
    compactions: int


class LocalPopulation:
    """Population on models of this process: target, draft and up to `smc_groups` sequence groups.

    In a tensor-parallel group each rank holds its shards of both models. The logits are gathered, so all ranks execute
    everything else identically.
    """

    def __init__(
        self, target: Runner, draft: Runner, executors: Sequence[PopulationExecutor], config: PopulationConfig, *,
        max_tokens: int, lag: int = 0, reuse_prefixes: bool = True,
    ) -> None:  # fmt: skip
        """`executors`: executors of population rounds on these models, the fastest first.
        `max_tokens`: maximum length of an answer.
        `lag`: number of launched rounds whose results the host does not wait for.
        `reuse_prefixes`: whether the KV of earlier prompts with the same prefix is reused.
        """
        self.target, self.draft, self.config = target, draft, config
        self.executors = executors
        self.lag = lag
        if config.smc_groups > 1:
            for runner in (target, draft):
                runner.cache.reset(config.smc_groups)
        self.round = PopulationRound(target, draft, config, max_tokens)
        self.particles = self.round.particles
        self._slots = self.particles.mask.shape[-1]  # tree slots of each group
        self._prefixes = SequencePrefixes([target.cache, draft.cache], reuse_prefixes)
        self.groups: list[SequenceGroup] = []  # in order of admission
        self._order = [*range(config.smc_groups)]  # sequence of the group at each position of the particle tensors
        self._in_flight: deque[tuple[list[LaunchedGroup], RoundResult]] = deque()

    @property
    def busy(self) -> tuple[float, float]:
        return self.target.busy, self.draft.busy

    @property
    def draft_tokens_per_round(self) -> int:
        """Draft tokens per group and round."""
        return self.config.particles * self.config.smc_draft_tokens

    @property
    def exact(self) -> bool:
        """Whether every group is a verified chain, whose output follows the target's distribution exactly."""
        return self.config.chains is not None

    @property
    def max_requests(self) -> int:
        """Maximum number of requests that are decoded concurrently."""
        return self.config.smc_groups

    @property
    def has_room(self) -> bool:
        """Whether another request can be admitted."""
        return len(self.groups) < self.max_requests

    def select_executor(self, start: RequestStart) -> PopulationExecutor:
        """Returns the executor for a request: the one that the leader has chosen, otherwise the fastest that supports
        it."""
        hidden = ["hidden states"] if self.target.model.hidden_layers else []
        return select_executor(self.executors, features_of(start.sampling, "population", *hidden), start.executor)

    def admit(self, start: RequestStart, stops: Collection[int], limit: int) -> SequenceGroup:
        """Prefills the prompt on both models and fans out N particles. Returns their group. Other groups are not
        affected.

        An answer ends at a token of `stops` or after `limit` tokens. Requires `has_room`, and a request that
        `check_sampling` accepts.
        """
        assert self.has_room
        executor = self.select_executor(start)
        sequence, num_cached = self._prefill_prompt(start)
        self.round.open(self._order.index(sequence), start.tokens, start.sampling, stops, limit)
        # without rejections every particle grows by K + 1 tokens per round, so the number of rounds is known
        max_rounds = limit if self.round.rejects(start.sampling) else -(-limit // self.particles.step)
        group = SequenceGroup(
            sequence, executor, start.tokens, num_cached, len(start.tokens) - 1, max_rounds,
            compact_at=2 * self.config.slots_per_round,
        )  # fmt: skip
        self.groups.append(group)
        return group

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
            group.used_slots += self.config.slots_per_round
            group.rounds += 1
        executor = max((group.executor for group in going), key=self.executors.index)
        count = executor.groups(len(going), self.config.smc_groups)
        if count > len(going):
            for group in self.groups:
                if group not in going:  # it has just finished: pick now, before this round runs over its position
                    with suppress(NonFiniteLogits):
                        self.finish(group)
            self.particles.reset_idle(slice(len(going), count))
        width = min(executor.window(max(group.used_slots for group in going)), self._slots)
        launched = [LaunchedGroup(group, group.used_slots, group.compactions) for group in going]
        self._in_flight.append((launched, executor.round(self.round, width, count)))
        return True

    def collect(self) -> None:
        """Reads the results of all launched rounds except the last `lag`."""
        while len(self._in_flight) > self.lag:
            self._read_result()

    def finish(self, group: SequenceGroup) -> GroupResult:
        """Returns the result of a group; the first call picks the particle that is its answer. Waits for the device.
        Raises NonFiniteLogits if the group's logits or weights are not finite."""
        self._read_results_of(group)
        if group.not_finite:
            raise NonFiniteLogits(EITHER_MODEL)
        if group.answer is None:
            group.answer = self._pick(group)
        return group.answer

    def release(self, group: SequenceGroup) -> None:
        """Ends the request of a group, finished or not, and frees its cache sequence. The KV of its committed tokens
        stays in the cache for later prompts."""
        if group in self.groups:
            self._read_results_of(group)  # if its logits are not finite, its sequence must be wiped first
            self.groups.remove(group)
            self._prefixes.set_prefix(group.sequence, [*group.prompt, *group.tokens][: group.committed_tokens])
            self.particles.release(self._order.index(group.sequence))

    def _pick(self, group: SequenceGroup) -> GroupResult:
        at, p, rounds = self._order.index(group.sequence), self.particles, max(group.rounds, 1)
        uniform, lengths = self.round.streams.pick(at), p.length[at].tolist()
        row, shares = weights.pick_particle(p.log_weights[at].tolist(), uniform)
        texts = zip(p.tokens[at, :, : max(lengths)].tolist(), lengths, strict=True)
        found = zip(texts, p.stopped[at].tolist(), shares, strict=True)
        particles = tuple(Particle(tuple(text[:n]), stopped, share) for (text, n), stopped, share in found)
        return GroupResult(
            tokens=[*particles[row].tokens],
            stopped=particles[row].stopped,
            coalesced_prefix=len(group.tokens),
            ess_mean=float(p.ess[at]) / rounds,
            resample_rate=int(p.resampled[at]) / rounds,
            log_z=float(p.log_evidence()[at]),
            full=group.full,
            compactions=group.compactions,
            moved_slots=group.moved_slots,
            particles=particles,
            uniform=uniform,
        )

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
        """Moves the groups of these sequences, in this order, to the first positions of the particle tensors, because a
        round runs over the first groups."""
        if self._order[: len(sequences)] != sequences:
            order = [*self._order]
            for place, sequence in enumerate(sequences):
                other = order.index(sequence)
                order[place], order[other] = sequence, order[place]
            self.round.rearrange([self._order.index(sequence) for sequence in order])
            self._order = order

    def _ensure_slots(self, group: SequenceGroup) -> bool:
        """Compacts a group if that is due. Returns whether its tree region has room for another round; sets
        `SequenceGroup.full` if not."""
        limit = self._slots - self.config.slots_per_round
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
                group.all_finished = finished == self.config.particles
                group.accepted.append(accepted)
                if each.compactions == group.compactions:
                    group.slot_states = row[self.round.header_len :][: each.used_slots]

    def _wipe(self, group: SequenceGroup) -> None:
        """Zeroes a group's KV in both caches: NaN would propagate into later requests even where it is masked."""
        for cache in (self.target.cache, self.draft.cache):
            cache.wipe(group.sequence, group.used_slots)

    def _compact(self, group: SequenceGroup) -> None:
        """Commits the slots that all live particles share to the prefix region and frees the dead ones.

        Uses the slot states of the last result read and does not wait; slots allocated since then stay. The next
        compaction is due after `max(slots that stay, slots of two rounds)` further slots have been allocated.
        """
        if group.slot_states is None:
            return
        path = (group.slot_states == SHARED).nonzero()[0].tolist()
        keep = [*(group.slot_states == LIVE).nonzero()[0].tolist(), *range(len(group.slot_states), group.used_slots)]
        group.compact_at = len(keep) + max(len(keep), 2 * self.config.slots_per_round)
        if len(path) + len(keep) == group.used_slots and not path:
            return  # nothing to gain
        for runner in (self.target, self.draft):
            runner.cache.commit_sequence(group.sequence, path, keep)
        group.executor.compact(self.round, self._order.index(group.sequence), path, keep)
        # the path may be longer than the shared tokens that the host has read; only these are known
        group.committed_tokens = min(group.committed_tokens + len(path), len(group.prompt) + len(group.tokens))
        group.used_slots, group.slot_states = len(keep), None
        group.compactions += 1
        group.moved_slots += sum(slot != place for place, slot in enumerate([*path, *keep]))
