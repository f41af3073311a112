"""The requests of all groups as tensors on the device: what a round reads, and only the host changes between rounds."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import groupby

import torch
from torch import Tensor

from swiftspec.params import SamplingParams
from swiftspec.runtime.runner import Runner
from swiftspec.sampling.logits_processor import logits_bias
from swiftspec.smc.group_spans import GroupSpan, SamplingSpan
from swiftspec.smc.row_sampler import (
    ROW_PARAMS,
    RowSampler,
    SamplingClass,
    SamplingTensors,
    row_params,
    row_sampler_key,
)

NO_RULES = SamplingParams(temperature=1.0)  # the parameters of a group that has had no request


class GroupRequests:
    """The request of each group: its cache sequence, prefix length, sampling parameters and token sets.

    The groups that take part in a round are the first ones in every tensor. A position of the tensors is an index of
    their first dimension.
    """

    def __init__(self, target: Runner, groups: int) -> None:
        device, self._runner = target.model.device, target
        self.prefix = torch.zeros(groups, dtype=torch.int64, device=device)  # prefix lengths, equal in both caches
        self.sequences = torch.arange(groups, device=device)
        self.stops = torch.zeros(groups, target.vocab, dtype=torch.bool, device=device)
        self.sampling = SamplingTensors(
            params=torch.zeros(groups, len(ROW_PARAMS), dtype=torch.float64, device=device),
            scalars=torch.zeros(groups, 3, dtype=torch.float64, device=device),
            bias=torch.zeros(groups, target.vocab, device=device),
            prompts=torch.zeros_like(self.stops),
            suppressed=torch.zeros_like(self.stops),
        )
        self.order = [*range(groups)]  # cache sequence of the group at each position of the tensors
        self.num_running = groups  # groups at the front whose requests run; the others only fill a captured round
        self._params = [NO_RULES] * groups
        self._classes = [SamplingClass.of(NO_RULES, target.vocab)] * groups
        self._sampling_spans: dict[int, list[SamplingSpan]] = {}  # cache of `sampling_spans`, by number of groups
        for group in range(groups):
            self._load_sampling(group, NO_RULES)

    @property
    def native_tensors(self) -> list[Tensor]:
        """The tensors that native rounds take, in this order."""
        return [self.prefix, self.sequences, self.stops, self.sampling.prompts, self.sampling.suppressed]

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors."""
        return [self.prefix, self.sequences, self.stops, *self.sampling]

    def open(self, group: int, prompt: Sequence[int], sampling: SamplingParams, stops: Collection[int]) -> None:
        """Sets the request at position `group`, whose prompt except its last token is prefilled. `stops`: stop
        tokens."""
        runner = self._runner
        self._load_sampling(group, sampling)
        for table, tokens in (
            (self.stops, stops),
            (self.sampling.suppressed, {*runner.eos_token_ids, *sampling.stop_token_ids}),
            (self.sampling.prompts, prompt),
        ):
            table[group] = False
            known = torch.tensor([token for token in tokens if token < runner.vocab], dtype=torch.int64)
            table[group, known.to(table.device)] = True
        self.prefix[group].fill_(len(prompt) - 1)

    def _load_sampling(self, group: int, params: SamplingParams) -> None:
        """Sets the sampling parameters of the group at position `group`. Writes in place, because CUDA graphs read the
        tensors."""
        self._params[group], self._classes[group] = params, SamplingClass.of(params, self._runner.vocab)
        self._sampling_spans.clear()
        bias = logits_bias(params, self._runner.vocab)
        self.sampling.params[group].copy_(row_params(params))
        self.sampling.scalars[group].copy_(torch.tensor([params.temperature, 1.0, 1.0], dtype=torch.float64))
        self.sampling.bias[group].copy_(torch.zeros(()) if bias is None else bias)

    def assume_class(self, kind: SamplingClass) -> None:
        """Sets the class of all groups, none of which has a request, for captures ahead of requests of this class."""
        self._classes = [kind] * len(self._classes)

    def rearrange(self, order: Sequence[int]) -> None:
        """Notes that the group at position `order[i]` of the tensors has moved to position i, for every i."""
        self._params = [self._params[place] for place in order]
        self._classes = [self._classes[place] for place in order]
        self.order = [self.order[place] for place in order]
        self._sampling_spans.clear()

    def sampling_class(self, sequence: int) -> SamplingClass:
        """Returns the class of the request in a cache sequence."""
        return self._classes[self.order.index(sequence)]

    def classes(self, groups: int) -> tuple[tuple[SamplingClass, int], ...]:
        """Returns the class of each run of groups of the same class among the first `groups` groups, with their number;
        idle groups belong to the last run. Rounds with equal runs execute the same operators, so this is part of the
        key of captured graphs."""
        running = self._classes[: min(groups, self.num_running)]
        idle = running[-1:] * (groups - len(running))
        return tuple((kind, len([*run])) for kind, run in groupby([*running, *idle]))

    def spans(self, groups: int) -> list[GroupSpan]:
        """Returns the runs of `classes`, each with its sampler."""
        spans, begin = list[GroupSpan](), 0
        for kind, count in self.classes(groups):
            some = slice(begin, begin + count)
            sampler = RowSampler(kind, self.sampling.part(some), self._runner.vocab, self._runner.ops)
            spans.append(GroupSpan(sampler, some))
            begin += count
        return spans

    def sampling_spans(self, groups: int) -> list[SamplingSpan]:
        """Returns the runs of groups with equal parameters among the first `groups` groups, as native rounds take
        them."""
        if groups not in self._sampling_spans:
            spans, begin = list[SamplingSpan](), 0
            for _, run in groupby(self._params[:groups], row_sampler_key):
                same = [*run]
                bias = self.sampling.bias[begin] if self._classes[begin].biased else None
                spans.append(SamplingSpan.of(len(same), same[0], bias))
                begin += len(same)
            self._sampling_spans[groups] = spans
        return self._sampling_spans[groups]
