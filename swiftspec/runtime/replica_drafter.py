"""The drafter that proposes from a copy of a draft's tree elsewhere (see tree/replica.py)."""

from __future__ import annotations

from typing import Protocol

from swiftspec.config import EngineConfig
from swiftspec.errors import DrafterLost
from swiftspec.messages import Opening, Proposal, VerifyResult
from swiftspec.runtime.ahead_drafter import expansion_pays
from swiftspec.tree.replica import Replica, TreeDelta


class FeedLink(Protocol):
    """The way to a `TreeFeed` and back. Any call may raise DrafterLost. `busy`: as of a `Drafter`."""

    @property
    def busy(self) -> float: ...

    def open(self, opening: Opening) -> None:
        """Has the draft begin a request. What it has sent before is never handed out again."""

    def send(self, result: VerifyResult) -> None:
        """Sends a result on its way to the draft."""

    def take(self, *, wait: bool) -> TreeDelta | None:
        """The next delta in the order sent. None: none is here yet, and nobody wants to wait."""
        ...

    def close(self) -> None:
        """Ends the request."""


class ReplicaDrafter:
    """Proposes from a replica, which grows as deltas come.

    With d fixed a proposal rests on all growth from before the last result, d expansions, and on those after it that
    the tree alone asks for. These are waited for, so the rounds are those of an `AheadDrafter`. With d free it rests on
    what has come, and is waited for only while there are fewer than bs nodes and more to come: the rounds follow the
    clock, the text does not. Drawn children are not for a replica, since a proposal of them must not follow the clock.
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
        self._ended = False  # the draft does not grow on before the next result, where d is free
        self._replica.open(opening.tokens[-1])
        self._link.open(opening)

    def propose(self) -> Proposal:
        if self._free:
            self._gather()
        else:
            self._complete()
        tokens, parents = self._replica.best(self._shape.verify_batch)
        return Proposal(self._request, self._round, self._root_at, tuple(tokens), tuple(parents))

    def grow(self) -> None:
        """It grows elsewhere; what of that has come is taken in."""
        while (self._free or self._due > 0) and self._take(wait=False) is not None:
            pass

    def observe(self, result: VerifyResult) -> None:
        self._link.send(result)
        self._replica.follow(result.tokens, result.round + 1)
        self._round, self._root_at = result.round + 1, result.prefix_len + len(result.tokens)
        self._ended = False

    def close(self) -> None:
        self._link.close()

    def _gather(self) -> None:
        """All that has come, and at least bs nodes where there are so many."""
        self.grow()
        while not self._ended and self._is_short():
            self._take(wait=True)

    def _complete(self) -> None:
        """The growth from before the last result, then what is expanded on seeing it, by the rule of `AheadDrafter`."""
        while self._due > 0:
            self._take(wait=True)
        if self._is_short():
            self._take_one()
        while self._shape.catch_up and self._pays() and self._take_one():
            pass
        self._due = self._shape.steps

    def _is_short(self) -> bool:
        bs = self._shape.verify_batch
        return len(self._replica.best(bs)[0]) < bs

    def _pays(self) -> bool:
        prospects = self._replica.prospects(self._shape.verify_batch, self._shape.draft_leaves)
        return expansion_pays(*prospects, self._shape.steps)

    def _take_one(self) -> bool:
        """Waits for an expansion that the last result has brought about. Whether there was room for it."""
        self._due = 1
        delta = self._take(wait=True)
        return delta is not None and len(delta) > 0

    def _take(self, *, wait: bool) -> TreeDelta | None:
        """Takes in the next delta. Raises DrafterLost on one that cannot have come from this request's tree."""
        delta = self._link.take(wait=wait)
        while delta is not None and delta.request != self._request:  # that is over
            delta = self._link.take(wait=wait)
        if delta is None:
            return None
        try:
            if not self._free:
                if delta.expansions > self._due:
                    raise ValueError(f"growth of {delta.expansions} expansions, where {self._due} are due")
                self._due -= delta.expansions
            self._replica.apply(delta)
        except ValueError as error:
            raise DrafterLost(f"the draft sent what is not of this tree: {error}") from None
        self._ended = delta.round == self._round and len(delta) == 0
        return delta
