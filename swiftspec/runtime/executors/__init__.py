"""Executors run the phases of a round on a model: expansions and verifications (rounds of particles:
smc/executors.py).

The eager executor (eager.py) supports every request. The others are faster and support some requests: the native one
(native.py) runs a phase as one C++ call, the graph executors run a forward (graph.py) or a whole phase (graph_*.py) as
one CUDA graph. A role receives the executors that its model can use, the fastest first, and the first one that supports
a request runs it. In a tensor-parallel group the leader selects, and sends its choice as `RequestStart.executor`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from swiftspec.capabilities import Features, why_slower
from swiftspec.messages import Proposal
from swiftspec.sampling.sampler import Paths, Sampler
from swiftspec.tree.acceptance import Accepted, AcceptFn
from swiftspec.tree.children import NativeDraws
from swiftspec.tree.tree import DraftTree, Leaves

# as `ChildSelector.rank`
RankChildren = Callable[[Tensor, Leaves, Paths | None, Tensor], tuple[NDArray[np.int64], NDArray[np.floating]]]


@dataclass(frozen=True, slots=True)
class ExpansionShape:
    """Shape of an expansion: the `leaves` (w) most likely leaves get `children` (k) children each.

    `rank_children` selects the children from the logits of the leaves. An executor may instead select them itself: as
    `Sampler.children` does with `coupled` and `tau`, or those of `sampled`, which are None unless children are sampled,
    as `SampledChildren.sample` does.
    """

    leaves: int
    children: int
    coupled: bool
    tau: float
    rank_children: (
        RankChildren  # logits [leaves, vocab], leaves, paths, positions [leaves] -> tokens, log-weights [leaves, k]
    )
    sampled: NativeDraws | None = None


@dataclass(frozen=True, slots=True)
class ExecutorRequest:
    """A request as the executors of one model receive it, after the runner has opened it. `accept` is set on the
    target, `expansion` on the draft."""

    sampler: Sampler
    accept: AcceptFn | None = None
    expansion: ExpansionShape | None = None


class Executor(Protocol):
    """Base protocol of executors. `columns`: the columns of `capabilities.EXECUTORS` that describe what it does not
    run."""

    @property
    def name(self) -> str: ...
    @property
    def columns(self) -> Sequence[str]: ...


class TreeExecutor(Executor, Protocol):
    """An executor of tree expansions and verifications on one model."""

    def open(self, request: ExecutorRequest) -> None:
        """Starts a request that this executor supports."""

    def expand(self, tree: DraftTree, pending: list[int], count: int) -> None:
        """Expands the tree `count` times, or fewer if tree or KV cache is full or no leaf is left. `pending`: verified
        tokens before an unexpanded root whose KV is missing; it is computed in the root's forward, and the list is
        cleared."""

    def verify(self, proposal: Proposal) -> Accepted:
        """Runs the target over a proposal's nodes and decides which of them are accepted."""
        ...

    def probabilities(self, tokens: Sequence[int], parents: Sequence[int]) -> Sequence[float] | None:
        """Returns the target's probability of each node's token given its parent, the root excluded, for the proposal
        that was verified last, or None if the host has no complete logits of it."""

    def logits(self, nodes: Sequence[int]) -> Tensor:
        """Returns the raw target logits [nodes, >= vocab] of nodes of the proposal that was verified last, in a group
        this rank's columns. Only for requests with the feature `log-probabilities`."""
        ...

    def hidden_states(self, nodes: Sequence[int]) -> Tensor | None:
        """Returns the hidden states [nodes, hidden layers, hidden size] of nodes of the proposal that was verified last
        (`ForwardOutput`), or None if the model keeps none. May be called until the model's next forward."""

    def settle(self, path: Sequence[int]) -> None:
        """Commits the accepted path's KV to the prefix, unless `verify` has already done so."""


T = TypeVar("T", bound=Executor)


def select_executor(kinds: Sequence[T], required: Features, named: str = "") -> T:
    """Returns the first executor that runs a request with the `required` features, or the one with the name `named`,
    which a leader has selected. The last one, which is eager, runs all of them."""
    if named:
        return next(kind for kind in kinds if kind.name == named)
    return next((kind for kind in kinds if why_slower(kind.columns, required) is None), kinds[-1])
