"""The target with all that a request may ask of its verifications: rejection sampling, and log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from swiftspec.messages import Likelihood, Opening, Proposal, VerifyResult
from swiftspec.params import SamplingParams
from swiftspec.runtime.executors import Features, Steps
from swiftspec.runtime.runner import Runner
from swiftspec.runtime.verifier import LocalVerifier
from swiftspec.sampling.logprobs import PromptLikelihoods, likelihoods
from swiftspec.sampling.sampler import Paths, Sampler
from swiftspec.tree.acceptance import Accept, Accepted


class FullVerifier(LocalVerifier):
    """A `LocalVerifier` of any request."""

    def __init__(
        self, runner: Runner, steps: Sequence[Steps], rejection: Callable[[Sampler], Accept] | None = None
    ) -> None:
        """`rejection`: what verifies sampled requests, in place of Match."""
        super().__init__(runner, steps)
        self._rejection = rejection
        self._prompt: tuple[Likelihood, ...] | None = None  # for the next result
        self._likelihoods: tuple[Likelihood, ...] | None = None  # of the tokens last accepted

    def _rejects(self, sampling: SamplingParams) -> bool:
        """Whether a request is verified by rejection. At temperature 0 both ways are the same, and only one needs to
        know what the draft drew."""
        return self._rejection is not None and not sampling.greedy

    def asked(self, sampling: SamplingParams) -> Features:
        more = {"rejection": self._rejects(sampling), "log-probabilities": sampling.logprobs is not None}
        return super().asked(sampling) | {name for name, there in more.items() if there}

    def accept(self, sampler: Sampler) -> Accept:
        params, rejection = sampler.params, self._rejection
        decide = rejection(sampler) if rejection is not None and self._rejects(params) else super().accept(sampler)
        return decide if params.logprobs is None else self._scored(decide, sampler, params.logprobs)

    def _scored(self, decide: Accept, sampler: Sampler, k: int) -> Accept:
        """Decides likewise, and notes the log-probabilities of what it accepts."""

        def accept(proposal: Proposal, logits: Tensor, paths: Paths | None, positions: Tensor) -> Accepted:
            accepted = decide(proposal, logits, paths, positions)
            if accepted.tokens[-1] >= 0:
                self._likelihoods = likelihoods(sampler, logits[accepted.path], accepted.tokens, k)
            return accepted

        return accept

    def open(self, opening: Opening) -> int:
        self._prompt = self._likelihoods = None
        k = opening.sampling.prompt_logprobs
        if k is None:
            return super().open(opening)
        plain = self.runner.sampler(SamplingParams(), ())  # the rows are the model's own, whatever the request
        prompt = PromptLikelihoods(plain, opening.tokens, k)
        self.runner.reading = prompt.read
        try:
            kept = super().open(opening)
        finally:
            self.runner.reading = None
        self._prompt = tuple(prompt.known)
        return kept

    def probabilities(self, tokens: Sequence[int], parents: Sequence[int]) -> Sequence[float] | None:
        """What the target gives each token of the proposal verified last after its parent, the root left out: by its
        logits as they are. None where nobody has whole logits: in a group of ranks, and in a graph."""
        return self.steps.probabilities(tokens, parents)

    def verify(self, proposal: Proposal) -> VerifyResult:
        result = super().verify(proposal)
        if self._likelihoods is None and self._prompt is None:
            return result
        result = replace(result, likelihoods=self._likelihoods, prompt=self._prompt)
        self._prompt = None
        return result
