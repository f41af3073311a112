"""The drafter that proposes from a copy of a draft's tree elsewhere (see tree/replica.py)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import groupby
from typing import Protocol

from swiftspec.config import EngineConfig
from swiftspec.errors import DrafterLost
from swiftspec.messages import Opening, Proposal, VerifyResult
from swiftspec.runtime.ahead_drafter import expansion_pays
from swiftspec.tree.replica import Replica, TreeDelta, joined


class FeedLink(Protocol):
    """The way to a `TreeFeed` and back. Any call may raise DrafterLost. `busy`: as of a `Drafter`; `patience`: seconds
    that a proposal may wait."""

    @property
    def busy(self) -> float: ...

    @property
    def patience(self) -> float: ...

    def open(self, opening: Opening) -> None:
        """Has the draft begin a request. What it has sent before is never handed out again."""

    def send(self, result: VerifyResult) -> None:
        """Sends a result on its way to the draft."""

    def take(self, until: float | None) -> TreeDelta | None:
        """The next delta in the order sent, waited for until then (`time.monotonic`); a DrafterLost says that it did
        not come. None: nobody wants to wait, and none is here."""
        ...

    def close(self) -> None:
        """Ends the request."""


class ReplicaDrafter:
    """Proposes from a replica, which grows as deltas come.

    With d fixed a proposal rests on all growth from before the last result, d expansions, and on those after it that
    the tree alone asks for. These are waited for, so the rounds are those of an `AheadDrafter`. With d free it rests on
    what has come, and is waited for only while more is to come and there are fewer than bs nodes, or the draft, which
    has seen the last result, is at an expansion that is worth its time: the rounds follow the clock, the text does not.
    Drawn children are not for a replica, since a proposal of them must not follow the clock.

    Where a link gives up waiting, `propose` may be asked again, or what was missed meanwhile told by `catch_up` once
    `answered` says so.
    """

    def __init__(self, link: FeedLink, replica: Replica, config: EngineConfig) -> None:
        assert config.proposal != "sample", "a proposal of drawn children must not depend on the clock"
        self._link, self._replica, self._config = link, replica, config
        self.draft_steps = config.steps  # d; not asked for where it is free

    @property
    def busy(self) -> float:
        return self._link.busy

    def open(self, opening: Opening) -> None:
        self._shape = self._config.for_request(opening.sampling)
        self._free = self._shape.free_steps
        self._request, self._round, self._root_at = opening.request, 0, len(opening.tokens) - 1
        self._due = self._shape.steps  # expansions to come before the next proposal, where d is fixed
        self._heard = -1  # the last delta's round,
        self._added = 0  # and what it has added
        self._ended = False  # the draft does not grow on before the next result, where d is free
        self._came = self._shape.steps  # expansions that have come in this round; _pace: in the one before
        self._replica.open(opening.tokens[-1])
        self._begin()
        self._link.open(opening)

    def propose(self) -> Proposal:
        until = time.monotonic() + self._link.patience
        if self._free:
            self.grow()
        while self._is_waiting():
            self._take(until)
        tokens, parents = self._replica.best(self._shape.verify_batch)
        return Proposal(self._request, self._round, self._root_at, tuple(tokens), tuple(parents))

    def grow(self) -> None:
        """It grows elsewhere; what of that has come is taken in."""
        while (self._free or self._due > 0) and self._take(None):
            pass

    def observe(self, result: VerifyResult) -> None:
        until = time.monotonic() + self._link.patience
        while self._waits:  # nobody has asked for a proposal; its growth is to be told from the next one's
            self._take(until)
        self._link.send(result)
        self._replica.follow(result.tokens, result.round + 1)
        self._round, self._root_at = result.round + 1, result.prefix_len + len(result.tokens)
        self._begin()

    def answered(self) -> bool:
        """Whether the draft is in step: it has told what a proposal needs. Does not wait for it."""
        if self._free:
            self.grow()
            return self._heard == self._round
        while self._waits and self._take(None):
            pass
        return not self._waits

    def catch_up(self, result: VerifyResult) -> None:
        """Rounds without the draft, as the result of a long one."""
        self.observe(result)

    def close(self) -> None:
        self._link.close()

    def _begin(self) -> None:
        """Another round: what its proposal has to wait for."""
        self._ended = False
        self._pace, self._came = max(self._came, 1), 0
        self._growth = None if self._free else self._expected()
        self._waits = self._growth is not None and next(self._growth, False)

    def _is_waiting(self) -> bool:
        """Whether the proposal has to wait for another delta."""
        if not self._free:
            return self._waits
        in_step = self._heard == self._round  # then the next one is an expansion away
        worth = in_step and self._shape.catch_up and self._pays(self._pace)
        return not self._ended and (self._is_short() or worth)

    def _expected(self) -> Iterator[bool]:
        """With d fixed: goes on with each delta, as long as the proposal needs more of them. That is the growth from
        before the last result, then what is expanded on seeing it, by the rule of `AheadDrafter`."""
        while self._due > 0:
            yield True
        if self._is_short():
            self._due = 1
            yield True
        while self._shape.catch_up and self._pays(self._shape.steps):
            self._due = 1
            yield True
            if self._added == 0:  # there is no room
                break
        self._due = self._shape.steps

    def _is_short(self) -> bool:
        bs = self._shape.verify_batch
        return len(self._replica.best(bs)[0]) < bs

    def _pays(self, steps: int) -> bool:
        """Whether another expansion is worth its time, of which a round has so many."""
        prospects = self._replica.prospects(self._shape.verify_batch, self._shape.draft_leaves)
        return expansion_pays(*prospects, steps)

    def _take(self, until: float | None) -> bool:
        """Takes in the next delta, and where d is free all that have come: together they cost little more than one.
        False: nobody wants to wait, and none is here. Raises DrafterLost on what cannot be of this request's tree."""
        first = self._next(until)
        if first is None:
            return False
        come = [first]
        while self._free and (delta := self._next(None)) is not None:
            come.append(delta)
        for _, some in groupby(come, lambda delta: (delta.round, len(delta) == 0)):  # an empty one says something
            self._take_in(joined([*some]))
        return True

    def _next(self, until: float | None) -> TreeDelta | None:
        delta = self._link.take(until)
        while delta is not None and delta.request != self._request:  # that is over
            delta = self._link.take(until)
        return delta

    def _take_in(self, delta: TreeDelta) -> None:
        try:
            if not self._free:
                if delta.expansions > self._due:
                    raise ValueError(f"growth of {delta.expansions} expansions, where {self._due} are due")
                self._due -= delta.expansions
            self._replica.apply(delta)
        except ValueError as error:
            raise DrafterLost(f"the draft sent what is not of this tree: {error}") from None
        self._heard, self._added = delta.round, len(delta)
        self._came += delta.expansions
        self._ended = self._heard == self._round and self._added == 0
        if self._waits and self._growth is not None:
            self._waits = next(self._growth, False)
