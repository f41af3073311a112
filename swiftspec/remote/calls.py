"""One group, one mind: what the leader of a group does on its roles, its followers do too, call by call.

A group's logits are bitwise equal on all its ranks, so the same calls in the same order have the same results
everywhere and nothing inside a round needs a word. Only the leader sees clocks, sockets and the user.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol, TypeVar

import numpy as np

from swiftspec.batch import Opening, Proposal, VerifyResult, Words
from swiftspec.errors import RankLost
from swiftspec.params import SamplingParams
from swiftspec.remote.channel import Channel
from swiftspec.worker.drafter import FAILURES
from swiftspec.worker.local_drafter import LocalDrafter
from swiftspec.worker.verifier import LocalPending, LocalVerifier

T = TypeVar("T")


class Call(IntEnum):
    """The kinds of messages; those after LEAVE go upwards."""

    VERIFIER_OPEN = 1
    VERIFY = 2
    VERIFIER_CLOSE = 3
    DRAFTER_OPEN = 4
    PROPOSE = 5
    GROW = 6
    OBSERVE = 7
    DRAFTER_CLOSE = 8
    STEPS = 9
    PACE = 10
    LEAVE = 11
    READY = 12
    PROPOSAL = 13
    TIME = 14
    LOST = 15


@dataclass(frozen=True, slots=True)
class Number:
    """A message of one word."""

    value: int

    def pack(self) -> Words:
        return np.array([self.value], np.int32)


def to_words(text: str) -> Words:
    """Text as int32 words, filled up with blanks."""
    data = text.encode()
    return np.frombuffer(data.ljust(-(-len(data) // 4) * 4), np.int32)


def to_text(words: Words) -> str:
    """The inverse of `to_words`."""
    return words.tobytes().decode(errors="replace").rstrip()


class Message(Protocol):
    """What has a flat form."""

    def pack(self) -> Words: ...


def tell(followers: Sequence[Channel], call: Call, message: Message | None = None) -> None:
    """Sends a call to all followers. Raises RankLost when one is gone, since its group cannot go on without it."""
    if not followers:
        return
    words = None if message is None else message.pack()
    for follower in followers:
        try:
            follower.send(call, words)
        except ConnectionError as error:
            raise RankLost(str(error)) from None


class LeadingVerifier:
    """The verifier of a group's leader."""

    def __init__(self, verifier: LocalVerifier, followers: Sequence[Channel]) -> None:
        self._verifier = verifier
        self._followers = followers

    @property
    def busy(self) -> float:
        return self._verifier.busy

    def open(self, request: int, tokens: Sequence[int], sampling: SamplingParams, prompt_len: int) -> None:
        tell(self._followers, Call.VERIFIER_OPEN, Opening(request, tuple(tokens), sampling, prompt_len))
        self._verifier.open(request, tokens, sampling, prompt_len)

    def submit(self, proposal: Proposal) -> LocalPending:
        return LocalPending(self, proposal)

    def verify(self, proposal: Proposal) -> VerifyResult:
        """As `LocalVerifier.verify`, on all ranks of the group."""
        tell(self._followers, Call.VERIFY, proposal)
        return self._verifier.verify(proposal)

    def settle(self) -> None:
        self._verifier.settle()  # a follower does so at once

    def close(self) -> None:
        tell(self._followers, Call.VERIFIER_CLOSE)
        self._verifier.close()


class LeadingDrafter:
    """The drafter of a group's leader."""

    def __init__(self, drafter: LocalDrafter, followers: Sequence[Channel]) -> None:
        self._drafter = drafter
        self._followers = followers

    @property
    def busy(self) -> float:
        return self._drafter.busy

    @property
    def steps(self) -> int:
        """d, the expansions of a round."""
        return self._drafter.steps

    @steps.setter
    def steps(self, steps: int) -> None:
        tell(self._followers, Call.STEPS, Number(steps))
        self._drafter.steps = steps

    def open(self, request: int, tokens: Sequence[int], sampling: SamplingParams, prompt_len: int) -> None:
        tell(self._followers, Call.DRAFTER_OPEN, Opening(request, tuple(tokens), sampling, prompt_len))
        self._together(lambda: self._drafter.open(request, tokens, sampling, prompt_len))

    def propose(self) -> Proposal:
        tell(self._followers, Call.PROPOSE)
        return self._together(self._drafter.propose)

    def grow(self) -> None:
        tell(self._followers, Call.GROW)
        self._together(self._drafter.grow)

    def observe(self, result: VerifyResult) -> None:
        tell(self._followers, Call.OBSERVE, result)
        self._together(lambda: self._drafter.observe(result))

    def close(self) -> None:
        tell(self._followers, Call.DRAFTER_CLOSE)
        self._drafter.close()

    def _together(self, act: Callable[[], T]) -> T:
        """Alone a leader may fail and be asked again. With followers it cannot: they are in the middle of the call."""
        try:
            return act()
        except FAILURES as error:
            if self._followers:
                raise RankLost(f"the draft model failed: {error}") from error
            raise


def follow(leader: Channel, verifier: LocalVerifier | None, drafter: LocalDrafter | None) -> None:
    """What a follower does: the leader's calls on its own roles, until the leader leaves. Raises RankLost when the
    leader is gone without a word."""
    while True:
        try:
            call, words = leader.recv()
        except ConnectionError as error:
            raise RankLost(str(error)) from None
        if call == Call.LEAVE:
            return
        _obey(Call(call), words, verifier, drafter)


def _obey(call: Call, words: Words, verifier: LocalVerifier | None, drafter: LocalDrafter | None) -> None:
    if call in (Call.VERIFIER_OPEN, Call.VERIFY, Call.VERIFIER_CLOSE):
        assert verifier is not None
        if call == Call.VERIFIER_OPEN:
            opening = Opening.unpack(words)
            verifier.open(opening.request, opening.tokens, opening.sampling, opening.prompt_len)
        elif call == Call.VERIFY:
            verifier.verify(Proposal.unpack(words))
            verifier.settle()
        else:
            verifier.close()
        return
    assert drafter is not None
    match call:
        case Call.DRAFTER_OPEN:
            opening = Opening.unpack(words)
            drafter.open(opening.request, opening.tokens, opening.sampling, opening.prompt_len)
        case Call.PROPOSE:
            drafter.propose()
        case Call.GROW:
            drafter.grow()
        case Call.OBSERVE:
            drafter.observe(VerifyResult.unpack(words))
        case Call.DRAFTER_CLOSE:
            drafter.close()
        case Call.STEPS:
            drafter.steps = int(words[0])
        case _:
            raise ValueError(f"a leader does not send {call.name}")
