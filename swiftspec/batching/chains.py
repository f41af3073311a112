"""The chains of an exact batch: each group has one row, whose draft tokens the target verifies.

`CoupledChains` accept the draft tokens that equal those of autoregressive decoding, under the same noise.
`RejectionSampledChains` accept by rejection sampling.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat

import torch
from torch import Tensor

from swiftspec.batching.group_method import DraftedTokens, RoundVerdict
from swiftspec.batching.logits_processor import GroupSpan, LogitsProcessor
from swiftspec.batching.noise_streams import RowStreams
from swiftspec.batching.rows import GroupRows
from swiftspec.batching.sequence_group import GroupAnswer, SequenceGroup
from swiftspec.config import BatchConfig, NativeRoundParams
from swiftspec.params import SamplingParams
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
        if all(span.processor.greedy for span in spans):
            return repeat(None)
        return self.streams.target_keys(rows.tail_positions[..., 1:] + 1 + rows.steps)

    def draw(self, processor: LogitsProcessor, logits: Tensor, keys: Tensor | None) -> tuple[Tensor, Tensor]:
        """See `GroupMethod.draw`. The log-probabilities are 0, since nothing uses them."""
        tokens = processor.draw_autoregressive(logits, keys)
        tokens = tokens.clamp_min_(0)  # -1 marks logits that are not finite; any token is a valid proposal
        return tokens, torch.zeros_like(tokens, dtype=torch.float64)

    def keeps_logits(self, processor: LogitsProcessor, step: int) -> bool:
        """See `GroupMethod.keeps_logits`."""
        return False

    def verify(self, processor: LogitsProcessor, logits: Tensor, drafted: DraftedTokens) -> RoundVerdict:
        """Accepts the draft tokens before the first one that differs from the token of autoregressive decoding."""
        keys = [each for each in drafted.keys if each is not None]
        found = processor.match_chains(
            logits.squeeze(2), drafted.tokens.squeeze(1), torch.stack(keys, 1) if keys else None
        )
        return RoundVerdict(found.count[:, None], found.bonus[:, None])


class RejectionSampledChains(VerifiedChains):
    """Chains verified by rejection sampling: the output follows the target's distribution."""

    def noise_keys(self, rows: GroupRows, spans: Sequence[GroupSpan]) -> Iterator[Tensor | None]:
        """See `GroupMethod.noise_keys`."""
        return self.streams.round_keys(rows.clock[:, None] + rows.steps)

    def draw(self, processor: LogitsProcessor, logits: Tensor, keys: Tensor | None) -> tuple[Tensor, Tensor]:
        """See `GroupMethod.draw`."""
        assert keys is not None
        tokens, log_probs = processor.draw(logits, keys)
        return tokens.clamp_min_(0), log_probs  # -1 marks logits that are not finite: the token is rejected

    def keeps_logits(self, processor: LogitsProcessor, step: int) -> bool:
        """See `GroupMethod.keeps_logits`."""
        return True

    def verify(self, processor: LogitsProcessor, logits: Tensor, drafted: DraftedTokens) -> RoundVerdict:
        """Accepts draft tokens by rejection sampling."""
        keys, tokens = drafted.keys[-1], drafted.tokens.squeeze(1)
        assert keys is not None
        uniforms = drafted.uniforms(tokens.shape[1]).squeeze(1)
        found = processor.reject_chains(logits.squeeze(2), torch.stack(drafted.logits, 1), tokens, uniforms, keys)
        return RoundVerdict(found.count[:, None], found.bonus[:, None])


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
