"""Particles: the texts of mode smc in the tree region of the KV cache, with their weights.

A particle is a path of tree slots, and its mask row marks these slots. A slot belongs to a token as soon as the token
is sampled, before the token's KV exists. What a `DraftTree` keeps on the host is kept here in tensors on the device, so
that a round never waits for the host.

Copies of a particle that are made before a token's KV exists share the token's slot and write the same values to it. So
fan-out and resampling copy mask rows and move no KV, and the reference count of a slot is the sum of its mask column.

A group is the particles of one request, with its own cache sequence and clock. All groups are in the same tensors and
never read each other's data.

Shapes: N particles per group, K draft tokens per round, V tokens in the vocabulary; `slots` is the size of a tree
region and `width` that of its part in use, the window.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from swiftspec.backends.reference import resampling
from swiftspec.backends.reference.resampling import PATH_HEADER_WORDS
from swiftspec.config import PopulationConfig

DEAD, LIVE, SHARED = 0, 1, 2  # slot states: used by no live particle, by some, by all (and its KV is written)
WEIGHT_FIELDS = ("log_weights", "log_z", "ess", "resampled", "rounds")
STATE_FIELDS = ("mask", "_ends", "_path", "slots_used", "clock", "limit", *WEIGHT_FIELDS)


class Particles:
    """State of the particles of all groups. A particle is a row of its group's tensors; resampling overwrites the
    contents of a row with those of another.

    A finished particle keeps its tokens and its weight, and can still be a source or destination of resampling. Its
    slots are freed, since its KV is never read again.
    """

    def __init__(
        self,
        config: PopulationConfig,
        slots: int,
        max_tokens: int,
        device: torch.device | str = "cpu",
        resample: resampling.Resample = resampling.resample,
    ) -> None:
        """`slots`: tree slots of each group. `max_tokens`: maximum length of an answer. `resample`: the operator of the
        target's backend."""
        g, n, self.step = config.smc_groups, config.particles, config.smc_draft_tokens + 1
        self._resample = resample

        def zeros(*size: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.limit = zeros(g)  # maximum length of a group's texts, at most `max_tokens`
        # The state that a copy of a particle inherits is in three tensors, so that resampling copies three kinds of
        # rows.
        self.mask = zeros(g, n, slots, dtype=torch.bool)
        self._ends = zeros(g, n, 2, dtype=torch.bool)
        self._path = zeros(g, n, PATH_HEADER_WORDS + max_tokens + self.step)
        self.slots_used = zeros(g)  # number of tree slots allocated so far
        self.clock = zeros(g)  # length of the prompt plus draws so far; keys the noise
        self.log_weights = zeros(g, n, dtype=torch.float64)
        # log of the mean weight, summed over the resamplings; effective sample size, summed over the rounds
        self.log_z, self.ess = zeros(g, dtype=torch.float64), zeros(g, dtype=torch.float64)
        self.resampled, self.rounds = zeros(g), zeros(g)  # number of rounds with a resampling, and of all rounds
        self._rows = torch.arange(n, device=device)
        self.steps = torch.arange(self.step, device=device)  # 0..K
        self._bind_views()
        self._ends.fill_(True)

    def _bind_views(self) -> None:
        self.finished, self.stopped = self._ends.unbind(-1)  # stopped: by a stop token rather than by length
        self.length = self._path[..., 0]
        # The last two tokens of each row, without draft KV; the second, the pending token, has no target KV either.
        self.tail_tokens, self.tail_slots, self.tail_positions = self._path[..., 1:7].split(2, -1)
        self.tokens = self._path[..., PATH_HEADER_WORDS:]
        self._weighed = resampling.ResamplingState(
            log_weights=self.log_weights,
            mask=self.mask,
            ends=self._ends,
            path=self._path,
            log_z=self.log_z,
            ess=self.ess,
            resampled=self.resampled,
            rounds=self.rounds,
        )

    def first_groups(self, groups: int) -> Self:
        """Returns a view of the first `groups` groups, which shares their tensors."""
        some = copy.copy(self)
        for name in STATE_FIELDS:
            setattr(some, name, getattr(self, name)[:groups])
        some._bind_views()
        return some

    @property
    def state(self) -> list[Tensor]:
        """All tensors of the state; their first dimension is the group."""
        return [getattr(self, name) for name in STATE_FIELDS]

    @property
    def groups(self) -> int:
        return self.tokens.shape[0]

    @property
    def count(self) -> int:
        """N, the number of particles per group."""
        return self.tokens.shape[1]

    def open(self, group: int, token: int, position: int, limit: int) -> None:
        """Fans out the N particles of a group from a prompt. `token`, `position`: the prompt's last token and its
        absolute position; the token is pending in tree slot 0. `limit`: maximum number of output tokens."""
        self.mask[group] = False
        self.mask[group, :, 0] = True
        weights = [getattr(self, name) for name in WEIGHT_FIELDS]
        for tensor in (self.length, self.tail_slots, self._ends, *weights):
            tensor[group].zero_()
        self.tail_tokens[group].fill_(token)
        self.tail_positions[group].fill_(position)
        self.limit[group].fill_(limit)
        self.slots_used[group].fill_(1)
        self.clock[group].fill_(position + 1)

    def release(self, group: int) -> None:
        """Ends the request of a group, finished or not. All its particles then count as finished, because a round may
        still run over it."""
        self.mask[group] = False
        self._ends[group] = True
        self.reset_idle(slice(group, group + 1))

    def reset_idle(self, groups: slice) -> None:
        """Resets the counts of slots and rounds of groups without a running request, which a captured round increases
        as well."""
        self.slots_used[groups] = 1
        self.rounds[groups] = 0

    def new_slots(self) -> Tensor:
        """Returns the tree slots [groups, N, K + 1] of this round's tokens. The N slots of a step follow those of the
        step before it, so slots are in topological order."""
        return self.slots_used[:, None, None] + self.steps * self.count + self._rows[:, None]

    def append_round(
        self, drafts: Tensor, accepted: Tensor, bonus: Tensor, terms: Tensor, stops: Tensor, width: int
    ) -> None:
        """Appends a round to every unfinished particle, adds the log-weights of the new tokens, and finishes particles
        at a stop token or at their length limit. Allocates N (K + 1) slots per group.

        `drafts`: [groups, N, K] draft tokens, of which the first `accepted` [groups, N] are kept.
        `bonus`: [groups, N], the token after those: bonus token or residual sample.
        `terms`: [groups, N, K + 1], log-weight of each new token; entry `accepted` is that of `bonus`, later entries
        are ignored.
        `stops`: [groups, V] bool, the stop tokens.
        `width`: number of tree slots in use, including the new ones.
        """
        slots, place = self.new_slots(), self.steps
        at = accepted[..., None]
        new = torch.cat((drafts, bonus[..., None]), -1).scatter(-1, at, bonus[..., None])
        stop = stops.gather(1, new.flatten(1)).view_as(new)
        end = stop | (self.length[..., None] + place >= self.limit[:, None, None] - 1)
        after = end.cumsum(-1) - end.to(torch.int64)  # number of ends before this position
        counts = (place <= at) & (after == 0) & ~self.finished[..., None]
        self.tokens.scatter_(-1, self.length[..., None] + place, new)
        self.length += counts.sum(-1)
        self.stopped |= (stop & counts).any(-1)
        self.finished |= (end & counts).any(-1)

        window = self.mask[..., :width]
        seen = (place < at) | (place == self.step - 1)  # the bonus token always has the last slot of the row
        window.scatter_(-1, slots, seen)
        window &= ~self.finished[..., None]
        chain = torch.cat((self.tail_tokens[..., 1:], drafts), -1)
        chain_slots = torch.cat((self.tail_slots[..., 1:], slots[..., :-1]), -1)
        position = self.tail_positions[..., 1:] + at
        going = ~self.finished[..., None]  # positions of finished rows must not grow beyond the position tables
        self.tail_positions.copy_(torch.where(going, torch.cat((position, position + 1), -1), self.tail_positions))
        self.tail_tokens.copy_(torch.cat((chain.gather(-1, at), bonus[..., None]), -1))
        self.tail_slots.copy_(torch.cat((chain_slots.gather(-1, at), slots[..., -1:]), -1))
        self.slots_used += self.count * self.step
        self.clock += self.step
        self.log_weights += torch.where(counts, terms, 0).sum(-1)

    def resample(self, threshold: float, uniform: Tensor, width: int) -> None:
        """Resamples each group whose effective sample size is below `threshold` * N.

        `uniform`: [groups], the uniform number of each group's systematic resampling.
        `width`: number of tree slots in use.
        """
        self._resample(self._weighed, uniform, threshold, width)

    def log_evidence(self) -> Tensor:
        """Returns the estimates [groups] of log Z (smc/weights.py)."""
        return self.log_z + (self.log_weights.logsumexp(-1) - math.log(self.count))

    def slot_states(self, width: int) -> Tensor:
        """Returns the state of each tree slot in the window: DEAD, LIVE or SHARED [groups, width]. Slots of the last
        two tokens of a row are never SHARED, since their KV is not complete. In later rounds DEAD slots stay dead, and
        SHARED slots stay shared by all live rows."""
        mask = self.mask[..., :width]
        counts = mask.sum(1)
        live = self.count - self.finished.sum(1, keepdim=True)
        # tails of finished rows may point anywhere, also beyond the window
        tails = torch.zeros_like(mask).scatter_(-1, self.tail_slots.clamp_max(width - 1), True)
        tails &= mask
        shared = (counts == live) & ~tails.any(1)
        return torch.where(counts == 0, DEAD, torch.where(shared, SHARED, LIVE))

    def compact(self, group: int, path: Sequence[int], keep: Sequence[int]) -> None:
        """Updates a group after `ModelCache.commit_sequence(path, keep)`: the slots in `path` leave the tree region,
        and those in `keep` become slots 0, 1, ..."""
        mask, device = self.mask[group], self.mask.device
        kept = torch.tensor(keep, dtype=torch.int64, device=device)
        place = torch.zeros(mask.shape[1], dtype=torch.int64, device=device)
        place[kept] = torch.arange(len(keep), device=device)
        rows = mask[:, kept]
        mask.zero_()
        mask[:, : len(keep)] = rows
        tails = self.tail_slots[group]
        tails.copy_(place[tails])
        self.slots_used[group].fill_(len(keep))

    def counts(self, vocab: int) -> Tensor:
        """Returns how often each token occurs in each row's text: [groups, N, `vocab`] float32."""
        places = torch.arange(self.tokens.shape[-1], device=self.tokens.device)
        there = (places < self.length[..., None]).to(torch.float32)
        found = torch.zeros(self.groups, self.count, vocab, device=self.tokens.device)
        return found.scatter_add_(-1, self.tokens.clamp(0, vocab - 1), there)

    def common_lengths(self) -> Tensor:
        """Returns the number of leading tokens that all rows of a group share, [groups]. Finished rows are included,
        since any of them may become the answer."""
        same = (self.tokens == self.tokens[:, :1]).all(1)
        return torch.minimum(same.cumprod(-1).sum(-1), self.length.amin(-1))
