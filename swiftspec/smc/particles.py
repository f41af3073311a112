"""Populations of particles over the tree regions of the cache: the mask is the genealogy.

A particle is a path of tree slots, and its mask row names them. A slot belongs to a token from the moment the token is
sampled; copies made before its KV exists share the slot, and write the same values there. So fan-out and resampling
move rows of a mask and no KV, and a slot's reference count is its column's sum. What a `DraftTree` keeps on the host is
kept here in tensors on the device: nothing in a round waits for them.

A group is the population of one request, with a sequence of the cache, weights and a clock of its own. All groups lie
in the same tensors, and nothing that one of them does reads another.

Letters: G groups of N particles, K draft tokens a round, R slots of a tree region, W those that this round looks at, L
tokens.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from swiftspec.backends.reference import resampling

DEAD, LIVE, SHARED = 0, 1, 2  # what a column is: nobody's, somebody's, every live row's with its KV written
STATE_FIELDS = (
    "mask",
    "_ends",
    "_path",
    "log_weights",
    "base",
    "clock",
    "limit",
    "log_z",
    "ess",
    "resampled",
    "rounds",
)


class Particles:
    """The state of G groups. Rows are stable; resampling overwrites what they hold.

    A finished row keeps its tokens and its weight and may be copied over or be copied, but gives up its slots: nothing
    reads its KV again.
    """

    def __init__(
        self, groups: int, particles: int, draft_tokens: int, slots: int, max_tokens: int,
        device: torch.device | str = "cpu", resample: resampling.Resample = resampling.resample,
    ) -> None:  # fmt: skip
        g, n, step = groups, particles, draft_tokens + 1

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.step, self._resample = step, resample
        self.limit = zeros(g)  # tokens that a text may have, at most `max_tokens`
        self.log_weights = zeros(g, n, dtype=torch.float64)
        # What a copy takes over lies in three tensors, so that resampling has three kinds of rows to copy.
        self.mask = zeros(g, n, slots, dtype=torch.bool)
        self._ends = zeros(g, n, 2, dtype=torch.bool)
        self._path = zeros(g, n, resampling.PATH_HEADER_WORDS + max_tokens + step)
        self.base = zeros(g)  # tree slots handed out
        self.clock = zeros(g)  # draws so far, counted from the prompt's end: what keys the noise
        self.log_z = zeros(g, dtype=torch.float64)  # of all resamplings so far
        self.ess = zeros(g, dtype=torch.float64)  # summed over the rounds
        self.resampled = zeros(g)  # rounds that were
        self.rounds = zeros(g)
        self._rows = torch.arange(n, device=device)
        self._steps = torch.arange(step, device=device)
        self._bind_views()
        self._ends.fill_(True)

    def _bind_views(self) -> None:
        self.finished, self.stopped = self._ends.unbind(-1)  # stopped: by a stop token, not by its length
        self.length = self._path[..., 0]
        # The two tokens whose KV the draft lacks; the target lacks that of the second, which is the pending one.
        self.tail_tokens, self.tail_slots, self.tail_positions = self._path[..., 1:7].split(2, -1)
        self.tokens = self._path[..., resampling.PATH_HEADER_WORDS :]
        self._weighed = resampling.ResamplingState(
            self.log_weights, self.mask, self._ends, self._path, self.log_z, self.ess, self.resampled, self.rounds
        )

    def first_groups(self, groups: int) -> Particles:
        """The first so many groups, in the same tensors."""
        some = copy.copy(self)
        for name in STATE_FIELDS:
            setattr(some, name, getattr(self, name)[:groups])
        some._bind_views()
        return some

    @property
    def state(self) -> list[Tensor]:
        """All that belongs to a group: [G, ...] each."""
        return [getattr(self, name) for name in STATE_FIELDS]

    @property
    def groups(self) -> int:
        return self.tokens.shape[0]

    @property
    def count(self) -> int:
        """N, the particles of a group."""
        return self.tokens.shape[1]

    def fan_out(self, group: int, token: int, position: int, limit: int) -> None:
        """N particles from one prompt, whose last token is pending in tree slot 0 and stands at `position`. Texts end
        after `limit` tokens."""
        self.mask[group] = False
        self.mask[group, :, 0] = True
        books = (self.log_z, self.ess, self.resampled, self.rounds)
        for tensor in (self.length, self.log_weights, self.tail_slots, self._ends, *books):
            tensor[group].zero_()
        self.tail_tokens[group].fill_(token)
        self.tail_positions[group].fill_(position)
        self.limit[group].fill_(limit)
        self.base[group].fill_(1)
        self.clock[group].fill_(position + 1)

    def release(self, group: int) -> None:
        """Ends a request wherever it stands. A round may run over a group without one, whose rows are all finished."""
        self.mask[group] = False
        self._ends[group] = True
        self.reset_idle(slice(group, group + 1))

    def reset_idle(self, groups: slice) -> None:
        """Groups without a request give back what a round has handed out to them."""
        self.base[groups] = 1
        self.rounds[groups] = 0

    def new_slots(self) -> Tensor:
        """[G, N, K + 1], the tree slots of this round's tokens, step by step: topological, and each step is one run."""
        return self.base[:, None, None] + self._steps * self.count + self._rows[:, None]

    def append_round(
        self, drafts: Tensor, accepted: Tensor, bonus: Tensor, terms: Tensor, stops: Tensor, width: int
    ) -> None:
        """Appends a round to every row that is not finished, and ends those that met a stop token or their length.

        `drafts` [G, N, K]; of them the first `accepted` [G, N] stay; `bonus` [G, N] comes after those: bonus or
        residual.
        `terms` [G, N, K + 1]: log-weights by place in the new text, the last one that counts being the extra token's.
        `stops` [G, V] bool. Hands out N (K + 1) slots of each group.
        """
        slots, place = self.new_slots(), self._steps
        at = accepted[..., None]
        new = torch.cat((drafts, bonus[..., None]), -1).scatter(-1, at, bonus[..., None])
        stop = stops.gather(1, new.flatten(1)).view_as(new)
        end = stop | (self.length[..., None] + place >= self.limit[:, None, None] - 1)
        after = end.cumsum(-1) - end.to(torch.int64)  # ends before this place
        counts = (place <= at) & (after == 0) & ~self.finished[..., None]
        self.tokens.scatter_(-1, self.length[..., None] + place, new)
        self.log_weights += torch.where(counts, terms, 0).sum(-1)
        self.length += counts.sum(-1)
        self.stopped |= (stop & counts).any(-1)
        self.finished |= (end & counts).any(-1)

        window = self.mask[..., :width]
        seen = (place < at) | (place == self.step - 1)  # the extra token has the last of the row's slots, always
        window.scatter_(-1, slots, seen)
        window &= ~self.finished[..., None]
        chain = torch.cat((self.tail_tokens[..., 1:], drafts), -1)
        chain_slots = torch.cat((self.tail_slots[..., 1:], slots[..., :-1]), -1)
        position = self.tail_positions[..., 1:] + at
        going = ~self.finished[..., None]  # a finished row's positions must not grow beyond the tables
        self.tail_positions.copy_(torch.where(going, torch.cat((position, position + 1), -1), self.tail_positions))
        self.tail_tokens.copy_(torch.cat((chain.gather(-1, at), bonus[..., None]), -1))
        self.tail_slots.copy_(torch.cat((chain_slots.gather(-1, at), slots[..., -1:]), -1))
        self.base += self.count * self.step
        self.clock += self.step

    def resample(self, threshold: float, uniform: Tensor, width: int) -> None:
        """Resamples each group whose effective sample size is below `threshold` N, by its number of `uniform` [G]."""
        self._resample(self._weighed, uniform, threshold, width)

    def slot_states(self, width: int) -> Tensor:
        """DEAD, LIVE or SHARED [G, W] for each tree slot. A token of somebody's tail is never SHARED: its KV is not
        written yet. Later rounds leave what is DEAD dead, and what is SHARED shared by those that go on."""
        mask = self.mask[..., :width]
        counts = mask.sum(1)
        live = self.count - self.finished.sum(1, keepdim=True)
        # those of finished rows point anywhere, beyond the window too
        tails = torch.zeros_like(mask).scatter_(-1, self.tail_slots.clamp_max(width - 1), True)
        tails &= mask
        shared = (counts == live) & ~tails.any(1)
        return torch.where(counts == 0, DEAD, torch.where(shared, SHARED, LIVE))

    def compact(self, group: int, path: Sequence[int], keep: Sequence[int]) -> None:
        """Follows `KVCache.commit_sequence(path, keep)`: the path's columns leave the window, `keep` become slots 0,
        1, ..."""
        mask, device = self.mask[group], self.mask.device
        accepted = torch.tensor(keep, dtype=torch.int64, device=device)
        place = torch.zeros(mask.shape[1], dtype=torch.int64, device=device)
        place[accepted] = torch.arange(len(keep), device=device)
        rows = mask[:, accepted]
        mask.zero_()
        mask[:, : len(keep)] = rows
        tails = self.tail_slots[group]
        tails.copy_(place[tails])
        self.base[group].fill_(len(keep))

    def ref_counts(self, group: int, width: int | None = None) -> Tensor:
        """How many live rows of a group hold each tree slot: [W] int64."""
        return self.mask[group, :, :width].sum(0)

    def counts(self, vocab: int) -> Tensor:
        """[G, N, V] float32 how often each row's text has each token."""
        places = torch.arange(self.tokens.shape[-1], device=self.tokens.device)
        there = (places < self.length[..., None]).to(torch.float32)
        found = torch.zeros(self.groups, self.count, vocab, device=self.tokens.device)
        return found.scatter_add_(-1, self.tokens.clamp(0, vocab - 1), there)

    def common_lengths(self) -> Tensor:
        """[G] how many leading tokens all rows of a group share, finished ones included: any of them may be the
        answer."""
        same = (self.tokens == self.tokens[:, :1]).all(1)
        return torch.minimum(same.cumprod(-1).sum(-1), self.length.amin(-1))

    def log_evidence(self) -> Tensor:
        """[G] the estimates of log Z."""
        return self.log_z + self._log_mean()

    def _log_mean(self) -> Tensor:
        """[G] the logarithm of the mean weight."""
        return self.log_weights.logsumexp(-1) - math.log(self.count)
