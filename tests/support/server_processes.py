"""The processes of a server: who they are, what can be done to them, and what they leave behind."""

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

from tests.support.server_process import Served

SLOW = 0.2  # seconds that a process is stopped where it is to be slow
SHARED = Path("/dev/shm")


class Job:
    """The processes of a server with so many ranks, watched from its start to its end."""

    def __init__(self, served: Served, count: int) -> None:
        self.served, self.count = served, count
        self._seen: dict[int, int] = {}  # processes, and when each began
        self._shared = _shared()  # others' and older ones

    def health(self) -> dict[str, Any]:
        """What /health says; empty where nobody answers."""
        try:
            return httpx.get(f"{self.served.url}/health", timeout=5).json()
        except httpx.TransportError:
            return {}

    def ranks(self) -> list[dict[str, Any]]:
        """The ranks as /health has them."""
        return self.health().get("ranks", [])

    def look(self) -> dict[int, list[str]]:
        """Its processes now, and how each was called. They are remembered."""
        found = {}
        for process in self.served.processes():
            with suppress(OSError, IndexError):
                self._seen[process] = _began(process)
                found[process] = Path(f"/proc/{process}/cmdline").read_text().split("\0")
        return found

    def front_end(self) -> int:
        """Its process; 0 where there is none."""
        return next((process for process, argv in self.look().items() if "swiftspec.serve.http" in argv), 0)

    def keepers(self) -> list[int]:
        """The processes that the launcher started, by their rank's number."""
        parents = {int(rank["rank"]): _parent(int(rank["pid"])) for rank in self.ranks()}
        return [parents[rank] for rank in sorted(parents)]

    def process(self, rank: int) -> int:
        """That of a rank; 0 where it has none now."""
        process = next((int(one["pid"]) for one in self.ranks() if one["rank"] == rank and one["state"] != "lost"), 0)
        return process if process in self.look() else 0

    def up(self) -> bool:
        """Whether it serves, and no rank is missing."""
        health = self.health()
        ranks = health.get("ranks", [])
        return health.get("status") == "ok" and [rank["state"] for rank in ranks] == ["up"] * self.count

    def wait_until_up(self, seconds: float) -> float:
        """The seconds that it took to be up. Raises AssertionError after so many."""
        return until(self.up, seconds, lambda: f"it is not up again: {self.health()}")

    def left(self, seconds: float) -> list[str]:
        """What is still there so long after the end."""
        with suppress(AssertionError):
            until(lambda: not self._left(), seconds)
        return self._left()

    def _left(self) -> list[str]:
        alive = [process for process, began in self._seen.items() if _alive(process) and _began_or_0(process) == began]
        return [f"process {process}" for process in alive] + [
            str(SHARED / name) for name in sorted(_shared() - self._shared) if _is_of(name, self._seen)
        ]


def hurt(what: str, process: int) -> bool:
    """`kill` -9s a process, `stop`s it, or has it `slow` for a moment. False where there is none, or none any more, or
    it is slow since it was stopped for good."""
    if not process or (what == "slow" and _state(process) == "T"):
        return False
    try:
        os.kill(process, signal.SIGKILL if what == "kill" else signal.SIGSTOP)
        if what == "slow":
            time.sleep(SLOW)
            os.kill(process, signal.SIGCONT)
    except ProcessLookupError:
        return False
    return True


def until(true: Callable[[], bool], seconds: float, said: Callable[[], str] = lambda: "it did not come") -> float:
    """Waits for what another process does. Returns the seconds that it took."""
    began = time.monotonic()
    while not true():
        assert time.monotonic() < began + seconds, said()
        time.sleep(0.05)
    return time.monotonic() - began


def _shared() -> set[str]:
    return {entry.name for entry in SHARED.iterdir() if entry.name.startswith("swiftspec-")}


def _is_of(name: str, processes: dict[int, int]) -> bool:
    """swiftspec-PID-TOKEN, of one of these processes."""
    found = re.match(r"swiftspec-(\d+)-", name)
    return found is not None and int(found[1]) in processes


def _stat(process: int) -> list[str]:
    """From the state on."""
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
    """Whether it is there, and no zombie that nobody has asked after."""
    return _state(process) not in ("", "Z")


def _state(process: int) -> str:
    """R, S, T, Z, ...; empty where there is none."""
    try:
        return _stat(process)[0]
    except (OSError, IndexError):
        return ""
