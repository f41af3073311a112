"""A drafter that proposes from a replica of a draft tree in another process (see tree/replica.py)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import groupby
from typing import Protocol

from swiftspec.config import EngineConfig
from swiftspec.errors import DrafterLost
from swiftspec.messages import Proposal, RequestStart, VerifyResult
from swiftspec.tree.replica import TreeDelta, TreeReplica, merge_deltas
from swiftspec.tree.tree import expansion_pays


class TreeDeltaLink(Protocol):
    """A connection to a `TreeDeltaSender`. Any call may raise DrafterLost.

    `busy`: seconds that the draft model has spent in forwards, as far as this process knows.
    `answer_timeout_s`: longest time in seconds that a proposal may wait for deltas.
    """

    @property
    def busy(self) -> float: ...

    @property
    def answer_timeout_s(self) -> float: ...

    def open(self, start: RequestStart) -> None:
        """Starts a request on the draft. Discards all deltas that were sent before."""

    def send(self, result: VerifyResult) -> None:
        """Sends a result to the draft."""

    def receive(self, deadline: float | None) -> TreeDelta | None:
        """Returns the next delta, in the order sent. Blocks until `deadline`, a `time.monotonic` time, and then raises
        DrafterLost. Without a deadline it does not block, and returns None if no delta has arrived."""
        ...

    def close(self) -> None:
        """Ends the request."""


class ReplicaDrafter:
    """Drafter that proposes from a tree replica, which it updates as tree deltas arrive.

    With fixed d, `propose` waits for the deltas of the expansions that a `LookaheadDrafter` would make: d before the
    last result, and further ones after it by the rules of `LookaheadDrafter.propose`. The rounds are therefore the same
    as those of a `LookaheadDrafter`.

    With adaptive d, `propose` uses the deltas that have arrived. It waits for another delta only if the draft can still
    expand in this round, and either the proposal has fewer than bs nodes, or the draft has processed the last result
    and another expansion pays (`expansion_pays`). Rounds then depend on timing; the output does not.

    Sampled children are not supported: which of them are proposed must not depend on timing.

    After a timeout of the link, `propose` may be called again. Alternatively the caller continues without the draft,
    and calls `catch_up` with the result of the missed rounds once `poll` returns True.
    """

    lost_reason = None

    def __init__(self, link: TreeDeltaLink, replica: TreeReplica, config: EngineConfig) -> None:
        assert config.proposal != "sample", "sampled children are not supported: the proposal would depend on timing"
        self._link, self._replica, self._config = link, replica, config
        self.draft_steps = config.initial_draft_steps  # d; unused if it is adaptive

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
        self._ended = False  # with adaptive d: the draft does not expand again before the next result
        self._expansions_received = (
            self._shape.initial_draft_steps
        )  # expansions whose deltas have arrived in this round; initially of an assumed round before the first one
        self._replica.open(start.tokens[-1], self._root_at)
        self._start_round()
        self._link.open(start)

    def propose(self) -> Proposal:
        deadline = time.monotonic() + self._link.answer_timeout_s
        if self._free_steps:
            self.grow()
        while self._is_waiting():
            self._receive(deadline)
        best = self._replica.best(self._shape.verify_batch)
        return Proposal.from_draft_model(self._request, self._round, self._root_at, *best)

    def grow(self) -> None:
        """Applies the deltas that have arrived; the draft expands in another process."""
        while (self._free_steps or self._expansions_due > 0) and self._receive(None):
            pass

    def observe(self, result: VerifyResult) -> None:
        deadline = time.monotonic() + self._link.answer_timeout_s
        while self._needs_delta:  # `propose` was not called: receive this round's deltas before the next round's
            self._receive(deadline)
        self._link.send(result)
        self._replica.follow(result.tokens, result.round + 1)
        self._round, self._root_at = result.round + 1, result.prefix_len + len(result.tokens)
        self._start_round()

    def poll(self) -> bool:
        """Returns whether all deltas that the next proposal needs have arrived. Does not block."""
        if self._free_steps:
            self.grow()
            return self._last_delta_round == self._round
        while self._needs_delta and self._receive(None):
            pass
        return not self._needs_delta

    def catch_up(self, result: VerifyResult) -> None:
        """Processes the rounds that were decoded without the draft. `result`: their results, merged into one."""
        self.observe(result)

    def close(self) -> None:
        self._link.close()

    def _start_round(self) -> None:
        """Resets the per-round state, and with fixed d starts to count the deltas that the proposal needs."""
        self._ended = False
        self._expansions_last_round, self._expansions_received = max(self._expansions_received, 1), 0
        self._requirements = None if self._free_steps else self._required_deltas()
        self._needs_delta = self._requirements is not None and next(self._requirements, False)

    def _is_waiting(self) -> bool:
        """Returns whether the proposal has to wait for another delta."""
        if not self._free_steps:
            return self._needs_delta
        in_step = self._last_delta_round == self._round  # then the next delta is one expansion away
        worth = in_step and self._shape.catch_up and self._expansion_pays(self._expansions_last_round)
        return not self._ended and (self._is_short() or worth)

    def _required_deltas(self) -> Iterator[bool]:
        """With fixed d: yields True for each further delta that the proposal needs, and ends when it needs none. Needed
        are the d expansions before the last result, then those after it by the rules of `LookaheadDrafter.propose`."""
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
        """Returns `expansion_pays` for a round of `steps` expansions."""
        prospects = self._replica.expected_mass(self._shape.verify_batch, self._shape.leaves_per_expansion)
        return expansion_pays(*prospects, steps)

    def _receive(self, deadline: float | None) -> bool:
        """Applies the next delta, and with adaptive d all that have arrived, since several cost little more than one.
        Blocks until `deadline`, see `TreeDeltaLink.receive`. Returns False if no delta has arrived. Raises DrafterLost
        if a delta does not fit this request's tree."""
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
                    raise ValueError(f"delta of {delta.expansions} expansions, expected at most {self._expansions_due}")
                self._expansions_due -= delta.expansions
            self._replica.apply(delta)
        except ValueError as error:
            raise DrafterLost(f"the draft sent an invalid tree delta: {error}") from None
        self._last_delta_round, self._nodes_added = delta.round, len(delta)
        self._expansions_received += delta.expansions
        self._ended = self._last_delta_round == self._round and self._nodes_added == 0
        if self._needs_delta and self._requirements is not None:
            self._needs_delta = next(self._requirements, False)
