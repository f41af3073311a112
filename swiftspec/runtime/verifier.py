"""Verifiers say what the target makes of a proposal. A token is true when it has been sampled here, not before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from swiftspec.errors import NonFiniteLogits
from swiftspec.messages import Proposal, RequestStart, VerifyResult
from swiftspec.params import SamplingParams
from swiftspec.runtime.executors import ExecutorRequest, Features, TreeExecutor, features_of, select_executor
from swiftspec.runtime.runner import Runner
from swiftspec.sampling.guidance import Guidance
from swiftspec.sampling.sampler import Sampler
from swiftspec.tree.acceptance import AcceptFn, TokenMatching


class PendingVerification(Protocol):
    """A verification under way."""

    def wait(self) -> VerifyResult: ...


class Verifier(Protocol):
    """Verifies proposals on the target model, one at a time. `busy`: seconds that it has spent in forwards."""

    @property
    def busy(self) -> float: ...

    def open(self, opening: RequestStart) -> int:
        """Starts a request from its verified tokens. Returns how many of them were kept from earlier ones."""
        ...

    def submit(self, proposal: Proposal) -> PendingVerification:
        """Starts the forward over the proposal's nodes."""
        ...

    def settle(self) -> None:
        """Called once a result is on its way to the drafter: does what that need not wait for."""

    def close(self) -> None:
        """Ends the request."""


class LocalVerifier:
    """The target model in this process. Its prefix holds every verified token before the root.

    It is its own `PendingVerification`, as there is one verification at a time.
    """

    def __init__(self, runner: Runner, executors: Sequence[TreeExecutor]) -> None:
        """`executors`: those that can verify, the fastest first."""
        self.runner, self.executors = runner, executors

    @property
    def busy(self) -> float:
        return self.runner.busy

    def required_features(self, sampling: SamplingParams) -> Features:
        """What a request asks of the steps."""
        shard, more = self.runner.shard, ["guidance"] if sampling.guided else []
        deep = shard is not None and sampling.filtered and sampling.top_k >= shard.num_exchanged
        return features_of(sampling, *more, *(["deep top-k"] if deep else []))

    def acceptance_rule(self, sampler: Sampler) -> AcceptFn:
        """What decides over a request's proposals."""
        return TokenMatching(sampler)

    def select_executor(self, opening: RequestStart) -> TreeExecutor:
        """The steps that run a request."""
        return select_executor(self.executors, self.required_features(opening.sampling), opening.executor)

    def open(self, opening: RequestStart) -> int:
        self._sampler = self.runner.sampler(opening.sampling, opening.prompt)
        self._sampler.observe(opening.output)
        guidance = Guidance.of(opening.sampling, opening.tokens, opening.prompt_len)
        kept = self.runner.open(opening.tokens, guidance, opening.num_cached_tokens)
        self.executor = self.select_executor(opening)
        self.executor.open(ExecutorRequest(self._sampler, accept=self.acceptance_rule(self._sampler)))
        return kept

    def submit(self, proposal: Proposal) -> PendingVerification:
        self._submitted = proposal
        return self

    def wait(self) -> VerifyResult:
        """Runs the forward only now: this process has nothing else to do meanwhile."""
        return self.verify(self._submitted)

    def verify(self, proposal: Proposal) -> VerifyResult:
        """Forward, then what stands. `settle` commits the accepted path."""
        assert proposal.prefix_len == self.runner.cache.prefix_len[0], "proposal and target differ in their prefix"
        accepted = self._accepted = self.executor.verify(proposal)
        if accepted.tokens[-1] < 0:
            self.runner.cache.reset(0)  # NaN would spoil the sums of a later request, even where it is masked
            raise NonFiniteLogits
        about = proposal.request, proposal.round, proposal.prefix_len
        return VerifyResult(*about, tuple(accepted.path), tuple(accepted.tokens), accepted.overlaps)

    def settle(self) -> None:
        self.executor.settle(self._accepted.path)
        self._sampler.observe(self._accepted.tokens)
        self.runner.observe(self._accepted.tokens)

    def close(self) -> None:
        self.runner.cache.commit(())  # what is verified stays
