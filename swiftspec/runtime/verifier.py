"""Verifiers say what the target makes of a proposal. A token is true when it has been sampled here, not before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from swiftspec.errors import UserError
from swiftspec.messages import Proposal, VerifyResult
from swiftspec.params import SamplingParams
from swiftspec.runtime.graph import Graphs
from swiftspec.runtime.runner import Runner
from swiftspec.runtime.verify_step import VerifyStep, VerifySteps
from swiftspec.sampling.guidance import Guidance
from swiftspec.sampling.sampler import Sampler
from swiftspec.tree import mask as tree_mask
from swiftspec.tree import walk as tree_walk
from swiftspec.tree.reject import Rejection


class Pending(Protocol):
    """A verification under way."""

    def wait(self) -> VerifyResult: ...


class Verifier(Protocol):
    """Verifies proposals on the target model, one at a time. `busy`: seconds that it has spent in forwards."""

    @property
    def busy(self) -> float: ...

    def open(self, request: int, tokens: Sequence[int], sampling: SamplingParams, prompt_len: int) -> None:
        """Starts from `tokens`, of which the last is the root and those from `prompt_len` on are output. Raises
        UserError where guidance finds no memory."""
        ...

    def submit(self, proposal: Proposal) -> Pending:
        """Starts the forward over the proposal's nodes."""
        ...

    def settle(self) -> None:
        """Called once a result is on its way to the drafter: does what that need not wait for."""
        ...

    def close(self) -> None:
        """Ends the request."""
        ...


class LocalVerifier:
    """The target model in this process. Its prefix holds every verified token before the root."""

    def __init__(self, runner: Runner, vocab: int, method: str = "match") -> None:
        self.runner = runner
        self._vocab = vocab
        self._method = method  # as EngineConfig.verify has it
        self._steps = VerifySteps(runner, vocab)
        self._step: VerifyStep | None = None

    @property
    def busy(self) -> float:
        return self.runner.busy

    def open(self, request: int, tokens: Sequence[int], sampling: SamplingParams, prompt_len: int) -> None:
        model = self.runner.model
        self._sampler = Sampler(sampling, tokens[:prompt_len], self._vocab, model.device, model.group, self.runner.ops)
        self._sampler.observe(tokens[prompt_len:])
        # at temperature 0 both methods are the same, and only one needs to know what the draft drew
        rejects = self._method == "reject" and not sampling.greedy
        self._rejection = Rejection(self._sampler, model.device) if rejects else None
        guidance = Guidance.of(sampling, tokens, prompt_len)
        try:
            self.runner.open(tokens, guidance)
        except (MemoryError, RuntimeError) as error:
            if guidance is None or "memory" not in str(error):
                raise
            raise UserError("no memory for a second prefix: take a smaller max_model_len, or no guidance") from None
        self._scoring = None if rejects else self._sampler.scoring(self.runner.rounds)
        self._step = None if rejects else self._steps.open(self._sampler)

    def submit(self, proposal: Proposal) -> LocalPending:
        return LocalPending(self, proposal)

    def close(self) -> None:
        self.runner.reset()

    def settle(self) -> None:
        path, tokens = self._accepted
        if self._scoring is None:  # else it is done
            self.runner.cache.commit(path)
        self._sampler.observe(tokens)

    def verify(self, proposal: Proposal) -> VerifyResult:
        """Forward, then sample at every node and walk, or judge drawn children. `settle` commits the accepted path."""
        assert proposal.prefix_len == self.runner.cache.prefix_len[0], "proposal and target differ in their prefix"
        overlaps: list[float] = []
        if self._scoring is not None:
            path, tokens = self.runner.verify(proposal.tokens, proposal.parents, self._scoring)
        else:
            path, tokens, overlaps = self._verify_in_steps(proposal)
        self._accepted = path, tokens
        head = (proposal.request, proposal.round, proposal.prefix_len)
        return VerifyResult(*head, tuple(path), tuple(tokens), tuple(overlaps))

    def _verify_in_steps(self, proposal: Proposal) -> tuple[list[int], list[int], list[float]]:
        """Where it is no native call. As `Rejection.walk`; where nothing was drawn, no overlaps."""
        mask = tree_mask.from_parents(proposal.parents)
        depths = mask.sum(-1) - 1
        rows = np.array(proposal.tokens), depths, mask
        if self._step is not None and Graphs.take(len(depths)):
            found = self.runner.tree_step(self._step, *rows)
        else:
            found = self.runner.forward_tree(*rows)
        if isinstance(found, torch.Tensor):
            paths = tree_walk.paths(proposal.tokens, proposal.parents) if self._sampler.params.penalised else None
            positions = torch.from_numpy(depths + proposal.prefix_len).to(found.device)
            with self.runner.naming_lost():  # a group's ranks speak here, too
                if self._rejection is not None:
                    return self._rejection.walk(proposal, found, paths, positions)
                found = self._sampler.draw(found, paths, positions).tolist()
        path, tokens = tree_walk.walk(proposal.tokens, proposal.parents, found)
        return path, tokens, []


class Verifies(Protocol):
    """What runs the forward that a LocalPending stands for."""

    def verify(self, proposal: Proposal) -> VerifyResult: ...


class LocalPending:
    """Runs the forward when it is waited for: this process has nothing else to do meanwhile."""

    def __init__(self, verifier: Verifies, proposal: Proposal) -> None:
        self._verifier = verifier
        self._proposal = proposal

    def wait(self) -> VerifyResult:
        return self._verifier.verify(self._proposal)
