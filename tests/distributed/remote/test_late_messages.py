"""Messages that are late, repeated, too short or of another place in the request, over each transport: an answer of an
earlier round is discarded, and anything else that does not fit is refused in one line."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from swiftspec.config import EngineConfig
from swiftspec.distributed.remote import client
from swiftspec.distributed.remote.client import DrafterLate, DraftLink, RemoteDrafter
from swiftspec.distributed.remote.remote_verifier import RemoteVerifier
from swiftspec.distributed.remote.served_roles import ServedDrafter, ServedRole
from swiftspec.distributed.remote.server_link import ServerLink
from swiftspec.distributed.remote.session_messages import (
    ErrorCode,
    ModelIdentity,
    ModelInfo,
    SessionStart,
    pack_error,
    unpack_error,
    unpack_timed,
)
from swiftspec.distributed.remote.sessions import WorkerSessions
from swiftspec.distributed.remote.worker import Worker
from swiftspec.distributed.transport.codec import Frame, Words, pack_message, pack_scored_result, unpack_proposal
from swiftspec.distributed.transport.opcodes import Opcode
from swiftspec.distributed.transport.request_state import ModelLimits, RequestState
from swiftspec.distributed.transport.transport import Transport
from swiftspec.errors import DrafterLost, UserError
from swiftspec.messages import Proposal, RequestStart, VerifyResult
from swiftspec.params import SamplingParams
from swiftspec.runtime.cancellation import CancelCheck
from tests.support.proposals import draft_proposal
from tests.support.transports import KINDS, both_ends

BOUNDS = ModelLimits(40, 200, 8)
START = RequestStart(2, (4, 5), SamplingParams(temperature=0), 2)
RESULT = VerifyResult(2, 0, 1, (0,), (9,))
CURRENT = draft_proposal(2, 1, 2, (9, 3), (-1, 0))  # after RESULT
Ends = tuple[Transport, Transport]


@pytest.fixture(params=KINDS)
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    with both_ends(request.param) as ends:
        yield ends


def sent_proposal(proposal: Proposal) -> Frame:
    return Opcode.PROPOSAL, [0, *pack_message(proposal)]


def receive_until(far: Transport, wanted: Opcode) -> Words:
    while (frame := far.recv(10))[0] != wanted:
        pass
    return frame[1]


def drafting(ends: Ends) -> RemoteDrafter:
    """A client that waits for the proposal of round 1."""
    near, far = ends
    link = DraftLink(ServerLink(near, RequestState(BOUNDS), "draft"), answer_timeout_s=10, open_timeout_s=10)
    drafter = RemoteDrafter(link, 3)
    drafter.open(START)
    receive_until(far, Opcode.DRAFTER_OPEN)
    far.send(*sent_proposal(draft_proposal(2, 0, 1, (5,), (-1,))))
    drafter.propose()
    drafter.observe(RESULT)
    receive_until(far, Opcode.OBSERVE)
    return drafter


LATE = {
    "of an earlier request": sent_proposal(draft_proposal(1, 1, 2, (9, 3), (-1, 0))),
    "of an earlier round": sent_proposal(draft_proposal(2, 0, 1, (5,), (-1,))),
    "error of an earlier request": (Opcode.ERROR, pack_error((1, 5, 9), ErrorCode.FAILED, "out of memory")),
    "error of an earlier round": (Opcode.ERROR, pack_error((2, 0, 1), ErrorCode.STALE, "round 0 has already ended")),
}


@pytest.mark.parametrize("name", LATE)
def test_a_late_answer_of_a_draft_is_discarded(ends: Ends, name: str) -> None:
    drafter = drafting(ends)
    ends[1].send(*LATE[name])
    ends[1].send(*sent_proposal(CURRENT))
    assert drafter.propose() == CURRENT


def test_a_draft_that_sends_only_other_messages_is_late(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = drafting(ends)
    monkeypatch.setattr(client, "LATE_DRAIN_S", -1.0)
    for _ in range(3):
        ends[1].send(Opcode.STEP_TIMES, [1, 1])
    drafter.link.answer_timeout_s = 0.5
    with pytest.raises(DrafterLate):
        drafter.propose()
    kind, words = ends[0].recv(10)
    assert (kind, list(words)) == (Opcode.STEP_TIMES, [1, 1]), "it has not read all of them"


def test_a_draft_may_answer_after_the_timeout(ends: Ends) -> None:
    drafter = drafting(ends)
    drafter.link.answer_timeout_s = 0.01
    with pytest.raises(DrafterLate, match="did not answer in time"):
        drafter.propose()
    assert not drafter.poll()
    ends[1].send(*sent_proposal(CURRENT))
    drafter.link.answer_timeout_s = 10
    assert drafter.propose() == CURRENT


WRONG = {
    "no words": (Opcode.PROPOSAL, []),
    "without nodes": (Opcode.PROPOSAL, [0, 2, 1, 2]),
    "cut off": (Opcode.PROPOSAL, sent_proposal(CURRENT)[1][:-1]),
    "another base length": sent_proposal(draft_proposal(2, 1, 3, (9, 3), (-1, 0))),
    "a later round": sent_proposal(draft_proposal(2, 2, 2, (9, 3), (-1, 0))),
    "another root": sent_proposal(draft_proposal(2, 1, 2, (8, 3), (-1, 0))),
    "a short error": (Opcode.ERROR, [2]),
    "another opcode": (Opcode.VERIFY, []),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_invalid_answer_of_a_draft_loses_the_request(ends: Ends, name: str) -> None:
    drafter = drafting(ends)
    ends[1].send(*WRONG[name])
    with pytest.raises(DrafterLost, match="sent an invalid message") as caught:
        drafter.propose()
    assert "\n" not in str(caught.value)
    assert drafter.link.lost_reason is None, "the next request uses the draft"


def play_worker(far: Transport, answer: Frame) -> None:
    """A worker that opens the request, and answers the proposal with `answer`."""
    receive_until(far, Opcode.VERIFIER_OPEN)
    far.send(Opcode.SESSION_ATTACHED, [1, 2, 3, 4])
    far.send(Opcode.REQUEST_OPENED, [7, 2, 0, 1, 0])
    receive_until(far, Opcode.VERIFY)
    far.send(*answer)


def verify(ends: Ends, answer: Frame) -> VerifyResult:
    near, far = ends
    worker = threading.Thread(target=play_worker, args=(far, answer))
    worker.start()
    try:
        session = SessionStart(ModelIdentity("", ""), EngineConfig("serial"))
        verifier = RemoteVerifier(near, session, BOUNDS, 10.0)
        assert verifier.open(START) == 0
        return verifier.submit(Proposal.root_only(2, 0, 1, 5)).wait()
    finally:
        worker.join(10)


def test_a_result_over_each_transport(ends: Ends) -> None:
    assert verify(ends, (Opcode.RESULT, [3, *pack_scored_result(RESULT)])) == RESULT


BAD_RESULTS = {
    "no words": (Opcode.RESULT, []),
    "cut off": (Opcode.RESULT, [0, *pack_scored_result(RESULT)[:-1]]),
    "too long": (Opcode.RESULT, [0, *pack_scored_result(RESULT), 0]),
    "another request": (Opcode.RESULT, [0, *pack_scored_result(replace(RESULT, request=1))]),
    "another round": (Opcode.RESULT, [0, *pack_scored_result(replace(RESULT, round=1))]),
    "another base length": (Opcode.RESULT, [0, *pack_scored_result(replace(RESULT, prefix_len=2))]),
    "a path outside the proposal": (
        Opcode.RESULT,
        [0, *pack_scored_result(replace(RESULT, path=(0, 1), tokens=(9, 9)))],
    ),
    "a negative time": (Opcode.RESULT, [-1, *pack_scored_result(RESULT)]),
    "short times": (Opcode.TIMED_ANSWER, [1, 2, 3]),
}


@pytest.mark.parametrize("name", BAD_RESULTS)
def test_an_invalid_result_gives_no_token(ends: Ends, name: str) -> None:
    with pytest.raises(UserError, match="sent an invalid") as caught:
        verify(ends, BAD_RESULTS[name])
    assert "\n" not in str(caught.value)


class FixedDrafter:
    """Proposes the root and one token."""

    busy, draft_steps, lost_reason = 0.0, 3, None

    def open(self, start: RequestStart) -> None:
        self.request, self.round, self.at, self.root = start.request, 0, len(start.tokens) - 1, start.tokens[-1]

    def propose(self) -> Proposal:
        return draft_proposal(self.request, self.round, self.at, (self.root, 3), (-1, 0))

    def observe(self, result: VerifyResult) -> None:
        self.round, self.at, self.root = result.round + 1, self.at + len(result.tokens), result.tokens[-1]

    def grow(self) -> None: ...
    def close(self) -> None: ...


def serve(far: Transport) -> None:
    """A worker over any transport, for one stream."""

    def make(shape: EngineConfig, masked: tuple[int, ...]) -> ServedRole:
        return ServedDrafter(FixedDrafter(), BOUNDS, CancelCheck(), shape)

    sessions = WorkerSessions(make, 2, 60.0)
    for frame in Worker("draft", ModelInfo("", "", "", 40, 200, (), ""), sessions).serve(far):
        far.send(*frame)


def refused(near: Transport, words: Words) -> tuple[int, int, int, str]:
    near.send(Opcode.OBSERVE, words)
    kind, words = near.recv(10)
    assert kind == Opcode.ERROR
    return unpack_error(words)


def test_late_and_short_messages_to_a_server(ends: Ends) -> None:
    near, far = ends
    server = threading.Thread(target=serve, args=(far,))
    server.start()
    near.send(Opcode.SESSION_ATTACH, SessionStart(ModelIdentity("", ""), EngineConfig("serial")).pack())
    near.send(Opcode.DRAFTER_OPEN, pack_message(START))
    assert [near.recv(10)[0] for _ in range(2)] == [Opcode.SESSION_ATTACHED, Opcode.TIMED_ANSWER]
    near.send(Opcode.OBSERVE, pack_message(RESULT))
    assert near.recv(10)[0] == Opcode.TIMED_ANSWER
    late = pack_message(replace(RESULT, tokens=(8,)))
    assert refused(near, late) == (2, 1, ErrorCode.STALE, "round 0 has already ended; expected round 1")
    assert refused(near, late[:3])[2] == ErrorCode.FAILED
    assert "request 2 at 9" in refused(near, pack_message(replace(RESULT, round=1, prefix_len=9)))[3]
    assert "request 3" in refused(near, pack_message(replace(RESULT, request=3)))[3]
    near.send(Opcode.OBSERVE, pack_message(VerifyResult(2, 1, 2, (0,), (7,))))
    times, kind, words = unpack_timed(near.recv(10)[1])
    assert (times.wall > 0, kind) == (True, Opcode.PROPOSAL)
    assert unpack_proposal(words[1:]) == draft_proposal(2, 2, 3, (7, 3), (-1, 0)), (
        "what was refused has changed nothing"
    )
    near.send(Opcode.DRAFTER_CLOSE)
    server.join(10)
    assert not server.is_alive()
