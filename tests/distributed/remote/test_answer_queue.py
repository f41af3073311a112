"""Tree deltas on their way to the sender: pending ones are merged, in order, and none is lost."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Event
from typing import Any

import numpy as np
import pytest

from swiftspec.config import EngineConfig
from swiftspec.distributed.remote.answer_queue import MAX_QUEUED_ANSWERS, AnswerQueue
from swiftspec.distributed.remote.client import DraftLink
from swiftspec.distributed.remote.server_link import ServerLink
from swiftspec.distributed.remote.session_messages import Answer, AnswerTimes, ModelIdentity, SessionStart
from swiftspec.distributed.transport.opcodes import Opcode
from swiftspec.distributed.transport.request_state import ModelLimits, RequestState
from swiftspec.messages import RequestStart, VerifyResult
from swiftspec.params import SamplingParams
from swiftspec.tree.replica import TreeDelta
from tests.support.fuzz.roles import FakeChannel

TIMES = AnswerTimes(span=7, began=1, wall=3, queue=0)


def delta(
    round_: int, first: int, count: int = 2, request: int = 1, times: AnswerTimes | None = TIMES, merge: bool = True
) -> Answer:
    nodes = np.full(count, first - 1), np.arange(count), np.full(count, -1.0)
    cost = 0 if times is None else 2
    return Answer(Opcode.TREE_DELTA, TreeDelta(request, round_, 1 + round_, 1, first, *nodes), cost, times, merge)


def taken(queue: AnswerQueue) -> list[Answer]:
    """All answers until the end."""
    found: list[Answer] = []
    while together := queue.take():
        found += together
    return found


def place(answer: Answer) -> tuple[int, int, int, int]:
    assert isinstance(answer.words, TreeDelta)
    return answer.words.round, answer.words.first, len(answer.words), answer.words.expansions


@pytest.mark.parametrize("merge", [False, True])
def test_pending_deltas_are_merged_and_the_end_is_separate(merge: bool) -> None:
    arrived, places = Event(), [(0, 1, 2), (0, 3, 2), (0, 5, 0), (1, 5, 2), (1, 7, 2)]

    def answers() -> Iterator[Answer]:
        yield from (delta(*place, merge=merge) for place in places)
        arrived.set()

    queue = AnswerQueue(answers())
    assert arrived.wait(10)
    found = taken(queue)
    whole = [(0, 1, 4, 2), (0, 5, 0, 1), (1, 5, 4, 2)]
    assert [place(each) for each in found] == (whole if merge else [(*each, 1) for each in places])
    assert sum(each.times.wall for each in found if each.times is not None) == 15
    assert sum(each.model_us or 0 for each in found) == 10


def test_deltas_of_different_requests_and_other_answers_are_separate() -> None:
    arrived = Event()

    def answers() -> Iterator[Answer]:
        yield from (delta(0, 1 + 2 * number, request=request) for request in (1, 2) for number in range(2))
        yield Answer(Opcode.ERROR, [1])
        yield Answer(Opcode.ERROR, [2])
        arrived.set()

    queue = AnswerQueue(answers())
    assert arrived.wait(10)
    *deltas, one, two = taken(queue)
    assert [place(each) for each in deltas] == [(0, 1, 4, 2), (0, 1, 4, 2)]
    assert [one.words, two.words] == [[1], [2]]


def test_an_exception_is_raised_after_the_pending_answers() -> None:
    def answers() -> Iterator[Answer]:
        yield delta(0, 1)
        raise ValueError("no more")

    queue = AnswerQueue(answers())
    assert [place(each) for each in queue.take()] == [(0, 1, 2, 1)]
    with pytest.raises(ValueError, match="no more"):
        queue.take()


def test_a_tree_stops_expanding_when_its_deltas_are_not_read() -> None:
    more = Event()

    def answers() -> Iterator[Answer]:
        for number in range(MAX_QUEUED_ANSWERS + 2):
            if number == MAX_QUEUED_ANSWERS + 1:
                more.set()
            yield delta(0, 1 + 2 * number, merge=False)

    queue = AnswerQueue(answers())
    assert not more.wait(0.3)
    assert len(taken(queue)) == MAX_QUEUED_ANSWERS + 2 and more.is_set()
    stuck = AnswerQueue(answers())
    stuck.close()


def make_link(transport: Any) -> DraftLink:
    session = SessionStart(ModelIdentity("", ""), EngineConfig(mode="async"))
    return DraftLink(ServerLink(transport, RequestState(ModelLimits(64, 100, 16)), "draft", session))


def test_the_first_answer_of_a_late_opened_request_has_time_for_the_prefill() -> None:
    transport: Any = FakeChannel([])
    link = make_link(transport)
    link.answer_timeout_s, link.open_timeout_s = 1.0, 9.0
    link.open(RequestStart(1, (5, 17), SamplingParams(), 2), None)
    link.send_result(VerifyResult(1, 0, 1, (0,), (9,)))
    link.note_answer(0)
    assert link.timeout_s == 9.0
    link.note_answer(1)
    assert link.timeout_s == 1.0


def test_the_time_of_expansions_is_attributed_to_the_request_message() -> None:
    answers = [delta(0, 1), delta(0, 3, times=None), delta(1, 5)]
    transport: Any = FakeChannel([(int(kind), words) for kind, words in (each.frame() for each in answers)])
    link = make_link(transport)
    link.open(RequestStart(1, (5, 17), SamplingParams(), 2), None)
    link.send_result(VerifyResult(1, 0, 1, (0,), (9,)))
    for _ in range(3):
        link.recv(Opcode.TREE_DELTA, None)
    start, result = link.rpc_log.drain()
    assert (start.round, result.round) == (-1, 0) and start.asked < result.asked and result.model == 2000
    assert link.busy == pytest.approx(4e-6)
