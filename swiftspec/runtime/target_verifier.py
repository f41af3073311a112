"""Target verifier: the local verifier with rejection sampling, synthetic acceptance and log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from swiftspec.capabilities import Features
from swiftspec.messages import RequestStart, SampledLogprob, VerifyResult
from swiftspec.params import SamplingParams
from swiftspec.runtime.executors import TreeExecutor
from swiftspec.runtime.runner import Runner
from swiftspec.runtime.verifier import LocalVerifier
from swiftspec.sampling.logprobs import PromptLogprobs, token_logprobs
from swiftspec.sampling.sampler import Sampler
from swiftspec.tree.acceptance import AcceptFn
from swiftspec.tree.synthetic_acceptance import SyntheticAcceptance


class TargetVerifier(LocalVerifier):
    """A `LocalVerifier` that also supports rejection sampling, synthetic acceptance, and log-probabilities of prompt
    and output."""

    def __init__(
        self,
        runner: Runner,
        executors: Sequence[TreeExecutor],
        rejection: Callable[[Sampler], AcceptFn] | None = None,
        synthetic_length: float | None = None,
    ) -> None:
        """`rejection`: creates the acceptance rule of requests at a temperature above 0; None: coupled verification.
        `synthetic_length`: mean tokens per round of synthetic acceptance, which excludes `rejection`; None: off."""
        super().__init__(runner, executors)
        self._rejection, self._synthetic_length = rejection, synthetic_length
        self._prompt_logprobs: tuple[SampledLogprob, ...] | None = None  # to be sent with the next result

    def _rejects(self, sampling: SamplingParams) -> bool:
        """Returns whether a request is verified by rejection sampling. At temperature 0 both rules give the same
        result, and coupled verification does not need the draft's probabilities."""
        return self._rejection is not None and not sampling.greedy

    def required_features(self, sampling: SamplingParams) -> Features:
        return super().required_features(sampling) | ({"verify reject"} if self._rejects(sampling) else set())

    def acceptance_rule(self, sampler: Sampler) -> AcceptFn:
        if self._synthetic_length is not None:
            return SyntheticAcceptance(sampler, self._synthetic_length)
        if self._rejection is not None and self._rejects(sampler.params):
            return self._rejection(sampler)
        return super().acceptance_rule(sampler)

    def open(self, start: RequestStart) -> int:
        self._prompt_logprobs = None
        k = start.sampling.prompt_logprobs
        if k is None:
            return super().open(start)
        plain = self.runner.sampler(SamplingParams(), ())  # prompt logprobs use unprocessed logits
        prompt = PromptLogprobs(plain, start.tokens, k)
        self.runner.on_prompt_logits = prompt.add_rows
        try:
            kept = super().open(start)
        finally:
            self.runner.on_prompt_logits = None
        self._prompt_logprobs = tuple(prompt.values)
        return kept

    def probabilities(self, tokens: Sequence[int], parents: Sequence[int]) -> Sequence[float] | None:
        """Returns the target's probability of each node's token given its parent, the root excluded, for the proposal
        that was verified last. Bias, penalties, temperature and filters are not applied. None if the host has no
        complete logits: in a tensor-parallel group, or after a verification as one CUDA graph."""
        return self.executor.probabilities(tokens, parents)

    def complete(self, result: VerifyResult) -> VerifyResult:
        params, logprobs = self._sampler.params, None
        if params.logprobs is not None:
            with self.runner.translate_peer_errors():
                rows = self.executor.logits(result.path)
                logprobs = token_logprobs(self._sampler, rows, result.tokens, params.logprobs, params.logprob_token_ids)
        if logprobs is None and self._prompt_logprobs is None:
            return result
        result = replace(result, logprobs=logprobs, prompt_logprobs=self._prompt_logprobs)
        self._prompt_logprobs = None
        return result
