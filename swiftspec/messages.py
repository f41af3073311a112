"""Messages between the target side and the draft side."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from swiftspec.params import SamplingParams


@dataclass(frozen=True, slots=True)
class RequestStart:
    """Start of a request: the verified tokens, of which those from `prompt_len` on are output, and the sampling
    parameters.

    The last token is the root. The leader of a group chooses for all its ranks: `executor`, the executor that runs the
    request, and `num_cached_tokens`, the number of tokens of each sequence that the KV cache already holds. An empty
    `executor` and None mean that the leader has not chosen yet.
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
    """Draft distributions that the children of a proposal were drawn from, without replacement and in the order of the
    nodes.

    There is one row for each node that has children, in node order. A token that is not in a row was never drawn.
    """

    tokens: NDArray[np.int32]  # [rows, width]
    probs: NDArray[np.float32]  # [rows, width]; 0 marks an unused entry


@dataclass(frozen=True, slots=True)
class Proposal:
    """The sub-tree that is sent for verification, in topological order. Node 0 is the root: the last verified token.

    `prefix_len` is the number of verified tokens before the root, which is also the absolute position of the root.
    """

    request: int
    round: int
    prefix_len: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...]  # parents[0] == -1, parents[i] < i
    draft_probs: DraftProbs | None = None  # if the children were sampled and are verified by rejection

    @staticmethod
    def root_only(request: int, round_: int, prefix_len: int, token: int) -> Proposal:
        """A proposal of the root alone, as autoregressive decoding sends it."""
        return Proposal(request, round_, prefix_len, (token,), (-1,))


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of a token in the target's distribution, and the most likely tokens with theirs."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """Result of a verification: the accepted path and the tokens that the target sampled along it.

    `tokens` are the tokens of the path without the root, followed by the bonus token. `prefix_len` is copied from the
    proposal, so the next root is at position prefix_len + len(tokens).
    """

    request: int
    round: int
    prefix_len: int
    path: tuple[int, ...]  # accepted proposal nodes, the root first
    tokens: tuple[int, ...]  # as many as `path` has nodes
    overlaps: tuple[float, ...] = field(default=(), compare=False)  # see tree.acceptance.Accepted; unused by drafters
    logprobs: tuple[Logprob, ...] | None = field(default=None, compare=False)  # of the tokens; unused by drafters
    prompt_logprobs: tuple[Logprob, ...] | None = field(
        default=None, compare=False
    )  # in the first result of a request: see engine.TokenChunk
