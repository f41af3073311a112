"""What operators may do as one call instead of one by one: a model's whole stack, and the inner part of a round.

Letters as in reference.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray
from torch import Tensor

from swiftspec.model.batch import Batch


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
    group: object | None  # the ranks that sum the outputs of O and down


class Rounds(Protocol):
    """The inner part of a round as one call, for the only sequence of one cache; host_rounds.HostRounds says what its
    functions take. What comes back has no logits in it, so it is for requests that nothing else is to be done for."""

    def scoring(
        self, vocab: int, temperature: float, bias: Tensor | None, noisy: bool, seed: int, stream: int, /
    ) -> Any: ...
    def tree(self, arrays: Sequence[NDArray], nodes: int, slots: int, /) -> Any: ...
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

    def rounds(self, cache: Any, /) -> Rounds | None:
        """The inner part of a round over that cache, if it has one sequence. A group's ranks make the same calls."""
        ...
