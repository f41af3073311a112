"""Recovery of a lost draft group, on rank 0 and while the target decodes.

Restarted draft ranks join the rendezvous, pass the startup barrier and connect, as at the start of the job.
"""

from __future__ import annotations

import time
from contextlib import suppress

from swiftspec.config import EngineConfig
from swiftspec.distributed.launch.config_check import RankConfig, check_consistent
from swiftspec.distributed.launch.rendezvous import RendezvousInfo
from swiftspec.distributed.launch.supervision import RankTable
from swiftspec.distributed.launch.world import World
from swiftspec.distributed.remote.reconnect import MIN_DELAY_S, Reconnector
from swiftspec.distributed.transport.codec import Words
from swiftspec.distributed.transport.connections import Connections, accept_draft_leader
from swiftspec.distributed.transport.opcodes import Opcode
from swiftspec.distributed.transport.transport import Transport
from swiftspec.errors import RankLost

POLL_S = 0.1  # seconds between two polls of a draft group that loads its weights
LOAD_TIMEOUT_S = 600.0  # seconds; the longest wait for a draft group to load its weights


class DraftGroupRecovery:
    """Connects to restarted draft ranks. `reconnector`: calls `connect` in a background thread until it is closed."""

    def __init__(
        self,
        world: World,
        plan: EngineConfig,
        rank_config: RankConfig,
        vocab: Words,
        rank_table: RankTable,
        connections: Connections,
    ) -> None:
        """`world`: the world that `join_world` has returned.

        `rank_config`: configuration of rank 0, which the restarted ranks must match.
        `vocab`: vocabulary size of the job, then the tokens that its draft never proposes.
        `rank_table`: receives the states of the draft's ranks.
        `connections`: connections of rank 0. A recovery replaces the transport to the draft's leader in it, so that a
        draft group that has just recovered receives SHUTDOWN at the end.
        """
        self._world, self._plan, self._rank_config, self._vocab = world, plan, rank_config, vocab
        self._rank_table, self._connections = rank_table, connections
        self._ranks = range(plan.target_tp, plan.num_ranks)
        self.reconnector = Reconnector(
            self.connect, lambda: rank_table.set_state("draft", "lost"), on_demand=False, max_delay_s=MIN_DELAY_S
        )

    def connect(self) -> Transport | None:
        """Returns the transport to a draft group that has been restarted and has loaded its weights; None if its ranks
        have not joined the rendezvous yet. Raises RankLost, UserError or OSError if the startup fails; the ranks are
        then restarted again."""
        rendezvous = self._world.rendezvous
        assert rendezvous is not None
        with suppress(RuntimeError):  # the store is gone, and the job with it
            if rendezvous.alive_ranks(self._ranks):
                self._rank_table.set_state("draft", "lost")
            info = rendezvous.try_form(self._ranks)
            return None if info is None else self._start(info)
        return None

    def _start(self, info: RendezvousInfo) -> Transport | None:
        """Performs rank 0's part of the startup of a restarted draft group: passes the startup barrier, opens the
        transport and waits until the weights are loaded. `info`: result of the rendezvous."""
        world = self._world.after_rendezvous(info).next_engine()
        self._rank_table.update(
            member for member in check_consistent(world, self._plan, self._rank_config) if member.rank in self._ranks
        )
        transport = accept_draft_leader(world, self._world.timeouts.grace_s)
        try:
            transport.send(Opcode.READY, self._vocab)
            loaded = self._await_loaded(transport) == Opcode.READY
        except BaseException:
            transport.close()
            raise
        if not loaded:
            transport.close()
            return None
        self._connections.draft_leader = transport
        self._rank_table.set_state("draft", "up")
        return transport

    def _await_loaded(self, transport: Transport) -> int:
        """Returns the opcode that the draft's leader sends after loading its weights: READY or ERROR. Raises RankLost
        after LOAD_TIMEOUT_S, or when the reconnector is closed."""
        until = time.monotonic() + LOAD_TIMEOUT_S
        while not self.reconnector.closing and time.monotonic() < until:
            with suppress(TimeoutError):
                return transport.recv(POLL_S)[0]
        raise RankLost("the draft group did not load in time")
