"""Executors run the phases of a round on one model: expansions, verifications, rounds of particles.

The eager executor (eager.py) supports every request. Others are faster and support some requests: native.py runs a
phase as one C++ call, graph.py as one CUDA graph. A role receives the executors that its model can use, the fastest
first, and the first one that supports a request runs it. In a group of ranks the leader selects, and
`RequestStart.executor` carries the choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from swiftspec.messages import Proposal
from swiftspec.params import SamplingParams
from swiftspec.sampling.sampler import Paths, Sampler
from swiftspec.tree.acceptance import Accepted, AcceptFn
from swiftspec.tree.tree import DraftTree, Leaves

FEATURES = {
    "greedy": "temperature 0",
    "sampled": "temperature above 0",
    "logit bias": "logit_bias",
    "filters": "top_k, top_p or min_p, at a temperature above 0",
    "deep top-k": "top_k above what the ranks of a group exchange, 64 tokens each",
    "penalties": "repetition, presence or frequency penalty",
    "guidance": "guidance_scale other than 1",
    "drawn proposals": "proposal sample",
    "rejection": "verify reject, at a temperature above 0",
    "log-probabilities": "logprobs",
    "grammar": "a grammar",
    "population": "mode smc",
}
Features = frozenset[str]  # keys of FEATURES: the properties of a request that decide which executors support it
RankChildren = Callable[[Tensor, Leaves, Paths | None, Tensor], tuple[NDArray[np.int64], NDArray[np.floating]]]


def features_of(sampling: SamplingParams, *more: str) -> Features:
    """The features that a request needs of an executor. `more`: features that its role adds, such as `rejection`."""
    found = {
        "greedy": sampling.greedy,
        "sampled": not sampling.greedy,
        "logit bias": bool(sampling.logit_bias),
        "filters": sampling.filtered,
        "penalties": sampling.penalised,
        "grammar": sampling.grammar is not None,
    }
    return frozenset(name for name, requested in found.items() if requested) | frozenset(more)


@dataclass(frozen=True, slots=True)
class ExpansionShape:
    """How leaves are expanded: the `leaves` (w) most likely ones into `children` (k) each.

    `coupled` and `tau` are those of `Sampler.children`, which an executor may implement itself unless children are
    sampled; `rank_children` works in every case.
    """

    leaves: int
    children: int
    coupled: bool
    tau: float
    rank_children: (
        RankChildren  # logits [n, vocab], their leaves, paths, positions [n] -> tokens [n, k], weights [n, k]
    )


@dataclass(frozen=True, slots=True)
class ExecutorRequest:
    """A request as the executors of one model receive it, after the runner has opened it. `accept` is set on the
    target, `expansion` on the draft."""

    sampler: Sampler
    accept: AcceptFn | None = None
    expansion: ExpansionShape | None = None


class Executor(Protocol):
    """What all executors have in common, for the selection by features."""

    @property
    def name(self) -> str: ...
    def supports(self, required: Features) -> bool: ...  # whether it can run a request with these features


class TreeExecutor(Executor, Protocol):
    """An executor of tree expansions and verifications on one model."""

    def open(self, request: ExecutorRequest) -> None:
        """Starts a request that this executor supports."""

    def expand(self, tree: DraftTree, pending: list[int], count: int) -> None:
        """Expands the tree `count` times, or fewer if it runs out of room or leaves. `pending`: verified tokens before
        the root that have no KV yet; they are computed together with an unexpanded root, and the list is cleared."""

    def verify(self, proposal: Proposal) -> Accepted:
        """Runs the target over a proposal's nodes and decides which of them are accepted."""
        ...

    def probabilities(self, tokens: Sequence[int], parents: Sequence[int]) -> Sequence[float] | None:
        """The target's probabilities of the tokens verified last, except the root; None if no rank has the whole
        logits."""

    def settle(self, path: Sequence[int]) -> None:
        """Commits the accepted path's KV to the prefix, unless `verify` has already done so."""

    def fast_reply(self, tree: DraftTree, *where: Any) -> Any:
        """A native object that answers the next result without Python, or None. `where`: request, position of the root,
        bs, w, d, and the yield of an expansion (`lookahead_drafter.EXPANSION_YIELD`)."""


T = TypeVar("T", bound=Executor)


def select_executor(kinds: Sequence[T], required: Features, named: str = "") -> T:
    """The first executor that supports a request, or the one that the leader has `named`."""
    return next(kind for kind in kinds if kind.name == named or (not named and kind.supports(required)))
