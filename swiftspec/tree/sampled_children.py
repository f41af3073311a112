"""Children drawn from the draft: without replacement, with what they were drawn from kept for whoever verifies them.

For rejection to be exact, whether a node is proposed must not depend on its own draw, only on draws before it: those of
its ancestors, of its earlier siblings, and of nodes that were chosen before it. Here that holds because

- a child's weight is a function of q and of its earlier siblings: the chance that the child to be drawn next is
  accepted, before it is drawn. It never exceeds its parent's or an earlier sibling's;
- leaves are expanded and nodes proposed by the order of these weights, ties by age. So nothing below a node in that
  order, its own children above all, has a say in whether it is proposed (tree.py);
- where a proposal is short and the tree expands once more, whatever was there before is proposed first;
- every expanded node has noise of its own, used once: two nodes at the same position are independent;
- a tree ends after LIFETIME re-roots, so that it never runs out of room, which is a matter of all draws.

What survives a re-root has never been proposed: the new root is the bonus token, and that is no child that was sent.
tests/tree/test_sampled_law.py proves it by enumeration, over two rounds, through the drafters themselves.

Source: Gumbel top-k, Kool et al. 2019; recursive rejection sampling without replacement, Jeon et al. 2024.
Letters: n expanded leaves, k children of each, `width` tokens of a q.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swiftspec.backends.reference.noise import counters, gumbel, row_bits, row_key, row_keys
from swiftspec.messages import DraftProbs
from swiftspec.sampling.noise import DRAFT_STREAM
from swiftspec.sampling.sampler import Paths, Sampler
from swiftspec.tree.tree import Leaves

MAX_CANDIDATES = 64  # the likeliest tokens of the draft, which are all that is drawn from
MAX_REROOTS = 3  # re-roots
WEIGHT_DIGITS = 6  # of a weight's logarithm
Ints, Floats = NDArray[np.int64], NDArray[np.float64]


class SampledChildren:
    """k children of each leaf, drawn; and the q of every expanded node of a draft tree, by its tree slot."""

    sampled = True

    def __init__(self, k: int, slots: int, vocab: int, *, carry: bool) -> None:
        """`carry`: proposals tell what their nodes were drawn from, for who verifies them by rejection."""
        self.k, self._carry = k, carry
        self.width = min(MAX_CANDIDATES, vocab)
        self._tokens = np.zeros((slots, self.width), np.int32)
        self._probs = np.zeros((slots, self.width), np.float32)
        self._counters = counters(range(self.width))

    def open(self, sampler: Sampler, position: int, tau: float) -> None:
        """Starts a request, or goes on with one, at the root's absolute position: the noise is that of no other. `tau`
        is the exponent of the draft's confidence."""
        self._sampler, self._exponent = sampler, tau
        key = row_key(sampler.params.seed, DRAFT_STREAM, position)
        self._key = torch.tensor([key], dtype=torch.uint32).view(torch.int32)
        self._rows = 0  # expanded so far
        self._age = 0

    def rank(self, logits: Tensor, leaves: Leaves, paths: Paths | None, positions: Tensor) -> tuple[Ints, Floats]:
        """As `Children.rank`; tokens in the order drawn."""
        likeliest = self._sampler.children(logits, paths, positions, k=self.width)
        return self.sample(leaves.mask.shape[1] - len(leaves.nodes), *likeliest)  # slots are handed out in order

    def sample(self, first: int, tokens: Tensor, logprobs: Tensor) -> tuple[Ints, Floats]:
        """Draws children for leaves in tree slots `first` and on, from the draft's likeliest `tokens` and their
        `logprobs` [n, width]."""
        rows = tokens.shape[0]
        here = slice(first, first + rows)
        self._tokens[here] = tokens.cpu().numpy()
        q = logprobs.cpu().double().softmax(-1).float().nan_to_num_(0)  # a draft without an opinion has dead children
        self._probs[here] = q.numpy()
        order = self._sample_order(q := q.double())
        q = q.gather(-1, order)
        return tokens.cpu().gather(-1, order[:, : self.k]).numpy(), child_log_weights(q.numpy(), self._exponent)[
            :, : self.k
        ]

    def _sample_order(self, q: Tensor) -> Tensor:
        """Draws all of each row: [n, width], the first draw first."""
        clock = torch.arange(self._rows, self._rows + q.shape[0])
        self._rows += q.shape[0]
        noise = gumbel(row_bits(row_keys(self._key, clock), self._counters), q.dtype)
        return (q.log() + noise).argsort(-1, descending=True)

    def reroot(self) -> bool:
        """Counts a re-root within the tree. False: it has been enough, start over."""
        self._age += 1
        return self._age <= MAX_REROOTS

    def retain_slots(self, slots: list[int]) -> None:
        """Follows the tree, of whose slots these survive, ascending. Where none does, it has started over."""
        if not slots:
            self._age = 0
        self._tokens[: len(slots)] = self._tokens[slots]
        self._probs[: len(slots)] = self._probs[slots]

    def draft_probs(self, slots: Ints) -> DraftProbs | None:
        """What the children of the nodes in these tree slots were drawn from."""
        return DraftProbs(self._tokens[slots], self._probs[slots]) if self._carry and len(slots) > 0 else None


def child_log_weights(q: Floats, exponent: float) -> Floats:
    """log of the chance that the i-th child is the one accepted, before it is drawn; q [n, width] in the order drawn.

    With q_i what is left of q after i draws, the chance that its draw passes is taken to be the mean of q_i^exponent
    under q_i: a draft that is sure of itself is believed. Never above an earlier child's; -inf where none is left.
    """
    left = _reverse_cumsum(q)
    with np.errstate(divide="ignore", invalid="ignore"):
        passes = np.minimum(_reverse_cumsum(q ** (1 + exponent)) / left ** (1 + exponent), 1)
        failed = np.log1p(-passes).cumsum(-1)
        out = np.log(passes)
        out[:, 1:] += failed[:, :-1]
    out[(q <= 0) | np.isnan(out)] = -np.inf
    # the order in which a sum was made, hence its last bits, tells of the draws to come
    return np.minimum.accumulate(out, -1).round(WEIGHT_DIGITS)


def _reverse_cumsum(x: Floats) -> Floats:
    """Each entry with all after it, summed from the small end."""
    return x[:, ::-1].cumsum(-1)[:, ::-1]
