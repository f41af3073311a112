"""An acceptance rule that is biased on purpose, to show that the exactness test detects it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from swiftspec.messages import Proposal
from swiftspec.sampling.sampler import Paths
from swiftspec.tree.acceptance import Accepted
from swiftspec.tree.rejection import RejectionSampling


class LongestBranch(RejectionSampling):
    """An independent coin for every node, and the longest accepted branch: it resembles rejection sampling, but prefers
    long branches, samples no residual after a rejection, and uses a q that siblings no longer follow."""

    def __call__(self, proposal: Proposal, logits: Tensor, paths: Paths | None, positions: Tensor) -> Accepted:
        """Like `Rejection`, on one rank, but not exact."""
        p = self._sampler.process_logits(logits, paths).softmax(-1)
        noise = np.random.default_rng([self._sampler.params.seed, proposal.prefix_len])
        branches, above = [[0]], np.unique(np.array(proposal.parents[1:], np.int64)).tolist()
        for node, (parent, token) in enumerate(zip(proposal.parents[1:], proposal.tokens[1:], strict=True), 1):
            assert proposal.draft_probs is not None
            row = above.index(parent)
            q = proposal.draft_probs.probs[row][proposal.draft_probs.tokens[row] == token].sum()
            branch = next((b for b in branches if b[-1] == parent), None)
            if branch is not None and noise.random() * q < float(p[parent, token]):
                branches.append([*branch, node])
        path = max(branches, key=len)
        last = torch.from_numpy(noise.gumbel(size=p.shape[-1])).to(p.device) + p[path[-1]].log()
        return Accepted(path, [*(proposal.tokens[node] for node in path[1:]), int(last.argmax())])
