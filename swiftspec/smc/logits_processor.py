"""What one request's sampling parameters make of logits, without a look at their values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from swiftspec.backends.reference import Scores
from swiftspec.params import SamplingParams
from swiftspec.runtime.executors.graph import logits_key
from swiftspec.sampling import filters
from swiftspec.sampling.sampler import Sampler, SamplerOps


class LogitsProcessor:
    """The distributions of one request, or of several with the same parameters: p of the target and q of the draft.

    Filters shape p alone: the draft must reach what the target does (smc/weights.py). Penalties shape both, and come
    first: where there are any, all else takes what `penalise` has made of logits. `key` is equal for two requests that
    one shaper serves.
    """

    def __init__(self, sampling: SamplingParams, vocab: int, device: torch.device, ops: SamplerOps) -> None:
        self.key, self.filtered, self.greedy = logits_key(sampling), sampling.filtered, sampling.greedy
        self._ops, self._vocab, self._top_p = ops, vocab, sampling.top_p
        self._penalties = Sampler(sampling, (), vocab, device) if sampling.penalised else None
        if sampling.penalised:
            no = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
            sampling = replace(sampling, logit_bias={}, **no)
        self._draft = Sampler(replace(sampling, top_k=0, top_p=1.0, min_p=0.0), (), vocab, device)
        self._target = Sampler(replace(sampling, top_p=1.0), (), vocab, device)
        self.temperature, self.bias = sampling.temperature, self._draft.bias  # which is all where nothing is filtered

    @property
    def penalised(self) -> bool:
        """Whether a row's logits depend on the tokens of its text."""
        return self._penalties is not None

    def penalise(self, logits: Tensor, prompts: Tensor, counts: Tensor) -> Tensor:
        """Raw logits [A, ..., N, >= V] -> [A, ..., N, V], biased and penalised where there are penalties. `prompts`
        [A, V] bool: the tokens of each group's prompt; `counts` [A, ..., N, V]: of each row's text so far."""
        logits = logits[..., : self._vocab]
        if self._penalties is None:
            return logits
        if self._penalties.bias is not None:
            logits = logits + self._penalties.bias.to(logits.dtype)
        prompts = prompts.view(len(prompts), *[1] * (logits.dim() - 2), self._vocab)
        return self._penalties.apply_penalties(logits, prompts, counts)

    def target(self, logits: Tensor) -> Tensor:
        """The target's [n, >= V] raw -> [n, V] tempered, biased and filtered."""
        shaped = self._target.process_logits(logits, None)
        return filters.apply_top_p(shaped, self._top_p, num_candidates=shaped.shape[-1]) if self._top_p < 1 else shaped

    def tempered(self, logits: Tensor) -> Tensor:
        """[n, >= V] raw -> [n, V] tempered and biased: the draft's, or the target's without filters."""
        return self._draft.process_logits(logits, None)

    def draw(self, logits: Tensor, keys: Tensor, power: float = 1.0) -> tuple[Tensor, Tensor]:
        """A token [n] of each row of raw logits, without filters, to that power, by the noise of its key [n]; -1 where
        logits are no numbers. And its log-probability [n], NaN there."""
        return self._ops.draw_keyed(logits, self._vocab, keys, self._scores(power))

    def draw_autoregressive(self, logits: Tensor, keys: Tensor | None) -> Tensor:
        """A token [n] of each row of raw logits as plain decoding draws it, by the noise of its key [n], and without
        any at temperature 0; -1 where logits are no numbers."""
        params, bias, temperature = self._draft.params, self._draft.bias, 1.0
        if self.filtered:
            logits, bias = self.target(logits), None
        elif not params.greedy:
            temperature = params.temperature
        if params.greedy or keys is None:
            return self._ops.draw(logits, self._vocab, Scores(temperature, bias))
        return self._ops.draw_keyed(logits, self._vocab, keys, Scores(temperature, bias))[0]

    def log_probs(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """The log-probabilities [n] of tokens [n] by raw logits, without filters."""
        return self._ops.log_probs(logits, self._vocab, tokens, self._scores())

    def _scores(self, power: float = 1.0) -> Scores:
        return Scores(self._draft.params.temperature / power, self._draft.bias)


@dataclass(frozen=True, slots=True)
class GroupSpan:
    """Neighbouring groups whose requests shape logits alike."""

    processor: LogitsProcessor
    groups: slice  # positions

    def rows(self, particles: int) -> slice:
        """Theirs among the rows of a forward of N rows a group."""
        return slice(self.groups.start * particles, self.groups.stop * particles)


def group_spans(processors: Sequence[LogitsProcessor | None]) -> list[GroupSpan]:
    """Those of groups with these shapers. One that never had a request joins its neighbour."""
    spans: list[GroupSpan] = []
    for processor, run in groupby(range(len(processors)), lambda group: processors[group]):
        places = [*run]
        if processor is None:
            before = spans.pop()
            processor, places = before.processor, [before.groups.start, *places]
        spans.append(GroupSpan(processor, slice(places[0], places[-1] + 1)))
    return spans


def penalise_spans(spans: Sequence[GroupSpan], logits: Tensor, prompts: Tensor, counts: Tensor) -> Tensor:
    """Raw logits [A, ..., N, >= V] after the penalties of those requests that have any: `LogitsProcessor.penalise`,
    span by
    span."""
    return concatenate([s.processor.penalise(logits[s.groups], prompts[s.groups], counts[s.groups]) for s in spans])


def concatenate(parts: Sequence[Tensor]) -> Tensor:
    """One after the other."""
    return parts[0] if len(parts) == 1 else torch.cat([*parts])
