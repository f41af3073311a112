"""The host-side state of a sequence group, from admission to its answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from numpy.typing import NDArray

from swiftspec.runtime.executors.population_rounds import PopulationExecutor
from swiftspec.sampling.guidance import Guidance


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAnswer:
    """The answer of a sequence group, and statistics of the group."""

    tokens: list[int]
    stopped: bool  # by a stop token
    full: bool  # the group ended because its tree region had no room for another round
    compactions: int  # number of compactions of its tree region
    moved_slots: int  # slots whose KV compactions moved; fan-out and resampling move no KV


@dataclass(frozen=True, slots=True)
class CompanionSequence:
    """The unconditional sequence of a guided group, in the target's cache only: every row of the group's tree runs in
    both sequences."""

    sequence: int  # index of its cache sequence
    guidance: Guidance
    offset: int  # its length minus that of the group's sequence, the same in every round


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """The rows of one request: one chain in an exact batch, N particles in mode smc."""

    sequence: int  # index of its cache sequence, exclusive until it is evicted
    companion: CompanionSequence | None  # None without guidance
    executor: PopulationExecutor  # the fastest one that supports the request; slower ones support it too
    prompt: Sequence[int]
    num_cached_tokens: int  # prompt tokens whose KV an earlier request has computed
    committed_tokens: int  # tokens of prompt and answer that are known to be in the cache's prefix region
    max_rounds: int
    compact_at: int  # tree slots in use at which the next compaction is due
    used_slots: int = 1  # number of tree slots allocated
    rounds: int = 0
    tokens: list[int] = field(default_factory=list)  # shared by all rows, as of the last result read
    all_finished: bool = False  # every row has finished
    slot_states: NDArray | None = None  # state of each tree slot in the last result read; None after a compaction
    full: bool = False  # its tree region has no room for another round
    not_finite: bool = False  # its logits or weights are not finite
    accepted: list[int] = field(default_factory=list)  # accepted draft tokens, per round
    compactions: int = 0  # number of compactions
    moved_slots: int = 0  # slots whose KV compactions moved
    answer: GroupAnswer | None = None  # set once it is picked

    @property
    def sequences(self) -> list[int]:
        """The cache sequences that the group owns."""
        return [self.sequence] if self.companion is None else [self.sequence, self.companion.sequence]

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
