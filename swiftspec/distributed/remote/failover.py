"""Failover: a drafter that proposes in time even if the draft group, or the draft worker, is late, lost or restarting.

A round without the draft group proposes only the root, as in autoregressive decoding. The rounds that a late draft
group has missed are sent to it merged into one result; a restarted draft group starts from all tokens verified so far.
A background thread connects to a lost drafter while the target decodes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

from swiftspec.config import EngineConfig
from swiftspec.control.step_times import SteppedDrafter
from swiftspec.distributed.launch.config_check import RankConfig, check_consistent
from swiftspec.distributed.launch.rendezvous import RendezvousInfo
from swiftspec.distributed.launch.supervisor_link import RankTable
from swiftspec.distributed.launch.world import World
from swiftspec.distributed.remote.client import LATE_MESSAGE, DrafterLate, DraftLink
from swiftspec.distributed.remote.reconnector import MIN_DELAY_S, ReconnectedLink, Reconnector
from swiftspec.distributed.transport.codec import Words
from swiftspec.distributed.transport.connections import Connections, accept_draft_leader
from swiftspec.distributed.transport.opcodes import Opcode
from swiftspec.distributed.transport.transport import Transport
from swiftspec.errors import RankLost
from swiftspec.messages import Proposal, RequestStart, VerifyResult, merge_results
from swiftspec.observe.rpc_latency import RpcLog
from swiftspec.runtime.drafter import Drafter, DrafterWrapper, NoDrafter
from swiftspec.runtime.fallback_drafter import FAILURES

# Seconds that a request waits for its first proposal. After a long prompt the proposal may take longer; the rounds
# until then are decoded without the draft.
FIRST_PROPOSAL_TIMEOUT_S = 2.0
# The timeout of all later proposals, in seconds, is TIMEOUT_FACTOR times the usual wait, within these bounds.
MIN_TIMEOUT_S, MAX_TIMEOUT_S = 0.5, 10.0
TIMEOUT_FACTOR = 5.0
STEADY_ROUNDS = 16  # rounds with a proposal in time after which the backoff is reset
POLL_S = 0.1  # seconds between two polls of a draft group that loads its weights
LOAD_TIMEOUT_S = 600.0  # seconds; the longest wait for a draft group to load its weights


class ResumableDrafter(Drafter, Protocol):
    """A drafter that can continue after rounds that were decoded without it."""

    def catch_up(self, result: VerifyResult) -> None:
        """Applies `result`, which merges rounds that this drafter has missed. Called instead of `observe`."""
        ...


class RecoverableDrafter(SteppedDrafter, ResumableDrafter, Protocol):
    """A drafter in another process, which can be lost and recover.

    `propose` raises DrafterLate on a timeout; it can then be called again.
    """

    def poll(self) -> bool:
        """Returns whether the proposal that follows the last result has arrived. Does not block."""
        ...


@dataclass(frozen=True, slots=True)
class RemoteDraft:
    """A drafter in another process, its connection and its reconnector.

    `reconnector`: None if a lost drafter is not restarted. Each later request then tries to open it anyway.
    """

    drafter: RecoverableDrafter
    connection: DraftLink
    reconnector: ReconnectedLink | None
    rpc_log: RpcLog | None = None  # RPC latencies, if the drafter is a worker
    disconnect: Callable[[], None] = lambda: None  # ends the connection to a worker


@dataclass(slots=True)
class Outage:
    """An interval of a request without the draft group, in seconds since the request began."""

    reason: str
    since: float
    until: float | None = None  # None until the outage ends


class FailoverDrafter(DrafterWrapper[ResumableDrafter]):
    """Drafter that forwards to a remote drafter, and to a spare one without a model while that is late or lost.
    `outages`: outages of the current or last request."""

    def __init__(
        self,
        drafter: ResumableDrafter,
        remote: RemoteDraft,
        spare: Drafter | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`drafter`: the remote drafter, or a controller that wraps it. `spare`: proposes meanwhile, and must not fail;
        None: proposes only the root."""
        super().__init__(drafter)
        self._remote, self._clock = remote, clock
        self._fallback = NoDrafter() if spare is None else spare
        self._usual_wait_s = 0.0  # seconds; moving average of the wait for a proposal
        self.outages: list[Outage] = []

    @property
    def lost_reason(self) -> str | None:
        """The reason why the draft group does not propose at present; None if it does."""
        return self.outages[-1].reason if self.outages and self.outages[-1].until is None else None

    def open(self, start: RequestStart) -> None:
        self.outages, self._began = [], self._clock()
        self._opening, self._tokens = start, list(start.tokens)
        self._fallback.open(start)
        self._num_late = self._rounds_in_step = 0  # late proposals (at most 8), rounds in time since the last of them
        self._rounds_to_skip = 0  # until the next attempt
        self._remote.connection.open_timeout_s = FIRST_PROPOSAL_TIMEOUT_S
        self._attach()
        self._start(start)
        self._in_step = not self._lost

    def propose(self) -> Proposal:
        if self._attach():  # the restarted draft prefills first, so this round is without it
            self._start(replace(self._opening, tokens=tuple(self._tokens)))
            self._in_step = not (self._lost or self._remote.connection.awaits_first_answer)  # a controller may wait
            return self._fallback.propose()
        if self._lost or not (self._in_step or self._caught_up()):
            return self._fallback.propose()
        began = self._clock()
        try:
            proposal = self.inner.propose()
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
            self._try(self.inner.grow)

    def observe(self, result: VerifyResult) -> None:
        if self._in_step:
            self._try(lambda: self.inner.observe(result))  # first, because the draft group is waiting for it
        else:
            self._missed.append(result)
        self._fallback.observe(result)
        self._tokens += result.tokens

    def close(self) -> None:
        if not self._lost:
            self._try(self.inner.close)

    def _attach(self) -> bool:
        """Switches to the draft group if it has just recovered. Returns whether it has."""
        back = None if self._remote.reconnector is None else self._remote.reconnector.poll()
        if back is not None:
            self._try(lambda: self._remote.connection.attach(back))  # a failure recurs in `_start`
        return back is not None

    def _start(self, start: RequestStart) -> None:
        """Opens the request on the draft group. The last of `start.tokens` is the root of its first proposal."""
        self._lost, self._in_step = False, False
        self._missed: list[VerifyResult] = []
        self._try(lambda: self.inner.open(start))

    def _caught_up(self) -> bool:
        """Polls a late draft group, unless the backoff excludes this round. If its proposal has arrived, sends it the
        missed rounds and returns True; otherwise returns False."""
        if self._rounds_to_skip > 0:
            self._rounds_to_skip -= 1
            return False
        if not self._try(self._catch_up):
            return False
        link = self._remote.connection
        if self.lost_reason is None and link.awaits_first_answer and not link.is_opening:
            self._on_late(LATE_MESSAGE)
        return self._in_step

    def _catch_up(self) -> None:
        if self._remote.drafter.poll():
            if self._missed:
                self.inner.catch_up(merge_results(self._missed))
                self._missed = []
            self._in_step = True

    def _update_timeout(self, seconds: float) -> None:
        """Updates the timeout of proposals from the latest wait, in seconds. Waits that timed out count as well, so the
        timeout grows if the draft group is slow."""
        self._usual_wait_s += 0.1 * (seconds - self._usual_wait_s)
        self._remote.connection.answer_timeout_s = min(
            max(TIMEOUT_FACTOR * self._usual_wait_s, MIN_TIMEOUT_S), MAX_TIMEOUT_S
        )

    def _on_answer(self) -> None:
        """Ends the outage, if there is one, after a proposal that has arrived in time, and resets the backoff after
        STEADY_ROUNDS of them."""
        if self.lost_reason is not None:
            self.outages[-1].until = self._clock() - self._began
        self._rounds_in_step += 1
        if self._rounds_in_step == STEADY_ROUNDS:
            self._num_late = 0

    def _on_late(self, reason: str) -> None:
        """Begins an outage after a late proposal. The next attempt is made 2^n - 1 rounds later, after n earlier late
        proposals. While other requests run, a first proposal is not waited for, and not late before its timeout."""
        if self._remote.connection.is_opening:
            self._in_step = False
            return
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


class DraftGroupRecovery:
    """Connects to restarted draft ranks, on rank 0 and while the target decodes. They join the rendezvous, pass the
    startup barrier and connect, as at the start of the job.

    `reconnector`: calls `connect` in a background thread until it is closed.
    """

    def __init__(
        self,
        world: World,
        plan: EngineConfig,
        rank_config: RankConfig,
        vocab: Words,
        rank_table: RankTable,
        connections: Connections,
    ) -> None:
        """`world`: the world that `join_world` has returned.

        `rank_config`: configuration of rank 0, which the restarted ranks must match.
        `vocab`: vocabulary size of the job, then the tokens that its draft never proposes.
        `rank_table`: receives the states of the draft's ranks.
        `connections`: connections of rank 0. A recovery replaces the transport to the draft's leader in it, so that a
        draft group that has just recovered receives SHUTDOWN at the end.
        """
        self._world, self._plan, self._rank_config, self._vocab = world, plan, rank_config, vocab
        self._rank_table, self._connections = rank_table, connections
        self._ranks = range(plan.target_tp, plan.num_ranks)
        self.reconnector = Reconnector(
            self.connect, lambda: rank_table.set_state("draft", "lost"), on_demand=False, max_delay_s=MIN_DELAY_S
        )

    def connect(self) -> Transport | None:
        """Returns the transport to a draft group that has been restarted and has loaded its weights; None if its ranks
        have not joined the rendezvous yet. Raises RankLost, UserError or OSError if the startup fails; the ranks are
        then restarted again."""
        rendezvous = self._world.rendezvous
        assert rendezvous is not None
        with suppress(RuntimeError):  # the store is gone, and the job with it
            waits, info = rendezvous.alive_ranks(self._ranks), rendezvous.try_form(self._ranks)
            if waits or info is not None:  # also if it has come between these two calls
                self._rank_table.set_state("draft", "lost")
            return None if info is None else self._start(info)
        return None

    def _start(self, info: RendezvousInfo) -> Transport | None:
        """Performs rank 0's part of the startup of a restarted draft group: passes the startup barrier, opens the
        transport and waits until the weights are loaded. `info`: result of the rendezvous."""
        world = self._world.after_rendezvous(info).next_engine()
        self._rank_table.update(
            member for member in check_consistent(world, self._plan, self._rank_config) if member.rank in self._ranks
        )
        transport = accept_draft_leader(world, self._world.timeouts.grace_s)
        try:
            transport.send(Opcode.READY, self._vocab)
            loaded = self._await_loaded(transport) == Opcode.READY
        except BaseException:
            transport.close()
            raise
        if not loaded:
            transport.close()
            return None
        self._connections.draft_leader = transport
        self._rank_table.set_state("draft", "up")
        return transport

    def _await_loaded(self, transport: Transport) -> int:
        """Returns the opcode that the draft's leader sends after loading its weights: READY or ERROR. Raises RankLost
        after LOAD_TIMEOUT_S, or when the reconnector is closed."""
        until = time.monotonic() + LOAD_TIMEOUT_S
        while not self.reconnector.closing and time.monotonic() < until:
            with suppress(TimeoutError):
                return transport.recv(POLL_S)[0]
        raise RankLost("the draft group did not load in time")
