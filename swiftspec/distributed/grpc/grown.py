"""What a draft's tree has grown, on its way from the thread that grows it to the one that sends it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby
from queue import Empty, SimpleQueue
from threading import Thread

from swiftspec.distributed.grpc import swiftspec_pb2 as pb
from swiftspec.tree.replica import TreeDelta, joined

Telling = tuple[TreeDelta, pb.Telemetry | None]


class Grown:
    """A thread grows. A message that is being sent holds it up no more than its bytes take to be made."""

    def __init__(self, grow: Callable[[], Iterable[Telling]]) -> None:
        self._ready: SimpleQueue[Telling | Exception | None] = SimpleQueue()
        Thread(target=self._run, args=(grow,), name="growth", daemon=True).start()

    def take(self, *, join: bool) -> list[Telling]:
        """What has grown since it was asked last, waited for; nothing: there is no more. `join`: several deltas of a
        round as one. Raises what growing has raised."""
        come, more = [self._ready.get()], True
        while more and isinstance(come[-1], tuple):
            try:
                come.append(self._ready.get_nowait())
            except Empty:
                more = False
        last = come[-1]
        told = [each for each in come if isinstance(each, tuple)]
        if not isinstance(last, tuple):
            if told:
                self._ready.put(last)  # the next one that is taken: nothing comes after it
            elif last is not None:
                raise last
        return _joined(told) if join else told

    def _run(self, grow: Callable[[], Iterable[Telling]]) -> None:
        try:
            for each in grow():
                self._ready.put(each)
            self._ready.put(None)
        except Exception as error:
            self._ready.put(error)


def _joined(told: list[Telling]) -> list[Telling]:
    """Those of a round as one, which has cost what they have cost. That there is no more to come is told apart."""
    found: list[Telling] = []
    for _, same in groupby(told, lambda each: (each[0].round, len(each[0]) == 0)):
        some = [*same]
        costs = [cost for _, cost in some if cost is not None]
        for cost in costs[1:]:
            costs[0].wall += cost.wall
            costs[0].queue += cost.queue
            costs[0].model += cost.model
        found.append((joined([delta for delta, _ in some]), costs[0] if costs else None))
    return found
