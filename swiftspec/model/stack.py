"""A model made ready by its operators, and what operators may do with all of it as one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray
from torch import Tensor

from swiftspec.model.batch import Batch
from swiftspec.model.group import Group


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer made ready at load: two norms, four projections."""

    input_norm: Any
    qkv: Any
    o: Any
    post_norm: Any
    gate_up: Any
    down: Any


@dataclass(frozen=True, slots=True)
class Stack:
    """All that a forward reads of a model, or of one rank's share of it."""

    embedding: Tensor  # [vocab, D]
    layers: Sequence[Layer]
    norm: Any
    head: Any
    cos: Tensor  # [positions, hd]
    sin: Tensor
    num_heads: int
    kv_heads: int
    group: Group | None  # the ranks that sum the outputs of O and down


class NativeRounds(Protocol):
    """The inner part of a round as one call, over the only sequence of one cache. What comes back has no logits in it.
    A group's ranks make the same calls; OSError says that one of them is gone. csrc/bind/rounds.cpp defines it."""

    def scoring(
        self, vocab: int, temperature: float, bias: Tensor | None, noisy: bool, seed: int, stream: int, /
    ) -> Any: ...
    def expand(
        self, tree: Any, prefix: int, pending: list[int], w: int, k: int, scoring: Any, coupled: bool, tau: float, /
    ) -> tuple[int, float]: ...
    def verify(
        self, tokens: Sequence[int], parents: Sequence[int], prefix: int, scoring: Any, /
    ) -> tuple[list[int], list[int], float]: ...


class Fused(Protocol):
    """A whole stack as one call."""

    def forward(self, batch: Batch, cache: Any, head: bool, /) -> Tensor | None:
        """Writes the rows' keys and values into the cache. Returns logits [n, V], or None without the head."""
        ...

    def rounds(self, cache: Any, /) -> NativeRounds:
        """The inner part of a round over a cache of one sequence."""
        ...

    def tree(self, arrays: Sequence[NDArray], /) -> Any:
        """The native side of a draft tree on its arrays."""
        ...
