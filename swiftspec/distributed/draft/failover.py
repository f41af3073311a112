"""Failover: a drafter that proposes in time even if the draft group is late, lost or restarting.

A round without the draft group proposes only the root, as in autoregressive decoding. The rounds that a late draft
group has missed are sent to it merged into one result; a restarted draft group starts from all tokens verified so far.
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
STEADY_ROUNDS = 16  # rounds answered in time after which the backoff is reset


class ResumableDrafter(Drafter, Protocol):
    """A drafter that can continue after rounds that were decoded without it."""

    def catch_up(self, result: VerifyResult) -> None:
        """Replaces `observe` for rounds that this drafter has missed, merged into one result."""
        ...


class RemoteDrafter(SteppedDrafter, ResumableDrafter, Protocol):
    """A drafter in another process, which can be lost and recover.

    `propose` raises DrafterLate on a timeout; it can then be called again.
    """

    def poll(self) -> bool:
        """Whether the proposal that follows the last result has arrived. Does not block."""
        ...


class DraftConnection(Protocol):
    """Connection to a remote drafter. Implemented by `DraftGroupClient` and `DraftStream`."""

    lost_reason: str | None  # why the connection is lost, until `attach` replaces it; else None
    answer_timeout_s: float  # seconds; the longest wait for a proposal
    open_timeout_s: float  # seconds; the longest wait for a request's first proposal

    def attach(self, back: Any, /) -> None:
        """Switches to a recovered drafter, which has no open request."""


class Reconnector(Protocol):
    """Recovers a lost drafter. Implemented by `DraftGroupRecovery` and `WorkerReconnector`."""

    def poll(self) -> Any:
        """Returns a recovered drafter for `DraftConnection.attach`, once; None if there is not one yet."""
        ...

    def on_lost(self) -> None:
        """Called when the drafter is lost."""


@dataclass(frozen=True, slots=True)
class RemoteDraft:
    """A remote drafter, its connection, and what recovers it.

    `reconnector`: None if the drafter is not restarted; the next request then tries again.
    """

    drafter: RemoteDrafter
    connection: DraftConnection
    reconnector: Reconnector | None
    rpc_log: RpcLog | None = None  # RPC latencies, if the drafter is a worker


@dataclass(slots=True)
class Outage:
    """An interval without the draft group, in seconds since the request began; `until` is unset during the outage."""

    reason: str
    since: float
    until: float | None = None


class FailoverDrafter:
    """Drafter that falls back to proposing the root alone. `outages`: those of the current or last request."""

    def __init__(
        self, drafter: ResumableDrafter, remote: RemoteDraft, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`drafter`: the remote drafter, or a controller that wraps it."""
        self._drafter, self._remote, self._clock = drafter, remote, clock
        self._fallback = NoDrafter()
        self._usual_wait_s = 0.0  # seconds; moving average of the wait for a proposal
        self.outages: list[Outage] = []

    @property
    def busy(self) -> float:
        return self._drafter.busy

    @property
    def lost_reason(self) -> str | None:
        """Why the draft group does not propose at present, or None."""
        return self.outages[-1].reason if self.outages and self.outages[-1].until is None else None

    def open(self, start: RequestStart) -> None:
        self.outages, self._began = [], self._clock()
        self._opening, self._tokens = start, list(start.tokens)
        self._fallback.open(start)
        self._num_late = self._rounds_in_step = self._rounds_to_skip = (
            0  # late proposals; rounds answered in time since; rounds to decode before the next attempt
        )
        self._remote.connection.open_timeout_s = FIRST_PROPOSAL_TIMEOUT_S
        self._attach()
        self._start(start)
        self._in_step = not self._lost

    def propose(self) -> Proposal:
        if self._attach():  # it starts a prefill and counts rounds from there, so it misses this round
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
            self._try(lambda: self._drafter.observe(result))  # first, because the draft group is waiting for it
        else:
            self._missed.append(result)
        self._fallback.observe(result)
        self._tokens += result.tokens

    def close(self) -> None:
        if not self._lost:
            self._try(self._drafter.close)

    def _attach(self) -> bool:
        """Switches to a recovered draft group, if there is one, and returns whether it did."""
        back = None if self._remote.reconnector is None else self._remote.reconnector.poll()
        if back is not None:
            self._try(lambda: self._remote.connection.attach(back))  # a failure repeats in `open`, where it is handled
        return back is not None

    def _start(self, start: RequestStart) -> None:
        """Opens the request on the draft group. Its first proposal starts at the last of these tokens."""
        self._lost, self._in_step = False, False
        self._missed: list[VerifyResult] = []
        self._try(lambda: self._drafter.open(start))

    def _caught_up(self) -> bool:
        """Whether a late draft group has answered and received the rounds that it has missed."""
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
        """Updates the timeout from a wait in seconds, also an unsuccessful one: it grows for a slow draft group."""
        self._usual_wait_s += 0.1 * (seconds - self._usual_wait_s)
        self._remote.connection.answer_timeout_s = min(
            max(TIMEOUT_FACTOR * self._usual_wait_s, MIN_TIMEOUT_S), MAX_TIMEOUT_S
        )

    def _on_answer(self) -> None:
        """Records a proposal that arrived in time."""
        if self.lost_reason is not None:
            self.outages[-1].until = self._clock() - self._began
        self._rounds_in_step += 1
        if self._rounds_in_step == STEADY_ROUNDS:
            self._num_late = 0

    def _on_late(self, reason: str) -> None:
        """Continues without the draft group, and doubles the number of rounds until the next attempt."""
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
