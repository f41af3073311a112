"""How soon, and how often, a process that has ended is started again."""

from __future__ import annotations

from collections import deque

DELAYS = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)  # seconds before each start in a row, then the last of them
CALM = 60.0  # seconds of being ready after which the row begins anew
MOST, WINDOW = 8, 600.0  # so many starts in so many seconds, and no more


class Restarts:
    """The restarts of one process."""

    def __init__(self) -> None:
        self._row = 0
        self._times: deque[float] = deque()

    def delay(self, now: float, ready_for: float) -> float | None:
        """Seconds until the next start of a process that has ended now and was ready for so long; None: it has been
        started too often."""
        while self._times and now - self._times[0] > WINDOW:
            self._times.popleft()
        if len(self._times) >= MOST:
            return None
        self._times.append(now)
        self._row = 0 if ready_for >= CALM else self._row
        self._row += 1
        return DELAYS[min(self._row, len(DELAYS)) - 1]
