"""A population's rounds as one native call each, on a CPU.

The native side works on the population's own tensors and on both caches, so an eager round may follow a native one. It
takes groups whose logits need no more than a bias, a temperature and noise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from swiftspec.config import PopulationConfig
from swiftspec.runtime.executors import Features
from swiftspec.runtime.executors.population_rounds import Work
from swiftspec.runtime.runner import Runner

Told = Callable[[bool, int, float], None]  # of a forward: whether it was the target's, its rows, its seconds


class NativePopulation(Protocol):
    """Rounds on tensors that stay where they are. csrc/bind/population.cpp defines it."""

    def round(
        self, spans: Sequence[tuple[int, float, Tensor | None]], head: NDArray, told: Told | None, /
    ) -> tuple[float, float]: ...
    def compact(self, group: int, promoted: int, keep: Sequence[int], /) -> None: ...


class Both(Protocol):
    """A target as one native call, which makes rounds with a draft that is one, too."""

    def population(
        self, cache: Any, draft: Any, draft_cache: Any, tensors: Sequence[Tensor], config: PopulationConfig, /
    ) -> NativePopulation: ...


@dataclass(frozen=True, slots=True)
class Here:
    """Mail that needs no carrying."""

    head: NDArray

    def read(self) -> NDArray:
        return self.head


class NativeRounds:
    """Rounds of two models that are each a native call (`Fused`)."""

    name = "native"
    TAKES: Features = frozenset({"greedy", "sampled", "logit bias", "population"})

    def __init__(self, target: Runner, draft: Runner, models: tuple[Both, Any], config: PopulationConfig) -> None:
        self._runners, self._models, self._config = (target, draft), models, config
        self._work: Work | None = None  # what `_native` was made of, and the two caches' keys
        self._target: Tensor | None = None
        self._draft: Tensor | None = None

    def takes(self, wanted: Features) -> bool:
        return wanted <= self.TAKES

    def window(self, slots: int) -> int:
        """Each group's ends where its slots do."""
        return slots

    def groups(self, live: int, most: int) -> int:
        return live

    def round(self, work: Work, width: int, groups: int) -> Here:
        native = self._native_of(work)
        # no tensor: after forwards torch has to be read from memory anew, and takes longer than what it does here
        head = np.empty((groups, work.told + width), np.int64)
        target, draft = self._runners
        watched = target.hooks or draft.hooks
        spent = native.round(work.shaped(groups), head, self._tell if watched else None)
        if not watched:
            draft.busy, target.busy = draft.busy + spent[0], target.busy + spent[1]
        return Here(head)

    def compact(self, work: Work, group: int, path: Sequence[int], keep: Sequence[int]) -> None:
        self._native_of(work).compact(group, len(path), keep)

    def _native_of(self, work: Work) -> NativePopulation:
        target, draft = self._runners[0].cache, self._runners[1].cache
        if self._work is not work or self._target is not target.k or self._draft is not draft.k:
            self._native = self._models[0].population(target, self._models[1], draft, work.tensors, self._config)
            self._work, self._target, self._draft = work, target.k, draft.k
        return self._native

    def _tell(self, of_target: bool, rows: int, seconds: float) -> None:
        """Of a forward that ends now."""
        self._runners[not of_target].note(time.perf_counter() - seconds, rows, seconds)
