"""Executors run the phases of a round on a model: expansions, verifications, rounds of sequence groups.

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

from swiftspec.errors import UserError
from swiftspec.messages import Proposal
from swiftspec.params import SamplingParams
from swiftspec.sampling.sampler import Paths, Sampler
from swiftspec.tree.acceptance import Accepted, AcceptFn
from swiftspec.tree.tree import DraftTree, Leaves

# feature that an executor must support -> the setting of a request or of the engine that requires it
FEATURES = {
    "greedy": "temperature 0",
    "sampled": "temperature above 0",
    "logit bias": "logit_bias, allowed_token_ids, or a bad word that is one token",
    "filters": "top_k, top_p or min_p, at a temperature above 0",
    "deep top-k": "top_k above what the ranks of a group exchange, 64 tokens each",
    "penalties": "repetition, presence or frequency penalty",
    "guidance": "guidance_scale other than 1",
    "drawn proposals": "proposal sample",
    "rejection": "verify reject, at a temperature above 0",
    "log-probabilities": "logprobs",
    "grammar": "a grammar",
    "token rules": "min_tokens, or a bad word of several tokens",
    "population": "sequence groups: max_num_seqs above 1, or mode smc",
    "hidden states": "a target that keeps hidden states",
}
Features = frozenset[str]  # keys of FEATURES: the properties of a request that decide which executors support it
# as `ChildSelector.rank`
RankChildren = Callable[[Tensor, Leaves, Paths | None, Tensor], tuple[NDArray[np.int64], NDArray[np.floating]]]


def features_of(sampling: SamplingParams, *more: str) -> Features:
    """Returns the features that an executor must support to run a request. `more`: features that do not follow from
    the sampling parameters, such as `rejection`."""
    found = {
        "greedy": sampling.greedy,
        "sampled": not sampling.greedy,
        "logit bias": bool(sampling.logit_bias) or sampling.excludes_tokens,
        "filters": sampling.filtered,
        "penalties": sampling.penalised,
        "grammar": sampling.grammar is not None,
        "token rules": sampling.has_path_rules,
    }
    return frozenset(name for name, requested in found.items() if requested) | frozenset(more)


@dataclass(frozen=True, slots=True)
class ExpansionShape:
    """Shape of an expansion: the `leaves` (w) most likely leaves get `children` (k) children each.

    `rank_children` selects the children from the logits of the leaves. Unless children are sampled, an executor may
    instead select them itself as `Sampler.children` does with `coupled` and `tau`.
    """

    leaves: int
    children: int
    coupled: bool
    tau: float
    rank_children: (
        RankChildren  # logits [leaves, vocab], leaves, paths, positions [leaves] -> tokens, log-weights [leaves, k]
    )


@dataclass(frozen=True, slots=True)
class ExecutorRequest:
    """A request as the executors of one model receive it, after the runner has opened it. `accept` is set on the
    target, `expansion` on the draft."""

    sampler: Sampler
    accept: AcceptFn | None = None
    expansion: ExpansionShape | None = None


class Executor(Protocol):
    """Base protocol of executors: a name, and the features by which `select_executor` selects."""

    @property
    def name(self) -> str: ...
    def supports(self, required: Features) -> bool: ...  # whether it can run a request with these features


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
    """Returns the first executor that supports the `required` features, or the one with the name `named`, which a
    leader has selected. Raises UserError if there is none."""
    for kind in kinds:
        if kind.name == named or (not named and kind.supports(required)):
            return kind
    alone = sorted(name for name in required if not any(kind.supports(frozenset((name,))) for kind in kinds))
    causes = ", ".join(FEATURES[name] for name in alone or sorted(required))
    raise UserError(f"no executor of this mode supports {causes}; choose another mode")
