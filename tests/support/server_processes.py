"""The processes of a server: their roles, faults to inject, and what they leave behind."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from tests.support.server_process import ServerProcess

SLOW_S = 0.2  # duration of the fault "slow"
SHARED_MEMORY = Path("/dev/shm")


class ServerProcesses:
    """The processes of a server with `count` ranks, observed from start to end."""

    def __init__(self, served: ServerProcess, count: int) -> None:
        self.server, self.count = served, count
        self._seen: dict[int, int] = {}  # processes and their start times
        self._shared = _shared()  # segments of other servers

    def health(self) -> dict[str, Any]:
        """The response of /health; empty if the server does not answer."""
        try:
            return httpx.get(f"{self.server.url}/health", timeout=5).json()
        except httpx.TransportError:
            return {}

    def ranks(self) -> list[dict[str, Any]]:
        """The ranks in /health."""
        return self.health().get("ranks", [])

    def snapshot(self) -> dict[int, list[str]]:
        """The present processes and their command lines. They are remembered for `leftovers`."""
        found = {}
        for process in self.server.processes():
            with suppress(OSError, IndexError):
                self._seen[process] = _began(process)
                found[process] = Path(f"/proc/{process}/cmdline").read_text().split("\0")
        return found

    def front_end(self) -> int:
        """The front end's process; 0 if it does not exist."""
        return next((process for process, argv in self.snapshot().items() if "swiftspec.serve.frontend" in argv), 0)

    def supervisors(self) -> list[int]:
        """The supervisor process of each rank."""
        parents = {int(rank["rank"]): _parent(int(rank["pid"])) for rank in self.ranks()}
        return [parents[rank] for rank in sorted(parents)]

    def process(self, rank: int) -> int:
        """The process of a rank; 0 if it does not exist."""
        process = next((int(one["pid"]) for one in self.ranks() if one["rank"] == rank and one["state"] != "lost"), 0)
        return process if process in self.snapshot() else 0

    def is_up(self) -> bool:
        """Whether it serves and all ranks are up."""
        health = self.health()
        ranks = health.get("ranks", [])
        return health.get("status") == "ok" and [rank["state"] for rank in ranks] == ["up"] * self.count

    def wait_until_up(self, seconds: float) -> float:
        """Waits until it is up; returns the seconds. Raises AssertionError after `seconds`."""
        return until(self.is_up, seconds, lambda: f"it is not up again: {self.health()}")

    def leftovers(self, seconds: float) -> list[str]:
        """Processes and shared memory that still exist `seconds` after the end."""
        with suppress(AssertionError):
            until(lambda: not self._left(), seconds)
        return self._left()

    def _left(self) -> list[str]:
        alive = [process for process, began in self._seen.items() if _alive(process) and _began_or_0(process) == began]
        return [f"process {process}" for process in alive] + [
            str(SHARED_MEMORY / name) for name in sorted(_shared() - self._shared) if _is_of(name, self._seen)
        ]


def inject_fault(what: str, process: int) -> bool:
    """Sends SIGKILL ("kill"), SIGSTOP ("stop"), or SIGSTOP for a moment ("slow") to a process. Returns False if the
    process does not exist, or would be slowed while it is stopped."""
    if not process or (what == "slow" and _state(process) == "T"):
        return False
    try:
        os.kill(process, signal.SIGKILL if what == "kill" else signal.SIGSTOP)
        if what == "slow":
            time.sleep(SLOW_S)
            os.kill(process, signal.SIGCONT)
    except ProcessLookupError:
        return False
    return True


def until(
    condition: Callable[[], bool],
    seconds: float,
    message: Callable[[], str] = lambda: "the condition did not become true",
) -> float:
    """Polls until a condition holds. Returns the seconds that it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() < began + seconds, message()
        time.sleep(0.05)
    return time.monotonic() - began


def _shared() -> set[str]:
    return {entry.name for entry in SHARED_MEMORY.iterdir() if entry.name.startswith("swiftspec-")}


def _is_of(name: str, processes: dict[int, int]) -> bool:
    """Whether swiftspec-PID-TOKEN belongs to one of these processes."""
    found = re.match(r"swiftspec-(\d+)-", name)
    return found is not None and int(found[1]) in processes


def _stat(process: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()


def _began(process: int) -> int:
    return int(_stat(process)[19])


def _began_or_0(process: int) -> int:
    try:
        return _began(process)
    except (OSError, IndexError):
        return 0


def _parent(process: int) -> int:
    return int(_stat(process)[1])


def _alive(process: int) -> bool:
    """Whether it exists and is not a zombie."""
    return _state(process) not in ("", "Z")


def _state(process: int) -> str:
    """R, S, T, Z, ...; empty if it does not exist."""
    try:
        return _stat(process)[0]
    except (OSError, IndexError):
        return ""
