"""How the ranks of a job are connected, and whether all of them are ready."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass, field

from swiftspec.config import EngineConfig
from swiftspec.distributed.launch.config_check import RankRole
from swiftspec.distributed.launch.startup_barrier import first_line
from swiftspec.distributed.launch.world import World
from swiftspec.distributed.transport.channel import Channel, accept, dial
from swiftspec.distributed.transport.codec import single_word, text_to_words, words_to_text
from swiftspec.distributed.transport.opcodes import Opcode
from swiftspec.errors import RankLost, UserError

CONNECT_TIMEOUT_S = 60.0  # seconds; all ranks have just answered the roll call


@dataclass(slots=True)
class Connections:
    """A rank's connections. A follower has its leader; a leader its followers; and between the two leaders lies the
    bridge, whose ends are `drafts` on the target's and `target` on the draft's."""

    leader: Channel | None = None
    followers: list[Channel] = field(default_factory=list)
    draft_leader: Channel | None = None
    target_leader: Channel | None = None

    @staticmethod
    def connect(world: World, plan: EngineConfig) -> Connections:
        """Connects this rank; all ranks call it at about the same time. Raises RankLost when one does not come."""
        here, links, store, spin = RankRole.of(world.rank, plan), Connections(), world.store, world.spin
        first = world.rank - here.group_rank
        try:
            host = _host(world)
            if here.group_rank > 0:
                links.leader = dial(store, f"rank/{world.rank}", f"rank {first}", spin=spin, timeout=CONNECT_TIMEOUT_S)
                return links
            for rank in range(first + 1, first + here.group_size):
                follower = accept(
                    store, f"rank/{rank}", f"rank {rank}", host=host, spin=spin, timeout=CONNECT_TIMEOUT_S
                )
                links.followers.append(follower)
            if plan.mode == "async" and here.group == "target":
                links.draft_leader = accept_draft_leader(world, CONNECT_TIMEOUT_S)
            elif plan.mode == "async":
                links.target_leader = dial(store, "bridge", "the target group", spin=spin, timeout=CONNECT_TIMEOUT_S)
        except (OSError, RuntimeError, ValueError) as error:  # the store's are RuntimeErrors
            raise RankLost(f"rank {world.rank} found no connection at the start: {first_line(error)}") from None
        return links

    def broadcast_value(self, value: int) -> int:
        """Rank 0's value, on all ranks. Raises RankLost when whoever should pass it on is gone or does not."""
        up = self.leader or self.target_leader
        try:
            if up is not None:
                kind, words = up.recv()
                value = single_word(words if kind == Opcode.READY else [], "value")
            for channel in (*self.followers, *([] if self.draft_leader is None else [self.draft_leader])):
                channel.send(Opcode.READY, [value])
        except (ConnectionError, ValueError) as error:
            raise RankLost(str(error)) from None
        return value

    def wait_ready(self, error: str | None, kinds: set[str]) -> set[str]:
        """Tells upwards that this rank, and all it leads, are ready, or why not; returns at once except on leaders.

        `kinds`: of steps that this rank can use; returned are those that all ranks of its group can, as far as this
        rank knows. Raises UserError on rank 0 with the first reason.
        """
        for channel in self.followers:
            heard, theirs = _heard(channel)
            error, kinds = error or heard, kinds & theirs
        if self.draft_leader is not None:
            error = error or _heard(self.draft_leader)[0]
        up = self.leader or self.target_leader
        if up is not None:
            ready = (Opcode.READY, text_to_words(",".join(sorted(kinds))))
            try:
                up.send(*(ready if error is None else (Opcode.ERROR, text_to_words(error))))
            except ConnectionError as gone:
                raise RankLost(str(gone)) from None
        elif error is not None:
            raise UserError(error)
        return kinds

    def close(self, *, shutdown: bool) -> None:
        """Closes all connections, and before that sends home whoever is led from here, or says nothing."""
        for channel in (*self.followers, *([] if self.draft_leader is None else [self.draft_leader])):
            with contextlib.suppress(ConnectionError):  # gone already
                if shutdown:
                    channel.send(Opcode.SHUTDOWN)
        for channel in (self.leader, self.target_leader, self.draft_leader, *self.followers):
            if channel is not None:
                channel.close()


def accept_draft_leader(world: World, timeout: float) -> Channel:
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
    return (None, set(words_to_text(words).split(","))) if kind == Opcode.READY else (words_to_text(words), set())


def _address_towards(host: str) -> str:
    """This machine's address on the way to `host`. No packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 1))
        return str(probe.getsockname()[0])
