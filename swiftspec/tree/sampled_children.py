"""Children sampled from the draft without replacement, with the distributions that rejection sampling needs.

Rejection sampling is exact only if the decision to propose a node does not depend on its own draw, only on earlier
draws: those of its ancestors, of its earlier siblings, and of nodes that were selected before it. This holds because

- the weight of a child is a function of q and of its earlier siblings: the prior probability that the child drawn next
  is accepted. It never exceeds the weight of its parent or of an earlier sibling;
- leaves are expanded and nodes proposed in the order of these weights, ties by age (tree.py). Nodes that come later in
  that order, such as a node's own children, therefore do not influence whether it is proposed;
- if a proposal is too short and the tree expands once more, the nodes that existed before are proposed first;
- every expanded node has its own noise, which is used once: two nodes at the same position are independent;
- a tree is reset after MAX_REROOTS re-roots, so that it never becomes full: when it is full would depend on all draws.

Nodes that survive a re-root have never been proposed, because the new root is the bonus token, which was not a proposed
child. tests/tree/test_sampled_distribution.py verifies this by enumeration, over two rounds, through the drafters
themselves.

Source: Gumbel top-k, Kool et al. 2019; recursive rejection sampling without replacement, Jeon et al. 2024.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swiftspec.backends.reference.noise import counters, gumbel, row_bits, row_key, row_keys
from swiftspec.messages import DraftProbs
from swiftspec.sampling.noise import DRAFT_STREAM
from swiftspec.sampling.sampler import Paths, Sampler
from swiftspec.tree.tree import Leaves

MAX_CANDIDATES = 64  # number of most likely draft tokens that q covers; it is 0 elsewhere
MAX_REROOTS = 3  # re-roots after which a tree is reset
WEIGHT_DIGITS = 6  # decimal places of a log-weight
Ints, Floats = NDArray[np.int64], NDArray[np.float64]


class DrawState(NamedTuple):
    """The state of the draws of one request, from which native code draws children (csrc/bind/rounds.cpp)."""

    key: int
    leaves: int
    exponent: float
    tokens: NDArray[np.int32]
    probs: NDArray[np.float32]


class SampledChildren:
    """Child selector that samples k children per leaf without replacement, and keeps the draft distribution q of every
    expanded node by tree slot. A q covers `width` tokens."""

    sampled = True

    def __init__(self, k: int, slots: int, vocab: int, *, carry: bool) -> None:
        """`slots`: number of tree slots. `carry`: whether proposals contain the draft distributions of their nodes,
        which rejection sampling needs."""
        self.k, self._carry = k, carry
        self.width = min(MAX_CANDIDATES, vocab)
        self._tokens = np.zeros((slots, self.width), np.int32)
        self._probs = np.zeros((slots, self.width), np.float32)
        self._counters = counters(range(self.width))

    def open(self, sampler: Sampler, position: int, tau: float) -> None:
        """Starts or resumes a request. `position`: absolute position of the root, which keys the noise. `tau`: exponent
        of the draft's confidence, see `child_log_weights`."""
        self._sampler, self._exponent = sampler, tau
        self._key = row_key(sampler.params.seed, DRAFT_STREAM, position)
        self._rows = 0  # number of leaves expanded in this request: the counter of their noise
        self._age = 0  # re-roots since the tree was reset

    def rank(self, logits: Tensor, leaves: Leaves, paths: Paths | None, positions: Tensor) -> tuple[Ints, Floats]:
        """See `ChildSelector.rank`. The children of a leaf are in the order drawn."""
        likeliest = self._sampler.children(logits, paths, positions, k=self.width)
        return self.sample(leaves.mask.shape[1] - len(leaves.nodes), *likeliest)  # slots are allocated in order

    def sample(self, first: int, tokens: Tensor, logprobs: Tensor) -> tuple[Ints, Floats]:
        """Draws k children of each leaf: tokens [leaves, k] and log-weights [leaves, k], in the order drawn.

        `first`: tree slot of the first leaf; the others follow. `tokens`, `logprobs` [leaves, width]: the draft's most
        likely tokens and their log-probabilities.
        """
        rows = tokens.shape[0]
        here = slice(first, first + rows)
        self._tokens[here] = tokens.cpu().numpy()
        q = logprobs.cpu().double().softmax(-1).float().nan_to_num_(0)  # non-finite draft logits give dead children
        self._probs[here] = q.numpy()
        order = self._sample_order(q := q.double())
        q = q.gather(-1, order)
        return tokens.cpu().gather(-1, order[:, : self.k]).numpy(), child_log_weights(q.numpy(), self._exponent)[
            :, : self.k
        ]

    def _sample_order(self, q: Tensor) -> Tensor:
        """Draws all tokens of each row of `q` without replacement. Returns their columns in the order drawn."""
        clock = torch.arange(self._rows, self._rows + q.shape[0])
        self._rows += q.shape[0]
        key = torch.tensor([self._key], dtype=torch.uint32).view(torch.int32)
        noise = gumbel(row_bits(row_keys(key, clock), self._counters), q.dtype)
        return (q.log() + noise).argsort(stable=True, dim=-1, descending=True)

    @property
    def draws(self) -> SampledChildren:
        """See `ChildSelector.draws`."""
        return self

    def draw_state(self) -> DrawState:
        """Returns what native code needs to draw children as `sample` does. It writes the draft distributions;
        `count_leaves` follows."""
        return DrawState(self._key, self._rows, self._exponent, self._tokens, self._probs)

    def count_leaves(self, count: int) -> None:
        """Counts leaves whose children native code has drawn."""
        self._rows += count

    def reroot(self) -> bool:
        """See `ChildSelector.reroot`. Returns False after MAX_REROOTS re-roots of the same tree."""
        self._age += 1
        return self._age <= MAX_REROOTS

    def retain_slots(self, slots: list[int]) -> None:
        """See `ChildSelector.retain_slots`."""
        if not slots:
            self._age = 0
        self._tokens[: len(slots)] = self._tokens[slots]
        self._probs[: len(slots)] = self._probs[slots]

    def draft_probs(self, slots: Ints) -> DraftProbs | None:
        """See `ChildSelector.draft_probs`."""
        return DraftProbs(self._tokens[slots], self._probs[slots]) if self._carry and len(slots) > 0 else None


def child_log_weights(q: Floats, exponent: float) -> Floats:
    """Returns the log-weight of each child: log of the estimated probability that it is the accepted one.

    `q` [leaves, width]: draft probabilities in the order drawn. With q_i the distribution q without its first i tokens,
    normalised, the probability that the next token is accepted is estimated as a_i = sum(q_i^(1 + exponent)), which is
    larger for a confident draft. The weight of child i is a_i (1 - a_0) ... (1 - a_(i-1)), limited to that of the
    previous child. It is -inf where q has no mass left.
    """
    left = _reverse_cumsum(q)
    with np.errstate(divide="ignore", invalid="ignore"):
        passes = np.minimum(_reverse_cumsum(q ** (1 + exponent)) / left ** (1 + exponent), 1)
        failed = np.log1p(-passes).cumsum(-1)
        out = np.log(passes)
        out[:, 1:] += failed[:, :-1]
    out[(q <= 0) | np.isnan(out)] = -np.inf
    # Rounded, because the last bits of a sum depend on its order, hence on later draws.
    return np.minimum.accumulate(out, -1).round(WEIGHT_DIGITS)


def _reverse_cumsum(x: Floats) -> Floats:
    """Returns the sum of each entry and all later ones of its row, added from the end, where entries are small."""
    return x[:, ::-1].cumsum(-1)[:, ::-1]
