"""Executors of population rounds; a round is one phase of both models."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from typing import Protocol

from numpy.typing import NDArray
from torch import Tensor

from swiftspec.runtime.async_copy import AsyncCopy
from swiftspec.runtime.executors import FEATURES, Executor, Features
from swiftspec.runtime.executors.graph import ROUND_GRAPHS, GraphCache
from swiftspec.tree.mask import MASK_WIDTHS

EAGER_WINDOW_SLOTS = 16  # windows of eager rounds are multiples of it


class RoundResult(Protocol):
    """The outcome of a launched round."""

    def read(self) -> NDArray:
        """[groups, `RoundProgram.header_len` + width] int64. Waits for the round."""
        ...


class RoundProgram(Protocol):
    """A round of a population as operators on tensors at fixed addresses; swiftspec/smc/round.py implements it."""

    @property
    def key(self) -> Hashable:
        """Equal for rounds that, for the same number of groups and window width, run the same operators on the same
        tensors."""
        ...

    @property
    def state(self) -> Sequence[Tensor]:
        """The tensors that a round changes, except keys and values, which the next round writes again."""
        ...

    @property
    def tensors(self) -> Sequence[Tensor]:
        """All tensors that a round without penalties reads or changes, except keys and values: [G, ...] each."""
        ...

    @property
    def header_len(self) -> int:
        """The number of values per group in the result, in addition to one per slot of the window."""
        ...

    def compact(self, group: int, path: Sequence[int], keep: Sequence[int], /) -> None:
        """Applies `KVCache.commit_sequence` of both caches to the group at that position."""
        ...

    def sampling_spans(self, groups: int, /) -> Sequence[tuple[int, float, Tensor | None]]:
        """The logits parameters of the first groups, as runs of equal neighbours: number of groups, temperature,
        bias."""
        ...

    def __call__(self, width: int, groups: int, /) -> Tensor:
        """Runs one round, operator by operator."""
        ...


class PopulationExecutor(Executor, Protocol):
    """An executor of population rounds."""

    def window(self, slots: int) -> int:
        """The width of the mask window for a round over that many tree slots."""
        ...

    def groups(self, live: int, max_groups: int) -> int:
        """The number of groups that a round runs over if `live` of at most `max_groups` take part; the others are
        idle."""
        ...

    def round(self, program: RoundProgram, width: int, groups: int, /) -> RoundResult:
        """Launches a round of the first groups over a window of that width."""
        ...

    def compact(self, program: RoundProgram, group: int, path: Sequence[int], keep: Sequence[int], /) -> None:
        """`RoundProgram.compact`, ordered after the rounds launched so far."""
        ...


class EagerPopulationExecutor:
    """Rounds operator by operator, for every request and device."""

    name = "eager"

    def supports(self, required: Features) -> bool:
        return True

    def window(self, slots: int) -> int:
        return -(-slots // EAGER_WINDOW_SLOTS) * EAGER_WINDOW_SLOTS

    def groups(self, live: int, max_groups: int) -> int:
        return live

    def round(self, program: RoundProgram, width: int, groups: int) -> RoundResult:
        return AsyncCopy(program(width, groups))

    def compact(self, program: RoundProgram, group: int, path: Sequence[int], keep: Sequence[int]) -> None:
        program.compact(group, path, keep)


class GraphPopulationExecutor(EagerPopulationExecutor):
    """Population rounds as one CUDA graph each, with the forwards of both models and everything between. The time per
    model cannot be measured, so `Runner.busy` does not include it."""

    name = "graph"
    SUPPORTED: Features = frozenset(FEATURES) - {"guidance"}

    def __init__(self, graphs: GraphCache) -> None:
        self.graphs = graphs
        self._key: Hashable = None

    def supports(self, required: Features) -> bool:
        return required <= self.SUPPORTED

    def window(self, slots: int) -> int:
        """One of a few widths, each with its own graph."""
        step = MASK_WIDTHS[-1]
        if slots < step:
            step = next(width for width in MASK_WIDTHS if width >= slots)
        return -(-slots // step) * step

    def groups(self, live: int, max_groups: int) -> int:
        """One of a few numbers: a power of two, or the maximum."""
        return min(1 << (live - 1).bit_length(), max_groups)

    def round(self, program: RoundProgram, width: int, groups: int) -> RoundResult:
        if program.key != self._key:
            self.graphs.evict(ROUND_GRAPHS)  # the tensors that its graphs hold no longer exist
            self._key = program.key
        self.graphs.open(ROUND_GRAPHS, lambda: None)
        return AsyncCopy(self.graphs.run(ROUND_GRAPHS, (width, groups), partial(program, width, groups), program.state))
