"""Restart policy of a supervised process: delay before each restart and maximum restart rate."""

from __future__ import annotations

from collections import deque

RESTART_DELAYS_S = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)  # before consecutive restarts; the last value repeats
STABLE_AFTER_S = 60.0  # after a process was ready this long, its delays begin again at the first
MAX_RESTARTS, RESTART_WINDOW_S = 8, 600.0  # at most MAX_RESTARTS restarts per window


class RestartPolicy:
    """Restart policy of one process, and the history of its restarts."""

    def __init__(self) -> None:
        self._consecutive = 0
        self._restart_times: deque[float] = deque()

    def next_delay(self, now: float, ready_s: float) -> float | None:
        """Returns the delay in seconds before the next restart, or None once the restart limit is reached.

        `now`: time of the exit; `ready_s`: how long the process was ready before it."""
        while self._restart_times and now - self._restart_times[0] > RESTART_WINDOW_S:
            self._restart_times.popleft()
        if len(self._restart_times) >= MAX_RESTARTS:
            return None
        self._restart_times.append(now)
        self._consecutive = 0 if ready_s >= STABLE_AFTER_S else self._consecutive
        self._consecutive += 1
        return RESTART_DELAYS_S[min(self._consecutive, len(RESTART_DELAYS_S)) - 1]
