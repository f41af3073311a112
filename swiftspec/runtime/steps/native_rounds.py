"""A population's rounds as one native call each, on a CPU.

The native side works on the population's own tensors and on both caches, so an eager round may follow a native one. It
takes groups whose logits need no more than a bias, a temperature and noise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from swiftspec.config import PopulationConfig
from swiftspec.runtime.runner import Runner
from swiftspec.runtime.steps import Features
from swiftspec.runtime.steps.rounds import Work

Told = Callable[[bool, int, float], None]  # of a forward: whether it was the target's, its rows, its seconds


class NativePopulation(Protocol):
    """Rounds on tensors that stay where they are. csrc/bind/population.cpp defines it."""

    def round(self, spans: Sequence[tuple[int, float, Tensor | None]], head: Tensor, told: Told, /) -> None: ...


class Both(Protocol):
    """A target as one native call, which makes rounds with a draft that is one, too."""

    def population(
        self, cache: Any, draft: Any, draft_cache: Any, tensors: Sequence[Tensor], config: PopulationConfig, /
    ) -> NativePopulation: ...


class NativeRounds:
    """Rounds of two models that are each a native call (`Fused`)."""

    name = "native"
    TAKES: Features = frozenset({"greedy", "sampled", "logit bias", "population"})

    def __init__(
        self, target: Runner, draft: Runner, models: tuple[Both, Any], config: PopulationConfig
    ) -> None:
        self._runners, self._models, self._config = (target, draft), models, config
        self._bound: list[Tensor] = []  # whose addresses `_native` knows

    def takes(self, wanted: Features) -> bool:
        return wanted <= self.TAKES

    def window(self, slots: int) -> int:
        """Each group's ends where its slots do."""
        return slots

    def groups(self, live: int, most: int) -> int:
        return live

    def round(self, work: Work, width: int, groups: int) -> Tensor:
        native = self._native_of(work)
        head = torch.empty(groups, work.told, dtype=torch.int64)
        native.round(work.shaped(groups), head, self._book)
        return head

    def _native_of(self, work: Work) -> NativePopulation:
        target, draft = (runner.cache for runner in self._runners)
        tensors = [*work.tensors, target.k, draft.k]
        if len(tensors) != len(self._bound) or any(a is not b for a, b in zip(tensors, self._bound, strict=True)):
            self._native = self._models[0].population(target, self._models[1], draft, work.tensors, self._config)
            self._bound = tensors
        return self._native

    def _book(self, of_target: bool, rows: int, seconds: float) -> None:
        self._runners[not of_target].note(time.perf_counter() - seconds, rows, seconds)
