"""Concurrent requests of a tensor-parallel group: the followers suspend and resume the same calls as their leader.

Each request has roles of its own on every rank, at the same batch index. The leader runs a request as a coroutine
(runtime/coroutines.py), which broadcasts the calls of its roles. A follower runs every such call as a coroutine, until
it ends or waits for a forward. The leader also broadcasts which calls run as one forward, and which request it resumes
next, so whatever changes the caches, and every exchange between ranks, has the same order on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from swiftspec.distributed.group.follower_dispatch import Action, FollowerDispatcher
from swiftspec.distributed.group.leader import FollowerGroup
from swiftspec.distributed.transport.codec import Message, Words
from swiftspec.distributed.transport.opcodes import Opcode
from swiftspec.distributed.transport.request_state import in_range
from swiftspec.runtime.coroutines import RECEIVE, ROW_BUDGET, CallQueue, RequestCoroutine, in_coroutine
from swiftspec.runtime.runner import Call

LEADER_CALLS = (RECEIVE, ROW_BUDGET)  # the followers get their outcome: the rows of a proposal
NO_CALLS, PREFILL_CALLS, ALL_CALLS = 0, 1, 2  # which calls suspend a request, as `CallQueue.wait` decides


class LeaderCallQueue(CallQueue):
    """Call queue of the leader: broadcasts which request it selects, runs and resumes. A request that is not resumed
    has ended; its next call ends it on the followers, too."""

    def __init__(self, team: FollowerGroup) -> None:
        super().__init__()
        self._team = team
        self._sent = 0, NO_CALLS  # what the followers know: the selected batch index, and which calls suspend
        self._indices = dict[Call, int]()  # the batch index of each call that a request waits for

    def group_of(self, index: int) -> FollowerGroup:
        """Returns the followers as the roles with a batch index call them."""
        return _RequestFollowerGroup(self._team, partial(self._select, index))

    def run(self, calls: Sequence[Call]) -> None:
        if calls[0].priority not in LEADER_CALLS:
            self._team.broadcast(Opcode.CALLS_RUN, tuple(self._indices[call] for call in calls))
        super().run(calls)

    def _select(self, index: int) -> None:
        """Broadcasts that the next call is that of the roles with this batch index, unless the followers know it."""
        state = index, self._suspending()
        if state != self._sent:
            self._team.broadcast(Opcode.REQUEST_SELECT, state)
            self._sent = state

    def _suspend(self, call: Call) -> None:
        if call.priority in LEADER_CALLS:
            super()._suspend(call)
            return
        index, _ = self._sent  # it waits inside a call of its roles, which has selected it
        self._indices[call] = index
        try:
            super()._suspend(call)
        finally:
            del self._indices[call]
        self._sent = index, self._suspending()
        self._team.broadcast(Opcode.REQUEST_RESUME, self._sent)

    def _suspending(self) -> int:
        if not in_coroutine():
            return NO_CALLS
        return ALL_CALLS if self.company else PREFILL_CALLS


class _RequestFollowerGroup(FollowerGroup):
    """The followers as one of several requests calls them. `whole`: receives the calls. `select`: selects the request
    on the followers."""

    def __init__(self, whole: FollowerGroup, select: Callable[[], None]) -> None:
        super().__init__((), whole.end_round)
        self._whole, self._select = whole, select

    @property
    def broken(self) -> str | None:
        return self._whole.broken

    def broadcast(self, call: Opcode, message: Message | None = None) -> None:
        self._select()
        self._whole.broadcast(call, message)

    def translate_error(self, call: Opcode, error: BaseException) -> BaseException:
        return self._whole.translate_error(call, error)


class FollowerRequests:
    """The concurrent requests of a follower. `requests`: dispatchers of their roles, by batch index. `calls`: of their
    runners."""

    def __init__(self, requests: Sequence[FollowerDispatcher], calls: CallQueue) -> None:
        self._requests, self._calls = requests, calls
        self._selected, self._suspending = 0, NO_CALLS
        self._running = dict[int, RequestCoroutine]()  # the calls that have not ended, by batch index

    def decode(self, kind: int, words: Words) -> Action:
        """Returns a function that executes the command with opcode `kind`. Raises ValueError if the command is
        invalid."""
        match kind:
            case Opcode.REQUEST_SELECT:
                return partial(self._select, *self._state(words))
            case Opcode.REQUEST_RESUME:
                index, suspending = self._state(words)
                running = self._running.get(index)
                if running is None or running.waiting is not None:
                    raise ValueError(f"request {index} has no call that has run")
                return partial(self._resume, index, suspending)
            case Opcode.CALLS_RUN:
                each = [self._running.get(index) for index in words]
                waiting = [running for running in each if running is not None and running.waiting is not None]
                if not waiting or len({*words}) != len(waiting):
                    raise ValueError("a request waits for no call")
                return partial(self._run, waiting)
            case _:
                return partial(self._begin, self._requests[self._selected].decode(kind, words))

    def _state(self, words: Words) -> tuple[int, int]:
        """Unpacks a batch index, and which calls suspend a request."""
        if len(words) != 2:
            raise ValueError(f"a selection must be two words, not {len(words)}")
        index = in_range(words[0], 0, len(self._requests) - 1, "the batch index")
        return index, in_range(words[1], NO_CALLS, ALL_CALLS, "the kind of calls that suspend")

    def _select(self, index: int, suspending: int) -> None:
        self._selected, self._suspending, self._calls.company = index, suspending, suspending == ALL_CALLS

    def _begin(self, act: Action) -> None:
        """Executes a call of the selected roles, until it ends or waits."""
        ended = self._running.pop(self._selected, None)
        if ended is not None:
            ended.end()
        if self._suspending == NO_CALLS:
            act()
            return

        def body() -> None:
            act()

        self._continue(self._selected, RequestCoroutine(body))

    def _resume(self, index: int, suspending: int) -> None:
        self._select(index, suspending)
        self._continue(index, self._running.pop(index))

    def _continue(self, index: int, running: RequestCoroutine) -> None:
        running.waiting = running.resume()
        if running.waiting is not None:
            self._running[index] = running

    def _run(self, waiting: Sequence[RequestCoroutine]) -> None:
        self._calls.run([running.waiting for running in waiting if running.waiting is not None])
        for running in waiting:
            running.waiting = None
