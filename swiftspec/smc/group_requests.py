"""The requests of all groups as tensors on the device: what a round reads, and only the host changes between rounds."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence

import torch
from torch import Tensor

from swiftspec.params import SamplingParams
from swiftspec.runtime.runner import Runner
from swiftspec.smc.group_spans import GroupSpan, SamplingSpan, group_spans
from swiftspec.smc.row_sampler import RowSampler, row_sampler_key


class GroupRequests:
    """The request of each group: its cache sequence, prefix length, sampler and token sets.

    The groups that take part in a round are the first ones in every tensor. A position of the tensors is an index of
    their first dimension.
    """

    def __init__(self, target: Runner, groups: int) -> None:
        device, self._runner = target.model.device, target
        self.prefix = torch.zeros(groups, dtype=torch.int64, device=device)  # prefix lengths, equal in both caches
        self.sequences = torch.arange(groups, device=device)
        self.stops = torch.zeros(groups, target.vocab, dtype=torch.bool, device=device)
        self.prompts = torch.zeros_like(self.stops)  # the tokens of each prompt, for penalties
        self.suppressed = torch.zeros_like(self.stops)  # the tokens that `min_tokens` excludes
        self.order = [*range(groups)]  # cache sequence of the group at each position of the tensors
        self._samplers: list[RowSampler | None] = [None] * groups
        self._sampling_spans: dict[int, list[SamplingSpan]] = {}  # cache of `sampling_spans`, by number of groups

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors, in the order in which native rounds take them."""
        return [self.prefix, self.sequences, self.stops, self.prompts, self.suppressed]

    def open(self, group: int, prompt: Sequence[int], sampling: SamplingParams, stops: Collection[int]) -> None:
        """Sets the request at position `group`, whose prompt except its last token is prefilled. `stops`: stop
        tokens."""
        runner, key = self._runner, row_sampler_key(sampling)
        alike = (sampler for sampler in self._samplers if sampler is not None and sampler.key == key)
        # reuse an equal sampler, since graphs have captured its tensors
        self._samplers[group] = next(alike, None) or RowSampler(sampling, runner.vocab, self.stops.device, runner.ops)
        self._sampling_spans.clear()
        for table, tokens in (
            (self.stops, stops),
            (self.suppressed, {*runner.eos_token_ids, *sampling.stop_token_ids}),
        ):
            table[group] = False
            known = torch.tensor([token for token in tokens if token < runner.vocab], dtype=torch.int64)
            table[group, known.to(table.device)] = True
        self.prompts[group] = False
        self.prompts[group, torch.tensor(prompt, device=self.prompts.device)] = True
        self.prefix[group].fill_(len(prompt) - 1)

    def rearrange(self, order: Sequence[int]) -> None:
        """Notes that the group at position `order[i]` of the tensors has moved to position i, for every i."""
        self._samplers = [self._samplers[place] for place in order]
        self.order = [self.order[place] for place in order]
        self._sampling_spans.clear()

    def spans(self, groups: int) -> list[GroupSpan]:
        """Returns the runs of consecutive groups with equal logits parameters among the first `groups` groups."""
        return group_spans(self._samplers[:groups])

    def sampling_spans(self, groups: int) -> list[SamplingSpan]:
        """Returns `spans` as native rounds take them."""
        if groups not in self._sampling_spans:
            self._sampling_spans[groups] = [span.native() for span in self.spans(groups)]
        return self._sampling_spans[groups]

    @property
    def key(self) -> Hashable:
        """Key of captured graphs: rounds with equal keys run the same operators on the same tensors."""
        return tuple((span.sampler, span.groups.stop) for span in group_spans(self._samplers))
