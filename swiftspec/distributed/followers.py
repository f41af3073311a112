"""One group, one mind: what the leader of a group does on its roles, its followers do too, call by call.

A group's logits are bitwise equal on all its ranks, so the same calls in the same order have the same results
everywhere and nothing inside a round needs a word. Only the leader sees clocks, sockets and the user.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial
from typing import Any, Protocol, TypeVar

from swiftspec.distributed.channel import Channel
from swiftspec.errors import RankLost
from swiftspec.messages import Opening, Proposal, VerifyResult, Words, bytes_to_words, words_to_bytes
from swiftspec.params import PopulationConfig, SamplingParams
from swiftspec.runtime.drafter import FAILURES, NearDrafter
from swiftspec.runtime.local_drafter import LocalDrafter
from swiftspec.runtime.runner import Runner
from swiftspec.runtime.verifier import LocalPending, LocalVerifier
from swiftspec.smc.population import SMC, Answer, Report

T = TypeVar("T")


class Call(IntEnum):
    """The kinds of messages. Those after LEAVE are answers; READY also carries rank 0's word at the start."""

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
    POPULATION_OPEN = 11
    POPULATION_ROUND = 12
    POPULATION_CLOSE = 13
    LEAVE = 14
    READY = 15
    PROPOSAL = 16
    TIME = 17
    LOST = 18
    TRACE = 19


@dataclass(frozen=True, slots=True)
class Number:
    """A message of one word."""

    value: int

    def pack(self) -> Words:
        return [self.value]


def to_words(text: str) -> Words:
    """Text as words, filled up with blanks."""
    return bytes_to_words(text.encode())


def to_text(words: Words) -> str:
    """The inverse of `to_words`."""
    return words_to_bytes(words).decode(errors="replace").rstrip()


class Message(Protocol):
    """What has a flat form."""

    def pack(self) -> Words: ...


class Team:
    """The followers of one leader. A call happens on all ranks of the group or, once one has failed in the middle, on
    none: nobody knows any more how far the others have come, so the leader raises RankLost from then on."""

    def __init__(self, followers: Sequence[Channel]) -> None:
        self._followers = followers
        self.broken: str | None = None  # why

    def call(self, call: Call, message: Message | None, act: Callable[[], T]) -> T:
        """Has the followers do what `act` does here. A leader alone may fail as it likes, and be asked again."""
        if not self._followers:
            return act()
        if self.broken is not None:
            raise RankLost(self.broken)
        words = [] if message is None else message.pack()
        try:
            for follower in self._followers:
                follower.send(call, words)
            return act()
        except BaseException as error:
            self.broken = f"the group is out of step after {call.name}: {str(error) or type(error).__name__}"
            if isinstance(error, (ConnectionError, *FAILURES)):
                raise RankLost(self.broken) from error
            raise

    def end(self, call: Call, act: Callable[[], None]) -> None:
        """Closes something, if only here."""
        if self.broken is None:
            self.call(call, None, act)
        else:
            act()


class LeadingVerifier:
    """The verifier of a group's leader."""

    def __init__(self, verifier: LocalVerifier, team: Team) -> None:
        self._verifier = verifier
        self._team = team

    @property
    def busy(self) -> float:
        return self._verifier.busy

    def open(self, request: int, tokens: Sequence[int], sampling: SamplingParams, prompt_len: int) -> None:
        opening = Opening(request, tuple(tokens), sampling, prompt_len)
        act = partial(self._verifier.open, request, tokens, sampling, prompt_len)
        self._team.call(Call.VERIFIER_OPEN, opening, act)

    def submit(self, proposal: Proposal) -> LocalPending:
        return LocalPending(self, proposal)

    def verify(self, proposal: Proposal) -> VerifyResult:
        """As `LocalVerifier.verify`, on all ranks of the group."""
        return self._team.call(Call.VERIFY, proposal, partial(self._verifier.verify, proposal))

    def settle(self) -> None:
        self._verifier.settle()  # a follower does so at once

    def close(self) -> None:
        self._team.end(Call.VERIFIER_CLOSE, self._verifier.close)


class LeadingDrafter:
    """The drafter of a group's leader."""

    def __init__(self, drafter: NearDrafter, team: Team) -> None:
        self._drafter = drafter
        self._team = team

    @property
    def busy(self) -> float:
        return self._drafter.busy

    @property
    def steps(self) -> int:
        """d, the expansions of a round."""
        return self._drafter.steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self._team.call(Call.STEPS, Number(steps), lambda: setattr(self._drafter, "steps", steps))

    def open(self, request: int, tokens: Sequence[int], sampling: SamplingParams, prompt_len: int) -> None:
        opening = Opening(request, tuple(tokens), sampling, prompt_len)
        act = partial(self._drafter.open, request, tokens, sampling, prompt_len)
        self._team.call(Call.DRAFTER_OPEN, opening, act)

    def propose(self) -> Proposal:
        return self._team.call(Call.PROPOSE, None, self._drafter.propose)

    def grow(self) -> None:
        self._team.call(Call.GROW, None, self._drafter.grow)

    def offer(self) -> Any:
        """As `NearDrafter.offer`. It takes no forward, so the followers need not know."""
        return self._drafter.offer()

    def observe(self, result: VerifyResult) -> None:
        self._team.call(Call.OBSERVE, result, partial(self._drafter.observe, result))

    def close(self) -> None:
        self._team.end(Call.DRAFTER_CLOSE, self._drafter.close)


class LeadingPopulation:
    """The population of a group's leader, in mode smc."""

    def __init__(self, population: SMC, team: Team) -> None:
        self._smc = population
        self._team = team

    @property
    def plan(self) -> PopulationConfig:
        return self._smc.plan

    @property
    def rounds(self) -> int:
        return self._smc.rounds

    @property
    def answer(self) -> Answer | None:
        return self._smc.answer

    @property
    def busy(self) -> tuple[float, float]:
        return self._smc.busy

    @property
    def runners(self) -> tuple[Runner, Runner]:
        return self._smc.runners

    def open(self, prompt: Sequence[int], sampling: SamplingParams, stops: Collection[int], limit: int) -> None:
        ends = replace(sampling, stop_token_ids=tuple(sorted(stops)), max_tokens=limit)
        opening = Opening(0, tuple(prompt), ends, len(prompt))
        self._team.call(Call.POPULATION_OPEN, opening, partial(self._smc.open, prompt, sampling, stops, limit))

    def launch(self) -> bool:
        return self._team.call(Call.POPULATION_ROUND, None, self._smc.launch)

    def collect(self) -> Report:
        return self._smc.collect()  # a follower does so at once

    def finish(self) -> Answer:
        return self._smc.finish()  # takes no forward

    def close(self) -> None:
        self._team.end(Call.POPULATION_CLOSE, self._smc.close)


def follow(leader: Channel, verifier: LocalVerifier | None, drafter: LocalDrafter | None, smc: SMC | None) -> None:
    """What a follower does: the leader's calls on its own roles, until the leader leaves. Raises RankLost when the
    leader is gone without a word."""
    while True:
        try:
            call, words = leader.recv()
        except ConnectionError as error:
            raise RankLost(str(error)) from None
        if call == Call.LEAVE:
            return
        if smc is not None:
            _obey_population(Call(call), words, smc)
        else:
            _obey(Call(call), words, verifier, drafter)


def has_left(peer: Channel) -> bool:
    """Whether the last word of a peer that is gone is that all may leave."""
    with contextlib.suppress(ConnectionError, TimeoutError):
        while True:
            if peer.recv(0.0)[0] == Call.LEAVE:
                return True
    return False


def park(leader: Channel) -> None:
    """Does nothing until the leader leaves, or is gone."""
    with contextlib.suppress(ConnectionError):
        while leader.recv()[0] != Call.LEAVE:
            pass


def _obey_population(call: Call, words: Words, smc: SMC) -> None:
    match call:
        case Call.POPULATION_OPEN:
            opening = Opening.unpack(words)
            ends = opening.sampling
            assert ends.max_tokens is not None
            smc.open(opening.tokens, ends, ends.stop_token_ids, ends.max_tokens)
        case Call.POPULATION_ROUND:
            smc.launch()
            smc.collect()
        case Call.POPULATION_CLOSE:
            smc.close()
        case _:
            raise ValueError(f"a leader of a population does not send {call.name}")


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
            drafter.steps = words[0]
        case _:
            raise ValueError(f"a leader does not send {call.name}")
