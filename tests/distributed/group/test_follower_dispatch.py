"""A follower executes the commands of its leader if their order is valid."""

from __future__ import annotations

from typing import Any

import pytest

from swiftspec.distributed.group.follower_dispatch import FollowerDispatcher
from swiftspec.distributed.transport.codec import Words, pack_message
from swiftspec.distributed.transport.opcodes import Opcode
from swiftspec.messages import Proposal, RequestStart, VerifyResult
from swiftspec.params import SamplingParams
from tests.support.fuzz.message_words import BOUNDS
from tests.support.fuzz.roles import FakeRole

OPENING = pack_message(RequestStart(1, (3, 1, 4), SamplingParams(), 3, "eager", (0,)))
PROPOSAL, RESULT = pack_message(Proposal.root_only(1, 0, 2, 4)), pack_message(VerifyResult(1, 0, 2, (0,), (9,)))


def follower(*, drafts: bool) -> FollowerDispatcher:
    role: Any = FakeRole()
    return FollowerDispatcher(None, role, None, BOUNDS) if drafts else FollowerDispatcher(role, None, None, BOUNDS)


def test_commands_in_a_valid_order_are_executed() -> None:
    dispatcher = follower(drafts=False)
    for kind, words in ((Opcode.VERIFIER_OPEN, OPENING), (Opcode.VERIFY, PROPOSAL), (Opcode.VERIFIER_CLOSE, [])):
        dispatcher.decode(kind, words)()
    dispatcher = follower(drafts=True)
    for kind, words in (
        (Opcode.SET_DRAFT_STEPS, [5]),
        (Opcode.DRAFTER_OPEN, OPENING),
        (Opcode.EXPAND, []),
        (Opcode.OBSERVE, RESULT),
    ):
        dispatcher.decode(kind, words)()


@pytest.mark.parametrize(
    ("drafts", "kind", "words", "message"),
    [
        (False, Opcode.VERIFY, PROPOSAL, "no request is open"),
        (True, Opcode.PROPOSE, [], "no request is open"),
        (True, Opcode.EXPAND, [], "no request is open"),
        (True, Opcode.OBSERVE, RESULT, "no request is open"),
        (True, Opcode.SET_DRAFT_STEPS, [], "must be one word, not 0"),
        (True, Opcode.SET_DRAFT_STEPS, [10**6], r"steps must lie in 1\.\.64"),
        (True, Opcode.VERIFY, PROPOSAL, "unexpected opcode 2 from the leader"),
        (False, Opcode.POPULATION_ROUND, [], "unexpected opcode 12 from the leader"),
        (False, 99, [], "unexpected opcode 99 from the leader"),
        (
            False,
            Opcode.VERIFIER_OPEN,
            pack_message(RequestStart(1, (3,), SamplingParams(), 1, "magic")),
            "names an executor that this rank does not have",
        ),
        (
            False,
            Opcode.VERIFIER_OPEN,
            pack_message(RequestStart(1, (3, 4), SamplingParams(), 2, "eager", (1,))),
            "this rank has",
        ),
        (
            True,
            Opcode.DRAFTER_OPEN,
            pack_message(RequestStart(1, (3, 4), SamplingParams(), 2, "eager")),
            "this rank has",
        ),
    ],
)
def test_commands_in_another_order_are_refused(drafts: bool, kind: int, words: Words, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        follower(drafts=drafts).decode(kind, words)
