"""A draft group that may be late, be lost, and come back, behind a drafter that always proposes in time.

Rounds without it are plain ones: their proposal is the root. What it missed it is told as the result of one long round,
so that it is in step again at once; one that comes back begins with the tokens so far.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from swiftspec.control.controller import merged
from swiftspec.control.step_times import SteppedDrafter
from swiftspec.distributed.draft.client import DrafterLate
from swiftspec.messages import Opening, Proposal, VerifyResult
from swiftspec.observe.rpc_latency import Hops
from swiftspec.runtime.drafter import Drafter, NoDrafter
from swiftspec.runtime.fallback_drafter import FAILURES

FIRST = 2.0  # seconds to wait for the first proposal; of a long prompt it may be later, and is used then
LEAST, MOST = 0.5, 10.0  # seconds to wait for any other: five times as long as it usually takes, within these
USUALLY = 5.0
STEADY = 16  # rounds in step after which being late is forgotten


class Resumed(Drafter, Protocol):
    """A drafter that can go on after rounds without it."""

    def catch_up(self, result: VerifyResult) -> None:
        """In place of `observe`: rounds that were not this drafter's, as the result of a long one."""
        ...


class AwayDrafter(SteppedDrafter, Resumed, Protocol):
    """A drafter in another process, which may be lost and come back. `propose` may raise DrafterLate, after which it
    may be asked again."""

    def answered(self) -> bool:
        """Whether the proposal for the result told last is there. Does not wait for it."""
        ...


class Line(Protocol):
    """The way to it (bridge.GroupDrafter, grpc.draft_stream.DraftStream)."""

    gone: str | None  # why there is nobody to speak with, until `attach` gives another
    answer_timeout: float  # seconds that a proposal may take
    open_timeout: float  # and the first one of a request

    def attach(self, back: Any, /) -> None:
        """Speaks with this one from now on, who knows of no request."""


class Returns(Protocol):
    """Looks for a drafter that is lost (comeback.Comeback, grpc.redial.Redial)."""

    def take(self) -> Any:
        """What has come back, for `Line.attach`, once; None while nothing has."""
        ...

    def lost(self) -> None:
        """It does not answer any more."""


@dataclass(frozen=True, slots=True)
class Away:
    """A drafter in another process, the way to it, and who looks for it when it is lost; None: nobody starts it again,
    and the next request tries."""

    drafter: AwayDrafter
    line: Line
    returns: Returns | None
    hops: Hops | None = None  # exchanges with it, where it is a worker


@dataclass(slots=True)
class Outage:
    """A time without the draft group: why, and from when to when, in seconds since the request began. `until` is None
    while it lasts."""

    reason: str
    since: float
    until: float | None = None


class PatientDrafter:
    """`outages`: those of the request begun last."""

    def __init__(self, drafter: Resumed, away: Away, clock: Callable[[], float] = time.monotonic) -> None:
        """`drafter`: the one that is away, or a controller around it."""
        self._drafter, self._away, self._clock = drafter, away, clock
        self._none = NoDrafter()
        self._usual = 0.0  # seconds that an answer takes
        self.outages: list[Outage] = []

    @property
    def busy(self) -> float:
        return self._drafter.busy

    @property
    def lost(self) -> str | None:
        """Why the draft group does not propose, should that be so."""
        return self.outages[-1].reason if self.outages and self.outages[-1].until is None else None

    def open(self, opening: Opening) -> None:
        self.outages, self._began = [], self._clock()
        self._opening, self._tokens = opening, list(opening.tokens)
        self._none.open(opening)
        self._lates = self._steady = self._pause = 0  # times late; rounds in step since; rounds not to ask for
        self._away.line.open_timeout = FIRST
        self._attach()
        self._start(opening)
        self._in_step = not self._lost

    def propose(self) -> Proposal:
        if self._attach():  # it reads the text now, and counts rounds from there: first it has to miss one
            self._start(replace(self._opening, tokens=tuple(self._tokens)))
            return self._none.propose()
        if self._lost or not (self._in_step or self._caught_up()):
            return self._none.propose()
        began = self._clock()
        try:
            proposal = self._drafter.propose()
        except DrafterLate as error:
            self._took(self._clock() - began)
            self._late(str(error))
        except FAILURES as error:
            self._lose(error)
        else:
            self._took(self._clock() - began)
            self._answered()
            return proposal
        return self._none.propose()

    def grow(self) -> None:
        if self._in_step:
            self._try(self._drafter.grow)

    def observe(self, result: VerifyResult) -> None:
        if self._in_step:
            self._try(lambda: self._drafter.observe(result))  # first: somebody waits for it
        else:
            self._missed.append(result)
        self._none.observe(result)
        self._tokens += result.tokens

    def close(self) -> None:
        if not self._lost:
            self._try(self._drafter.close)

    def _attach(self) -> bool:
        """Takes a group that has come back, which knows of no request."""
        back = None if self._away.returns is None else self._away.returns.take()
        if back is not None:
            self._try(lambda: self._away.line.attach(back))  # what fails here fails again at the opening
        return back is not None

    def _start(self, opening: Opening) -> None:
        """Tells the group of the request, from these tokens on. Its first proposal is for the root that is now."""
        self._lost, self._in_step = False, False
        self._missed: list[VerifyResult] = []
        self._try(lambda: self._drafter.open(opening))

    def _caught_up(self) -> bool:
        """Whether a group that was out of step has answered, and has been told what it missed since."""
        if self._pause > 0:
            self._pause -= 1
            return False
        return self._try(self._catch_up) and self._in_step

    def _catch_up(self) -> None:
        if self._away.drafter.answered():
            if self._missed:
                self._drafter.catch_up(merged(self._missed))
                self._missed = []
            self._in_step = True

    def _took(self, seconds: float) -> None:
        """How long an answer was waited for, in vain or not: one that is always slow comes to be waited for longer."""
        self._usual += 0.1 * (seconds - self._usual)
        self._away.line.answer_timeout = min(max(USUALLY * self._usual, LEAST), MOST)

    def _answered(self) -> None:
        """A proposal came in time."""
        if self.lost is not None:
            self.outages[-1].until = self._clock() - self._began
        self._steady += 1
        if self._steady == STEADY:
            self._lates = 0

    def _late(self, reason: str) -> None:
        """Goes on without waiting; one that is late again and again is asked less and less often."""
        self._out(reason)
        self._in_step, self._steady = False, 0
        self._pause = 2**self._lates - 1
        self._lates = min(self._lates + 1, 8)

    def _try(self, act: Callable[[], None]) -> bool:
        try:
            act()
        except FAILURES as error:
            self._lose(error)
            return False
        return True

    def _lose(self, error: BaseException) -> None:
        self._lost, self._in_step = True, False
        self._out(str(error) or type(error).__name__)
        if self._away.returns is not None and self._away.line.gone is not None:
            self._away.returns.lost()

    def _out(self, reason: str) -> None:
        if self.lost is None:
            self.outages.append(Outage(reason, self._clock() - self._began))
        else:
            self.outages[-1].reason = reason
