"""How the ranks of a job are connected, and whether all of them are ready."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass, field

from swiftspec.config import EngineConfig
from swiftspec.distributed.launch.config_check import Place
from swiftspec.distributed.launch.startup_barrier import first_line
from swiftspec.distributed.launch.world import World
from swiftspec.distributed.transport.channel import Channel, accept, dial
from swiftspec.distributed.transport.codec import one_word, to_text, to_words
from swiftspec.distributed.transport.opcodes import Call
from swiftspec.errors import RankLost, UserError

CONNECT_TIMEOUT = 60.0  # seconds; all ranks have just answered the roll call


@dataclass(slots=True)
class Links:
    """A rank's connections. A follower has its leader; a leader its followers; and between the two leaders lies the
    bridge, whose ends are `drafts` on the target's and `target` on the draft's."""

    leader: Channel | None = None
    followers: list[Channel] = field(default_factory=list)
    drafts: Channel | None = None
    target: Channel | None = None

    @staticmethod
    def connect(world: World, plan: EngineConfig) -> Links:
        """Connects this rank; all ranks call it at about the same time. Raises RankLost when one does not come."""
        here, links, store, spin = Place.of(world.rank, plan), Links(), world.store, world.spin
        first = world.rank - here.rank
        try:
            host = _host(world)
            if here.rank > 0:
                links.leader = dial(store, f"rank/{world.rank}", f"rank {first}", spin=spin, timeout=CONNECT_TIMEOUT)
                return links
            for rank in range(first + 1, first + here.size):
                follower = accept(store, f"rank/{rank}", f"rank {rank}", host=host, spin=spin, timeout=CONNECT_TIMEOUT)
                links.followers.append(follower)
            if plan.mode == "async" and here.side == "target":
                links.drafts = accept_drafts(world, CONNECT_TIMEOUT)
            elif plan.mode == "async":
                links.target = dial(store, "bridge", "the target group", spin=spin, timeout=CONNECT_TIMEOUT)
        except (OSError, RuntimeError, ValueError) as error:  # the store's are RuntimeErrors
            raise RankLost(f"rank {world.rank} found no connection at the start: {first_line(error)}") from None
        return links

    def share(self, value: int) -> int:
        """Rank 0's value, on all ranks. Raises RankLost when whoever should pass it on is gone or does not."""
        up = self.leader or self.target
        try:
            if up is not None:
                kind, words = up.recv()
                value = one_word(words if kind == Call.READY else [], "value")
            for channel in (*self.followers, *([] if self.drafts is None else [self.drafts])):
                channel.send(Call.READY, [value])
        except (ConnectionError, ValueError) as error:
            raise RankLost(str(error)) from None
        return value

    def report(self, error: str | None, kinds: set[str]) -> set[str]:
        """Tells upwards that this rank, and all it leads, are ready, or why not; returns at once except on leaders.

        `kinds`: of steps that this rank can use; returned are those that all ranks of its group can, as far as this
        rank knows. Raises UserError on rank 0 with the first reason.
        """
        for channel in self.followers:
            heard, theirs = _heard(channel)
            error, kinds = error or heard, kinds & theirs
        if self.drafts is not None:
            error = error or _heard(self.drafts)[0]
        up = self.leader or self.target
        if up is not None:
            ready = (Call.READY, to_words(",".join(sorted(kinds))))
            try:
                up.send(*(ready if error is None else (Call.LOST, to_words(error))))
            except ConnectionError as gone:
                raise RankLost(str(gone)) from None
        elif error is not None:
            raise UserError(error)
        return kinds

    def leave(self, *, home: bool) -> None:
        """Closes all connections, and before that sends home whoever is led from here, or says nothing."""
        for channel in (*self.followers, *([] if self.drafts is None else [self.drafts])):
            with contextlib.suppress(ConnectionError):  # gone already
                if home:
                    channel.send(Call.LEAVE)
        for channel in (self.leader, self.target, self.drafts, *self.followers):
            if channel is not None:
                channel.close()


def accept_drafts(world: World, timeout: float) -> Channel:
    """The target leader's end of the bridge. Raises OSError when the draft's leader does not come."""
    return accept(
        world.store, "bridge", "the draft group", host=_host(world), spin=world.spin, timeout=timeout
    )  # fmt: skip


def _host(world: World) -> str | None:
    """This machine's address for the other ranks; None where there are no other machines."""
    return None if world.one_machine else _address_towards(world.host)


def _heard(channel: Channel) -> tuple[str | None, set[str]]:
    """What a rank that reports here has to complain of, or is to be blamed for; and its kinds of steps."""
    try:
        kind, words = channel.recv()
    except ConnectionError as error:
        return f"{error}: it left while the models were loading", set()
    return (None, set(to_text(words).split(","))) if kind == Call.READY else (to_text(words), set())


def _address_towards(host: str) -> str:
    """This machine's address on the way to `host`. No packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 1))
        return str(probe.getsockname()[0])
