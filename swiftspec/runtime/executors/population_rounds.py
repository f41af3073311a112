"""Who runs a population's rounds, and how: each is one step of both models."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from typing import Protocol

from numpy.typing import NDArray
from torch import Tensor

from swiftspec.runtime.async_copy import AsyncCopy
from swiftspec.runtime.executors import FEATURES, Executor, Features
from swiftspec.runtime.executors.graph import ROUND_FAMILY, GraphCache
from swiftspec.tree.mask import MASK_WIDTHS

EAGER_WINDOW_SLOTS = 16  # windows of eager rounds are multiples of this many slots


class RoundResult(Protocol):
    """What a round leaves for the host."""

    def read(self) -> NDArray:
        """[groups, `RoundProgram.header_len` + width] int64, waited for."""
        ...


class RoundProgram(Protocol):
    """What a round of a population is: operators on tensors that stay where they are. swiftspec/smc/round.py has it."""

    @property
    def key(self) -> Hashable:
        """Equal for rounds that, with as many groups and as wide a window, run the same operators on the same
        tensors."""
        ...

    @property
    def state(self) -> Sequence[Tensor]:
        """What a round changes, but for keys and values, of which the next one writes the same anew."""
        ...

    @property
    def tensors(self) -> Sequence[Tensor]:
        """All that it reads or changes without penalties, but for keys and values: [G, ...] each."""
        ...

    @property
    def header_len(self) -> int:
        """How many numbers it leaves for each group, beside one for each slot of the window."""
        ...

    def compact(self, group: int, path: Sequence[int], keep: Sequence[int], /) -> None:
        """Follows `KVCache.commit_sequence` of both caches in the group at that position."""
        ...

    def sampling_spans(self, groups: int, /) -> Sequence[tuple[int, float, Tensor | None]]:
        """How the logits of the first groups are shaped, by neighbours: so many groups, their temperature and bias."""
        ...

    def __call__(self, width: int, groups: int, /) -> Tensor:
        """One round, operator by operator."""
        ...


class PopulationExecutor(Executor, Protocol):
    """One kind of rounds."""

    def window(self, slots: int) -> int:
        """The width of the mask window for a round over so many tree slots."""
        ...

    def groups(self, live: int, most: int) -> int:
        """How many groups a round runs over, where so many of at most `most` take part; the others are idle."""
        ...

    def round(self, program: RoundProgram, width: int, groups: int, /) -> RoundResult:
        """One round of the first groups over a window of that width."""
        ...

    def compact(self, program: RoundProgram, group: int, path: Sequence[int], keep: Sequence[int], /) -> None:
        """`RoundProgram.compact`, after the rounds that have begun."""
        ...


class EagerPopulationExecutor:
    """Operator by operator: on any device, for every request."""

    name = "eager"

    def supports(self, required: Features) -> bool:
        return True

    def window(self, slots: int) -> int:
        return -(-slots // EAGER_WINDOW_SLOTS) * EAGER_WINDOW_SLOTS

    def groups(self, live: int, most: int) -> int:
        return live

    def round(self, program: RoundProgram, width: int, groups: int) -> RoundResult:
        return AsyncCopy(program(width, groups))

    def compact(self, program: RoundProgram, group: int, path: Sequence[int], keep: Sequence[int]) -> None:
        program.compact(group, path, keep)


class GraphPopulationExecutor(EagerPopulationExecutor):
    """A population's rounds, each one graph of both models' forwards and all that comes between them. The seconds that
    it spends in either model cannot be told apart, and `Runner.busy` leaves them out."""

    name = "graph"
    TAKES: Features = frozenset(FEATURES) - {"guidance"}

    def __init__(self, graphs: GraphCache) -> None:
        self.graphs = graphs
        self._key: Hashable = None

    def supports(self, required: Features) -> bool:
        return required <= self.TAKES

    def window(self, slots: int) -> int:
        """One of few, each with its graph."""
        step = MASK_WIDTHS[-1]
        if slots < step:
            step = next(width for width in MASK_WIDTHS if width >= slots)
        return -(-slots // step) * step

    def groups(self, live: int, most: int) -> int:
        """One of few: a power of two, or all."""
        return min(1 << (live - 1).bit_length(), most)

    def round(self, program: RoundProgram, width: int, groups: int) -> RoundResult:
        if program.key != self._key:
            self.graphs.evict(ROUND_FAMILY)  # the tensors that they read by value are gone
            self._key = program.key
        self.graphs.open(ROUND_FAMILY, lambda: None)
        return AsyncCopy(self.graphs.run(ROUND_FAMILY, (width, groups), partial(program, width, groups), program.state))
