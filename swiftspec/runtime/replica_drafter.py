"""A drafter that proposes from a replica of a draft tree in another process (see tree/replica.py)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import groupby
from typing import Protocol

from swiftspec.config import EngineConfig
from swiftspec.errors import DrafterLost
from swiftspec.messages import Proposal, RequestStart, VerifyResult
from swiftspec.runtime.lookahead_drafter import expansion_pays
from swiftspec.tree.replica import TreeDelta, TreeReplica, merge_deltas


class TreeDeltaLink(Protocol):
    """A connection to a `TreeDeltaSender`. Any call may raise DrafterLost.

    `busy`: as of a `Drafter`.
    `answer_timeout_s`: seconds that a proposal may wait.
    """

    @property
    def busy(self) -> float: ...

    @property
    def answer_timeout_s(self) -> float: ...

    def open(self, start: RequestStart) -> None:
        """Starts a request on the draft. Deltas that were sent before are never returned again."""

    def send(self, result: VerifyResult) -> None:
        """Sends a result to the draft."""

    def receive(self, deadline: float | None) -> TreeDelta | None:
        """The next delta in the order sent. Waits until `deadline` (`time.monotonic`) and then raises DrafterLost.
        Without a deadline it does not wait, and returns None if nothing has arrived."""
        ...

    def close(self) -> None:
        """Ends the request."""


class ReplicaDrafter:
    """Proposes from a replica, which is updated as tree deltas arrive.

    With fixed d, a proposal is based on all d expansions from before the last result, and on those after it that the
    tree alone requires. These are waited for, so the rounds are the same as those of an `LookaheadDrafter`.

    With free d, a proposal is based on the deltas that have arrived. It waits only while more deltas are coming and
    either there are fewer than bs nodes, or the draft has seen the last result and its next expansion is worth the
    time. Rounds then depend on timing; the output does not.

    Sampled children are not supported: a proposal of them must not depend on timing.

    After a timeout of the link `propose` may be called again, or, once `poll` returns True, `catch_up` with the rounds
    that were missed.
    """

    def __init__(self, link: TreeDeltaLink, replica: TreeReplica, config: EngineConfig) -> None:
        assert config.proposal != "sample", "a proposal of sampled children must not depend on timing"
        self._link, self._replica, self._config = link, replica, config
        self.draft_steps = config.initial_draft_steps  # d; unused if it is free

    @property
    def busy(self) -> float:
        return self._link.busy

    def open(self, start: RequestStart) -> None:
        self._shape = self._config.for_request(start.sampling)
        self._free_steps = self._shape.draft_steps_adaptive
        self._request, self._round, self._root_at = start.request, 0, len(start.tokens) - 1
        self._expansions_due = (
            self._shape.initial_draft_steps
        )  # expansions still due before the next proposal, with fixed d
        self._last_delta_round = -1  # round of the last delta
        self._nodes_added = 0  # nodes added by the last delta
        self._ended = False  # the draft does not expand again before the next result, with free d
        self._expansions_received = (
            self._shape.initial_draft_steps
        )  # expansions that have come in this round; _pace: in the one before
        self._replica.open(start.tokens[-1])
        self._start_round()
        self._link.open(start)

    def propose(self) -> Proposal:
        deadline = time.monotonic() + self._link.answer_timeout_s
        if self._free_steps:
            self.grow()
        while self._is_waiting():
            self._receive(deadline)
        tokens, parents = self._replica.best(self._shape.verify_batch)
        return Proposal(self._request, self._round, self._root_at, tuple(tokens), tuple(parents))

    def grow(self) -> None:
        """Applies the deltas that have arrived; the draft expands in another process."""
        while (self._free_steps or self._expansions_due > 0) and self._receive(None):
            pass

    def observe(self, result: VerifyResult) -> None:
        deadline = time.monotonic() + self._link.answer_timeout_s
        while self._needs_delta:  # without a proposal in between: separate its deltas from the next round's
            self._receive(deadline)
        self._link.send(result)
        self._replica.follow(result.tokens, result.round + 1)
        self._round, self._root_at = result.round + 1, result.prefix_len + len(result.tokens)
        self._start_round()

    def poll(self) -> bool:
        """Whether the draft has sent everything that the next proposal needs. Does not wait."""
        if self._free_steps:
            self.grow()
            return self._last_delta_round == self._round
        while self._needs_delta and self._receive(None):
            pass
        return not self._needs_delta

    def catch_up(self, result: VerifyResult) -> None:
        """Replays rounds that were decoded without the draft, merged into one result."""
        self.observe(result)

    def close(self) -> None:
        self._link.close()

    def _start_round(self) -> None:
        """Resets the state of a round and computes which deltas its proposal waits for."""
        self._ended = False
        self._expansions_last_round, self._expansions_received = max(self._expansions_received, 1), 0
        self._requirements = None if self._free_steps else self._required_deltas()
        self._needs_delta = self._requirements is not None and next(self._requirements, False)

    def _is_waiting(self) -> bool:
        """Whether the proposal has to wait for another delta."""
        if not self._free_steps:
            return self._needs_delta
        in_step = self._last_delta_round == self._round  # then the next delta is one expansion away
        worth = in_step and self._shape.catch_up and self._expansion_pays(self._expansions_last_round)
        return not self._ended and (self._is_short() or worth)

    def _required_deltas(self) -> Iterator[bool]:
        """With fixed d: yields True for each delta that the proposal still needs. These are the expansions from before
        the last result, then those made after it by the rule of `LookaheadDrafter`."""
        while self._expansions_due > 0:
            yield True
        if self._is_short():
            self._expansions_due = 1
            yield True
        while self._shape.catch_up and self._expansion_pays(self._shape.initial_draft_steps):
            self._expansions_due = 1
            yield True
            if self._nodes_added == 0:  # the draft tree is full
                break
        self._expansions_due = self._shape.initial_draft_steps

    def _is_short(self) -> bool:
        bs = self._shape.verify_batch
        return len(self._replica.best(bs)[0]) < bs

    def _expansion_pays(self, steps: int) -> bool:
        """Whether another expansion is worth its time in a round of `steps` expansions."""
        prospects = self._replica.expected_mass(self._shape.verify_batch, self._shape.draft_leaves)
        return expansion_pays(*prospects, steps)

    def _receive(self, deadline: float | None) -> bool:
        """Applies the next delta, and with free d all that have arrived: together they cost little more than one.
        Returns False if nothing has arrived and there was no deadline to wait for. Raises DrafterLost for a delta that
        does not fit this request's tree."""
        first = self._next(deadline)
        if first is None:
            return False
        come = [first]
        while self._free_steps and (delta := self._next(None)) is not None:
            come.append(delta)
        for _, some in groupby(come, lambda delta: (delta.round, len(delta) == 0)):  # an empty delta is significant
            self._apply(merge_deltas([*some]))
        return True

    def _next(self, deadline: float | None) -> TreeDelta | None:
        delta = self._link.receive(deadline)
        while delta is not None and delta.request != self._request:  # of an earlier request
            delta = self._link.receive(deadline)
        return delta

    def _apply(self, delta: TreeDelta) -> None:
        try:
            if not self._free_steps:
                if delta.expansions > self._expansions_due:
                    raise ValueError(f"delta of {delta.expansions} expansions, where {self._expansions_due} are due")
                self._expansions_due -= delta.expansions
            self._replica.apply(delta)
        except ValueError as error:
            raise DrafterLost(f"the draft sent a delta that does not fit this tree: {error}") from None
        self._last_delta_round, self._nodes_added = delta.round, len(delta)
        self._expansions_received += delta.expansions
        self._ended = self._last_delta_round == self._round and self._nodes_added == 0
        if self._needs_delta and self._requirements is not None:
            self._needs_delta = next(self._requirements, False)
