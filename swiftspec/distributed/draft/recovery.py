"""Rank 0 brings a draft group back: once its ranks have been started again, they meet, agree and connect as at the
start, while the target decodes."""

from __future__ import annotations

import time
from contextlib import suppress
from threading import Event, Thread

from swiftspec.config import EngineConfig
from swiftspec.distributed.launch.config_check import RankConfig, check_consistent
from swiftspec.distributed.launch.rendezvous import RendezvousInfo
from swiftspec.distributed.launch.supervision import RankTable
from swiftspec.distributed.launch.world import World
from swiftspec.distributed.transport.channel import Channel
from swiftspec.distributed.transport.connections import Connections, accept_draft_leader
from swiftspec.distributed.transport.opcodes import Opcode
from swiftspec.errors import RankLost, UserError

POLL_S = 0.1  # seconds between two looks at who has come
LOAD_TIMEOUT_S = 600.0  # seconds in which a draft group has loaded its weights


class DraftGroupRecovery:
    """Looks in a thread for draft ranks that were started again, from the start to `close`."""

    def __init__(
        self,
        world: World,
        plan: EngineConfig,
        rank_config: RankConfig,
        vocab_size: int,
        rank_table: RankTable,
        connections: Connections,
    ) -> None:
        """`world`: as `join_world` gives it. `vocab`: tokens of the job's vocabulary. `links`: rank 0's, which get the
        new connection in place of the lost one."""
        self._world, self._plan, self._rank_config, self._vocab_size, self._rank_table = (
            world,
            plan,
            rank_config,
            vocab_size,
            rank_table,
        )
        self._connections = connections
        self._ranks = range(plan.target_tp, plan.num_ranks)
        self._recovered: Channel | None = None
        self._closing = Event()
        self._thread = Thread(target=self._run, name="comeback", daemon=True)
        self._thread.start()

    def poll(self) -> Channel | None:
        """The connection to a draft group that has come back and is ready, once."""
        back, self._recovered = self._recovered, None
        self._connections.draft_leader = back or self._connections.draft_leader
        return back

    def on_lost(self) -> None:
        """The draft group does not answer any more."""
        self._rank_table.set_state("draft", "lost")

    def close(self) -> None:
        """Looks no longer. A group that has just come back is among the links."""
        self._closing.set()
        self._thread.join(2 * POLL_S)
        self.poll()

    def _run(self) -> None:
        meetings = self._world.rendezvous
        assert meetings is not None
        with suppress(RuntimeError):  # the store is gone: so is the job
            while not self._closing.wait(POLL_S):
                if meetings.alive_ranks(self._ranks):
                    self._rank_table.set_state("draft", "lost")
                meeting = meetings.try_form(self._ranks)
                if meeting is not None:
                    with suppress(RankLost, UserError, ConnectionError, OSError):  # they come again
                        self._connect(meeting)

    def _connect(self, meeting: RendezvousInfo) -> None:
        """Rank 0's part of a start with the draft's ranks alone."""
        world = self._world.after_rendezvous(meeting).next_job()
        self._rank_table.update(
            member for member in check_consistent(world, self._plan, self._rank_config) if member.rank in self._ranks
        )
        channel = accept_draft_leader(world, self._world.timeouts.grace_s)
        try:
            channel.send(Opcode.READY, [self._vocab_size])
            kind = self._await_loaded(channel)
        except BaseException:
            channel.close()
            raise
        if kind == Opcode.READY:
            self._recovered = channel
            self._rank_table.set_state("draft", "up")
        else:
            channel.close()

    def _await_loaded(self, channel: Channel) -> int:
        """What they say once they have loaded their weights."""
        until = time.monotonic() + LOAD_TIMEOUT_S
        while not self._closing.is_set() and time.monotonic() < until:
            with suppress(TimeoutError):
                return channel.recv(POLL_S)[0]
        raise RankLost("the draft group did not load in time")
