"""Logits processing of sequence groups by their sampling parameters, without device synchronisation."""

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
    """The distributions of one request, or of several with equal parameters: p of the target and q of the draft.

    Filters apply to p only: the draft must cover the target's support (smc/weights.py). Penalties apply to both and
    come first: if there are any, all other methods take the output of `penalise`. `key` is equal for requests that can
    share one processor.
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
        self.temperature, self.bias = sampling.temperature, self._draft.bias  # sufficient without filters

    @property
    def penalised(self) -> bool:
        """Whether a row's logits depend on the tokens of its text."""
        return self._penalties is not None

    def penalise(self, logits: Tensor, prompts: Tensor, counts: Tensor) -> Tensor:
        """Applies bias and penalties: raw logits [A, ..., N, >= V] -> [A, ..., N, V]. Without penalties only the
        vocabulary is cut.

        `prompts`: [A, V] bool, the tokens of each group's prompt.
        `counts`: [A, ..., N, V], the token counts of each row's text so far.
        """
        logits = logits[..., : self._vocab]
        if self._penalties is None:
            return logits
        if self._penalties.bias is not None:
            logits = logits + self._penalties.bias.to(logits.dtype)
        prompts = prompts.view(len(prompts), *[1] * (logits.dim() - 2), self._vocab)
        return self._penalties.apply_penalties(logits, prompts, counts)

    def target(self, logits: Tensor) -> Tensor:
        """The target's logits: [n, >= V] raw -> [n, V] with temperature, bias and filters."""
        shaped = self._target.process_logits(logits, None)
        return filters.apply_top_p(shaped, self._top_p, num_candidates=shaped.shape[-1]) if self._top_p < 1 else shaped

    def tempered(self, logits: Tensor) -> Tensor:
        """[n, >= V] raw -> [n, V] with temperature and bias: the draft's logits, or the target's without filters."""
        return self._draft.process_logits(logits, None)

    def draw(self, logits: Tensor, keys: Tensor, power: float = 1.0) -> tuple[Tensor, Tensor]:
        """Samples a token [n] from each row of raw logits, without filters, raised to `power`, with the noise of its
        key [n]; -1 where logits are not finite. Also returns its log-probability [n], NaN where logits are not finite.
        """
        return self._ops.draw_keyed(logits, self._vocab, keys, self._scores(power))

    def draw_autoregressive(self, logits: Tensor, keys: Tensor | None) -> Tensor:
        """Samples a token [n] from each row of raw logits as autoregressive decoding does, with the noise of its key
        [n], or greedily at temperature 0; -1 where logits are not finite."""
        params, bias, temperature = self._draft.params, self._draft.bias, 1.0
        if self.filtered:
            logits, bias = self.target(logits), None
        elif not params.greedy:
            temperature = params.temperature
        if params.greedy or keys is None:
            return self._ops.draw(logits, self._vocab, Scores(temperature, bias))
        return self._ops.draw_keyed(logits, self._vocab, keys, Scores(temperature, bias))[0]

    def log_probs(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """The log-probabilities [n] of tokens [n], given raw logits, without filters."""
        return self._ops.log_probs(logits, self._vocab, tokens, self._scores())

    def _scores(self, power: float = 1.0) -> Scores:
        return Scores(self._draft.params.temperature / power, self._draft.bias)


@dataclass(frozen=True, slots=True)
class GroupSpan:
    """A run of neighbouring groups with equal logits parameters."""

    processor: LogitsProcessor
    groups: slice  # positions among the groups

    def rows(self, particles: int) -> slice:
        """Their rows in a forward with N rows per group."""
        return slice(self.groups.start * particles, self.groups.stop * particles)


def group_spans(processors: Sequence[LogitsProcessor | None]) -> list[GroupSpan]:
    """The spans of groups with these processors. A group that never had a request joins its neighbour."""
    spans: list[GroupSpan] = []
    for processor, run in groupby(range(len(processors)), lambda group: processors[group]):
        places = [*run]
        if processor is None:
            before = spans.pop()
            processor, places = before.processor, [before.groups.start, *places]
        spans.append(GroupSpan(processor, slice(places[0], places[-1] + 1)))
    return spans


def penalise_spans(spans: Sequence[GroupSpan], logits: Tensor, prompts: Tensor, counts: Tensor) -> Tensor:
    """Applies `LogitsProcessor.penalise` span by span to raw logits [A, ..., N, >= V]."""
    return concatenate([s.processor.penalise(logits[s.groups], prompts[s.groups], counts[s.groups]) for s in spans])


def concatenate(parts: Sequence[Tensor]) -> Tensor:
    """Concatenates along the first dimension; a single part is returned as is."""
    return parts[0] if len(parts) == 1 else torch.cat([*parts])
