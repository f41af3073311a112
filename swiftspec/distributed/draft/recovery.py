"""Recovery of a lost draft group, on rank 0 and while the target decodes.

Restarted draft ranks join the rendezvous, pass the startup barrier and connect, as at the start of the job.
"""

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

POLL_S = 0.1  # seconds between two polls of the rendezvous
LOAD_TIMEOUT_S = 600.0  # seconds; the longest wait for a draft group to load its weights


class DraftGroupRecovery:
    """Reconnects restarted draft ranks in a background thread, which runs until `close`."""

    def __init__(
        self,
        world: World,
        plan: EngineConfig,
        rank_config: RankConfig,
        vocab_size: int,
        rank_table: RankTable,
        connections: Connections,
    ) -> None:
        """`world`: the world that `join_world` has returned.

        `rank_config`: configuration of rank 0, which the restarted ranks must match.
        `vocab_size`: vocabulary size of the job.
        `rank_table`: receives the states of the draft's ranks.
        `connections`: channels of rank 0. `poll` replaces the channel to the draft's leader in it.
        """
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
        self._thread = Thread(target=self._run, name="draft-recovery", daemon=True)
        self._thread.start()

    def poll(self) -> Channel | None:
        """Returns the channel to the draft group once after each recovery, and None at all other times."""
        back, self._recovered = self._recovered, None
        self._connections.draft_leader = back or self._connections.draft_leader
        return back

    def on_lost(self) -> None:
        """Marks the draft group as lost in the rank table."""
        self._rank_table.set_state("draft", "lost")

    def close(self) -> None:
        """Stops the thread. A channel to a draft group that has just recovered is added to the connections, so that the
        draft group receives SHUTDOWN."""
        self._closing.set()
        self._thread.join(2 * POLL_S)
        self.poll()

    def _run(self) -> None:
        rendezvous = self._world.rendezvous
        assert rendezvous is not None
        with suppress(RuntimeError):  # the store is gone, and the job with it
            while not self._closing.wait(POLL_S):
                if rendezvous.alive_ranks(self._ranks):
                    self._rank_table.set_state("draft", "lost")
                info = rendezvous.try_form(self._ranks)
                if info is not None:
                    with suppress(RankLost, UserError, ConnectionError, OSError):  # the ranks are restarted again
                        self._connect(info)

    def _connect(self, info: RendezvousInfo) -> None:
        """Performs rank 0's part of the startup of a restarted draft group: passes the startup barrier, opens the
        channel and waits until the weights are loaded. `info`: result of the rendezvous."""
        world = self._world.after_rendezvous(info).next_engine()
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
        """Returns the opcode that the draft's leader sends after loading its weights: READY or ERROR. Raises RankLost
        after LOAD_TIMEOUT_S, or when `close` is called."""
        until = time.monotonic() + LOAD_TIMEOUT_S
        while not self._closing.is_set() and time.monotonic() < until:
            with suppress(TimeoutError):
                return channel.recv(POLL_S)[0]
        raise RankLost("the draft group did not load in time")
