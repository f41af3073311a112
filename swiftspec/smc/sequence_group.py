"""The host-side state of a sequence group, the particles of one request, from admission to its answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from numpy.typing import NDArray

from swiftspec.smc.group_result import GroupResult


@dataclass(slots=True, eq=False)
class RegionUsage:
    """The use of a group's tree region, in tree slots."""

    compact_at: int  # slots in use at which the next compaction is due
    used_slots: int = 1  # number of slots allocated
    slot_states: NDArray | None = None  # state of each slot in the last result read; None after a compaction
    full: bool = False  # there is no room for another round
    compactions: int = 0  # number of compactions
    moved_slots: int = 0  # slots whose KV compactions moved


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """The N particles of one request."""

    sequence: int  # index of its cache sequence, exclusive until it is evicted
    region: RegionUsage
    prompt: Sequence[int]
    num_cached_tokens: int  # prompt tokens whose KV an earlier request has computed
    committed_tokens: int  # tokens of prompt and answer that are known to be in the cache's prefix region
    max_rounds: int
    rounds: int = 0
    tokens: list[int] = field(default_factory=list)  # shared by all particles, as of the last result read
    all_finished: bool = False  # every particle has finished
    not_finite: bool = False  # its logits or weights are not finite
    answer: GroupResult | None = None  # set once it is picked

    @property
    def is_finished(self) -> bool:
        """Whether the group takes part in no further round."""
        return self.all_finished or self.region.full or self.not_finite or self.rounds == self.max_rounds


@dataclass(frozen=True, slots=True)
class LaunchedGroup:
    """A group in a launched round, with its tree slots in use and its compaction count at the launch."""

    group: SequenceGroup
    used_slots: int
    compactions: int
