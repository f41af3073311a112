"""Executors of rounds of sequence groups. A round runs as a whole, with the forwards of both models."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from numpy.typing import NDArray
from torch import Tensor

from swiftspec.runtime.async_copy import HostCopies
from swiftspec.runtime.executors import Executor
from swiftspec.runtime.executors.graph import ROUND_GRAPHS, GraphCache
from swiftspec.tree.mask import MASK_WIDTHS

EAGER_WINDOW_SLOTS = 16  # windows of eager rounds are multiples of it


class SamplingSpan(NamedTuple):
    """The sampling parameters of consecutive groups, as native rounds take them."""

    groups: int
    temperature: float  # 0: greedy
    bias: Tensor | None  # [vocab]
    filters: Mapping[str, float] | None  # by their names in SamplingParams; likewise penalties
    penalties: Mapping[str, float] | None
    min_tokens: int


class RoundResult(Protocol):
    """The result of a round that was launched on the device."""

    def read(self) -> NDArray:
        """Waits for the round. Returns [groups, `RoundProgram.header_len` + width] int64: per group the values that
        swiftspec/batching/round.py describes."""
        ...


class RoundProgram(Protocol):
    """A round of sequence groups as operators on tensors at fixed addresses; implemented by
    swiftspec/batching/round.py."""

    @property
    def key(self) -> Hashable:
        """Key of a captured round: equal keys mean the same operators on the same tensors, given the number of groups
        and the window width."""
        ...

    def buckets(self, width: int, /) -> Hashable:
        """Returns the `capture_bucket` of both models for a round over a window of `width` tree slots, which a captured
        round holds by value."""
        ...

    @property
    def state(self) -> Sequence[Tensor]:
        """The tensors that a round changes, except keys and values, which a repetition of the round overwrites."""
        ...

    @property
    def tensors(self) -> Sequence[Tensor]:
        """All tensors that a round reads or changes, except keys and values: [groups, ...] each."""
        ...

    @property
    def header_len(self) -> int:
        """The number of values per group in the result, in addition to one per slot of the window."""
        ...

    def compact(self, group: int, path: Sequence[int], keep: Sequence[int], /) -> None:
        """Updates the tensors of the group at position `group` after `ModelCache.commit_sequence` with the same `path`
        and `keep` in both caches."""
        ...

    def sampling_spans(self, groups: int, /) -> Sequence[SamplingSpan]:
        """Returns the sampling parameters of the first `groups` groups. Neighbours with equal parameters share one
        entry."""
        ...

    def __call__(self, width: int, groups: int, /) -> Tensor:
        """Runs one round of the first `groups` groups, operator by operator. `width`: width of the mask window, in tree
        slots. Returns what `RoundResult.read` copies to the host."""
        ...


class PopulationExecutor(Executor, Protocol):
    """An executor of rounds of sequence groups."""

    def window(self, slots: int) -> int:
        """Returns the width of the mask window for a round over `slots` tree slots: at least `slots`."""
        ...

    def groups(self, live: int, max_groups: int) -> int:
        """Returns the number of groups that a round runs over if `live` of at most `max_groups` take part. It may be
        larger than `live`; the further groups are idle."""
        ...

    def round(self, program: RoundProgram, width: int, groups: int, /) -> RoundResult:
        """Launches a round of the first `groups` groups over a mask window of `width` tree slots."""
        ...

    def compact(self, program: RoundProgram, group: int, path: Sequence[int], keep: Sequence[int], /) -> None:
        """Calls `RoundProgram.compact`, which takes effect after the rounds launched so far."""
        ...


class EagerPopulationExecutor:
    """Eager executor of rounds of sequence groups: launches operator by operator; supports every request and
    device."""

    name = "eager"
    columns: Sequence[str] = ()

    def __init__(self) -> None:
        self._copies = HostCopies()

    def window(self, slots: int) -> int:
        return -(-slots // EAGER_WINDOW_SLOTS) * EAGER_WINDOW_SLOTS

    def groups(self, live: int, max_groups: int) -> int:
        return live

    def round(self, program: RoundProgram, width: int, groups: int) -> RoundResult:
        return self._copies.start(program(width, groups))

    def compact(self, program: RoundProgram, group: int, path: Sequence[int], keep: Sequence[int]) -> None:
        program.compact(group, path, keep)


class GraphPopulationExecutor(EagerPopulationExecutor):
    """Executor that runs a round of sequence groups as one CUDA graph, with the forwards of both models and everything
    between them. The time of each model cannot be measured, so `Runner.busy` does not include it."""

    name = "graph"
    columns = ("graph of a round",)

    def __init__(self, graphs: GraphCache) -> None:
        super().__init__()
        self.graphs = graphs
        self._key: Hashable = None

    def window(self, slots: int) -> int:
        """See `PopulationExecutor.window`. Returns one of a few widths, because a graph is captured for each."""
        step = MASK_WIDTHS[-1]
        if slots < step:
            step = next(width for width in MASK_WIDTHS if width >= slots)
        return -(-slots // step) * step

    def groups(self, live: int, max_groups: int) -> int:
        """See `PopulationExecutor.groups`. Returns a power of two or `max_groups`, because a graph is captured for
        each number."""
        return min(1 << (live - 1).bit_length(), max_groups)

    def round(self, program: RoundProgram, width: int, groups: int) -> RoundResult:
        if program.key != self._key:
            self.graphs.evict(ROUND_GRAPHS)  # the tensors that its graphs hold no longer exist
            self._key = program.key
        key = width, groups, program.buckets(width)
        return self._copies.start(self.graphs.run(ROUND_GRAPHS, key, partial(program, width, groups), program.state))
