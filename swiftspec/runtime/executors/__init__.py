"""Who runs the steps of a round on one model, and how: the one seam for execution.

A step is an expansion of the draft tree, a verification, or a round of particles. There are several kinds of steps. The
eager ones (eager.py) take every request; others are faster and take some: native.py has a whole step as one native
call, graph.py as one CUDA graph. A role is handed the kinds that its model can use, the fastest first, and the first
that takes a request runs it. In a group of ranks the leader chooses, and `Opening.steps` carries the choice.
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
Features = frozenset[str]  # keys of FEATURES: what of a request matters to whether steps can take it
RankChildren = Callable[[Tensor, Leaves, Paths | None, Tensor], tuple[NDArray[np.int64], NDArray[np.floating]]]


def features_of(sampling: SamplingParams, *more: str) -> Features:
    """What a request asks of the steps; `more`: what its role adds, such as `rejection`."""
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
    """How leaves are expanded: the w likeliest of them (`leaves`) into k children each. `coupled` and `tau` as in
    `Sampler.children`, which steps may do by themselves unless children are drawn; `rank_children` does it in any case."""

    leaves: int
    children: int
    coupled: bool
    tau: float
    rank_children: (
        RankChildren  # logits [n, vocab], their leaves, paths, positions [n] -> tokens [n, k], weights [n, k]
    )


@dataclass(frozen=True, slots=True)
class ExecutorRequest:
    """A request as the steps of one model see it, once the runner has opened it. A target's has `accept`, a draft's
    has `expansion`."""

    sampler: Sampler
    accept: AcceptFn | None = None
    expansion: ExpansionShape | None = None


class Executor(Protocol):
    """What a request's features choose among."""

    @property
    def name(self) -> str: ...
    def supports(self, required: Features) -> bool: ...  # whether it can run a request with these features


class TreeExecutor(Executor, Protocol):
    """One kind of steps on one model."""

    def open(self, request: ExecutorRequest) -> None:
        """Begins a request that they take."""

    def expand(self, tree: DraftTree, pending: list[int], count: int) -> None:
        """Expands the tree `count` times, or fewer where it has no room or no leaves. `pending`: verified tokens before
        the root that have no KV yet; they go before an unexpanded root, and the list is empty then."""

    def verify(self, proposal: Proposal) -> Accepted:
        """Runs the target over a proposal's nodes and decides what stands."""
        ...

    def probabilities(self, tokens: Sequence[int], parents: Sequence[int]) -> Sequence[float] | None:
        """The target's own of the tokens verified last, the root left out; None where no one rank has its logits."""

    def settle(self, path: Sequence[int]) -> None:
        """Commits the accepted path's KV to the prefix, if `verify` has not done so already."""

    def fast_reply(self, tree: DraftTree, *where: Any) -> Any:
        """What can answer the next result without Python, at its arrival; None where nothing can. `where`: request,
        position of the root, bs, w, d, and what an expansion is worth (`ahead_drafter.YIELD`)."""


T = TypeVar("T", bound=Executor)


def select_executor(kinds: Sequence[T], required: Features, named: str = "") -> T:
    """The first kind that takes a request; where a leader has named one, that one."""
    return next(kind for kind in kinds if kind.name == named or (not named and kind.supports(required)))
