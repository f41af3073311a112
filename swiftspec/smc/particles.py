"""Particles over the tree region of the cache: the mask is the genealogy.

A particle is a path of tree slots, and its mask row marks them. A slot belongs to a token as soon as the token is
sampled; copies of a row that are made before the token's KV exists share the slot and write the same values to it. So
fan-out and resampling move mask rows and no KV, and the reference count of a slot is the sum of its column. What a
`DraftTree` keeps on the host is kept here in tensors on the device: a round never waits for them.

A group is the particles of one request, with its own cache sequence, weights and clock. All groups are in the same
tensors and never read each other's data.

Symbols: G groups of N particles, K draft tokens per round, R slots of a tree region, W slots in the window of a round,
L tokens.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from swiftspec.backends.reference import resampling

DEAD, LIVE, SHARED = 0, 1, 2  # slot states: held by no live row, by some, by all (and its KV is written)
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
    """The state of G groups. Rows are stable; resampling overwrites their contents.

    A finished row keeps its tokens and weight and can still be a source or destination of resampling. Its slots are
    freed, since its KV is never read again.
    """

    def __init__(
        self, groups: int, particles: int, draft_tokens: int, slots: int, max_tokens: int,
        device: torch.device | str = "cpu", resample: resampling.Resample = resampling.resample,
    ) -> None:  # fmt: skip
        g, n, step = groups, particles, draft_tokens + 1

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.step, self._resample = step, resample
        self.limit = zeros(g)  # maximum length of the texts, at most `max_tokens`
        self.log_weights = zeros(g, n, dtype=torch.float64)
        # The state that a copy inherits is in three tensors, so that resampling copies three kinds of rows.
        self.mask = zeros(g, n, slots, dtype=torch.bool)
        self._ends = zeros(g, n, 2, dtype=torch.bool)
        self._path = zeros(g, n, resampling.PATH_HEADER_WORDS + max_tokens + step)
        self.base = zeros(g)  # tree slots handed out
        self.clock = zeros(g)  # draws so far, counted from the end of the prompt; keys the noise
        self.log_z = zeros(g, dtype=torch.float64)  # sum over all resamplings so far
        self.ess = zeros(g, dtype=torch.float64)  # summed over the rounds
        self.resampled = zeros(g)  # rounds with a resampling
        self.rounds = zeros(g)
        self._rows = torch.arange(n, device=device)
        self._steps = torch.arange(step, device=device)
        self._bind_views()
        self._ends.fill_(True)

    def _bind_views(self) -> None:
        self.finished, self.stopped = self._ends.unbind(-1)  # stopped: by a stop token rather than by length
        self.length = self._path[..., 0]
        # The two tokens without draft KV; the second one, the pending token, has no target KV either.
        self.tail_tokens, self.tail_slots, self.tail_positions = self._path[..., 1:7].split(2, -1)
        self.tokens = self._path[..., resampling.PATH_HEADER_WORDS :]
        self._weighed = resampling.ResamplingState(
            self.log_weights, self.mask, self._ends, self._path, self.log_z, self.ess, self.resampled, self.rounds
        )

    def first_groups(self, groups: int) -> Particles:
        """A view of the first groups, on the same tensors."""
        some = copy.copy(self)
        for name in STATE_FIELDS:
            setattr(some, name, getattr(self, name)[:groups])
        some._bind_views()
        return some

    @property
    def state(self) -> list[Tensor]:
        """All tensors that belong to groups: [G, ...] each."""
        return [getattr(self, name) for name in STATE_FIELDS]

    @property
    def groups(self) -> int:
        return self.tokens.shape[0]

    @property
    def count(self) -> int:
        """N, the number of particles per group."""
        return self.tokens.shape[1]

    def fan_out(self, group: int, token: int, position: int, limit: int) -> None:
        """Starts N particles from one prompt, whose last token is pending in tree slot 0 at position `position`. Texts
        end after `limit` tokens."""
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
        """Ends a request in any state. A round may run over a group without a request; all its rows count as
        finished."""
        self.mask[group] = False
        self._ends[group] = True
        self.reset_idle(slice(group, group + 1))

    def reset_idle(self, groups: slice) -> None:
        """Frees the slots that a round has handed out to groups without a request."""
        self.base[groups] = 1
        self.rounds[groups] = 0

    def new_slots(self) -> Tensor:
        """[G, N, K + 1], the tree slots of this round's tokens: topological, and contiguous per step."""
        return self.base[:, None, None] + self._steps * self.count + self._rows[:, None]

    def append_round(
        self, drafts: Tensor, accepted: Tensor, bonus: Tensor, terms: Tensor, stops: Tensor, width: int
    ) -> None:
        """Appends a round to every unfinished row, and finishes rows at a stop token or at their length limit.
        Allocates N (K + 1) slots per group.

        `drafts`: [G, N, K], of which the first `accepted` [G, N] are kept.
        `bonus`: [G, N], the token after those: bonus token or residual sample.
        `terms`: [G, N, K + 1], log-weights by position in the new text; the last one that counts belongs to the bonus
        token.
        `stops`: [G, V] bool.
        """
        slots, place = self.new_slots(), self._steps
        at = accepted[..., None]
        new = torch.cat((drafts, bonus[..., None]), -1).scatter(-1, at, bonus[..., None])
        stop = stops.gather(1, new.flatten(1)).view_as(new)
        end = stop | (self.length[..., None] + place >= self.limit[:, None, None] - 1)
        after = end.cumsum(-1) - end.to(torch.int64)  # number of ends before this position
        counts = (place <= at) & (after == 0) & ~self.finished[..., None]
        self.tokens.scatter_(-1, self.length[..., None] + place, new)
        self.log_weights += torch.where(counts, terms, 0).sum(-1)
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
        self.base += self.count * self.step
        self.clock += self.step

    def resample(self, threshold: float, uniform: Tensor, width: int) -> None:
        """Resamples each group whose effective sample size is below `threshold` N, by one number per group in `uniform`
        [G]."""
        self._resample(self._weighed, uniform, threshold, width)

    def slot_states(self, width: int) -> Tensor:
        """DEAD, LIVE or SHARED [G, W] for each tree slot. A token of a row's tail is never SHARED: its KV is not
        written yet. Later rounds keep DEAD slots dead, and SHARED slots shared by all live rows."""
        mask = self.mask[..., :width]
        counts = mask.sum(1)
        live = self.count - self.finished.sum(1, keepdim=True)
        # tails of finished rows may point anywhere, also beyond the window
        tails = torch.zeros_like(mask).scatter_(-1, self.tail_slots.clamp_max(width - 1), True)
        tails &= mask
        shared = (counts == live) & ~tails.any(1)
        return torch.where(counts == 0, DEAD, torch.where(shared, SHARED, LIVE))

    def compact(self, group: int, path: Sequence[int], keep: Sequence[int]) -> None:
        """Applies `KVCache.commit_sequence(path, keep)`: the path leaves the window, `keep` become the slots 0, 1,
        ..."""
        mask, device = self.mask[group], self.mask.device
        kept = torch.tensor(keep, dtype=torch.int64, device=device)
        place = torch.zeros(mask.shape[1], dtype=torch.int64, device=device)
        place[kept] = torch.arange(len(keep), device=device)
        rows = mask[:, kept]
        mask.zero_()
        mask[:, : len(keep)] = rows
        tails = self.tail_slots[group]
        tails.copy_(place[tails])
        self.base[group].fill_(len(keep))

    def ref_counts(self, group: int, width: int | None = None) -> Tensor:
        """The number of live rows of a group that hold each tree slot: [W] int64."""
        return self.mask[group, :, :width].sum(0)

    def counts(self, vocab: int) -> Tensor:
        """[G, N, V] float32, how often each token occurs in each row's text."""
        places = torch.arange(self.tokens.shape[-1], device=self.tokens.device)
        there = (places < self.length[..., None]).to(torch.float32)
        found = torch.zeros(self.groups, self.count, vocab, device=self.tokens.device)
        return found.scatter_add_(-1, self.tokens.clamp(0, vocab - 1), there)

    def common_lengths(self) -> Tensor:
        """[G], the number of leading tokens that all rows of a group share, finished rows included, since any of them
        may become the answer."""
        same = (self.tokens == self.tokens[:, :1]).all(1)
        return torch.minimum(same.cumprod(-1).sum(-1), self.length.amin(-1))

    def log_evidence(self) -> Tensor:
        """[G], the estimates of log Z."""
        return self.log_z + self._log_mean()

    def _log_mean(self) -> Tensor:
        """[G], the logarithm of the mean weight."""
        return self.log_weights.logsumexp(-1) - math.log(self.count)
