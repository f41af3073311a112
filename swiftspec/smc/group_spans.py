"""Spans: consecutive sequence groups whose logits are processed together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from swiftspec.params import FILTERS, PENALTIES, SamplingParams
from swiftspec.smc.row_sampler import RowSampler


class SamplingSpan(NamedTuple):
    """The sampling parameters of consecutive groups with equal parameters, as native rounds take them."""

    groups: int
    temperature: float
    bias: Tensor | None  # [vocab]
    filters: Mapping[str, float] | None  # by their names in SamplingParams; likewise penalties
    penalties: Mapping[str, float] | None
    min_tokens: int

    @staticmethod
    def of(groups: int, params: SamplingParams, bias: Tensor | None) -> SamplingSpan:
        """Returns the span of `groups` groups with these parameters."""
        return SamplingSpan(
            groups=groups,
            temperature=params.temperature,
            bias=bias,
            filters=params.values_of(FILTERS) if params.filtered else None,
            penalties=params.values_of(PENALTIES) if params.penalised else None,
            min_tokens=params.min_tokens,
        )


@dataclass(frozen=True, slots=True)
class GroupSpan:
    """Consecutive groups of one `SamplingClass`, which share a sampler."""

    sampler: RowSampler
    groups: slice  # positions in the particle tensors

    def rows(self, particles: int) -> slice:
        """Returns the rows of these groups in a batch that has `particles` rows per group."""
        return slice(self.groups.start * particles, self.groups.stop * particles)


def penalise_spans(spans: Sequence[GroupSpan], logits: Tensor, counts: Tensor) -> Tensor:
    """Applies `RowSampler.penalise` to raw logits [groups, ..., N, at least V], each span with its own sampler."""
    return concatenate([span.sampler.penalise(logits[span.groups], counts[span.groups]) for span in spans])


def concatenate(parts: Sequence[Tensor]) -> Tensor:
    """Concatenates along the first dimension; returns a single tensor unchanged, without a copy."""
    return parts[0] if len(parts) == 1 else torch.cat([*parts])
