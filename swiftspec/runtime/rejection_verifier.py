"""The target with all that a request may ask of its verifications: rejection sampling, and log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from swiftspec.messages import Logprob, Proposal, RequestStart, VerifyResult
from swiftspec.params import SamplingParams
from swiftspec.runtime.executors import Features, TreeExecutor
from swiftspec.runtime.runner import Runner
from swiftspec.runtime.verifier import LocalVerifier
from swiftspec.sampling.logprobs import PromptLogprobs, token_logprobs
from swiftspec.sampling.sampler import Paths, Sampler
from swiftspec.tree.acceptance import Accepted, AcceptFn


class RejectionVerifier(LocalVerifier):
    """A `LocalVerifier` of any request."""

    def __init__(
        self, runner: Runner, executors: Sequence[TreeExecutor], rejection: Callable[[Sampler], AcceptFn] | None = None
    ) -> None:
        """`rejection`: what verifies sampled requests, in place of Match."""
        super().__init__(runner, executors)
        self._rejection = rejection
        self._prompt_logprobs: tuple[Logprob, ...] | None = None  # for the next result
        self._logprobs: tuple[Logprob, ...] | None = None  # of the tokens last accepted

    def _rejects(self, sampling: SamplingParams) -> bool:
        """Whether a request is verified by rejection. At temperature 0 both ways are the same, and only one needs to
        know what the draft drew."""
        return self._rejection is not None and not sampling.greedy

    def required_features(self, sampling: SamplingParams) -> Features:
        more = {"rejection": self._rejects(sampling), "log-probabilities": sampling.logprobs is not None}
        return super().required_features(sampling) | {name for name, there in more.items() if there}

    def acceptance_rule(self, sampler: Sampler) -> AcceptFn:
        params, rejection = sampler.params, self._rejection
        decide = (
            rejection(sampler) if rejection is not None and self._rejects(params) else super().acceptance_rule(sampler)
        )
        return decide if params.logprobs is None else self._with_logprobs(decide, sampler, params.logprobs)

    def _with_logprobs(self, decide: AcceptFn, sampler: Sampler, k: int) -> AcceptFn:
        """Decides likewise, and notes the log-probabilities of what it accepts."""

        def accept(proposal: Proposal, logits: Tensor, paths: Paths | None, positions: Tensor) -> Accepted:
            accepted = decide(proposal, logits, paths, positions)
            if accepted.tokens[-1] >= 0:
                self._logprobs = token_logprobs(sampler, logits[accepted.path], accepted.tokens, k)
            return accepted

        return accept

    def open(self, opening: RequestStart) -> int:
        self._prompt_logprobs = self._logprobs = None
        k = opening.sampling.prompt_logprobs
        if k is None:
            return super().open(opening)
        plain = self.runner.sampler(SamplingParams(), ())  # the rows are the model's own, whatever the request
        prompt = PromptLogprobs(plain, opening.tokens, k)
        self.runner.on_prompt_logits = prompt.add_rows
        try:
            kept = super().open(opening)
        finally:
            self.runner.on_prompt_logits = None
        self._prompt_logprobs = tuple(prompt.values)
        return kept

    def probabilities(self, tokens: Sequence[int], parents: Sequence[int]) -> Sequence[float] | None:
        """What the target gives each token of the proposal verified last after its parent, the root left out: by its
        logits as they are. None where nobody has whole logits: in a group of ranks, and in a graph."""
        return self.executor.probabilities(tokens, parents)

    def verify(self, proposal: Proposal) -> VerifyResult:
        result = super().verify(proposal)
        if self._logprobs is None and self._prompt_logprobs is None:
            return result
        result = replace(result, logprobs=self._logprobs, prompt_logprobs=self._prompt_logprobs)
        self._prompt_logprobs = None
        return result
