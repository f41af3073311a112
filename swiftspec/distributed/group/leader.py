"""One group, one mind: what the leader of a group does on its roles, its followers do too, call by call.

A group's logits are bitwise equal on all its ranks, so the same calls in the same order have the same results
everywhere and nothing inside a round needs a word. Only the leader sees clocks, sockets and the user.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from swiftspec.distributed.group.command_stream import Orders
from swiftspec.distributed.group.follower_dispatch import Act, Follower
from swiftspec.distributed.group.request_state import Bounds
from swiftspec.distributed.launch.supervision import Pulse
from swiftspec.distributed.transport.channel import Channel
from swiftspec.distributed.transport.codec import Message, Words, pack
from swiftspec.distributed.transport.opcodes import Call
from swiftspec.errors import RankLost, RequestEnds
from swiftspec.messages import Opening, Proposal, VerifyResult
from swiftspec.runtime.cancellation import Pause
from swiftspec.runtime.fallback_drafter import FAILURES
from swiftspec.runtime.local_drafter import LocalDrafter
from swiftspec.runtime.prefix_cache import told
from swiftspec.runtime.runner import Runner
from swiftspec.runtime.verifier import LocalVerifier
from swiftspec.smc.group_result import Answer
from swiftspec.smc.population import SMC, Group

T = TypeVar("T")


class Team:
    """The followers of one leader. A call happens on all ranks of the group or, once one has failed in the middle, on
    none: nobody knows any more how far the others have come, so the leader raises RankLost from then on."""

    def __init__(self, followers: Sequence[Channel]) -> None:
        self._followers = followers
        self.broken: str | None = None  # why

    def tell(self, call: Call, message: Message | None = None) -> None:
        """Has the followers do what the leader is about to do; it says `failed` if it cannot."""
        if self.broken is not None:
            raise RankLost(self.broken)
        words = [] if message is None or not self._followers else pack(message)
        try:
            for follower in self._followers:
                follower.send(call, words)
        except BaseException as error:
            raise self.failed(call, error) from error

    def failed(self, call: Call, error: BaseException) -> BaseException:
        """What the leader raises in place of an error in the middle of a call. A leader alone may fail as it likes, and
        be asked again; and what all ranks find at the same step leaves them in step."""
        if not self._followers or isinstance(error, RequestEnds):
            return error
        self.broken = f"the group is out of step after {call.name}: {str(error) or type(error).__name__}"
        return RankLost(self.broken) if isinstance(error, (ConnectionError, *FAILURES)) else error

    def call(self, call: Call, message: Message | None, act: Callable[[], T]) -> T:
        """Has the followers do what `act` does here."""
        self.tell(call, message)
        try:
            return act()
        except BaseException as error:
            raise self.failed(call, error) from error

    def end(self, call: Call, act: Callable[[], None], message: Message | None = None) -> None:
        """Closes something, if only here."""
        if self.broken is None:
            self.call(call, message, act)
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

    def open(self, opening: Opening) -> int:
        opening = told(replace(opening, steps=self._verifier.choose(opening).name), self._verifier.runner, guided=True)
        _read_grammar(opening, self._verifier.runner)
        return self._team.call(Call.VERIFIER_OPEN, opening, partial(self._verifier.open, opening))

    def submit(self, proposal: Proposal) -> LeadingPending:
        self._team.tell(Call.VERIFY, proposal)
        return LeadingPending(self._verifier, proposal, self._team)

    def settle(self) -> None:
        self._verifier.settle()  # a follower does so at once

    def close(self) -> None:
        self._team.end(Call.VERIFIER_CLOSE, self._verifier.close)


class LeadingPending:
    """A verification that the followers have begun."""

    def __init__(self, verifier: LocalVerifier, proposal: Proposal, team: Team) -> None:
        self._verifier, self._proposal, self._team = verifier, proposal, team

    def wait(self) -> VerifyResult:
        try:
            return self._verifier.verify(self._proposal)
        except BaseException as error:
            raise self._team.failed(Call.VERIFY, error) from error


class LeadingDrafter:
    """The drafter of a group's leader."""

    def __init__(self, drafter: LocalDrafter, team: Team) -> None:
        self.drafter = drafter
        self._team = team

    @property
    def busy(self) -> float:
        return self.drafter.busy

    @property
    def draft_steps(self) -> int:
        """d, the expansions of a round."""
        return self.drafter.draft_steps

    @draft_steps.setter
    def draft_steps(self, steps: int) -> None:
        self._team.call(Call.STEPS, steps, lambda: setattr(self.drafter, "draft_steps", steps))

    def open(self, opening: Opening) -> None:
        opening = told(replace(opening, steps=self.drafter.choose(opening).name), self.drafter.runner)
        _read_grammar(opening, self.drafter.runner)
        self._team.call(Call.DRAFTER_OPEN, opening, partial(self.drafter.open, opening))

    def propose(self) -> Proposal:
        return self._team.call(Call.PROPOSE, None, self.drafter.propose)

    def grow(self) -> None:
        self._team.call(Call.GROW, None, self.drafter.grow)

    def reply(self) -> Any:
        """As `LocalDrafter.reply`. It takes no forward, so the followers need not know."""
        return self.drafter.reply()

    def observe(self, result: VerifyResult) -> None:
        self._team.call(Call.OBSERVE, result, partial(self.drafter.observe, result))

    def close(self) -> None:
        self._team.end(Call.DRAFTER_CLOSE, self.drafter.close)


class LeadingPopulation:
    """The groups of particles of a group of ranks, in mode smc, as its leader decodes them."""

    def __init__(self, population: SMC, team: Team) -> None:
        self.population = population
        self._team = team

    @property
    def drafted(self) -> int:
        return self.population.drafted

    @property
    def busy(self) -> tuple[float, float]:
        return self.population.busy

    @property
    def groups(self) -> Sequence[Group]:
        return self.population.groups

    @property
    def exact(self) -> bool:
        return self.population.exact

    @property
    def places(self) -> int:
        return self.population.places

    @property
    def has_room(self) -> bool:
        return self.population.has_room

    def admit(self, opening: Opening, stops: Collection[int], limit: int) -> Group:
        ends = replace(opening.sampling, stop_token_ids=tuple(sorted(stops)), max_tokens=limit)
        opening = replace(opening, sampling=ends, steps=self.population.choose(opening).name)
        opening = told(opening, self.population.target, self.population.draft)
        return self._team.call(Call.POPULATION_OPEN, opening, partial(self.population.admit, opening, stops, limit))

    def launch(self) -> bool:
        return self._team.call(Call.POPULATION_ROUND, None, self.population.launch)

    def collect(self) -> None:
        self.population.collect()  # a follower does so at once

    def finish(self, group: Group) -> Answer:
        return self.population.finish(group)  # takes no forward

    def leave(self, group: Group) -> None:
        self._team.end(Call.POPULATION_CLOSE, partial(self.population.leave, group), group.sequence)


def _read_grammar(opening: Opening, runner: Runner) -> None:
    """Raises UserError on a grammar that is none, while the followers have not heard of the request: they would fail in
    the middle of it."""
    if opening.sampling.grammar is not None and runner.rules is not None:
        runner.rules(opening.sampling.grammar)


def follow(
    leader: Channel,
    verifier: LocalVerifier | None,
    drafter: LocalDrafter | None,
    smc: SMC | None,
    bounds: Bounds,
    pause: Pause,
    pulse: Pulse,
) -> None:
    """What a follower does: the leader's calls on its own roles, until the leader leaves. Raises RankLost when the
    leader is gone without a word, or says what it should not. `pause`: what the roles' runners call; `pulse`: when it
    works."""
    follower, orders = Follower(verifier, drafter, smc, bounds), Orders(leader)
    pause.cancelled = orders.given_up
    obey(leader, orders, follower.read, pulse)


def obey(leader: Channel, orders: Orders, read: Callable[[int, Words], Act], pulse: Pulse) -> None:
    """As `follow`; `read` says what a message asks for."""
    while True:
        try:
            pulse.rest()
            kind, words = orders.recv()
            pulse.work()
            if kind == Call.LEAVE:
                return
            act = read(kind, words)
        except ConnectionError as error:
            raise RankLost(str(error)) from None
        except ValueError as error:
            raise RankLost(f"{leader.peer} sent what is no message of ours: {error}") from None
        with contextlib.suppress(RequestEnds):  # the leader has found it, too, and ends the request
            act()


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
