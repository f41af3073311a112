"""A verifier that is wrong on purpose, to show that the test sees it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from swiftspec.messages import Proposal
from swiftspec.params import SamplingParams
from swiftspec.runtime.verifier import LocalVerifier
from swiftspec.tree.reject import Rejection


class LongestBranch(Rejection):
    """A coin for every node, by itself, and the longest branch that passed: what looks like rejection sampling, but a
    branch is kept for being long, no residual follows a rejection, and siblings are judged by a q that they have left.
    """

    def walk(
        self, proposal: Proposal, logits: Tensor, paths: list[list[int]] | None, positions: Tensor
    ) -> tuple[list[int], list[int], list[float]]:
        """As `Rejection.walk`, on one rank, and not exact."""
        p = self._sampler.shape(logits, paths).softmax(-1)
        noise = np.random.default_rng([self._sampler.params.seed, proposal.prefix_len])
        branches, above = [[0]], np.unique(np.array(proposal.parents[1:], np.int64)).tolist()
        for node, (parent, token) in enumerate(zip(proposal.parents[1:], proposal.tokens[1:], strict=True), 1):
            assert proposal.drawn is not None
            row = above.index(parent)
            q = proposal.drawn.probs[row][proposal.drawn.tokens[row] == token].sum()
            branch = next((b for b in branches if b[-1] == parent), None)
            if branch is not None and noise.random() * q < float(p[parent, token]):
                branches.append([*branch, node])
        path = max(branches, key=len)
        last = torch.from_numpy(noise.gumbel(size=p.shape[-1])).to(p.device) + p[path[-1]].log()
        return path, [*(proposal.tokens[node] for node in path[1:]), int(last.argmax())], []


class BiasedVerifier(LocalVerifier):
    """The target with that rule."""

    def open(self, request: int, tokens: Sequence[int], sampling: SamplingParams, prompt_len: int) -> None:
        super().open(request, tokens, sampling, prompt_len)
        self._rejection = LongestBranch(self._sampler, self.runner.model.device)
