"""What a draft's tree has grown, on its way from the thread that grows it to the one that sends it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby
from queue import Empty, Full, Queue
from threading import Thread

from swiftspec.distributed.rpc import swiftspec_pb2 as pb
from swiftspec.tree.replica import TreeDelta, merge_deltas

TimedDelta = tuple[TreeDelta, pb.Telemetry | None]
MAX_QUEUED_DELTAS = 64  # deltas that have not gone out; beyond them the tree has to wait
POLL_S = 1.0  # seconds between two looks at whether anybody takes them


class TreeDeltaQueue:
    """A thread grows, until `close` at the latest. A message that is being sent holds it up no more than its bytes take
    to be made."""

    def __init__(self, grow: Callable[[], Iterable[TimedDelta]]) -> None:
        self._ready: Queue[TimedDelta | Exception | None] = Queue(MAX_QUEUED_DELTAS)
        self._closed = False
        self._error: Exception | None = None  # what ended it
        self._ended = False
        Thread(target=self._run, args=(grow,), name="growth", daemon=True).start()

    def take(self, *, join: Callable[[], bool]) -> list[TimedDelta]:
        """What has grown since it was asked last, waited for; nothing: there is no more. `join`: whether several deltas
        of a round go as one, asked once there are some: only then is the request open that says so. Raises what
        growing has raised."""
        told: list[TimedDelta] = []
        while not self._ended:
            try:
                each = self._ready.get(block=not told)
            except Empty:
                break
            if isinstance(each, tuple):
                told.append(each)
            else:
                self._ended, self._error = True, each
        if not told and self._error is not None:
            raise self._error
        return _merge(told) if told and join() else told

    def close(self) -> None:
        """Nobody takes any more."""
        self._closed = True

    def _run(self, grow: Callable[[], Iterable[TimedDelta]]) -> None:
        try:
            for each in grow():
                if not self._put(each):
                    return
            self._put(None)
        except Exception as error:
            self._put(error)

    def _put(self, what: TimedDelta | Exception | None) -> bool:
        while not self._closed:
            try:
                self._ready.put(what, timeout=POLL_S)
                return True
            except Full:
                continue
        return False


def _merge(told: list[TimedDelta]) -> list[TimedDelta]:
    """Those of a round as one, which has cost what they have cost. That there is no more to come is told apart."""
    found: list[TimedDelta] = []
    for _, same in groupby(told, lambda each: (each[0].request, each[0].round, len(each[0]) == 0)):
        some = [*same]
        costs = [cost for _, cost in some if cost is not None]
        for cost in costs[1:]:
            costs[0].wall += cost.wall
            costs[0].queue += cost.queue
            costs[0].model += cost.model
        found.append((merge_deltas([delta for delta, _ in some]), costs[0] if costs else None))
    return found
