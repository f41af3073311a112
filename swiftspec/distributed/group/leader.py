"""Replicated execution within a tensor-parallel group: the leader broadcasts every call of a role (verifier, drafter or
scheduler), and the followers execute the same call on their own role.

Logits are bitwise identical on all ranks of a group, so the same calls in the same order have the same results on every
rank, and no messages are needed inside a round. Only the leader reads clocks, sockets and user input.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from swiftspec.distributed.group.command_stream import CommandStream
from swiftspec.distributed.group.follower_dispatch import Action
from swiftspec.distributed.launch.supervisor_link import Heartbeat
from swiftspec.distributed.transport.codec import Message, Words, pack_message
from swiftspec.distributed.transport.opcodes import Opcode
from swiftspec.distributed.transport.transport import Transport
from swiftspec.errors import NonFiniteLogits, RankLost, RequestFailed
from swiftspec.messages import Proposal, RequestStart, VerifyResult
from swiftspec.runtime.cancellation import CancelCheck
from swiftspec.runtime.coroutines import has_ended
from swiftspec.runtime.drafter import DrafterWrapper
from swiftspec.runtime.fallback_drafter import FAILURES
from swiftspec.runtime.local_drafter import LocalDrafter
from swiftspec.runtime.prefix_caching import with_cached_lengths
from swiftspec.runtime.runner import Runner
from swiftspec.runtime.verifier import LocalVerifier
from swiftspec.smc.group_result import GroupResult
from swiftspec.smc.scheduler import BatchScheduler
from swiftspec.smc.sequence_group import SequenceGroup

T = TypeVar("T")


class FollowerGroup:
    """The followers of one leader. `on_first_round`: called when the first round has ended.

    If a call fails on some ranks, their states differ from then on: the group is broken, and the leader raises RankLost
    for every later call.
    """

    def __init__(self, followers: Sequence[Transport], on_first_round: Callable[[], None] = lambda: None) -> None:
        self._followers, self._on_first_round = followers, on_first_round
        self._begun = False  # whether a round has ended
        self._broken: str | None = None

    @property
    def broken(self) -> str | None:
        """Why the group is broken; None while it is not."""
        return self._broken

    def broadcast(self, call: Opcode, message: Message | None = None) -> None:
        """Sends a call to the followers before the leader executes it. Raises RankLost if the group is broken."""
        if self.broken is not None:
            raise RankLost(self.broken)
        words = [] if message is None or not self._followers else pack_message(message)
        try:
            for follower in self._followers:
                follower.send(call, words)
        except BaseException as error:
            raise self.translate_error(call, error) from error

    def translate_error(self, call: Opcode, error: BaseException) -> BaseException:
        """Returns the exception that the leader raises after `error` has occurred in `call`, and marks the group as
        broken.

        The group stays usable in three cases: a leader without followers can be called again after any error, all
        ranks raise RequestFailed at the same point, and all ranks end a suspended request.
        """
        if not self._followers or isinstance(error, RequestFailed) or has_ended(error):
            return error
        self._broken = f"the ranks of the group have diverged after {call.name}: {str(error) or type(error).__name__}"
        return RankLost(self._broken) if isinstance(error, (ConnectionError, *FAILURES)) else error

    def run(self, call: Opcode, message: Message | None, act: Callable[[], T]) -> T:
        """Broadcasts `call` and returns the result of `act`, which executes the same call on the leader."""
        self.broadcast(call, message)
        try:
            return act()
        except BaseException as error:
            raise self.translate_error(call, error) from error

    def end_round(self) -> None:
        """Called at the end of a round of the leader."""
        if not self._begun:
            self._begun = True
            self._on_first_round()

    def run_close(self, call: Opcode, act: Callable[[], None], message: Message | None = None) -> None:
        """Like `run`, for calls that end a request. In a broken group it executes the call on the leader only, instead
        of raising RankLost."""
        if self.broken is None:
            self.run(call, message, act)
        else:
            act()


class LeaderVerifier:
    """Verifier on the leader: broadcasts every call to the followers and executes it on the leader's `verifier`."""

    def __init__(self, verifier: LocalVerifier, team: FollowerGroup) -> None:
        self._verifier = verifier
        self._team = team

    @property
    def busy(self) -> float:
        return self._verifier.busy

    def open(self, start: RequestStart) -> int:
        start = with_cached_lengths(
            replace(start, executor=self._verifier.select_executor(start).name), self._verifier.runner, guided=True
        )
        _read_grammar(start, self._verifier.runner)
        return self._team.run(Opcode.VERIFIER_OPEN, start, partial(self._verifier.open, start))

    def submit(self, proposal: Proposal) -> LeaderVerification:
        self._team.broadcast(Opcode.VERIFY, proposal)
        return LeaderVerification(self._verifier, proposal, self._team)

    def settle(self) -> None:
        self._verifier.settle()  # a follower settles immediately after each verification

    def close(self) -> None:
        self._team.run_close(Opcode.VERIFIER_CLOSE, self._verifier.close)


class LeaderVerification:
    """A verification that the followers are already executing. `wait` executes it on the leader."""

    def __init__(self, verifier: LocalVerifier, proposal: Proposal, team: FollowerGroup) -> None:
        self._verifier, self._proposal, self._team = verifier, proposal, team

    def wait(self) -> VerifyResult:
        try:
            result = self._verifier.verify(self._proposal)
        except BaseException as error:
            raise self._team.translate_error(Opcode.VERIFY, error) from error
        self._team.end_round()
        return result


class LeaderDrafter(DrafterWrapper[LocalDrafter]):
    """Drafter on the leader: broadcasts every call to the followers and executes it on the leader's drafter."""

    def __init__(self, drafter: LocalDrafter, team: FollowerGroup) -> None:
        super().__init__(drafter)
        self._team = team

    @property
    def draft_steps(self) -> int:
        """d, the number of expansions per round."""
        return self.inner.draft_steps

    @draft_steps.setter
    def draft_steps(self, steps: int) -> None:
        self._team.run(Opcode.SET_DRAFT_STEPS, steps, lambda: setattr(self.inner, "draft_steps", steps))

    def open(self, start: RequestStart) -> None:
        start = with_cached_lengths(replace(start, executor=self.inner.select_executor(start).name), self.inner.runner)
        _read_grammar(start, self.inner.runner)
        self._team.run(Opcode.DRAFTER_OPEN, start, partial(self.inner.open, start))

    def propose(self) -> Proposal:
        return self._team.run(Opcode.PROPOSE, None, self.inner.propose)

    def grow(self) -> None:
        if self.inner.grows:
            self._team.run(Opcode.EXPAND, None, self.inner.grow)

    def fast_reply(self) -> Any:
        """See `LocalDrafter.fast_reply`. It runs no forward, so the followers do not need the call."""
        return self.inner.fast_reply()

    def observe(self, result: VerifyResult) -> None:
        self._team.run(Opcode.OBSERVE, result, partial(self.inner.observe, result))
        self._team.end_round()

    def close(self) -> None:
        self._team.run_close(Opcode.DRAFTER_CLOSE, self.inner.close)


class LeaderScheduler:
    """Scheduler on the leader: broadcasts every call to the followers and executes it on the leader's `scheduler`."""

    def __init__(self, scheduler: BatchScheduler, team: FollowerGroup) -> None:
        self.scheduler = scheduler
        self._team = team

    @property
    def draft_tokens_per_round(self) -> int:
        return self.scheduler.draft_tokens_per_round

    @property
    def busy(self) -> tuple[float, float]:
        return self.scheduler.busy

    @property
    def groups(self) -> Sequence[SequenceGroup]:
        return self.scheduler.groups

    @property
    def max_requests(self) -> int:
        return self.scheduler.max_requests

    @property
    def has_room(self) -> bool:
        return self.scheduler.has_room

    def admit(self, start: RequestStart, stops: Collection[int], limit: int) -> SequenceGroup:
        ends = replace(
            start.sampling,
            stop_token_ids=tuple(sorted(stops)),
            max_tokens=limit,
            min_tokens=min(start.sampling.min_tokens, limit),
        )
        start = replace(start, sampling=ends, executor=self.scheduler.executor.name)
        start = with_cached_lengths(start, self.scheduler.target, self.scheduler.draft)
        return self._team.run(Opcode.POPULATION_OPEN, start, partial(self.scheduler.admit, start, stops, limit))

    def step(self) -> bool:
        more = self._team.run(Opcode.POPULATION_ROUND, None, self.scheduler.step)
        self._team.end_round()
        return more

    def finish(self, group: SequenceGroup) -> GroupResult:
        return self.scheduler.finish(group)  # runs no forward

    def cancel(self, group: SequenceGroup) -> GroupResult | None:
        with contextlib.suppress(NonFiniteLogits):
            self.scheduler.finish(group)
        if group in self.groups:
            self.evict_group(group)
        return group.answer

    def evict_group(self, group: SequenceGroup) -> None:
        self._team.run_close(Opcode.POPULATION_CLOSE, partial(self.scheduler.evict_group, group), group.sequence)


def _read_grammar(start: RequestStart, runner: Runner) -> None:
    """Raises UserError if the grammar of the request is invalid. Called before the broadcast, since an error on the
    followers would break the group."""
    if start.sampling.grammar is not None and runner.make_constraint is not None:
        runner.make_constraint(start.sampling.grammar)


def run_follower(
    leader: Transport,
    decode: Callable[[int, Words], Action],
    cancel_check: CancelCheck,
    heartbeat: Heartbeat,
) -> None:
    """Runs the main loop of a follower: executes the leader's calls on its own roles until SHUTDOWN.

    `decode`: that of the dispatcher of the roles.
    `cancel_check`: cancellation check of the roles' runners during prefill.
    `heartbeat`: records when this rank is busy.
    Raises RankLost if the leader is gone without SHUTDOWN or sends an invalid message.
    """
    orders = CommandStream(leader)
    cancel_check.cancelled = orders.prefill_aborted
    dispatch_loop(leader, orders, decode, heartbeat)


def dispatch_loop(
    leader: Transport, commands: CommandStream, decode: Callable[[int, Words], Action], heartbeat: Heartbeat
) -> None:
    """Executes the leader's commands until SHUTDOWN.

    `commands`: the commands from `leader`.
    `decode`: returns the function that executes a command, given its opcode and words.
    `heartbeat`: records when this rank is busy.
    Raises RankLost if the leader is gone without SHUTDOWN or sends an invalid message.
    """
    while True:
        try:
            heartbeat.mark_idle()
            kind, words = commands.recv()
            heartbeat.mark_busy()
            if kind == Opcode.SHUTDOWN:
                return
            act = decode(kind, words)
        except ConnectionError as error:
            raise RankLost(str(error)) from None
        except ValueError as error:
            raise RankLost(f"{leader.peer} sent an invalid message: {error}") from None
        with contextlib.suppress(RequestFailed):  # the leader raises it too and ends the request
            act()


def wait_for_shutdown(leader: Transport) -> None:
    """Blocks until the leader sends SHUTDOWN or is gone; discards all other messages."""
    with contextlib.suppress(ConnectionError):
        while leader.recv()[0] != Opcode.SHUTDOWN:
            pass
