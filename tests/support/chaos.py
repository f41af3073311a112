"""A server under load whose processes are killed, stopped and slowed, and whose clients leave, at seeded moments.

    python -m tests.support.chaos --minutes 60 --ranks 2 --seed 1

Prints the faults and the outcomes of all requests as JSON. Exits with 1 if an answer differs from the undisturbed one,
a request has no end, the server does not recover, or something is left behind.
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

from tests.support.server_process import ServerProcess
from tests.support.server_processes import ServerProcesses, inject_fault
from tests.support.server_request import (
    MAX_REQUEST_S,
    ClientRequest,
    RequestOutcome,
    disconnect_after,
    find_fault,
    send_request,
)

EXACT = ("--dtype", "float64", "--threads", "1")  # so that the order of sums does not change an answer
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
MAX_DEADLY_FAULTS, WINDOW_S = 7, 600.0  # per window: supervisors give up on a rank that dies more often
RECOVERY_S = 30.0  # limit of the recovery after the last fault, doubled if
CALM_S = 60.0  # deadly faults are less than this apart, since supervisors delay repeated restarts
DISCONNECT_RATE = 0.1  # of the requests
MAX_GROWTH_BYTES = {"supervisor": 16 << 20, "front end": 48 << 20}
MAX_GROWTH_FILES = 8


@dataclass(frozen=True)
class Plan:
    """Parameters of a run. `apart`: minimum seconds between two deadly faults."""

    seconds: float
    ranks: int = 2
    target_tp: int = 1
    seed: int = 1
    apart: float = 90.0
    faults: bool = True

    @property
    def flags(self) -> list[str]:
        split = ["--mode", "async", "--target-tp", str(self.target_tp), "--draft-tp", str(self.ranks - self.target_tp)]
        return [*(split if self.ranks > 1 else []), *EXACT]


@dataclass
class Chaos:
    """One run of a plan."""

    plan: Plan
    faults: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    longest: dict[str, float] = field(default_factory=dict)  # seconds, by outcome
    problems: list[str] = field(default_factory=list)
    restarts: dict[int, int] = field(default_factory=dict)
    recovery_s: float | None = None  # seconds from the last fault to the recovery
    expected_texts: dict[ClientRequest, str] = field(default_factory=dict)
    url: str = ""
    front_ends_died: list[float] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> dict[str, Any]:
        """Runs the plan. Returns the report."""
        began = time.monotonic()
        job = None
        try:
            with ServerProcess(self.plan.flags, self.plan.ranks) as server:
                job = ServerProcesses(server, self.plan.ranks)
                self._disturb(job)
                job.snapshot()
        except AssertionError as error:
            self.problems.append(str(error)[-2000:])
        self.problems += [f"{what} is left" for what in (job.leftovers(10.0) if job else ())]
        return {
            "ranks": self.plan.ranks, "target_tp": self.plan.target_tp, "seed": self.plan.seed,
            "seconds": round(time.monotonic() - began, 1), "faults": dict(sorted(self.faults.items())),
            "requests": dict(self.ends), "longest_s": {end: round(longest, 2) for end, longest in self.longest.items()},
            "whole_again_s": self.recovery_s, "restarts": self.restarts, "problems": self.problems[:20],
        }  # fmt: skip

    def _disturb(self, job: ServerProcesses) -> None:
        job.wait_until_up(2 * RECOVERY_S)
        self.url = job.server.url
        self.expected_texts = {request: self._undisturbed(request) for _ in range(2) for request in REQUESTS}
        before = usage(job)
        clients = [threading.Thread(target=self._client, args=(number,), daemon=True) for number in range(CLIENTS)]
        for client in clients:
            client.start()
        try:
            self._inject_faults(job)
        finally:
            self.over.set()
        last = time.monotonic()
        for client in clients:
            client.join(MAX_REQUEST_S + 10)
        assert not any(client.is_alive() for client in clients), "a client has no answer"
        back = RECOVERY_S if self.plan.apart > CALM_S else 2 * RECOVERY_S
        job.wait_until_up(max(back - (time.monotonic() - last), 1.0))
        self.recovery_s = round(time.monotonic() - last, 2)
        for request, text in self.expected_texts.items():
            assert self._undisturbed(request) == text, f"{request} has another answer in the end"
        self.problems += grown(before, usage(job))
        self.restarts = {rank["rank"]: rank["restarts"] for rank in job.ranks()}

    def _undisturbed(self, request: ClientRequest) -> str:
        with httpx.Client(base_url=self.url) as client:
            outcome = send_request(client, request)
        assert outcome.end == "text" and outcome.text, f"{request} has no answer: {outcome}"
        return outcome.text

    def _client(self, number: int) -> None:
        """One client, which sends one request after the other."""
        dice = random.Random(f"client {number} of {self.plan.seed}")
        with httpx.Client(base_url=self.url) as client:
            while not self.over.is_set():
                request = dice.choice(REQUESTS)
                outcome = send_request(
                    client, request, disconnect_after(dice.randrange(1, 12) if dice.random() < DISCONNECT_RATE else 0)
                )
                self._record(request, outcome)
                if outcome.end in ("refused", "disconnected"):
                    self.over.wait(0.2)

    def _record(self, request: ClientRequest, outcome: RequestOutcome) -> None:
        died = any(outcome.began - 1 < moment < outcome.ended + 1 for moment in self.front_ends_died)
        with self.lock:
            self.ends[outcome.end] += 1
            self.longest[outcome.end] = max(self.longest.get(outcome.end, 0.0), outcome.ended - outcome.began)
            if wrong := find_fault(request, outcome, self.expected_texts[request], died):
                self.problems.append(f"{wrong} (after {dict(self.faults)})")

    def _inject_faults(self, job: ServerProcesses) -> None:
        """Injects faults until the time is over."""
        dice, deadly = random.Random(f"faults of {self.plan.seed}"), list[float]()
        ends = time.monotonic() + self.plan.seconds
        while (now := time.monotonic()) < ends:
            time.sleep(min(dice.uniform(0.5, 4.0), ends - now))
            assert job.server.process.poll() is None, (
                "the server has ended: " + "".join(job.server.stderr_lines)[-1500:]
            )
            now, rank, what = time.monotonic(), dice.randrange(self.plan.ranks), "slow"
            if (not deadly or now > deadly[-1] + self.plan.apart) and sum(
                m > now - WINDOW_S for m in deadly
            ) < MAX_DEADLY_FAULTS:
                what = dice.choice(("kill", "stop", "front end"))
                deadly.append(now)
            if not self.plan.faults:
                continue
            if what == "front end":
                self.front_ends_died.append(time.monotonic())
                self.faults["kill front end"] += inject_fault("kill", job.front_end())
            else:
                self.faults[f"{what} rank {rank}"] += inject_fault(what, job.process(rank))


def usage(job: ServerProcesses) -> dict[str, tuple[int, int]]:
    """Resident memory in bytes and open files, of the front end and each supervisor."""
    costs = job.server.resource_usage()
    found = {f"supervisor {rank}": costs[process] for rank, process in enumerate(job.supervisors())}
    return {**found, "front end": costs[job.front_end()]}


def grown(before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]]) -> list[str]:
    """One line for each process whose memory or number of open files has increased."""
    found = []
    for name, (memory, files) in after.items():
        grown, opened = memory - before[name][0], files - before[name][1]
        if grown > MAX_GROWTH_BYTES[name.rstrip(" 0123456789")] or opened > MAX_GROWTH_FILES:
            found.append(f"the {name} has {grown >> 20} MiB and {opened} files more than at first")
    return found


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.chaos", description="A server under faults.")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--target-tp", type=int, default=1, help="of the ranks; the others draft")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--apart", type=float, default=90.0, help="seconds between two deadly faults at least")
    parser.add_argument("--no-faults", action="store_true", help="load alone")
    args = parser.parse_args()
    plan = Plan(args.minutes * 60, args.ranks, args.target_tp, args.seed, args.apart, not args.no_faults)
    report = Chaos(plan).run()
    print(json.dumps(report, indent=2))
    return 1 if report["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
