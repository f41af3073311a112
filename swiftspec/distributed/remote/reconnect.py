"""Reconnects to a drafter that is lost, while the target decodes: a draft worker, or a restarted draft group."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from threading import Event, Thread

from swiftspec.config import EngineConfig
from swiftspec.distributed.launch.config_check import RankConfig, check_consistent
from swiftspec.distributed.launch.rendezvous import RendezvousInfo
from swiftspec.distributed.launch.supervision import RankTable
from swiftspec.distributed.launch.world import World
from swiftspec.distributed.transport.codec import Words
from swiftspec.distributed.transport.connections import Connections, accept_draft_leader
from swiftspec.distributed.transport.opcodes import Opcode
from swiftspec.distributed.transport.transport import Transport
from swiftspec.errors import RankLost, UserError

MIN_DELAY_S, MAX_DELAY_S = 0.1, 5.0  # seconds between two attempts, doubled up to the maximum
POLL_S = 0.1  # seconds between two polls of a draft group that loads its weights
LOAD_TIMEOUT_S = 600.0  # seconds; the longest wait for a draft group to load its weights


class Reconnector:
    """Recovers the connection to a drafter in a background thread, which runs until `close`."""

    def __init__(
        self,
        connect: Callable[[], Transport | None],
        on_lost: Callable[[], None] = lambda: None,
        *,
        on_demand: bool,
        max_delay_s: float = MAX_DELAY_S,
    ) -> None:
        """`connect`: returns a transport to the recovered drafter, or None if there is none yet. An exception of a lost
        connection or a UserError means the same.

        `on_lost`: called when the drafter is lost.
        `on_demand`: whether `connect` is called only after the drafter was lost, until it succeeds.
        `max_delay_s`: longest pause between two attempts.
        """
        self._connect, self._on_lost, self._on_demand, self._max_delay_s = connect, on_lost, on_demand, max_delay_s
        self._recovered: Transport | None = None
        self._wanted, self._closing = Event(), Event()
        if not on_demand:
            self._wanted.set()
        self._thread = Thread(target=self._run, name="reconnect", daemon=True)
        self._thread.start()

    @property
    def closing(self) -> bool:
        """Whether `close` was called, so that an attempt in progress should be given up."""
        return self._closing.is_set()

    def poll(self) -> Transport | None:
        """Returns the transport once after each recovery, and None at all other times."""
        back, self._recovered = self._recovered, None
        return back

    def on_lost(self) -> None:
        """Notifies the reconnector that the drafter is lost."""
        self._on_lost()
        self._wanted.set()

    def close(self) -> None:
        """Stops the thread."""
        self._closing.set()
        self._wanted.set()
        self._thread.join(2 * MIN_DELAY_S)

    def _run(self) -> None:
        while self._wanted.wait() and not self._closing.is_set():
            if self._on_demand:
                self._wanted.clear()
            pause = MIN_DELAY_S
            while not self._closing.wait(pause):
                try:
                    found = self._connect()
                except (RankLost, UserError, OSError):
                    found = None
                if found is not None:
                    self._recovered = found
                    break
                pause = min(2 * pause, self._max_delay_s)


class DraftGroupRecovery:
    """Connects to restarted draft ranks, on rank 0 and while the target decodes. They join the rendezvous, pass the
    startup barrier and connect, as at the start of the job.

    `reconnector`: calls `connect` in a background thread until it is closed.
    """

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
