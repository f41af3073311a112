"""Connections between the ranks of a job, and the exchange of their readiness at startup."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from swiftspec.config import EngineConfig
from swiftspec.distributed.launch.config_check import RankRole
from swiftspec.distributed.launch.network_interface import address_towards
from swiftspec.distributed.launch.startup_barrier import first_line
from swiftspec.distributed.launch.world import World
from swiftspec.distributed.transport.codec import text_to_words, words_to_error, words_to_text
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

    def agree_in_group(self, error: str | None, executor_names: set[str]) -> tuple[str | None, set[str]]:
        """Blocks until all ranks of this rank's group have loaded or failed, and returns at about the same time on all
        of them: an error, or None, and the names of the executors that all ranks support.

        `error`: the reason why this rank has failed to load, or None. `executor_names`: those that it supports.
        Raises RankLost if the group's leader is gone.
        """
        if self.leader is not None:
            _report(self.leader, error, executor_names)
            heard, common = _recv_ready(self.leader, "while the models were loading")
            return error or heard, common
        for channel in self.followers:
            heard, theirs = _recv_ready(channel, "while the models were loading")
            error, executor_names = error or heard, executor_names & theirs
        for channel in self.followers:
            with contextlib.suppress(RankLost):  # a lost follower is the error already
                _report(channel, error, executor_names)
        return error, executor_names

    def wait_ready(self, error: str | None) -> None:
        """Blocks until the ranks that this rank leads are ready or have failed, and reports to this rank's own leader
        whether all of them, and this rank, are ready.

        `error`: the reason why this rank has failed, or None.
        Raises UserError on rank 0 with the error of a failed rank, and RankLost on the other ranks if their leader is
        gone.
        """
        for channel in (*self.followers, *([] if self.draft_leader is None else [self.draft_leader])):
            heard, _ = _recv_ready(channel, "during the start")
            error = error or heard
        up = self.leader or self.target_leader
        if up is not None:
            _report(up, error, set())
        elif error is not None:
            raise UserError(error)

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
    return accept(world.store, LEADERS_KEY, "the draft group", host=_host(world), spin=world.spin, timeout=timeout)


def _host(world: World) -> str | None:
    """Returns the address at which the other ranks reach this machine, or None if all ranks are on one machine."""
    return None if world.one_machine else address_towards(world.host)


def _report(channel: Transport, error: str | None, executor_names: set[str]) -> None:
    """Sends READY with names of executors, or ERROR. Raises RankLost if the rank at the other end is gone."""
    try:
        if error is None:
            channel.send(Opcode.READY, text_to_words(",".join(sorted(executor_names))))
        else:
            channel.send(Opcode.ERROR, text_to_words(error))
    except ConnectionError as gone:
        raise RankLost(str(gone)) from None


def _recv_ready(channel: Transport, when: str) -> tuple[str | None, set[str]]:
    """Blocks until the rank at the other end of `channel` reports. Returns its error, or None, and the names of the
    executors. A lost connection is returned as an error. `when`: phase of the start, for that error."""
    try:
        kind, words = channel.recv()
    except ConnectionError as error:
        return f"{error} {when}", set()
    return (None, set(words_to_text(words).split(","))) if kind == Opcode.READY else (words_to_error(words), set())
