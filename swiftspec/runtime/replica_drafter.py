"""The drafter that proposes from a copy of a draft's tree elsewhere (see tree/replica.py)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import groupby
from typing import Protocol

from swiftspec.config import EngineConfig
from swiftspec.errors import DrafterLost
from swiftspec.messages import Proposal, RequestStart, VerifyResult
from swiftspec.runtime.ahead_drafter import expansion_pays
from swiftspec.tree.replica import TreeDelta, TreeReplica, merge_deltas


class TreeDeltaLink(Protocol):
    """The way to a `TreeFeed` and back. Any call may raise DrafterLost. `busy`: as of a `Drafter`; `answer_timeout_s`: seconds
    that a proposal may wait."""

    @property
    def busy(self) -> float: ...

    @property
    def answer_timeout_s(self) -> float: ...

    def open(self, opening: RequestStart) -> None:
        """Has the draft begin a request. What it has sent before is never handed out again."""

    def send(self, result: VerifyResult) -> None:
        """Sends a result on its way to the draft."""

    def receive(self, deadline: float | None) -> TreeDelta | None:
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
    `poll` says so.
    """

    def __init__(self, link: TreeDeltaLink, replica: TreeReplica, config: EngineConfig) -> None:
        assert config.proposal != "sample", "a proposal of drawn children must not depend on the clock"
        self._link, self._replica, self._config = link, replica, config
        self.draft_steps = config.initial_draft_steps  # d; not asked for where it is free

    @property
    def busy(self) -> float:
        return self._link.busy

    def open(self, opening: RequestStart) -> None:
        self._shape = self._config.for_request(opening.sampling)
        self._free_steps = self._shape.draft_steps_adaptive
        self._request, self._round, self._root_at = opening.request, 0, len(opening.tokens) - 1
        self._expansions_due = (
            self._shape.initial_draft_steps
        )  # expansions to come before the next proposal, where d is fixed
        self._last_delta_round = -1  # the last delta's round,
        self._nodes_added = 0  # and what it has added
        self._ended = False  # the draft does not grow on before the next result, where d is free
        self._expansions_received = (
            self._shape.initial_draft_steps
        )  # expansions that have come in this round; _pace: in the one before
        self._replica.open(opening.tokens[-1])
        self._start_round()
        self._link.open(opening)

    def propose(self) -> Proposal:
        deadline = time.monotonic() + self._link.answer_timeout_s
        if self._free_steps:
            self.grow()
        while self._is_waiting():
            self._receive(deadline)
        tokens, parents = self._replica.best(self._shape.verify_batch)
        return Proposal(self._request, self._round, self._root_at, tuple(tokens), tuple(parents))

    def grow(self) -> None:
        """It grows elsewhere; what of that has come is taken in."""
        while (self._free_steps or self._expansions_due > 0) and self._receive(None):
            pass

    def observe(self, result: VerifyResult) -> None:
        deadline = time.monotonic() + self._link.answer_timeout_s
        while self._needs_delta:  # nobody has asked for a proposal; its growth is to be told from the next one's
            self._receive(deadline)
        self._link.send(result)
        self._replica.follow(result.tokens, result.round + 1)
        self._round, self._root_at = result.round + 1, result.prefix_len + len(result.tokens)
        self._start_round()

    def poll(self) -> bool:
        """Whether the draft is in step: it has told what a proposal needs. Does not wait for it."""
        if self._free_steps:
            self.grow()
            return self._last_delta_round == self._round
        while self._needs_delta and self._receive(None):
            pass
        return not self._needs_delta

    def catch_up(self, result: VerifyResult) -> None:
        """Rounds without the draft, as the result of a long one."""
        self.observe(result)

    def close(self) -> None:
        self._link.close()

    def _start_round(self) -> None:
        """Another round: what its proposal has to wait for."""
        self._ended = False
        self._expansions_last_round, self._expansions_received = max(self._expansions_received, 1), 0
        self._requirements = None if self._free_steps else self._required_deltas()
        self._needs_delta = self._requirements is not None and next(self._requirements, False)

    def _is_waiting(self) -> bool:
        """Whether the proposal has to wait for another delta."""
        if not self._free_steps:
            return self._needs_delta
        in_step = self._last_delta_round == self._round  # then the next one is an expansion away
        worth = in_step and self._shape.catch_up and self._expansion_pays(self._expansions_last_round)
        return not self._ended and (self._is_short() or worth)

    def _required_deltas(self) -> Iterator[bool]:
        """With d fixed: goes on with each delta, as long as the proposal needs more of them. That is the growth from
        before the last result, then what is expanded on seeing it, by the rule of `AheadDrafter`."""
        while self._expansions_due > 0:
            yield True
        if self._is_short():
            self._expansions_due = 1
            yield True
        while self._shape.catch_up and self._expansion_pays(self._shape.initial_draft_steps):
            self._expansions_due = 1
            yield True
            if self._nodes_added == 0:  # there is no room
                break
        self._expansions_due = self._shape.initial_draft_steps

    def _is_short(self) -> bool:
        bs = self._shape.verify_batch
        return len(self._replica.best(bs)[0]) < bs

    def _expansion_pays(self, steps: int) -> bool:
        """Whether another expansion is worth its time, of which a round has so many."""
        prospects = self._replica.expected_mass(self._shape.verify_batch, self._shape.draft_leaves)
        return expansion_pays(*prospects, steps)

    def _receive(self, deadline: float | None) -> bool:
        """Takes in the next delta, and where d is free all that have come: together they cost little more than one.
        False: nobody wants to wait, and none is here. Raises DrafterLost on what cannot be of this request's tree."""
        first = self._next(deadline)
        if first is None:
            return False
        come = [first]
        while self._free_steps and (delta := self._next(None)) is not None:
            come.append(delta)
        for _, some in groupby(come, lambda delta: (delta.round, len(delta) == 0)):  # an empty one says something
            self._apply(merge_deltas([*some]))
        return True

    def _next(self, deadline: float | None) -> TreeDelta | None:
        delta = self._link.receive(deadline)
        while delta is not None and delta.request != self._request:  # that is over
            delta = self._link.receive(deadline)
        return delta

    def _apply(self, delta: TreeDelta) -> None:
        try:
            if not self._free_steps:
                if delta.expansions > self._expansions_due:
                    raise ValueError(f"growth of {delta.expansions} expansions, where {self._expansions_due} are due")
                self._expansions_due -= delta.expansions
            self._replica.apply(delta)
        except ValueError as error:
            raise DrafterLost(f"the draft sent what is not of this tree: {error}") from None
        self._last_delta_round, self._nodes_added = delta.round, len(delta)
        self._expansions_received += delta.expansions
        self._ended = self._last_delta_round == self._round and self._nodes_added == 0
        if self._needs_delta and self._requirements is not None:
            self._needs_delta = next(self._requirements, False)
