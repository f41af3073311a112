"""Rank 0 brings a draft group back: once its ranks have been started again, they meet, agree and connect as at the
start, while the target decodes."""

from __future__ import annotations

import time
from contextlib import suppress
from threading import Event, Thread

from swiftspec.config import EngineConfig
from swiftspec.distributed.launch.config_check import Facts, agree
from swiftspec.distributed.launch.rendezvous import Meeting
from swiftspec.distributed.launch.supervision import Members
from swiftspec.distributed.launch.world import World
from swiftspec.distributed.transport.channel import Channel
from swiftspec.distributed.transport.connections import Links, accept_drafts
from swiftspec.distributed.transport.opcodes import Call
from swiftspec.errors import RankLost, UserError

LOOK = 0.1  # seconds between two looks at who has come
LOADING = 600.0  # seconds in which a draft group has loaded its weights


class Comeback:
    """Looks in a thread for draft ranks that were started again, from the start to `close`."""

    def __init__(
        self, world: World, plan: EngineConfig, facts: Facts, vocab: int, members: Members, links: Links
    ) -> None:
        """`world`: as `join_world` gives it. `vocab`: tokens of the job's vocabulary. `links`: rank 0's, which get the
        new connection in place of the lost one."""
        self._world, self._plan, self._facts, self._vocab, self._members = world, plan, facts, vocab, members
        self._links = links
        self._ranks = range(plan.target_tp, plan.ranks)
        self._back: Channel | None = None
        self._closing = Event()
        self._thread = Thread(target=self._run, name="comeback", daemon=True)
        self._thread.start()

    def take(self) -> Channel | None:
        """The connection to a draft group that has come back and is ready, once."""
        back, self._back = self._back, None
        self._links.drafts = back or self._links.drafts
        return back

    def lost(self) -> None:
        """The draft group does not answer any more."""
        self._members.mark("draft", "lost")

    def close(self) -> None:
        """Looks no longer. A group that has just come back is among the links."""
        self._closing.set()
        self._thread.join(2 * LOOK)
        self.take()

    def _run(self) -> None:
        meetings = self._world.meetings
        assert meetings is not None
        with suppress(RuntimeError):  # the store is gone: so is the job
            while not self._closing.wait(LOOK):
                if meetings.here(self._ranks):
                    self._members.mark("draft", "lost")
                meeting = meetings.call(self._ranks)
                if meeting is not None:
                    with suppress(RankLost, UserError, ConnectionError, OSError):  # they come again
                        self._connect(meeting)

    def _connect(self, meeting: Meeting) -> None:
        """Rank 0's part of a start with the draft's ranks alone."""
        world = self._world.met(meeting).next_job()
        self._members.take(member for member in agree(world, self._plan, self._facts) if member.rank in self._ranks)
        channel = accept_drafts(world, self._world.waiting.grace)
        try:
            channel.send(Call.READY, [self._vocab])
            kind = self._loaded(channel)
        except BaseException:
            channel.close()
            raise
        if kind == Call.READY:
            self._back = channel
            self._members.mark("draft", "up")
        else:
            channel.close()

    def _loaded(self, channel: Channel) -> int:
        """What they say once they have loaded their weights."""
        until = time.monotonic() + LOADING
        while not self._closing.is_set() and time.monotonic() < until:
            with suppress(TimeoutError):
                return channel.recv(LOOK)[0]
        raise RankLost("the draft group did not load in time")
