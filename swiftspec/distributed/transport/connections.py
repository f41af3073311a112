"""Connections between the ranks of a job, and the exchange of their readiness at startup."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field

from swiftspec.config import EngineConfig
from swiftspec.distributed.launch.config_check import RankRole
from swiftspec.distributed.launch.startup_barrier import first_line
from swiftspec.distributed.launch.world import World
from swiftspec.distributed.transport.codec import text_to_words, words_to_text
from swiftspec.distributed.transport.opcodes import Opcode
from swiftspec.distributed.transport.transport import Transport, accept, dial
from swiftspec.errors import RankLost, UserError

LEADERS_KEY = "draft-leader"  # key of the store for the connection between the leaders of the two groups
CONNECT_TIMEOUT_S = 60.0  # seconds; all ranks have just passed the startup barrier


@dataclass(slots=True)
class Connections:
    """Channels of one rank.

    A follower is connected to its leader, and a leader to its followers. If there is a draft group, the two leaders are
    connected to each other: `draft_leader` is set on the target's leader, and `target_leader` on the draft's leader.
    """

    leader: Transport | None = None
    followers: list[Transport] = field(default_factory=list)
    draft_leader: Transport | None = None
    target_leader: Transport | None = None

    @staticmethod
    def connect(world: World, plan: EngineConfig) -> Connections:
        """Connects this rank to its peers and returns the channels. Raises RankLost if a peer does not connect within
        CONNECT_TIMEOUT_S, so all ranks have to call it at about the same time."""
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
                links.target_leader = dial(store, LEADERS_KEY, "the target group", spin=spin, timeout=CONNECT_TIMEOUT_S)
        except (OSError, RuntimeError, ValueError) as error:  # the store raises RuntimeError
            raise RankLost(f"rank {world.rank} could not connect to its peers: {first_line(error)}") from None
        return links

    def broadcast_vocab(self, size: int, masked: Sequence[int]) -> list[int]:
        """Returns rank 0's vocabulary on all ranks: its size, then the tokens that the draft never proposes. Raises
        RankLost if a peer is gone or sends an invalid message."""
        up, vocab = self.leader or self.target_leader, [size, *masked]
        try:
            if up is not None:
                kind, words = up.recv()
                vocab = [*words] if kind == Opcode.READY else []
                if not vocab or vocab[0] < 1:
                    raise ValueError(f"{up.peer} sent an invalid vocabulary")
            for channel in (*self.followers, *([] if self.draft_leader is None else [self.draft_leader])):
                channel.send(Opcode.READY, vocab)
        except (ConnectionError, ValueError) as error:
            raise RankLost(str(error)) from None
        return vocab

    def wait_ready(self, error: str | None, executor_names: set[str]) -> set[str]:
        """Blocks until the ranks that this rank leads have loaded or failed, and reports to this rank's own leader
        whether all of them, and this rank, have loaded.

        `error`: the reason why this rank has failed to load, or None.
        `executor_names`: names of the executors that this rank supports.
        Returns the names of the executors that this rank and all its followers support. Raises UserError on rank 0 with
        the error of a failed rank, and RankLost on the other ranks if their leader is gone.
        """
        for channel in self.followers:
            heard, theirs = _recv_ready(channel)
            error, executor_names = error or heard, executor_names & theirs
        if self.draft_leader is not None:
            error = error or _recv_ready(self.draft_leader)[0]
        up = self.leader or self.target_leader
        if up is not None:
            ready = (Opcode.READY, text_to_words(",".join(sorted(executor_names))))
            try:
                up.send(*(ready if error is None else (Opcode.ERROR, text_to_words(error))))
            except ConnectionError as gone:
                raise RankLost(str(gone)) from None
        elif error is not None:
            raise UserError(error)
        return executor_names

    def close(self, *, shutdown: bool) -> None:
        """Closes all connections. With `shutdown`, first sends SHUTDOWN to the ranks that this rank leads."""
        for channel in (*self.followers, *([] if self.draft_leader is None else [self.draft_leader])):
            with contextlib.suppress(ConnectionError):  # the peer is gone already
                if shutdown:
                    channel.send(Opcode.SHUTDOWN)
        for channel in (self.leader, self.target_leader, self.draft_leader, *self.followers):
            if channel is not None:
                channel.close()


def accept_draft_leader(world: World, timeout: float) -> Transport:
    """Opens the target leader's channel to the draft's leader, and blocks until it is connected. Raises OSError if the
    draft's leader does not connect within `timeout` seconds."""
    return accept(
        world.store, LEADERS_KEY, "the draft group", host=_host(world), spin=world.spin, timeout=timeout
    )  # fmt: skip


def _host(world: World) -> str | None:
    """Returns the address at which the other ranks reach this machine, or None if all ranks are on one machine."""
    return None if world.one_machine else _address_towards(world.host)


def _recv_ready(channel: Transport) -> tuple[str | None, set[str]]:
    """Blocks until the rank at the other end of `channel` has loaded or failed. Returns the error, or None, and the
    names of the executors that the rank supports. A lost connection is returned as an error."""
    try:
        kind, words = channel.recv()
    except ConnectionError as error:
        return f"{error} while the models were loading", set()
    return (None, set(words_to_text(words).split(","))) if kind == Opcode.READY else (words_to_text(words), set())


def _address_towards(host: str) -> str:
    """Returns the local IPv4 address from which packets to `host` are sent. Sends no packet itself."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 1))
        return str(probe.getsockname()[0])
