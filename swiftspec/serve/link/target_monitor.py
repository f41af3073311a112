"""Watches the worker of a remote target, also while no request runs."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Thread

POLL_INTERVAL_S = 2.0


class TargetMonitor:
    """Calls `check` every POLL_INTERVAL_S seconds in a thread, until `close`.

    `lost_reason`: pings the worker; returns why it does not serve this server, or None if it does.
    `report`: called with that result whenever it changes. The worker is expected to serve at the start.
    """

    def __init__(self, lost_reason: Callable[[], str | None], report: Callable[[str | None], None]) -> None:
        self._lost_reason, self._report = lost_reason, report
        self._lost: str | None = None
        self._closing = Event()
        self._thread = Thread(target=self._run, name="target monitor", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def check(self) -> None:
        """Pings the worker once."""
        lost = self._lost_reason()
        if lost != self._lost and not self._closing.is_set():
            self._lost = lost
            self._report(lost)

    def close(self) -> None:
        """Ends the thread. A ping in progress is not waited for."""
        self._closing.set()

    def _run(self) -> None:
        while not self._closing.wait(POLL_INTERVAL_S):
            self.check()
