"""Queue of tree deltas between the thread that expands the tree and the thread that sends them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby
from queue import Empty, Full, Queue
from threading import Thread

from swiftspec.distributed.rpc import swiftspec_pb2 as pb
from swiftspec.tree.replica import TreeDelta, merge_deltas

TimedDelta = tuple[TreeDelta, pb.Telemetry | None]
MAX_QUEUED_DELTAS = 64  # unsent deltas; beyond that, expansion blocks
POLL_S = 1.0  # seconds between two checks whether the queue was closed


class TreeDeltaQueue:
    """Queue that a background thread fills with the deltas of `grow`, until `grow` ends or `close` is called.

    Sending a message delays the expansions only while the message is serialized, because serialization holds the GIL.
    """

    def __init__(self, grow: Callable[[], Iterable[TimedDelta]]) -> None:
        self._ready: Queue[TimedDelta | Exception | None] = Queue(MAX_QUEUED_DELTAS)
        self._closed = False
        self._error: Exception | None = None  # the exception that `grow` has raised
        self._ended = False
        Thread(target=self._run, args=(grow,), name="growth", daemon=True).start()

    def take(self, *, join: Callable[[], bool]) -> list[TimedDelta]:
        """Blocks until there are new deltas and returns them. Returns an empty list if `grow` has ended, and raises its
        exception if it has failed.

        `join`: returns whether the deltas of one round are merged. It is called only once a delta exists, because its
        answer depends on the open request.
        """
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
        """Stops the thread at its next delta. Deltas in the queue are discarded."""
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
    """Merges the deltas of each round and sums their telemetry. Empty deltas, which end a round, stay separate."""
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
