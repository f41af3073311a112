"""Commands that arrive during a prefill are neither lost nor processed twice."""

from __future__ import annotations

from typing import Any

import pytest

from swiftspec.distributed.group.command_stream import CommandStream
from swiftspec.distributed.transport.opcodes import Opcode
from swiftspec.errors import RankLost

GO_ON, CLOSE, STEPS, OPEN = (
    int(call) for call in (Opcode.PREFILL_CONTINUE, Opcode.DRAFTER_CLOSE, Opcode.SET_DRAFT_STEPS, Opcode.DRAFTER_OPEN)
)


class FakeChannel:
    """A channel that delivers messages of these kinds, then nothing; with `gone` it raises instead."""

    def __init__(self, *kinds: int, lost: bool = False) -> None:
        self.kinds, self.lost, self.peer = list(kinds), lost, "rank 0"

    def recv(self, timeout: float | None = None) -> tuple[int, list[int]]:
        if self.kinds:
            return self.kinds.pop(0), []
        raise ConnectionError("rank 0 is gone") if self.lost else TimeoutError


def command_stream(*kinds: int, lost: bool = False) -> CommandStream:
    giver: Any = FakeChannel(*kinds, lost=lost)
    return CommandStream(giver)


def test_a_follower_prefills_until_it_receives_another_opcode() -> None:
    commands = command_stream(GO_ON, GO_ON, CLOSE, OPEN)
    assert [commands.prefill_aborted() for _ in range(3)] == [False, False, True]
    assert [commands.recv()[0] for _ in range(2)] == [CLOSE, OPEN]


def test_a_follower_reports_a_lost_leader() -> None:
    with pytest.raises(RankLost, match="is gone"):
        command_stream(lost=True).prefill_aborted()


def test_a_draft_continues_until_the_end_of_its_request() -> None:
    commands = command_stream(STEPS, CLOSE)
    assert commands.request_ended()
    assert [commands.recv()[0] for _ in range(2)] == [STEPS, CLOSE], "in their order, and none is lost"
    assert not command_stream(STEPS).request_ended() and command_stream(lost=True).request_ended()
