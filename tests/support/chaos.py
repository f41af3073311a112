"""A server under load whose processes are killed, stopped and slowed, and whose clients leave, at seeded moments.

    python -m tests.support.chaos --minutes 60 --ranks 2 --seed 1

Prints what was done and how all requests ended as JSON. Leaves with 1 where anything was not as it should be: an answer
that is not the undisturbed one, a request without an end, a server that is not whole again, or something left behind.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.support.server_process import Served
from tests.support.server_processes import Job, hurt
from tests.support.server_request import MAX_REQUEST_S, ClientRequest, RequestOutcome, send_request, disconnect_after, find_fault

EXACT = ("--dtype", "float64", "--threads", "1")  # another order of sums must not change an answer
REQUESTS = (
    ClientRequest("def add(a, b):", 160),
    ClientRequest("class Stack:\n", 120, seed=3),
    ClientRequest("import os\n", 60, seed=11, stream=False),
    ClientRequest("for line in", 24),
    ClientRequest("def fibonacci(n):", 90, seed=5, chat=True),
    ClientRequest("def main():", 40, stream=False, chat=True),
    ClientRequest("A word: ", 40, seed=7, regex="[a-z ]{20,60}"),
)
CLIENTS = 3
MOST, WITHIN = 7, 600.0  # deadly faults in so many seconds: keepers give a rank up that dies more often
BACK = 30.0  # seconds after the last fault in which all is whole again,
CALM = 60.0  # where deadly faults are so far apart; else keepers wait longer and longer, and it may take twice as long
CUTS = 0.1  # of the requests
MORE_MEMORY = {"keeper": 16 << 20, "front end": 48 << 20}  # bytes
MORE_FILES = 8


@dataclass(frozen=True)
class Plan:
    """What is to be done. `apart`: seconds between two deadly faults at least."""

    seconds: float
    ranks: int = 2
    target_tp: int = 1
    seed: int = 1
    apart: float = 90.0
    faults: bool = True

    @property
    def flags(self) -> list[str]:
        split = ["--mode", "async", "--target-tp", str(self.target_tp), "--draft-tp", str(self.ranks - self.target_tp)]
        return [*(split if self.ranks > 1 else []), *EXACT, "--queue-timeout", "60"]


@dataclass
class Chaos:
    """One run of a plan."""

    plan: Plan
    faults: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    longest: dict[str, float] = field(default_factory=dict)  # seconds, by the end
    trouble: list[str] = field(default_factory=list)
    restarts: dict[int, int] = field(default_factory=dict)
    back: float | None = None  # seconds from the last fault until all was whole
    rights: dict[ClientRequest, str] = field(default_factory=dict)
    url: str = ""
    front_ends_died: list[float] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)
    noting: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> dict[str, Any]:
        """What came of the whole run, as JSON has it."""
        began = time.monotonic()
        job = None
        try:
            with Served(self.plan.flags, self.plan.ranks) as served:
                job = Job(served, self.plan.ranks)
                self._disturb(job)
                job.look()
        except AssertionError as error:
            self.trouble.append(str(error)[-2000:])
        self.trouble += [f"{what} is left" for what in (job.left(10.0) if job else ())]
        return {
            "ranks": self.plan.ranks, "target_tp": self.plan.target_tp, "seed": self.plan.seed,
            "seconds": round(time.monotonic() - began, 1), "faults": dict(sorted(self.faults.items())),
            "requests": dict(self.ends), "longest_s": {end: round(longest, 2) for end, longest in self.longest.items()},
            "whole_again_s": self.back, "restarts": self.restarts, "trouble": self.trouble[:20],
        }  # fmt: skip

    def _disturb(self, job: Job) -> None:
        job.wait_until_up(2 * BACK)
        self.url = job.served.url
        self.rights = {request: self._undisturbed(request) for _ in range(2) for request in REQUESTS}
        before = cost(job)
        clients = [threading.Thread(target=self._client, args=(number,), daemon=True) for number in range(CLIENTS)]
        for client in clients:
            client.start()
        try:
            self._hurt(job)
        finally:
            self.over.set()
        last = time.monotonic()
        for client in clients:
            client.join(MAX_REQUEST_S + 10)
        assert not any(client.is_alive() for client in clients), "a client has no answer"
        back = BACK if self.plan.apart > CALM else 2 * BACK
        job.wait_until_up(max(back - (time.monotonic() - last), 1.0))
        self.back = round(time.monotonic() - last, 2)
        for request, right in self.rights.items():
            assert self._undisturbed(request) == right, f"{request} has another answer in the end"
        self.trouble += grown(before, cost(job))
        self.restarts = {rank["rank"]: rank["restarts"] for rank in job.ranks()}

    def _undisturbed(self, request: ClientRequest) -> str:
        with httpx.Client(base_url=self.url) as client:
            outcome = send_request(client, request)
        assert outcome.end == "text" and outcome.text, f"{request} has no answer: {outcome}"
        return outcome.text

    def _client(self, number: int) -> None:
        """One client, which asks one request after the other."""
        dice = random.Random(f"client {number} of {self.plan.seed}")
        with httpx.Client(base_url=self.url) as client:
            while not self.over.is_set():
                request = dice.choice(REQUESTS)
                outcome = send_request(client, request, disconnect_after(dice.randrange(1, 12) if dice.random() < CUTS else 0))
                self._note(request, outcome)
                if outcome.end in ("refused", "disconnected"):
                    self.over.wait(0.2)

    def _note(self, request: ClientRequest, outcome: RequestOutcome) -> None:
        died = any(outcome.began - 1 < moment < outcome.ended + 1 for moment in self.front_ends_died)
        with self.noting:
            self.ends[outcome.end] += 1
            self.longest[outcome.end] = max(self.longest.get(outcome.end, 0.0), outcome.ended - outcome.began)
            if wrong := find_fault(request, outcome, self.rights[request], died):
                self.trouble.append(f"{wrong} (after {dict(self.faults)})")

    def _hurt(self, job: Job) -> None:
        """One process after the other, until the time is over."""
        dice, deadly = random.Random(f"faults of {self.plan.seed}"), list[float]()
        ends = time.monotonic() + self.plan.seconds
        while (now := time.monotonic()) < ends:
            time.sleep(min(dice.uniform(0.5, 4.0), ends - now))
            assert job.served.process.poll() is None, "it has ended: " + "".join(job.served.error)[-1500:]
            now, rank, what = time.monotonic(), dice.randrange(self.plan.ranks), "slow"
            if (not deadly or now > deadly[-1] + self.plan.apart) and sum(m > now - WITHIN for m in deadly) < MOST:
                what = dice.choice(("kill", "stop", "front end"))
                deadly.append(now)
            if not self.plan.faults:
                continue
            if what == "front end":
                self.front_ends_died.append(time.monotonic())
                self.faults["kill front end"] += hurt("kill", job.front_end())
            else:
                self.faults[f"{what} rank {rank}"] += hurt(what, job.process(rank))


def cost(job: Job) -> dict[str, tuple[int, int]]:
    """Resident memory in bytes and open files, of the front end and each keeper."""
    costs = job.served.cost()
    found = {f"keeper {rank}": costs[process] for rank, process in enumerate(job.keepers())}
    return {**found, "front end": costs[job.front_end()]}


def grown(before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]]) -> list[str]:
    """What has grown, a line for each."""
    found = []
    for name, (memory, files) in after.items():
        grown, opened = memory - before[name][0], files - before[name][1]
        if grown > MORE_MEMORY[name.rstrip(" 0123456789")] or opened > MORE_FILES:
            found.append(f"the {name} has {grown >> 20} MiB and {opened} files more than at first")
    return found


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.chaos", description="A server under faults.")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--target-tp", type=int, default=1, help="of the ranks; the others draft")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--apart", type=float, default=90.0, help="seconds between two deadly faults at least")
    parser.add_argument("--no-faults", action="store_true", help="load alone")
    given = parser.parse_args()
    plan = Plan(given.minutes * 60, given.ranks, given.target_tp, given.seed, given.apart, not given.no_faults)
    report = Chaos(plan).run()
    print(json.dumps(report, indent=2))
    return 1 if report["trouble"] else 0


if __name__ == "__main__":
    sys.exit(main())
