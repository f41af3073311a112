"""Verifiers: run the target over a proposal and decide which tokens become output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from swiftspec.capabilities import Features
from swiftspec.errors import NonFiniteLogits
from swiftspec.messages import Proposal, RequestStart, VerifyResult
from swiftspec.params import SamplingParams
from swiftspec.runtime.executors import ExecutorRequest, TreeExecutor, select_executor
from swiftspec.runtime.runner import Runner
from swiftspec.sampling.guidance import Guidance
from swiftspec.sampling.sampler import Sampler
from swiftspec.tree.acceptance import AcceptFn, TokenMatching


class PendingVerification(Protocol):
    """A verification in progress."""

    def wait(self) -> VerifyResult: ...


class Verifier(Protocol):
    """Verifies proposals on the target model, one at a time. `busy`: seconds spent in forwards."""

    @property
    def busy(self) -> float: ...

    def open(self, start: RequestStart) -> int:
        """Starts a request from its verified tokens. Returns the number of cached tokens."""
        ...

    def submit(self, proposal: Proposal) -> PendingVerification:
        """Starts the forward over the proposal's nodes."""
        ...

    def settle(self) -> None:
        """Completes a round, for example by the commit of the accepted path. Called after the result was sent to the
        drafter, which therefore does not wait for it."""

    def close(self) -> None:
        """Ends the request."""


class StateReceiver(Protocol):
    """Receives the target's hidden states at verified positions; `target_states.TargetStates` implements it."""

    def restart(self) -> None:
        """Called at the beginning of a request."""

    def append(self, position: int, states: Tensor, /) -> None:
        """Receives hidden states [rows, hidden layers, hidden size] of the positions from `position` on."""


class LocalVerifier:
    """Verifier on a model in this process. The prefix region of its KV cache holds all verified tokens before the root.

    It is its own `PendingVerification`, since there is one verification at a time.
    """

    def __init__(self, runner: Runner, executors: Sequence[TreeExecutor]) -> None:
        """`executors`: executors that can verify proposals, the fastest first."""
        self.runner, self.executors = runner, executors
        self.states: StateReceiver | None = None  # a draft head reads them

    @property
    def busy(self) -> float:
        return self.runner.busy

    def required_features(self, sampling: SamplingParams) -> Features:
        """Returns the features that an executor must support to run a request."""
        shard = self.runner.shard
        deep = shard is not None and sampling.filtered and sampling.top_k >= shard.num_exchanged
        return sampling.features | ({"deep top-k"} if deep else set())

    def acceptance_rule(self, sampler: Sampler) -> AcceptFn:
        """Returns the function that decides which nodes of a request's proposals are accepted."""
        return TokenMatching(sampler)

    def select_executor(self, start: RequestStart) -> TreeExecutor:
        """Returns the executor that runs a request."""
        return select_executor(self.executors, self.required_features(start.sampling), start.executor)

    def open(self, start: RequestStart) -> int:
        self._sampler = self.runner.sampler(start.sampling, start.prompt)
        self._sampler.observe(start.output)
        guidance = Guidance.of(start.sampling, start.tokens, start.prompt_len)
        if self.states is not None:
            self.states.restart()
            self.runner.on_prompt_hidden = self.states.append
        kept = self.runner.open(start.tokens, guidance, start.num_cached_tokens)
        self.executor = self.select_executor(start)
        self.executor.open(ExecutorRequest(self._sampler, accept=self.acceptance_rule(self._sampler)))
        return kept

    def submit(self, proposal: Proposal) -> PendingVerification:
        self._submitted = proposal
        return self

    def wait(self) -> VerifyResult:
        """Runs the target over the submitted proposal and returns the accepted path with the bonus token. It runs only
        now, since this process has no work to overlap. `settle` commits the path. Raises NonFiniteLogits if the
        target's logits contain NaN or infinity."""
        proposal = self._submitted
        assert proposal.prefix_len == self.runner.cache.prefix_len[0], "proposal and target differ in prefix length"
        accepted = self._accepted = self.executor.verify(proposal)
        if accepted.tokens[-1] < 0:
            self.runner.cache.reset(0)  # NaN would propagate into later requests even where it is masked
            raise NonFiniteLogits
        if self.states is not None and (hidden := self.accepted_hidden()) is not None:
            self.states.append(proposal.prefix_len, hidden)
        about = proposal.request, proposal.round, proposal.prefix_len
        return self.complete(VerifyResult(*about, tuple(accepted.path), tuple(accepted.tokens), accepted.overlaps))

    def verify(self, proposal: Proposal) -> VerifyResult:
        """Submits a proposal and returns its result; see `wait`."""
        return self.submit(proposal).wait()

    def complete(self, result: VerifyResult) -> VerifyResult:
        """Returns the result with the fields that a subclass adds."""
        return result

    def accepted_hidden(self) -> Tensor | None:
        """Returns the hidden states [nodes, hidden layers, hidden size] of the accepted path's nodes, root first, on
        the model's device, or None if the model keeps none. May be called after `wait`, until the target's next
        forward. `Runner.on_prompt_hidden` provides those of the prompt's tokens that are prefilled; tokens from the
        prefix cache have none."""
        return self.executor.hidden_states(self._accepted.path)

    def settle(self) -> None:
        self.executor.settle(self._accepted.path)
        self._sampler.observe(self._accepted.tokens)
        self.runner.observe(self._accepted.tokens)

    def close(self) -> None:
        self.runner.close()
