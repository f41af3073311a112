"""The messages that the target's and the draft's side exchange."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from swiftspec.params import SamplingParams


@dataclass(frozen=True, slots=True)
class RequestStart:
    """What opens a request: its verified tokens, of which those from `prompt_len` on are output, and how to sample.

    The last token is the root. The leader of a group chooses for all its ranks `steps`, the kind of steps that run the
    request, and `kept`, how many tokens of each sequence are not read anew. Empty and None: nobody has chosen yet.
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
    """The distributions that a proposal's children were drawn from, without replacement and in the order of the nodes.

    A row for each node that has children, in their order. A token that a row does not name was never drawn.
    """

    tokens: NDArray[np.int32]  # [rows, width]
    probs: NDArray[np.float32]  # [rows, width]; where it is 0, the token means nothing


@dataclass(frozen=True, slots=True)
class Proposal:
    """The sub-tree sent to be verified, in topological order. Node 0 is the root: the last verified token.

    `prefix_len` counts the verified tokens before the root, so the root stands at that absolute position.
    """

    request: int
    round: int
    prefix_len: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...]  # parents[0] == -1, parents[i] < i
    draft_probs: DraftProbs | None = None  # where the children were drawn and will be verified by rejection

    @staticmethod
    def root_only(request: int, round_: int, prefix_len: int, token: int) -> Proposal:
        """What plain decoding sends: nothing but the root."""
        return Proposal(request, round_, prefix_len, (token,), (-1,))


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's log-probability in the target's distribution, and the likeliest tokens with theirs there."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """What the target made of a proposal: the accepted path and the tokens it sampled along it.

    `tokens` are the path's tokens without the root, then the bonus token; `prefix_len` is the proposal's, so the next
    root stands at prefix_len + len(tokens).
    """

    request: int
    round: int
    prefix_len: int
    path: tuple[int, ...]  # accepted proposal nodes, the root first
    tokens: tuple[int, ...]  # len(path) of them
    overlaps: tuple[float, ...] = field(default=(), compare=False)  # see tree.walk.Accepted; no drafter needs them
    logprobs: tuple[Logprob, ...] | None = field(default=None, compare=False)  # of the tokens; nor these
    prompt_logprobs: tuple[Logprob, ...] | None = field(
        default=None, compare=False
    )  # in a first result: see engine.Chunk
