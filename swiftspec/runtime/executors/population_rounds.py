"""Who runs a population's rounds, and how: each is one step of both models."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from typing import Protocol

from numpy.typing import NDArray
from torch import Tensor

from swiftspec.runtime.async_copy import AsyncCopy
from swiftspec.runtime.executors import FEATURES, Features, Kind
from swiftspec.runtime.executors.graph import ROUNDS, Graphs
from swiftspec.tree.mask import WIDTHS

NARROW = 16  # windows of eager rounds are multiples of this many slots


class Mail(Protocol):
    """What a round leaves for the host."""

    def read(self) -> NDArray:
        """[groups, `Work.told` + width] int64, waited for."""
        ...


class Work(Protocol):
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
    def told(self) -> int:
        """How many numbers it leaves for each group, beside one for each slot of the window."""
        ...

    def compact(self, group: int, path: Sequence[int], keep: Sequence[int], /) -> None:
        """Follows `KVCache.promote` of both caches in the group at that position."""
        ...

    def shaped(self, groups: int, /) -> Sequence[tuple[int, float, Tensor | None]]:
        """How the logits of the first groups are shaped, by neighbours: so many groups, their temperature and bias."""
        ...

    def __call__(self, width: int, groups: int, /) -> Tensor:
        """One round, operator by operator."""
        ...


class Rounds(Kind, Protocol):
    """One kind of rounds."""

    def window(self, slots: int) -> int:
        """The width of the mask window for a round over so many tree slots."""
        ...

    def groups(self, live: int, most: int) -> int:
        """How many groups a round runs over, where so many of at most `most` take part; the others are idle."""
        ...

    def round(self, work: Work, width: int, groups: int, /) -> Mail:
        """One round of the first groups over a window of that width."""
        ...

    def compact(self, work: Work, group: int, path: Sequence[int], keep: Sequence[int], /) -> None:
        """`Work.compact`, after the rounds that have begun."""
        ...


class EagerRounds:
    """Operator by operator: on any device, for every request."""

    name = "eager"

    def takes(self, wanted: Features) -> bool:
        return True

    def window(self, slots: int) -> int:
        return -(-slots // NARROW) * NARROW

    def groups(self, live: int, most: int) -> int:
        return live

    def round(self, work: Work, width: int, groups: int) -> Mail:
        return AsyncCopy(work(width, groups))

    def compact(self, work: Work, group: int, path: Sequence[int], keep: Sequence[int]) -> None:
        work.compact(group, path, keep)


class GraphRounds(EagerRounds):
    """A population's rounds, each one graph of both models' forwards and all that comes between them. The seconds that
    it spends in either model cannot be told apart, and `Runner.busy` leaves them out."""

    name = "graph"
    TAKES: Features = frozenset(FEATURES) - {"guidance"}

    def __init__(self, graphs: Graphs) -> None:
        self.graphs = graphs
        self._key: Hashable = None

    def takes(self, wanted: Features) -> bool:
        return wanted <= self.TAKES

    def window(self, slots: int) -> int:
        """One of few, each with its graph."""
        step = WIDTHS[-1]
        if slots < step:
            step = next(width for width in WIDTHS if width >= slots)
        return -(-slots // step) * step

    def groups(self, live: int, most: int) -> int:
        """One of few: a power of two, or all."""
        return min(1 << (live - 1).bit_length(), most)

    def round(self, work: Work, width: int, groups: int) -> Mail:
        if work.key != self._key:
            self.graphs.forget(ROUNDS)  # the tensors that they read by value are gone
            self._key = work.key
        self.graphs.open(ROUNDS, lambda: None)
        return AsyncCopy(self.graphs.run(ROUNDS, (width, groups), partial(work, width, groups), work.state))
