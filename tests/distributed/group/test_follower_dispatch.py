"""A follower does what a leader may ask of it, in the order in which it may."""

from __future__ import annotations

from typing import Any

import pytest

from swiftspec.distributed.group.follower_dispatch import Follower
from swiftspec.distributed.transport.codec import Words, pack
from swiftspec.distributed.transport.opcodes import Call
from swiftspec.messages import Opening, Proposal, VerifyResult
from swiftspec.params import SamplingParams
from tests.support.fuzz.message_words import BOUNDS
from tests.support.fuzz.roles import FakeRole

OPENING = pack(Opening(1, (3, 1, 4), SamplingParams(), 3, "eager", (0,)))
PROPOSAL, RESULT = pack(Proposal.root_only(1, 0, 2, 4)), pack(VerifyResult(1, 0, 2, (0,), (9,)))


def follower(*, drafts: bool) -> Follower:
    role: Any = FakeRole()
    return Follower(None, role, None, BOUNDS) if drafts else Follower(role, None, None, BOUNDS)


def test_a_request_in_order() -> None:
    here = follower(drafts=False)
    for kind, words in ((Call.VERIFIER_OPEN, OPENING), (Call.VERIFY, PROPOSAL), (Call.VERIFIER_CLOSE, [])):
        here.read(kind, words)()
    here = follower(drafts=True)
    for kind, words in ((Call.STEPS, [5]), (Call.DRAFTER_OPEN, OPENING), (Call.GROW, []), (Call.OBSERVE, RESULT)):
        here.read(kind, words)()


@pytest.mark.parametrize(
    ("drafts", "kind", "words", "said"),
    [
        (False, Call.VERIFY, PROPOSAL, "no request is open"),
        (True, Call.PROPOSE, [], "no request is open"),
        (True, Call.GROW, [], "no request is open"),
        (True, Call.OBSERVE, RESULT, "no request is open"),
        (True, Call.STEPS, [], "not one number"),
        (True, Call.STEPS, [10**6], r"steps must lie in 1\.\.64"),
        (True, Call.VERIFY, PROPOSAL, "kind 2 to this rank"),
        (False, Call.POPULATION_ROUND, [], "kind 12 to this rank"),
        (False, 99, [], "kind 99 to this rank"),
        (False, Call.VERIFIER_OPEN, pack(Opening(1, (3,), SamplingParams(), 1, "magic")), "names no steps"),
        (False, Call.VERIFIER_OPEN, pack(Opening(1, (3, 4), SamplingParams(), 2, "eager", (1,))), "this rank has"),
        (True, Call.DRAFTER_OPEN, pack(Opening(1, (3, 4), SamplingParams(), 2, "eager")), "this rank has"),
    ],
)
def test_whatever_else_is_refused(drafts: bool, kind: int, words: Words, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        follower(drafts=drafts).read(kind, words)
