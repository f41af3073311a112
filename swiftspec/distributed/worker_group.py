"""A worker whose model is on a group of ranks. Rank 0 has the sessions, and so has every follower: each with caches of
its own there, moved by the same calls in the same order (followers.py). Before the calls of one session rank 0 says
which it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from swiftspec.config import EngineConfig
from swiftspec.distributed.collectives.join import AnyGroup, join_group
from swiftspec.distributed.group.command_stream import Orders
from swiftspec.distributed.group.follower_dispatch import Act, Follower
from swiftspec.distributed.group.leader import Team, obey
from swiftspec.distributed.launch.config_check import Facts, agree, telling
from swiftspec.distributed.launch.supervision import Pulse
from swiftspec.distributed.launch.world import World, run_on
from swiftspec.distributed.rank_startup import Builder
from swiftspec.distributed.transport.channel import Channel
from swiftspec.distributed.transport.codec import Message, Words, one_word, to_text, to_words
from swiftspec.distributed.transport.connections import Links
from swiftspec.distributed.transport.opcodes import Call
from swiftspec.errors import RankLost, UserError
from swiftspec.runtime.cancellation import Pause

SHAPE = (
    "mode", "verify_batch", "draft_leaves", "draft_steps", "verify", "proposal", "calibration", "catch_up",
    "adapt_steps",
)  # fmt: skip
SIGN = 0.2  # seconds in which the end of a process is noticed
MakeFollower = Callable[[EngineConfig, Pause], Follower]  # the roles of a session of that shape, on caches of its own


class Crew:
    """The followers of a worker's rank 0. They hear of a session in its first turn at the model, and of its end in the
    next turn of another one: until then its caches stay with them, which are no more than the worker has room for.
    Sessions begin and end in any thread; all else is for whoever has the turn at the model.

    `broken`: why the group cannot go on.
    """

    def __init__(self, followers: Sequence[Channel]) -> None:
        self.followers = followers
        self.broken: str | None = None
        self._lost: Callable[[str], None] = lambda why: None
        self._count = 0
        self._here: SessionTeam | None = None  # whose calls the followers take
        self._ended: list[SessionTeam] = []

    def team(self, shape: EngineConfig) -> SessionTeam:
        """The followers, as the leader of one more session leads them."""
        self._count += 1
        return SessionTeam(self, self._count, shape)

    def end(self, team: SessionTeam) -> None:
        """The session is over, and its caches go."""
        self._ended.append(team)

    def turn_to(self, team: SessionTeam) -> None:
        """Tells the followers whose calls come next. Raises ConnectionError."""
        if self._here is team:
            return
        while self._ended:
            over = self._ended.pop()
            if over.known:
                self._send(Call.SESSION_CLOSE, [over.number])
        if not team.known:
            values = {name: getattr(team.shape, name) for name in SHAPE}
            self._send(Call.SESSION_OPEN, [team.number, *to_words(json.dumps(values))])
            team.known = True
        self._send(Call.SESSION_TURN, [team.number])
        self._here = team

    def when_lost(self, lost: Callable[[str], None]) -> None:
        """`lost` hears why the group cannot go on, at once where it has come to that already."""
        self._lost = lost
        if self.broken is not None:
            lost(self.broken)

    def look(self, patience: float = SIGN) -> None:
        """Whether the followers are all there; they say nothing, so one that is heard of is gone."""
        for follower in self.followers:
            try:
                follower.recv(patience)
            except TimeoutError:
                continue
            except ConnectionError as error:
                self.fail(str(error))

    def fail(self, why: str) -> None:
        """Nobody knows any more how far the others have come."""
        if self.broken is None:
            self.broken = why
            self._lost(why)

    def _send(self, call: Call, words: Words) -> None:
        for follower in self.followers:
            follower.send(call, words)


class SessionTeam(Team):
    """The followers in one session. `known`: whether they have been told of it."""

    def __init__(self, crew: Crew, number: int, shape: EngineConfig) -> None:
        super().__init__(crew.followers)
        self.number, self.shape, self.known = number, shape, False
        self._crew = crew

    def tell(self, call: Call, message: Message | None = None) -> None:
        if self._crew.broken is not None:
            raise RankLost(self._crew.broken)
        try:
            self._crew.turn_to(self)
        except ConnectionError as error:
            raise self.failed(call, error) from None
        super().tell(call, message)

    def failed(self, call: Call, error: BaseException) -> BaseException:
        error = super().failed(call, error)
        if self.broken is not None:
            self._crew.fail(self.broken)
        return error


class FollowedSessions:
    """A follower's sessions, as its leader's messages move them."""

    def __init__(self, make: Callable[[EngineConfig], Follower]) -> None:
        self._make = make
        self._known: dict[int, Follower] = {}
        self._here: Follower | None = None

    def read(self, kind: int, words: Words) -> Act:
        """What a message asks for. Raises ValueError on what no leader sends."""
        match kind:
            case Call.SESSION_OPEN:
                number, shape = words[0] if words else 0, _shape(words[1:])
                if number in self._known:
                    raise ValueError("a session is opened twice")
                return partial(self._open, number, shape)
            case Call.SESSION_TURN:
                self._here = self._of(words)
                return lambda: None
            case Call.SESSION_CLOSE:
                gone = self._of(words)
                self._here = None if self._here is gone else self._here
                return partial(self._known.pop, words[0])
            case _ if self._here is None:
                raise ValueError("no session is open")
            case _:
                return self._here.read(kind, words)

    def _open(self, number: int, shape: EngineConfig) -> None:
        self._known[number] = self._make(shape)

    def _of(self, words: Words) -> Follower:
        number = one_word(words, "session")
        if number not in self._known:
            raise ValueError("there is no such session")
        return self._known[number]


def _shape(words: Words) -> EngineConfig:
    try:
        return EngineConfig(**json.loads(to_text(words)))
    except (ValueError, TypeError, UserError) as error:
        raise ValueError(f"a session's shape makes no sense ({str(error)[:200]})") from None


class WorkerRank:
    """One rank of a worker: agrees with the others on how they run, connects to them, loads its share of the model by
    `load`, and waits until all have done so. Raises UserError on all ranks where they were not started alike; and on
    rank 0 when any rank cannot start, the others then are just sent home.

    `kinds`: of steps, by name; on rank 0, who chooses, those that all ranks can use.
    """

    def __init__(
        self, world: World, plan: EngineConfig, builder: Builder, settings: Mapping[str, Any],
        load: Callable[[Any, AnyGroup], set[str]],
    ) -> None:  # fmt: skip
        """`settings`: what else all ranks must have been started with. `load` returns the kinds of steps that this one
        can use."""
        held = {"target": plan.mode == "ar", "draft": plan.mode != "ar"}
        with telling(world):
            facts = builder.facts(plan, **held)
        self._world = world = world.next_job()
        agree(world, plan, Facts({**facts.settings, **settings}, facts.files, facts.group_files))
        self._links = Links.connect(world, plan)
        vocab = self._links.share(builder.vocab_size)
        self._group: AnyGroup | None = None
        error, kinds = None, set[str]()
        try:
            builder = builder.with_vocab(vocab)
            self._group = join_group(
                world, "target", world.rank, world.size, device=builder.device, share_device=builder.share_device,
                width=builder.kernel_sums(**held),
            )  # fmt: skip
            kinds = load(builder, self._group)
        except UserError as problem:
            error = str(problem)
        except Exception as problem:  # no memory, no device, no group, a broken disk: rank 0 tells it
            error = f"rank {world.rank} cannot start: {str(problem) or type(problem).__name__}"
        try:
            self.kinds = self._links.report(error, kinds)
        except UserError:
            self.leave()
            raise
        self.crew = Crew(self._links.followers)

    def follow(self, make: MakeFollower) -> None:
        """The life of any rank but 0, until it is sent home. Raises RankLost when rank 0 is gone without a word."""
        leader = self._links.leader
        assert leader is not None
        orders = Orders(leader)

        def made(shape: EngineConfig) -> Follower:
            pause = Pause()
            pause.cancelled = orders.given_up
            return make(shape, pause)

        try:
            obey(leader, orders, FollowedSessions(made).read, Pulse())
        finally:
            self.leave()

    def leave(self) -> None:
        """Sends the others home, where this is rank 0, and leaves the group."""
        self._links.leave(home=True)
        run_on(set(self._world.cores))
        if self._group is not None:
            self._group.close()
            self._group = None
