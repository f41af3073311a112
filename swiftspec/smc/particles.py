"""A population of particles over the tree region of the cache: the mask is the genealogy.

A particle is a path of tree slots, and its mask row names them. A slot belongs to a token from the moment the token is
sampled; copies made before its KV exists share the slot, and write the same values there. So fan-out and resampling
move rows of a mask and no KV, and a slot's reference count is its column's sum. What a `DraftTree` keeps on the host is
kept here in tensors on the device: nothing in a round waits for them.

Letters: N particles, K draft tokens a round, R slots of the tree region, W those that this round looks at, L tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from swiftspec.smc import weights

DEAD, LIVE, SHARED = 0, 1, 2  # what a column is: nobody's, somebody's, every live row's with its KV written


class Particles:
    """The state of one request's population. Rows are stable; resampling overwrites what they hold.

    A finished row keeps its tokens and its weight and may be copied over or be copied, but gives up its slots: nothing
    reads its KV again.
    """

    def __init__(
        self, particles: int, draft_tokens: int, slots: int, longest: int, device: torch.device | str = "cpu"
    ) -> None:
        n, step = particles, draft_tokens + 1

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.step = step
        self.limit = zeros()  # tokens that a text may have, at most `longest`
        self.log_weights = zeros(n, dtype=torch.float64)
        # What a copy takes over lies in three tensors, so that resampling is three gathers.
        self.mask = zeros(n, slots, dtype=torch.bool)
        self._ends = zeros(n, 2, dtype=torch.bool)
        self.finished, self.stopped = self._ends.unbind(1)  # stopped: by a stop token, not by its length
        self._path = zeros(n, 7 + longest + step)
        self.length = self._path[:, 0]
        # The two tokens whose KV the draft lacks; the target lacks that of the second, which is the pending one.
        self.tail_tokens, self.tail_slots, self.tail_positions = self._path[:, 1:7].split(2, 1)
        self.tokens = self._path[:, 7:]
        self.base = zeros()  # tree slots handed out
        self.clock = zeros()  # draws so far, counted from the prompt's end: what keys the noise
        self.log_z = zeros(dtype=torch.float64)  # of all resamplings so far
        self.ess = zeros(dtype=torch.float64)  # summed over the rounds
        self.resampled = zeros()  # rounds that were
        self.rounds = zeros()
        self._rows = torch.arange(n, device=device)
        self._steps = torch.arange(step, device=device)

    @property
    def state(self) -> list[Tensor]:
        """All that a round changes."""
        books = [self.base, self.clock, self.log_z, self.ess, self.resampled, self.rounds]
        return [self.mask, self._ends, self._path, self.log_weights, *books]

    @property
    def count(self) -> int:
        return self.tokens.shape[0]

    def fan_out(self, token: int, position: int, limit: int) -> None:
        """N particles from one prompt, whose last token is pending in tree slot 0 and stands at `position`. Texts end
        after `limit` tokens."""
        self.mask.zero_()
        self.mask[:, 0] = True
        books = (self.log_z, self.ess, self.resampled, self.rounds)
        for tensor in (self.length, self.log_weights, self.tail_slots, self._ends, *books):
            tensor.zero_()
        self.tail_tokens.fill_(token)
        self.tail_positions.fill_(position)
        self.limit.fill_(limit)
        self.base.fill_(1)
        self.clock.fill_(position + 1)

    def new_slots(self) -> Tensor:
        """[N, K + 1], the tree slots of this round's tokens, step by step: topological, and each step is one run."""
        return self.base + self._steps * self.count + self._rows[:, None]

    def take(self, drafts: Tensor, kept: Tensor, extra: Tensor, terms: Tensor, stops: Tensor, width: int) -> None:
        """Appends a round to every row that is not finished, and ends those that met a stop token or their length.

        `drafts` [N, K]; of them the first `kept` [N] stay; `extra` [N] comes after those: bonus or residual. `terms`
        [N, K + 1]: log-weights by place in the new text, the last one that counts being the extra token's. `stops` [V]
        bool. Hands out N (K + 1) slots.
        """
        slots, place = self.new_slots(), self._steps
        at = kept[:, None]
        new = torch.cat((drafts, extra[:, None]), 1).scatter(1, at, extra[:, None])
        stop = stops[new]
        end = stop | (self.length[:, None] + place >= self.limit - 1)
        after = end.cumsum(1) - end.to(torch.int64)  # ends before this place
        counts = (place <= at) & (after == 0) & ~self.finished[:, None]
        self.tokens.scatter_(1, self.length[:, None] + place, new)
        self.log_weights += torch.where(counts, terms, 0).sum(1)
        self.length += counts.sum(1)
        self.stopped |= (stop & counts).any(1)
        self.finished |= (end & counts).any(1)

        window = self.mask[:, :width]
        seen = (place < at) | (place == self.step - 1)  # the extra token has the last of the row's slots, always
        window.scatter_(1, slots, seen)
        window &= ~self.finished[:, None]
        chain = torch.cat((self.tail_tokens[:, 1:], drafts), 1)
        chain_slots = torch.cat((self.tail_slots[:, 1:], slots[:, :-1]), 1)
        position = self.tail_positions[:, 1:] + at
        going = ~self.finished[:, None]  # a finished row's positions must not grow beyond the tables
        self.tail_positions.copy_(torch.where(going, torch.cat((position, position + 1), 1), self.tail_positions))
        self.tail_tokens.copy_(torch.cat((chain.gather(1, at), extra[:, None]), 1))
        self.tail_slots.copy_(torch.cat((chain_slots.gather(1, at), slots[:, -1:]), 1))
        self.base += self.count * self.step
        self.clock += self.step

    def resample(self, threshold: float, uniform: Tensor, width: int) -> None:
        """Resamples where the effective sample size is below `threshold` N, and does the same work where it is not."""
        shares = self.log_weights.softmax(0)
        ess = weights.effective(shares)
        poor = ess < threshold * self.count
        source = torch.where(poor, weights.systematic(shares, uniform), self._rows)
        self.log_z += torch.where(poor, self._log_mean(), 0)
        self.ess += ess
        self.resampled += poor
        self.rounds += 1
        self.log_weights.copy_(torch.where(poor, 0, self.log_weights))
        for rows in (self._path, self._ends, self.mask[:, :width]):
            rows.copy_(rows.index_select(0, source))

    def columns(self, width: int) -> Tensor:
        """DEAD, LIVE or SHARED [W] uint8 for each tree slot. A token of somebody's tail is never SHARED: its KV is not
        written yet."""
        counts = self.ref_counts(width)
        live = self.count - self.finished.sum()
        tails = torch.zeros_like(self.mask[:, :width]).scatter_(1, self.tail_slots, True)
        tails &= self.mask[:, :width]  # those of finished rows point anywhere
        shared = (counts == live) & ~tails.any(0)
        return torch.where(counts == 0, DEAD, torch.where(shared, SHARED, LIVE)).to(torch.uint8)

    def compact(self, path: Sequence[int], keep: Sequence[int]) -> None:
        """Follows `KVCache.commit(path, keep)`: the path's columns leave the window, `keep` become slots 0, 1, ..."""
        device = self.mask.device
        kept = torch.tensor(keep, dtype=torch.int64, device=device)
        place = torch.zeros(self.mask.shape[1], dtype=torch.int64, device=device)
        place[kept] = torch.arange(len(keep), device=device)
        rows = self.mask[:, kept]
        self.mask.zero_()
        self.mask[:, : len(keep)] = rows
        self.tail_slots.copy_(place[self.tail_slots])
        self.base.fill_(len(keep))

    def ref_counts(self, width: int | None = None) -> Tensor:
        """How many live rows hold each tree slot: [W] int64."""
        return self.mask[:, :width].sum(0)

    def common(self) -> Tensor:
        """[] how many leading tokens all rows share, finished ones included: any of them may be the answer."""
        same = (self.tokens == self.tokens[:1]).all(0)
        return torch.minimum(same.cumprod(0).sum(), self.length.min())

    def evidence(self) -> Tensor:
        """[] the estimate of log Z."""
        return self.log_z + self._log_mean()

    def _log_mean(self) -> Tensor:
        """[] the logarithm of the mean weight."""
        return self.log_weights.logsumexp(0) - math.log(self.count)

    def pick(self, uniform: Tensor) -> Tensor:
        """[] a row, with the probability of its share of the weight."""
        edges = self.log_weights.softmax(0).cumsum(0)
        return torch.searchsorted(edges, uniform, right=True).clamp_max(self.count - 1)
