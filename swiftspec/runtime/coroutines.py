"""Requests as coroutines: code for one request that stops where a model is called, so that the calls of several
requests become one forward.

Each request runs in a greenlet of its own. `CallQueue.wait` suspends it until the loop over the requests
(batching/tree_batch.py) has run its call, together with those of the same kind. Drafters, their wrappers and verifiers
therefore need no second form for several requests.

greenlet is imported by the first batch of requests: an engine that decodes one at a time does not need it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from swiftspec.runtime.runner import Call

if TYPE_CHECKING:
    from greenlet import greenlet

# Priorities of calls: results are read first, every request expands its tree, or receives its proposal from the draft
# group, before the rows of any are chosen, then all are verified, and new prompts are prefilled last.
READ, EXPANSION, RECEIVE, ROW_BUDGET, VERIFICATION, PREFILL = range(6)


class CallQueue:
    """Connects the calls of requests with the loop that runs them.

    `company`: whether several requests run; alone, a request runs its own calls, except prefill chunks, between which
    others may arrive.
    `num_requests`: of those that run, the number of requests that share the next round; 1 without the loop.
    """

    def __init__(self) -> None:
        self.company, self.num_requests = False, 1

    def wait(self, call: Call) -> Any:
        """Returns the result of a call: suspends the request until the loop has run it, or runs it at once. Raises the
        error of the call."""
        if (self.company or call.priority == PREFILL) and in_coroutine():
            self._suspend(call)
            if call.error is not None:
                raise call.error
        else:
            call.run(())
        return call.result

    def _suspend(self, call: Call) -> None:
        suspend(call)

    def run(self, calls: Sequence[Call]) -> None:
        """Runs calls with equal keys, for which requests wait, and sets the result or the error of each."""
        try:
            calls[0].run(calls[1:])
        except Exception as error:
            for call in calls:
                call.error = error


R = TypeVar("R", bound="RequestCoroutine")


def joint_calls(requests: Sequence[R]) -> list[R]:
    """Returns those of the requests whose calls run next, as one: the calls of the first priority that are alike."""
    waiting = [(each, each.waiting) for each in requests if each.waiting is not None]
    if not waiting:
        return []
    _, first = min(waiting, key=lambda pair: pair[1].priority)
    return [each for each, call in waiting if (call.priority, call.key) == (first.priority, first.key)]


def in_coroutine() -> bool:
    """Returns whether the current code is that of a request in a coroutine; False in greenlets of an application."""
    return _own_loop() is not None


def has_ended(error: BaseException) -> bool:
    """Returns whether an exception is the one that `RequestCoroutine.end` raises where the request is suspended."""
    from greenlet import GreenletExit

    return isinstance(error, GreenletExit)


def suspend(value: Any) -> None:
    """Suspends the current request and hands `value` to the loop over the requests."""
    loop = _own_loop()
    assert loop is not None, "only a request that runs in a coroutine can be suspended"
    loop.switch(value)


def _own_loop() -> greenlet | None:
    """Returns the greenlet that has resumed the current request; None outside the coroutine of a request, also in
    greenlets of an application."""
    current = _greenlets().getcurrent()
    return current.parent if getattr(current, "runs_request", False) else None


def _greenlets() -> ModuleType:
    import greenlet

    return greenlet


@dataclass(eq=False)
class RequestCoroutine:
    """A request that runs in a greenlet. `body`: its code, which may call `suspend`.

    `waiting`: the call that it waits for, or None if it can be resumed.
    """

    body: Callable[[], None]
    waiting: Call | None = None
    _greenlet: greenlet = field(init=False)
    _thread: int = field(init=False)

    def __post_init__(self) -> None:
        self._greenlet, self._thread = _greenlets().greenlet(self.body), threading.get_ident()
        setattr(self._greenlet, "runs_request", True)  # noqa: B010

    @property
    def in_own_thread(self) -> bool:
        """Whether the current thread is the only one that can run the request: that which has created it."""
        return threading.get_ident() == self._thread

    def resume(self) -> Any:
        """Runs the request until it is suspended or ends. Returns the value that it hands over; None at its end. Raises
        the exceptions of the request."""
        self._greenlet.parent = _greenlets().getcurrent()
        return self._greenlet.switch()

    def end(self) -> bool:
        """Ends the request where it is suspended, so that its `finally` clauses run. Returns False in another thread,
        where that is not possible."""
        here = self.in_own_thread
        if here and not self._greenlet.dead:
            self._greenlet.parent = _greenlets().getcurrent()
            self._greenlet.throw()
        return here
