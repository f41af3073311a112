"""Processing of the logits of sequence groups (bias, penalties, temperature, filters), without device
synchronisation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from swiftspec.backends.reference import Backend, chains
from swiftspec.backends.reference.chains import ChainVerdict
from swiftspec.backends.reference.noise import counters, gumbel, row_bits
from swiftspec.backends.reference.sampling import Scores
from swiftspec.params import SamplingParams
from swiftspec.runtime.executors.population_rounds import SamplingSpan
from swiftspec.sampling import filters
from swiftspec.sampling.sampler import Sampler


class LogitsProcessor:
    """Processing of raw logits to the distributions p of the target and q of the draft, for requests with equal
    parameters.

    Filters (min_p, top_k, top_p) apply to p only, because q must reach every token that p reaches (smc/weights.py).
    Penalties and `min_tokens` apply to both: if `penalised`, the input of all other methods is the output of `penalise`
    instead of raw logits. `key`: equal for requests that can share a processor.
    """

    def __init__(self, sampling: SamplingParams, vocab: int, device: torch.device, ops: Backend) -> None:
        self.key, self.filtered, self.greedy = logits_key(sampling), sampling.filtered, sampling.greedy
        self._ops, self._vocab = ops, vocab
        self._sampling = sampling
        self._min_tokens, penalised = sampling.min_tokens, sampling.penalised or sampling.min_tokens > 0
        self._penalties = Sampler(sampling, (), vocab, device) if penalised else None
        if penalised:
            no = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
            sampling = replace(sampling, logit_bias={}, allowed_token_ids=None, bad_words_ids=(), **no)
        self._draft = Sampler(replace(sampling, top_k=0, top_p=1.0, min_p=0.0), (), vocab, device)
        self._target = Sampler(sampling, (), vocab, device)
        # top_p may need all tokens, which is known on the device only; the other filters do not need more than top_k
        self._target.num_candidates = vocab if sampling.top_p < 1 else max(sampling.top_k, 1)
        self._target.check_all = lambda holds: True  # without synchronisation

    def sampling_span(self, groups: int) -> SamplingSpan:
        """Returns the parameters of this processor for native rounds of `groups` consecutive groups."""
        p, bias = self._sampling, (self._penalties or self._draft).bias
        return SamplingSpan(
            groups,
            p.temperature,
            bias,
            (p.top_k, p.top_p, p.min_p) if p.filtered else None,
            (p.repetition_penalty, p.presence_penalty, p.frequency_penalty) if p.penalised else None,
            p.min_tokens,
        )

    @property
    def penalised(self) -> bool:
        """Whether a penalty or `min_tokens` is set, so that logits depend on the preceding tokens."""
        return self._penalties is not None

    def penalise(self, logits: Tensor, prompts: Tensor, counts: Tensor, ends: Tensor) -> Tensor:
        """Applies `min_tokens`, bias and penalties to raw logits [groups, ..., N, at least V] and returns [groups, ...,
        N, V]. Unless `penalised` it applies none of them and only cuts the logits to the vocabulary.

        `prompts`: [groups, V] bool, whether a token occurs in the group's prompt.
        `counts`: [groups, ..., N, V], occurrences of each token in the output before the row's next token.
        `ends`: [groups, V] bool, the tokens that `min_tokens` excludes.
        """
        logits = logits[..., : self._vocab]
        if self._penalties is None:
            return logits
        per_group = len(prompts), *[1] * (logits.dim() - 2), self._vocab
        if self._min_tokens > 0:
            early = counts.sum(-1, keepdim=True) < self._min_tokens
            logits = logits.masked_fill(ends.view(per_group) & early, filters.NEG_INF)
        if self._penalties.bias is not None:
            logits = logits + self._penalties.bias.to(logits.dtype)
        return self._penalties.apply_penalties(logits, prompts.view(per_group), counts)

    def target(self, logits: Tensor) -> Tensor:
        """Returns the target's processed logits [rows, V]: raw logits [rows, at least V] with bias, temperature and
        filters."""
        return self._target.process_logits(logits, None)

    def tempered(self, logits: Tensor) -> Tensor:
        """Returns the draft's processed logits [rows, V]: raw logits [rows, at least V] with bias and temperature.
        Without filters, these are the target's too."""
        return self._draft.process_logits(logits, None)

    def draw(self, logits: Tensor, keys: Tensor, power: float = 1.0) -> tuple[Tensor, Tensor]:
        """Samples a token from each row, with bias and temperature, without filters.

        `logits`: raw logits [rows, at least V].
        `keys`: [rows], keys of the sampling noise.
        `power`: exponent of the distribution, which is then normalised.

        Returns the tokens [rows], -1 where logits are not finite, and their log-probabilities [rows], NaN there.
        """
        return self._ops.draw_keyed(logits, self._vocab, keys, self._scores(power))

    def draw_autoregressive(self, logits: Tensor, keys: Tensor | None) -> Tensor:
        """Samples a token from each row as autoregressive decoding does, with bias, temperature and filters.

        `logits`: raw logits [rows, at least V].
        `keys`: [rows], keys of the sampling noise; None at temperature 0, which is greedy.

        Returns the tokens [rows], -1 where logits are not finite.
        """
        logits, scores = self._autoregressive_scores(logits)
        if self.greedy or keys is None:
            return self._ops.draw(logits, self._vocab, scores)
        return self._ops.draw_keyed(logits, self._vocab, keys, scores)[0]

    def match_chains(self, logits: Tensor, tokens: Tensor, keys: Tensor | None) -> ChainVerdict:
        """Accepts the draft tokens before the first one that differs from the token of autoregressive decoding.

        `logits`: the target's raw logits, [requests, K + 1, at least V].
        `tokens`: [requests, K].
        `keys`: [requests, K + 1], keys of the sampling noise; None at temperature 0.

        The bonus token is -1 where logits are not finite.
        """
        shape, rows, keys = logits.shape[:2], logits.flatten(0, 1), None if self.greedy else keys
        fused = self._ops.match_chains
        if fused is None:
            best = self.draw_autoregressive(rows, None if keys is None else keys.flatten())
            return chains.accept_matching_prefix(best.view(shape), tokens)
        rows, scores = self._autoregressive_scores(rows)
        return fused(rows.view(*shape, -1), self._vocab, tokens, keys, scores)

    def reject_chains(
        self, logits: Tensor, draft: Tensor, tokens: Tensor, uniforms: Tensor, keys: Tensor
    ) -> ChainVerdict:
        """Accepts draft tokens by rejection sampling.

        `logits`: the target's raw logits, [requests, K + 1, at least V].
        `draft`: the draft's processed logits, [requests, K, V].
        `tokens`: [requests, K], sampled from the draft's distribution.
        `uniforms`: [requests, K], uniform in (0, 1).
        `keys`: [requests], keys of the noise of the token after the accepted ones.

        The bonus token is -1 where logits are not finite.
        """
        target = self.target(logits.flatten(0, 1)).view(*logits.shape[:2], -1)
        fused = self._ops.reject_chains
        if fused is not None:
            return fused(target, draft, tokens, uniforms, keys)
        noise = gumbel(row_bits(keys, counters(range(self._vocab), keys.device)), target.dtype)
        found = chains.verify_by_rejection(target, draft, tokens, uniforms, noise)
        last = target.gather(1, found.count[:, None, None].expand(-1, 1, target.shape[-1]))
        return replace(found, bonus=torch.where(last.isnan().flatten(1).any(-1), -1, found.bonus))

    def _autoregressive_scores(self, logits: Tensor) -> tuple[Tensor, Scores]:
        """Returns logits [rows, at least V], and the bias and temperature still to be applied to them, from which
        autoregressive decoding draws tokens. `logits`: raw."""
        if self.filtered:
            return self.target(logits), Scores()
        return logits, Scores(1.0 if self.greedy else self._draft.params.temperature, self._draft.bias)

    def log_probs(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Returns the log-probabilities [rows] of `tokens` [rows] under raw logits [rows, at least V] with bias and
        temperature, without filters."""
        return self._ops.log_probs(logits, self._vocab, tokens, self._scores())

    def _scores(self, power: float = 1.0) -> Scores:
        return Scores(self._draft.params.temperature / power, self._draft.bias)


def logits_key(sampling: SamplingParams) -> str:
    """Returns a key that is equal for requests whose logits are processed alike, so that one processor can serve all of
    them."""
    ends = {"prompt_logprobs": None, "max_tokens": None, "stop": (), "stop_token_ids": (), "ignore_eos": False}
    rounds = {"verify_batch": None, "draft_steps": None}
    return repr(replace(sampling, seed=0, negative_prompt_ids=(), **ends, **rounds))


@dataclass(frozen=True, slots=True)
class GroupSpan:
    """Consecutive groups with equal logits parameters, which share a processor."""

    processor: LogitsProcessor
    groups: slice  # positions in the particle tensors

    def rows(self, particles: int) -> slice:
        """Returns the rows of these groups in a batch that has `particles` rows per group."""
        return slice(self.groups.start * particles, self.groups.stop * particles)


def group_spans(processors: Sequence[LogitsProcessor | None]) -> list[GroupSpan]:
    """Returns the spans of groups, given the processor of each group. A group that never had a request (None) joins the
    span before it."""
    spans: list[GroupSpan] = []
    for processor, run in groupby(range(len(processors)), lambda group: processors[group]):
        places = [*run]
        if processor is None:
            before = spans.pop()
            processor, places = before.processor, [before.groups.start, *places]
        spans.append(GroupSpan(processor, slice(places[0], places[-1] + 1)))
    return spans


def penalise_spans(spans: Sequence[GroupSpan], logits: Tensor, prompts: Tensor, counts: Tensor, ends: Tensor) -> Tensor:
    """Applies `LogitsProcessor.penalise` to raw logits [groups, ..., N, at least V], each group with its own
    processor."""
    per_group = logits, prompts, counts, ends
    return concatenate([span.processor.penalise(*(each[span.groups] for each in per_group)) for span in spans])


def concatenate(parts: Sequence[Tensor]) -> Tensor:
    """Concatenates along the first dimension; returns a single tensor unchanged, without a copy."""
    return parts[0] if len(parts) == 1 else torch.cat([*parts])
