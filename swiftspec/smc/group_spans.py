"""Spans: consecutive sequence groups with equal logits parameters, which share a sampler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from swiftspec.params import FILTERS, PENALTIES
from swiftspec.smc.row_sampler import RowSampler


class SamplingSpan(NamedTuple):
    """The sampling parameters of consecutive groups, as native rounds take them."""

    groups: int
    temperature: float
    bias: Tensor | None  # [vocab]
    filters: Mapping[str, float] | None  # by their names in SamplingParams; likewise penalties
    penalties: Mapping[str, float] | None
    min_tokens: int


@dataclass(frozen=True, slots=True)
class GroupSpan:
    """Consecutive groups with equal logits parameters, which share a sampler."""

    sampler: RowSampler
    groups: slice  # positions in the particle tensors

    def rows(self, particles: int) -> slice:
        """Returns the rows of these groups in a batch that has `particles` rows per group."""
        return slice(self.groups.start * particles, self.groups.stop * particles)

    def native(self) -> SamplingSpan:
        """Returns the span as native rounds take it."""
        params = self.sampler.params
        return SamplingSpan(
            groups=self.groups.stop - self.groups.start,
            temperature=params.temperature,
            bias=self.sampler.bias,
            filters=params.values_of(FILTERS) if params.filtered else None,
            penalties=params.values_of(PENALTIES) if params.penalised else None,
            min_tokens=params.min_tokens,
        )


def group_spans(samplers: Sequence[RowSampler | None]) -> list[GroupSpan]:
    """Returns the spans of groups, given the sampler of each group. A group that never had a request (None) joins the
    span before it."""
    spans: list[GroupSpan] = []
    for sampler, run in groupby(range(len(samplers)), lambda group: samplers[group]):
        places = [*run]
        if sampler is None:
            before = spans.pop()
            sampler, places = before.sampler, [before.groups.start, *places]
        spans.append(GroupSpan(sampler, slice(places[0], places[-1] + 1)))
    return spans


def penalise_spans(spans: Sequence[GroupSpan], logits: Tensor, prompts: Tensor, counts: Tensor, ends: Tensor) -> Tensor:
    """Applies `RowSampler.penalise` to raw logits [groups, ..., N, at least V], each group with its own sampler."""
    per_group = logits, prompts, counts, ends
    return concatenate([span.sampler.penalise(*(each[span.groups] for each in per_group)) for span in spans])


def concatenate(parts: Sequence[Tensor]) -> Tensor:
    """Concatenates along the first dimension; returns a single tensor unchanged, without a copy."""
    return parts[0] if len(parts) == 1 else torch.cat([*parts])
