"""Tree deltas on their way to the sender: pending ones are merged, in order, and none is lost."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Event, Timer

import numpy as np
import pytest

from swiftspec.config import EngineConfig
from swiftspec.distributed.group.request_state import ModelLimits
from swiftspec.distributed.rpc import swiftspec_pb2 as pb
from swiftspec.distributed.rpc.draft_stream import DraftStream
from swiftspec.distributed.rpc.protobuf_codec import ModelIdentity, delta_to_proto
from swiftspec.distributed.rpc.tree_delta_queue import MAX_QUEUED_DELTAS, TimedDelta, TreeDeltaQueue
from swiftspec.messages import RequestStart, VerifyResult
from swiftspec.params import SamplingParams
from swiftspec.tree.replica import TreeDelta


def delta(round_: int, first: int, count: int = 2, request: int = 1) -> TreeDelta:
    parents = np.full(count, first - 1)
    return TreeDelta(request, round_, 1, first, parents, np.arange(count), np.full(count, -1.0))


COST = pb.Telemetry(span=7, wall=3, model=2)


def taken(grown: TreeDeltaQueue, *, join: bool) -> list[TimedDelta]:
    """All deltas until the end."""
    found: list[TimedDelta] = []
    while together := grown.take(join=lambda: join):
        found += together
    return found


@pytest.mark.parametrize("join", [False, True])
def test_pending_deltas_are_merged_and_the_end_is_separate(join: bool) -> None:
    arrived, sent = Event(), [delta(0, 1), delta(0, 3), delta(0, 5, 0), delta(1, 5), delta(1, 7)]

    def grow() -> Iterator[TimedDelta]:
        yield from ((each, pb.Telemetry.FromString(COST.SerializeToString())) for each in sent)
        arrived.set()

    grown = TreeDeltaQueue(grow)
    assert arrived.wait(10)
    found = taken(grown, join=join)
    shapes = [(each.round, each.first, len(each), each.expansions) for each, _ in found]
    whole = [(0, 1, 4, 2), (0, 5, 0, 1), (1, 5, 4, 2)]
    assert shapes == (whole if join else [(each.round, each.first, len(each), 1) for each in sent])
    assert sum(cost.wall for _, cost in found if cost is not None) == 15


def test_deltas_of_different_requests_are_separate_and_join_is_evaluated_on_the_first_delta() -> None:
    waits, opened, joins, arrived = Event(), Event(), list[bool](), Event()

    def grow() -> Iterator[TimedDelta]:
        assert waits.wait(10)
        opened.set()
        yield delta(0, 1), None

    def join() -> bool:
        joins.append(opened.is_set())
        return True

    grown = TreeDeltaQueue(grow)
    Timer(0.05, waits.set).start()  # while `take` waits
    assert len(grown.take(join=join)) == 1 and joins == [True]

    def both() -> Iterator[TimedDelta]:
        yield from ((delta(0, 1 + 2 * number, request=request), None) for request in (1, 2) for number in range(2))
        arrived.set()

    grown = TreeDeltaQueue(both)
    assert arrived.wait(10)
    assert [(each.request, each.first, len(each)) for each, _ in taken(grown, join=True)] == [(1, 1, 4), (2, 1, 4)]


def test_an_exception_of_an_expansion_is_raised_after_the_pending_deltas() -> None:
    def grow() -> Iterator[TimedDelta]:
        yield delta(0, 1), None
        raise ValueError("no more")

    grown = TreeDeltaQueue(grow)
    assert [each.first for each, _ in grown.take(join=lambda: True)] == [1]
    with pytest.raises(ValueError, match="no more"):
        grown.take(join=lambda: True)


def test_a_tree_stops_expanding_when_its_deltas_are_not_read() -> None:
    more = Event()

    def grow() -> Iterator[TimedDelta]:
        for number in range(MAX_QUEUED_DELTAS + 2):
            if number == MAX_QUEUED_DELTAS + 1:
                more.set()
            yield delta(0, 1 + 2 * number), None

    grown = TreeDeltaQueue(grow)
    assert not more.wait(0.3)
    assert len(taken(grown, join=False)) == MAX_QUEUED_DELTAS + 2 and more.is_set()
    stuck = TreeDeltaQueue(grow)
    stuck.close()


def test_the_time_of_expansions_is_attributed_to_the_request_message() -> None:
    class Link:
        peer = "--draft-url"

        def __init__(self) -> None:
            self.pending = [(0, 1, COST), (0, 3, None), (1, 5, COST)]

        def stream(self) -> Link:
            return self

        def send(self, message: pb.DraftRequest) -> None: ...

        def recv(self, timeout: float) -> pb.DraftAnswer:
            round_, first, cost = self.pending.pop(0)
            return pb.DraftAnswer(delta=delta_to_proto(delta(round_, first)), telemetry=cost)

    stream = DraftStream(Link(), EngineConfig(mode="async"), ModelLimits(64, 100, 16), 1.0)  # type: ignore[arg-type]
    stream.attach(ModelIdentity(b"", b""))
    stream.open(RequestStart(1, (5, 17), SamplingParams(), 2), 0)
    stream.send_result(VerifyResult(1, 0, 1, (0,), (9,)), 0)
    for _ in range(3):
        stream.recv(None)
    start, result = stream.rpc_log.drain()
    assert (start.round, result.round) == (-1, 0) and start.asked < result.asked
