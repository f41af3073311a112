"""Messages between the target side and the draft side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from swiftspec.drafter_kinds import NodeSource
from swiftspec.params import SamplingParams


@dataclass(frozen=True, slots=True)
class RequestStart:
    """Message that opens a request on the drafter and the verifier.

    `tokens`: the verified tokens; the first `prompt_len` are the prompt, the others output. The last one is the root.
    `executor`: name of the executor that runs the request; empty until the leader of the group has selected it.
    `num_cached_tokens`: for each sequence of the KV cache, the maximum number of its tokens to reuse; None until the
    leader of the group has determined it.
    """

    request: int
    tokens: tuple[int, ...]
    sampling: SamplingParams
    prompt_len: int
    executor: str = ""
    num_cached_tokens: tuple[int, ...] | None = None

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.tokens[: self.prompt_len]

    @property
    def output(self) -> tuple[int, ...]:
        return self.tokens[self.prompt_len :]


@dataclass(frozen=True, slots=True, eq=False)
class DraftProbs:
    """Draft distributions q from which the children in a proposal were sampled without replacement.

    There is one row for each node that has children, in node order; the children of a node were drawn in the order of
    their nodes. A token that is not in a row has q = 0.
    """

    tokens: NDArray[np.int32]  # [nodes with children, width]
    probs: NDArray[np.float32]  # q of `tokens`, of the same shape; 0 marks an unused entry


# Sources that can sample their nodes from a distribution q. Nodes of all other sources are deterministic, and rejection
# sampling would accept them with the wrong probability.
SAMPLED_SOURCES = frozenset({NodeSource.DRAFT_MODEL})


@dataclass(frozen=True, slots=True)
class Proposal:
    """The sub-tree that is sent for verification, in topological order. Node 0 is the root: the last verified token.

    `prefix_len` is the number of verified tokens before the root, which is also the absolute position of the root.

    `weights`: log-weight of each node: estimated log-probability that the target accepts the path from the root to the
    node, by which nodes of all sources are ranked. It is 0 at the root, finite, and at most that of the parent. The
    values are float32 numbers, so that they are equal on both sides of a connection.
    """

    request: int
    round: int
    prefix_len: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...]  # parents[0] == -1, parents[i] < i
    weights: tuple[float, ...]
    sources: tuple[NodeSource, ...]  # sources[0] == NodeSource.ROOT, which no other node has
    draft_probs: DraftProbs | None = None  # if the children were sampled and are verified by rejection

    @staticmethod
    def root_only(request: int, round_: int, prefix_len: int, token: int) -> Proposal:
        """Returns a proposal that contains only the root, as in autoregressive decoding. `token`: the root's token."""
        return Proposal(
            request=request,
            round=round_,
            prefix_len=prefix_len,
            tokens=(token,),
            parents=(-1,),
            weights=(0.0,),
            sources=(NodeSource.ROOT,),
        )

    @staticmethod
    def from_draft_model(
        request: int,
        round_: int,
        prefix_len: int,
        tokens: Sequence[int],
        parents: Sequence[int],
        weights: Sequence[float],
        *,
        draft_probs: DraftProbs | None = None,
        source: NodeSource = NodeSource.DRAFT_MODEL,
    ) -> Proposal:
        """Returns a proposal in which the draft model, or a draft head, is the `source` of all nodes except the
        root."""
        return Proposal(
            request=request,
            round=round_,
            prefix_len=prefix_len,
            tokens=tuple(tokens),
            parents=tuple(parents),
            weights=tuple(weights),
            sources=(NodeSource.ROOT, *(source,) * (len(tokens) - 1)),
            draft_probs=draft_probs,
        )

    def match_path(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Returns the nodes along the longest prefix of `tokens` that is a path of the proposal, without the root."""
        path, node = list[int](), 0
        for token in tokens:
            children = zip(self.tokens[node + 1 :], self.parents[node + 1 :])
            found = next((i for i, child in enumerate(children, node + 1) if child == (token, node)), None)
            if found is None:
                break
            path.append(node := found)
        return tuple(path)


@dataclass(frozen=True, slots=True)
class SampledLogprob:
    """Log-probability of a token under the target, and other tokens at the same position.

    `top`: (token, log-probability) pairs: the most likely tokens, the most likely first, or the requested
    `logprob_token_ids` in their order.
    `rank`: 1 for the most likely token of the vocabulary, 2 for the next one, ...
    """

    logprob: float
    top: tuple[tuple[int, float], ...]
    rank: int


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """Result of a verification: the accepted path and the tokens that the target sampled along it.

    `tokens` are the tokens of the path without the root, followed by the bonus token. `prefix_len` is that of the
    proposal, so the next root is at position prefix_len + len(tokens).
    """

    request: int
    round: int
    prefix_len: int
    path: tuple[int, ...]  # accepted proposal nodes, the root first
    tokens: tuple[int, ...]  # as many as `path` has nodes
    overlaps: tuple[float, ...] = field(default=(), compare=False)  # see tree.acceptance.Accepted; unused by drafters
    logprobs: tuple[SampledLogprob, ...] | None = field(
        default=None, compare=False
    )  # of the tokens; unused by drafters
    prompt_logprobs: tuple[SampledLogprob, ...] | None = field(
        default=None, compare=False
    )  # in the first result of a request: see engine.TokenChunk


def merge_results(results: Sequence[VerifyResult]) -> VerifyResult:
    """Merges the results of consecutive rounds into one result, as of a single long round. A drafter that has missed
    these rounds can observe it."""
    tokens = tuple(token for result in results for token in result.tokens)
    first, last = results[0], results[-1]
    return VerifyResult(last.request, last.round, first.prefix_len, tuple(range(len(tokens))), tokens)


class VerifiedRound(NamedTuple):
    """What was verified in a round: fields of its proposal and of its result. Without `sources`, the draft model is the
    source of all nodes except the root."""

    parents: tuple[int, ...]
    path: tuple[int, ...]  # as many nodes as the round has output tokens: all of them but one were accepted
    overlaps: tuple[float, ...] = ()
    sources: tuple[NodeSource, ...] = ()
    is_cut: bool = False  # the output ended within the round, and `path` has only the nodes of its output tokens


def cut_rounds(rounds: list[VerifiedRound], tokens: int) -> None:
    """Cuts the rounds of an output, in place, so that they have at most `tokens` output tokens: drops the rounds after
    them and cuts the path of the last one."""
    surplus = sum(len(each.path) for each in rounds) - tokens
    while surplus > 0:
        last = rounds.pop()
        surplus -= len(last.path)
        if surplus < 0:
            rounds.append(last._replace(path=last.path[:-surplus], is_cut=True))
