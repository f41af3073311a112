"""A model whose every step goes through somebody's hands, who may note its time or draw it out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from numpy.typing import NDArray
from torch import Tensor

from swiftspec.model.batch import Batch
from swiftspec.model.stack import Fused, Rounds
from swiftspec.runtime.kv_cache import KVCache
from swiftspec.runtime.runner import Model

T = TypeVar("T")


class Around(Protocol):
    """Runs a step over so many rows."""

    def __call__(self, rows: int, step: Callable[[], T], /) -> T: ...


class AroundModel:
    """A `runner.Model` around another, its rounds in one call included."""

    def __init__(self, model: Model, around: Around) -> None:
        self.config, self.kv_heads, self.group = model.config, model.kv_heads, model.group
        self.dtype, self.device = model.dtype, model.device
        self.fused: Fused | None = None if model.fused is None else _AroundFused(model.fused, around)
        self._model, self._around = model, around

    def forward(self, batch: Batch, cache: KVCache, *, head: bool = True) -> Tensor | None:
        """As the model's own."""
        return self._around(len(batch), lambda: self._model.forward(batch, cache, head=head))


class _AroundFused:
    def __init__(self, fused: Fused, around: Around) -> None:
        self._fused, self._around = fused, around

    def forward(self, batch: Batch, cache: Any, head: bool) -> Tensor | None:
        return self._around(len(batch), lambda: self._fused.forward(batch, cache, head))

    def rounds(self, cache: Any) -> Rounds | None:
        rounds = self._fused.rounds(cache)
        return None if rounds is None else _AroundRounds(rounds, self._around)


class _AroundRounds:
    """Its seconds are those of the whole step, whatever was done with it."""

    def __init__(self, rounds: Rounds, around: Around) -> None:
        self._rounds, self._around = rounds, around

    def scoring(
        self, vocab: int, temperature: float, bias: Tensor | None, noisy: bool, seed: int, stream: int
    ) -> object:
        return self._rounds.scoring(vocab, temperature, bias, noisy, seed, stream)

    def tree(self, arrays: Sequence[NDArray], nodes: int, slots: int) -> Any:
        return self._rounds.tree(arrays, nodes, slots)

    def expand(
        self, tree: Any, prefix: int, pending: list[int], w: int, k: int, scoring: Any, coupled: bool, tau: float
    ) -> tuple[int, float]:
        began = time.perf_counter()
        rounds, rows = self._rounds, len(pending) + w
        count, _ = self._around(rows, lambda: rounds.expand(tree, prefix, pending, w, k, scoring, coupled, tau))
        return count, time.perf_counter() - began

    def verify(
        self, tokens: Sequence[int], parents: Sequence[int], prefix: int, scoring: Any
    ) -> tuple[list[int], list[int], float]:
        began = time.perf_counter()
        rounds = self._rounds
        path, sampled, _ = self._around(len(tokens), lambda: rounds.verify(tokens, parents, prefix, scoring))
        return path, sampled, time.perf_counter() - began
