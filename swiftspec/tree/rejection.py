"""Rejection sampling on a tree whose children were drawn from the draft without replacement.

The children x_1, x_2, ... of a node were drawn from q and are tested in that order against the target distribution p.
x_1 is accepted with probability min(1, p / q). After a rejection p becomes norm(max(0, p - q)), x_1 is removed from q,
q is normalised again, and x_2 is tested. If all children are rejected, the token is drawn from the residual
distribution, that is the final p. The resulting token follows the original p; sampled_children.py states what that
requires of the proposal.

q covers at most `width` tokens. The probabilities of all other tokens keep their ratios, so the whole vocabulary is
read only twice: for the normaliser of p, and for the token drawn at the end of a path.

Source: Jeon et al. 2024 (recursive rejection sampling), Leviathan et al. 2023 for the acceptance rule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from swiftspec.backends.reference.noise import counters, row_bits, row_keys, stream_key
from swiftspec.backends.reference.sampling import argmax_token
from swiftspec.messages import SAMPLED_SOURCES, DraftProbs, Proposal
from swiftspec.sampling.noise import COIN_STREAM, RESIDUAL_STREAM
from swiftspec.sampling.sampler import Paths, Sampler
from swiftspec.tree.acceptance import Accepted

NO_DRAFT_PROBS = DraftProbs(np.zeros((0, 1), np.int32), np.zeros((0, 1), np.float32))  # of a root without children
ChildNodes = dict[int, list[int]]  # node -> its children
RESIDUAL_SHARE = 1e-30  # fraction of p that is added to a residual, so that rounding never makes it all zero


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of rejection sampling for the children of each node, with the residual distribution.

    Only the tokens that q covers have individual residual probabilities. Those of all other tokens are p times a common
    factor.
    """

    accepted: Tensor  # [nodes] int64, index of the accepted child among its siblings; -1: all were rejected
    inside: Tensor  # [nodes, width] float64, residual probabilities of the tokens that q covers
    outside: Tensor  # [nodes] float64, log of the factor for all other tokens
    overlap: Tensor  # [nodes] float64, 1 - TV(p, q): probability that the first child is accepted, before it is drawn


def verify_siblings(p: Tensor, q: Tensor, child_index: Tensor, uniforms: Tensor) -> Verdict:
    """Tests the children of each node by rejection sampling: sibling after sibling, vectorised over the nodes.

    `p`, `q` [nodes, width] float64: target and draft probabilities of the tokens that q covers; a row of q sums to
    about 1, or is 0 if the node has no children.
    `child_index` [nodes, children]: column of each child in `q`, in the order drawn; -1 for padding.
    `uniforms` [nodes, children]: uniform random numbers in (0, 1).
    """
    p = torch.where(q > 0, p, 0)
    overlap = torch.minimum(p, q / q.sum(-1, keepdim=True).clamp_min(RESIDUAL_SHARE)).sum(-1)
    out = (1 - p.sum(-1, keepdim=True)).clamp_min(0)
    outside = torch.zeros_like(out)
    accepted = torch.full_like(child_index[:, :1], -1)
    for i in range(child_index.shape[1]):
        own = child_index[:, i : i + 1]
        live = (own >= 0) & (accepted < 0)
        own = own.clamp_min(0)
        q = q / q.sum(-1, keepdim=True).clamp_min(RESIDUAL_SHARE)
        passes = uniforms[:, i : i + 1] * q.gather(-1, own) < p.gather(-1, own)
        accepted = torch.where(live & passes, i, accepted)
        failed = live & ~passes
        rest = (p - q).clamp_min(0) + RESIDUAL_SHARE * p
        whole = rest.sum(-1, keepdim=True) + out
        p, out = torch.where(failed, rest / whole, p), torch.where(failed, out / whole, out)
        outside = torch.where(failed, outside - whole.log(), outside)
        q = torch.where(failed, q.scatter(-1, own, 0), q)
    return Verdict(accepted.squeeze(-1), p, outside.squeeze(-1), overlap)


class RejectionSampling:
    """Acceptance rule (`AcceptFn`) of one request by rejection sampling. In a tensor-parallel group every rank must
    call it; all get the same result.

    `verdicts` tests every node and draws a final token after each, although only one path is used, so that it takes no
    decision on the host and can be part of a CUDA graph. The graph's owner replaces `noise_rows` by a function that
    reads a fixed buffer, and copies the request's `uniforms`, the stream key of the uniform random numbers, into the
    captured tensor.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self.noise = sampler.noise_of(RESIDUAL_STREAM)
        self.noise_rows = self.noise.rows
        key = torch.tensor([stream_key(sampler.params.seed, COIN_STREAM)], dtype=torch.uint32)
        self.uniform_stream_key = key.view(torch.int32).to(sampler.device)

    def __call__(self, proposal: Proposal, logits: Tensor, paths: Paths | None, positions: Tensor) -> Accepted:
        """See `AcceptFn`. Raises ValueError if a child of the proposal has no draft probability."""
        numbers, width = pack_draft_probs(proposal, len(proposal.tokens))
        numbers = torch.from_numpy(numbers).to(logits.device)
        positions = positions.to(logits.device)
        return rejection_path(proposal, self.verdicts(logits, paths, positions, numbers, width).cpu().numpy())

    def verdicts(self, logits: Tensor, paths: Any, positions: Tensor, numbers: Tensor, width: int) -> Tensor:
        """Returns [nodes, 3] float64. Per node: the index of the accepted child and the overlap (see `Verdict`), and
        the final token, which is output if the accepted path ends at this node. `numbers`, `width`: as returned by
        `pack_draft_probs`."""
        shaped, shard = self._sampler.process_logits(logits, paths), self._sampler.shard
        named, q, places = numbers.split((width, width, numbers.shape[1] - 2 * width), 1)
        named, places = named.long(), places.long()
        if shard is None:
            values, total = shaped.gather(-1, named), shaped.logsumexp(-1, keepdim=True)
        else:
            values, total = shard.values(shaped, named)
        bits = row_bits(
            row_keys(self.uniform_stream_key, positions + 1), counters(range(places.shape[1]), shaped.device)
        )
        uniforms = bits.to(torch.float64).add_(0.5).mul_(2.0**-32)
        judged = verify_siblings((values - total).double().exp(), q, places, uniforms)
        columns = range(shaped.shape[-1]) if shard is None else shard.tokens
        # Scatter the residual of p; entries outside q or of another rank go to a padding column that is dropped.
        inside = judged.inside.log() - judged.outside.unsqueeze(1) + total
        here = (q > 0) & (named >= columns.start) & (named < columns.stop)
        at = torch.where(here, named - columns.start, shaped.shape[-1])
        scores = F.pad(shaped, (0, 1)).scatter(1, at, inside.to(shaped.dtype))[:, :-1]
        block, rows = self.noise_rows(positions + 1, columns, scores.dtype)
        noisy = scores + block[rows]
        last = argmax_token(noisy) if shard is None else shard.argmax(noisy)
        return torch.stack((judged.accepted.double(), judged.overlap, last.double()), 1)


def pack_draft_probs(
    proposal: Proposal, rows: int, padded: Callable[[int], int] = lambda most: most
) -> tuple[NDArray[np.float64], int]:
    """Packs the draft distributions of a proposal into one array, so that one copy transfers them to the device.

    Returns the array and `width`, the number of tokens that each distribution q covers. The array has one row per node,
    padded to `rows` rows. A row consists of the `width` tokens, their probabilities, and for each child of the node its
    column among the tokens; -1 for padding.

    `padded`: maps the largest number of children of a node to the number of columns for them.
    Raises ValueError if a child of the proposal has no draft probability.
    """
    check_draft_probs(proposal)
    child_nodes, drawn = _child_nodes(proposal), proposal.draft_probs
    if not child_nodes or drawn is None:
        return np.tile([0.0, 0.0, -1.0], (rows, 1)), 1  # one unused token and no child
    nodes, places, width = list(child_nodes), _child_index(proposal, drawn, child_nodes), drawn.tokens.shape[1]
    out = np.zeros((rows, 2 * width + padded(places.shape[1])))
    out[:, 2 * width :] = -1
    out[nodes, :width], out[nodes, width : 2 * width] = drawn.tokens, drawn.probs
    out[nodes, 2 * width : 2 * width + places.shape[1]] = places
    return out, width


def rejection_path(proposal: Proposal, judged: NDArray[np.float64]) -> Accepted:
    """Returns the accepted path, which follows the accepted children down from the root. `judged`: as returned by
    `RejectionSampling.verdicts`."""
    child_nodes, path, tokens = _child_nodes(proposal), [0], []
    while (child := int(judged[path[-1], 0])) >= 0:
        path.append(child_nodes[path[-1]][child])
        tokens.append(proposal.tokens[path[-1]])
    overlaps = tuple(float(judged[node, 1]) for node in path if node in child_nodes)
    return Accepted(path, [*tokens, int(judged[path[-1], 2])], overlaps)


def check_draft_probs(proposal: Proposal) -> None:
    """Validates a proposal for rejection sampling. Raises ValueError if it has children without draft distributions, a
    child of a deterministic source, or a child whose token has no probability in the distribution of its parent."""
    drawn = draft_probs_of(proposal)
    if len(proposal.tokens) > 1:
        _child_index(proposal, drawn, _child_nodes(proposal))


def draft_probs_of(proposal: Proposal) -> DraftProbs:
    """Returns the draft distributions of a proposal for rejection sampling; none for a root without children. Raises
    ValueError if they are missing, or if a node is of a deterministic source."""
    if not SAMPLED_SOURCES.issuperset(proposal.sources[1:]):
        raise ValueError("verify reject requires sampled nodes, and a proposal has one of a deterministic source")
    if proposal.draft_probs is None and len(proposal.tokens) > 1:
        raise ValueError("verify reject requires a proposal with draft distributions")
    return proposal.draft_probs or NO_DRAFT_PROBS


def _child_nodes(proposal: Proposal) -> ChildNodes:
    """Returns the children of each node that has any, by node, in the order drawn."""
    child_nodes: ChildNodes = {}
    for node, parent in enumerate(proposal.parents[1:], 1):
        child_nodes.setdefault(parent, []).append(node)
    return dict(sorted(child_nodes.items()))


def _child_index(proposal: Proposal, drawn: DraftProbs, child_nodes: ChildNodes) -> NDArray[np.int64]:
    """Returns the column of each child's token in its parent's row of `drawn`: [parents, children], -1 for padding.
    Raises ValueError if the token has no probability in that row, or occurs in it more than once."""
    places = np.full((len(child_nodes), max(map(len, child_nodes.values()))), -1)
    for row, children in enumerate(child_nodes.values()):
        for i, child in enumerate(children):
            (found,) = np.nonzero((drawn.tokens[row] == proposal.tokens[child]) & (drawn.probs[row] > 0))
            if len(found) != 1:
                raise ValueError(f"the token of node {child} does not match the draft distribution of its parent")
            places[row, i] = found[0]
    return places
