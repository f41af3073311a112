"""The chains of an exact batch: each group has one row, whose draft tokens the target verifies.

`CoupledChains` accept the draft tokens that equal those of autoregressive decoding, under the same noise.
`RejectionSampledChains` accept by rejection sampling.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import repeat

import torch
from torch import Tensor

from swiftspec.backends.reference import chains
from swiftspec.backends.reference.chains import ChainVerdict
from swiftspec.backends.reference.noise import counters, gumbel, row_bits
from swiftspec.backends.reference.sampling import Scores
from swiftspec.batching.group_method import DraftedTokens, RoundVerdict
from swiftspec.batching.group_spans import GroupSpan
from swiftspec.batching.noise_streams import RowStreams
from swiftspec.batching.rows import GroupRows
from swiftspec.batching.sequence_group import GroupAnswer, SequenceGroup
from swiftspec.config import BatchConfig, NativeRoundParams
from swiftspec.params import SamplingParams
from swiftspec.sampling.row_sampler import RowSampler
from swiftspec.tree.mask import MASK_WIDTHS


class VerifiedChains:
    """What both kinds of chains share; the `GroupMethod` of an exact batch."""

    exact = True

    def __init__(self, config: BatchConfig, slots: int, max_tokens: int, device: torch.device | str) -> None:
        """`slots`: tree slots of each group. `max_tokens`: maximum length of an answer."""
        self.shape = config.shape
        self.rows = GroupRows(self.shape, slots, max_tokens, device)
        self.streams = RowStreams(self.shape.max_groups, self.shape.rows, device)
        self.native_params = NativeRoundParams(self.shape.draft_tokens, config.verify)

    def may_reject(self, sampling: SamplingParams) -> bool:
        """See `GroupMethod.may_reject`."""
        return True

    def append(self, rows: GroupRows, drafts: Tensor, verdict: RoundVerdict, stops: Tensor, width: int) -> None:
        """See `GroupMethod.append`."""
        rows.append_round(drafts, verdict.accepted, verdict.bonus.clamp_min(0), stops, width)

    def pick(self, group: SequenceGroup, place: int) -> GroupAnswer:
        """See `GroupMethod.pick`: there is one row."""
        rows = self.rows
        return GroupAnswer(
            tokens=rows.tokens[place, 0, : int(rows.length[place, 0])].tolist(),
            stopped=bool(rows.stopped[place, 0]),
            full=group.full,
            compactions=group.compactions,
            moved_slots=group.moved_slots,
        )


class CoupledChains(VerifiedChains):
    """Chains verified by matching: the output equals that of autoregressive decoding token by token."""

    def noise_keys(self, rows: GroupRows, spans: Sequence[GroupSpan]) -> Iterator[Tensor | None]:
        """See `GroupMethod.noise_keys`. The keys are those of autoregressive decoding, so that the draft samples with
        the target's noise."""
        if all(span.sampler.greedy for span in spans):
            return repeat(None)
        return self.streams.target_keys(rows.tail_positions[..., 1:] + 1 + rows.steps)

    def draw(self, sampler: RowSampler, logits: Tensor, keys: Tensor | None) -> tuple[Tensor, Tensor]:
        """See `GroupMethod.draw`. The log-probabilities are 0, since nothing uses them."""
        tokens = _draw_autoregressive(sampler, logits, keys).clamp_min_(
            0
        )  # -1 marks logits that are not finite; any token is a valid proposal
        return tokens, torch.zeros_like(tokens, dtype=torch.float64)

    def keeps_logits(self, sampler: RowSampler, step: int) -> bool:
        """See `GroupMethod.keeps_logits`."""
        return False

    def verify(self, sampler: RowSampler, logits: Tensor, drafted: DraftedTokens) -> RoundVerdict:
        """Accepts the draft tokens before the first one that differs from the token of autoregressive decoding."""
        keys = [each for each in drafted.keys if each is not None]
        stacked = torch.stack(keys, 1) if keys else None
        found = match_drafts(sampler, logits.squeeze(2), drafted.tokens.squeeze(1), stacked)
        return RoundVerdict(found.count[:, None], found.bonus[:, None])


class RejectionSampledChains(VerifiedChains):
    """Chains verified by rejection sampling: the output follows the target's distribution."""

    def noise_keys(self, rows: GroupRows, spans: Sequence[GroupSpan]) -> Iterator[Tensor | None]:
        """See `GroupMethod.noise_keys`."""
        return self.streams.round_keys(rows.clock[:, None] + rows.steps)

    def draw(self, sampler: RowSampler, logits: Tensor, keys: Tensor | None) -> tuple[Tensor, Tensor]:
        """See `GroupMethod.draw`."""
        assert keys is not None
        tokens, log_probs = sampler.draw(logits, keys)
        return tokens.clamp_min_(0), log_probs  # -1 marks logits that are not finite: the token is rejected

    def keeps_logits(self, sampler: RowSampler, step: int) -> bool:
        """See `GroupMethod.keeps_logits`."""
        return True

    def verify(self, sampler: RowSampler, logits: Tensor, drafted: DraftedTokens) -> RoundVerdict:
        """Accepts draft tokens by rejection sampling."""
        keys, tokens = drafted.keys[-1], drafted.tokens.squeeze(1)
        assert keys is not None
        uniforms = drafted.uniforms(tokens.shape[1]).squeeze(1)
        found = reject_drafts(sampler, logits.squeeze(2), torch.stack(drafted.logits, 1), tokens, uniforms, keys)
        return RoundVerdict(found.count[:, None], found.bonus[:, None])


def _autoregressive_scores(sampler: RowSampler, logits: Tensor) -> tuple[Tensor, Scores]:
    """Returns logits [rows, at least V], and the bias and temperature still to be applied to them, from which
    autoregressive decoding draws tokens. `logits`: raw."""
    if sampler.filtered:
        return sampler.target(logits), Scores()
    return logits, sampler.raw_scores()


def _draw_autoregressive(sampler: RowSampler, logits: Tensor, keys: Tensor | None) -> Tensor:
    """Samples a token [rows] from each row of raw logits as autoregressive decoding does; -1 where logits are not
    finite. `keys`: [rows], keys of the sampling noise; None at temperature 0, which is greedy."""
    logits, scores = _autoregressive_scores(sampler, logits)
    if sampler.greedy or keys is None:
        return sampler.ops.draw(logits, sampler.vocab, scores)
    return sampler.ops.draw_keyed(logits, sampler.vocab, keys, scores)[0]


def match_drafts(sampler: RowSampler, logits: Tensor, tokens: Tensor, keys: Tensor | None) -> ChainVerdict:
    """Accepts the draft tokens before the first one that differs from the token of autoregressive decoding.

    `logits`: the target's raw logits, [requests, K + 1, at least V].
    `tokens`: [requests, K].
    `keys`: [requests, K + 1], keys of the sampling noise; None at temperature 0.

    The bonus token is -1 where logits are not finite.
    """
    shape, rows, keys = logits.shape[:2], logits.flatten(0, 1), None if sampler.greedy else keys
    fused = sampler.ops.match_chains
    if fused is None:
        best = _draw_autoregressive(sampler, rows, None if keys is None else keys.flatten())
        return chains.accept_matching_prefix(best.view(shape), tokens)
    rows, scores = _autoregressive_scores(sampler, rows)
    return fused(rows.view(*shape, -1), sampler.vocab, tokens, keys, scores)


def reject_drafts(
    sampler: RowSampler, logits: Tensor, draft: Tensor, tokens: Tensor, uniforms: Tensor, keys: Tensor
) -> ChainVerdict:
    """Accepts draft tokens by rejection sampling.

    `logits`: the target's raw logits, [requests, K + 1, at least V].
    `draft`: the draft's processed logits, [requests, K, V].
    `tokens`: [requests, K], sampled from the draft's distribution.
    `uniforms`: [requests, K], uniform in (0, 1).
    `keys`: [requests], keys of the noise of the token after the accepted ones.

    The bonus token is -1 where logits are not finite.
    """
    target = sampler.target(logits.flatten(0, 1)).view(*logits.shape[:2], -1)
    fused = sampler.ops.reject_chains
    if fused is not None:
        return fused(target, draft, tokens, uniforms, keys)
    noise = gumbel(row_bits(keys, counters(range(sampler.vocab), keys.device)), target.dtype)
    found = chains.verify_by_rejection(target, draft, tokens, uniforms, noise)
    last = target.gather(1, found.count[:, None, None].expand(-1, 1, target.shape[-1]))
    return replace(found, bonus=torch.where(last.isnan().flatten(1).any(-1), -1, found.bonus))


def make_chains(
    config: BatchConfig, slots: int, max_tokens: int, device: torch.device | str
) -> CoupledChains | RejectionSampledChains:
    """Returns the chains of an exact batch, for its way of verification; parameters as in `VerifiedChains`."""
    kind = CoupledChains if config.verify == "match" else RejectionSampledChains
    return kind(config, slots, max_tokens, device)


def chain_region_slots(config: BatchConfig) -> int:
    """Returns the number of tree slots per group, a multiple of the widest mask window. A chain is committed to the
    prefix within two rounds."""
    widest = MASK_WIDTHS[-1]
    return -(-4 * config.shape.slots_per_round // widest) * widest
