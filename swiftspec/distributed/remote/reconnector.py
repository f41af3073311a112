"""Reconnection to a lost drafter in another process, in a background thread while the target decodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from threading import Event, Thread
from typing import Protocol

from swiftspec.distributed.transport.channels import Channel, ChannelSet
from swiftspec.distributed.transport.transport import Transport
from swiftspec.errors import RankLost, UserError

MIN_DELAY_S, MAX_DELAY_S = 0.1, 5.0  # seconds between two attempts, doubled up to the maximum


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


class ReconnectedLink(Protocol):
    """What recovers the connection to a drafter, as one request sees it: a `Reconnector`, or its part of a
    `SharedReconnector`."""

    def poll(self) -> Transport | None:
        """Returns the transport once after each recovery, and None at all other times."""
        ...

    def on_lost(self) -> None:
        """Notifies the reconnector that the drafter is lost."""


class SharedReconnector:
    """Recovers the connection to the draft group for concurrent requests, each of which has a channel of it.

    `parts`: for each of the requests, by batch index.
    """

    def __init__(self, reconnector: Reconnector, channels: ChannelSet) -> None:
        """`channels`: those of the present connection."""
        self._reconnector, self._channels = reconnector, channels
        self._recovered = set[int]()  # requests that have not switched to the present connection yet
        self.parts: list[ReconnectedLink] = [_ChannelLink(self, index) for index in range(len(channels.channels))]

    def poll(self, index: int) -> Channel | None:
        """See `ReconnectedLink.poll`. `index`: the batch index of the request."""
        transport = self._reconnector.poll()
        if transport is not None:
            self._channels = self._channels.renewed(transport)
            self._recovered = set(range(len(self.parts)))
        if index not in self._recovered:
            return None
        self._recovered.remove(index)
        return self._channels.channels[index]

    def on_lost(self, index: int) -> None:
        """See `ReconnectedLink.on_lost`. Ignored if the request has lost an earlier connection."""
        if index not in self._recovered:
            self._reconnector.on_lost()


@dataclass(frozen=True, slots=True)
class _ChannelLink:
    """The part of one request in a `SharedReconnector`."""

    shared: SharedReconnector
    index: int

    def poll(self) -> Transport | None:
        return self.shared.poll(self.index)

    def on_lost(self) -> None:
        self.shared.on_lost(self.index)
