"""A draft group that may be late, be lost, and come back, behind a drafter that always proposes in time.

Rounds without it are plain ones: their proposal is the root. What it missed it is told as the result of one long round,
so that it is in step again at once; one that comes back begins with the tokens so far.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from swiftspec.control.controller import merge_results
from swiftspec.control.step_times import SteppedDrafter
from swiftspec.distributed.draft.client import DrafterLate
from swiftspec.messages import Proposal, RequestStart, VerifyResult
from swiftspec.observe.rpc_latency import RpcLog
from swiftspec.runtime.drafter import Drafter, NoDrafter
from swiftspec.runtime.fallback_drafter import FAILURES

# A first proposal that arrives later, after a long prompt, is used when it arrives.
FIRST_PROPOSAL_TIMEOUT_S = 2.0
# Bounds on the wait for any later proposal: TIMEOUT_FACTOR times the usual wait.
MIN_TIMEOUT_S, MAX_TIMEOUT_S = 0.5, 10.0
TIMEOUT_FACTOR = 5.0
STEADY_ROUNDS = 16  # rounds in step after which being late is forgotten


class ResumableDrafter(Drafter, Protocol):
    """A drafter that can go on after rounds without it."""

    def catch_up(self, result: VerifyResult) -> None:
        """In place of `observe`: rounds that were not this drafter's, as the result of a long one."""
        ...


class RemoteDrafter(SteppedDrafter, ResumableDrafter, Protocol):
    """A drafter in another process, which may be lost and come back. `propose` may raise DrafterLate, after which it
    may be asked again."""

    def poll(self) -> bool:
        """Whether the proposal for the result told last is there. Does not wait for it."""
        ...


class DraftConnection(Protocol):
    """The way to it (bridge.GroupDrafter, grpc.draft_stream.DraftStream)."""

    lost_reason: str | None  # why there is nobody to speak with, until `attach` gives another
    answer_timeout_s: float  # seconds that a proposal may take
    open_timeout_s: float  # and the first one of a request

    def attach(self, back: Any, /) -> None:
        """Speaks with this one from now on, who knows of no request."""


class Reconnector(Protocol):
    """Looks for a drafter that is lost (comeback.Comeback, grpc.redial.Redial)."""

    def poll(self) -> Any:
        """What has come back, for `Line.attach`, once; None while nothing has."""
        ...

    def on_lost(self) -> None:
        """It does not answer any more."""


@dataclass(frozen=True, slots=True)
class RemoteDraft:
    """A drafter in another process, the way to it, and who looks for it when it is lost; None: nobody starts it again,
    and the next request tries."""

    drafter: RemoteDrafter
    connection: DraftConnection
    reconnector: Reconnector | None
    rpc_log: RpcLog | None = None  # exchanges with it, where it is a worker


@dataclass(slots=True)
class Outage:
    """A time without the draft group: why, and from when to when, in seconds since the request began. `until` is None
    while it lasts."""

    reason: str
    since: float
    until: float | None = None


class FailoverDrafter:
    """`outages`: those of the request begun last."""

    def __init__(
        self, drafter: ResumableDrafter, remote: RemoteDraft, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`drafter`: the one that is away, or a controller around it."""
        self._drafter, self._remote, self._clock = drafter, remote, clock
        self._fallback = NoDrafter()
        self._usual_wait_s = 0.0  # seconds that an answer takes
        self.outages: list[Outage] = []

    @property
    def busy(self) -> float:
        return self._drafter.busy

    @property
    def lost_reason(self) -> str | None:
        """Why the draft group does not propose, should that be so."""
        return self.outages[-1].reason if self.outages and self.outages[-1].until is None else None

    def open(self, opening: RequestStart) -> None:
        self.outages, self._began = [], self._clock()
        self._opening, self._tokens = opening, list(opening.tokens)
        self._fallback.open(opening)
        self._num_late = self._rounds_in_step = self._rounds_to_skip = (
            0  # times late; rounds in step since; rounds not to ask for
        )
        self._remote.connection.open_timeout_s = FIRST_PROPOSAL_TIMEOUT_S
        self._attach()
        self._start(opening)
        self._in_step = not self._lost

    def propose(self) -> Proposal:
        if self._attach():  # it reads the text now, and counts rounds from there: first it has to miss one
            self._start(replace(self._opening, tokens=tuple(self._tokens)))
            return self._fallback.propose()
        if self._lost or not (self._in_step or self._caught_up()):
            return self._fallback.propose()
        began = self._clock()
        try:
            proposal = self._drafter.propose()
        except DrafterLate as error:
            self._update_timeout(self._clock() - began)
            self._on_late(str(error))
        except FAILURES as error:
            self._on_failure(error)
        else:
            self._update_timeout(self._clock() - began)
            self._on_answer()
            return proposal
        return self._fallback.propose()

    def grow(self) -> None:
        if self._in_step:
            self._try(self._drafter.grow)

    def observe(self, result: VerifyResult) -> None:
        if self._in_step:
            self._try(lambda: self._drafter.observe(result))  # first: somebody waits for it
        else:
            self._missed.append(result)
        self._fallback.observe(result)
        self._tokens += result.tokens

    def close(self) -> None:
        if not self._lost:
            self._try(self._drafter.close)

    def _attach(self) -> bool:
        """Takes a group that has come back, which knows of no request."""
        back = None if self._remote.reconnector is None else self._remote.reconnector.poll()
        if back is not None:
            self._try(lambda: self._remote.connection.attach(back))  # what fails here fails again at the opening
        return back is not None

    def _start(self, opening: RequestStart) -> None:
        """Tells the group of the request, from these tokens on. Its first proposal is for the root that is now."""
        self._lost, self._in_step = False, False
        self._missed: list[VerifyResult] = []
        self._try(lambda: self._drafter.open(opening))

    def _caught_up(self) -> bool:
        """Whether a group that was out of step has answered, and has been told what it missed since."""
        if self._rounds_to_skip > 0:
            self._rounds_to_skip -= 1
            return False
        return self._try(self._catch_up) and self._in_step

    def _catch_up(self) -> None:
        if self._remote.drafter.poll():
            if self._missed:
                self._drafter.catch_up(merge_results(self._missed))
                self._missed = []
            self._in_step = True

    def _update_timeout(self, seconds: float) -> None:
        """How long an answer was waited for, in vain or not: one that is always slow comes to be waited for longer."""
        self._usual_wait_s += 0.1 * (seconds - self._usual_wait_s)
        self._remote.connection.answer_timeout_s = min(
            max(TIMEOUT_FACTOR * self._usual_wait_s, MIN_TIMEOUT_S), MAX_TIMEOUT_S
        )

    def _on_answer(self) -> None:
        """A proposal came in time."""
        if self.lost_reason is not None:
            self.outages[-1].until = self._clock() - self._began
        self._rounds_in_step += 1
        if self._rounds_in_step == STEADY_ROUNDS:
            self._num_late = 0

    def _on_late(self, reason: str) -> None:
        """Goes on without waiting; one that is late again and again is asked less and less often."""
        self._record_outage(reason)
        self._in_step, self._rounds_in_step = False, 0
        self._rounds_to_skip = 2**self._num_late - 1
        self._num_late = min(self._num_late + 1, 8)

    def _try(self, act: Callable[[], None]) -> bool:
        try:
            act()
        except FAILURES as error:
            self._on_failure(error)
            return False
        return True

    def _on_failure(self, error: BaseException) -> None:
        self._lost, self._in_step = True, False
        self._record_outage(str(error) or type(error).__name__)
        if self._remote.reconnector is not None and self._remote.connection.lost_reason is not None:
            self._remote.reconnector.on_lost()

    def _record_outage(self, reason: str) -> None:
        if self.lost_reason is None:
            self.outages.append(Outage(reason, self._clock() - self._began))
        else:
            self.outages[-1].reason = reason
