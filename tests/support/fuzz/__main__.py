"""`python -m tests.support.fuzz --minutes 60`: hostile input for all targets alternately; reports how many of each were
accepted and refused, and the most memory that one input took. Exit code 1 after a fault; its smallest example is
printed."""

from __future__ import annotations

import argparse
import faulthandler
import re
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Flaky

from tests.support.fuzz import Target, attempt, files, http, hub, messages, requests, services

HANGS = 900.0  # seconds, some of them without a CPU: a run that lasts longer ends the command, with a traceback
MAX_MIB = 256  # that one input may take; its files have at most some MiB
STATUS = Path("/proc/self/status")
TURN = 40  # examples of a target at a time, for cost 1
CHECKS: list[HealthCheck] = list(HealthCheck)  # pyright: ignore[reportAssignmentType]
TARGETS = (*files.TARGETS, *messages.TARGETS, *requests.TARGETS, *services.TARGETS, *http.TARGETS, *hub.TARGETS)


def memory_mib(peak: bool = False) -> int:
    """The memory of this process in MiB, or its peak since the last call without `peak`. Linux only; 0 elsewhere."""
    if not STATUS.exists():
        return 0
    if not peak:
        STATUS.with_name("clear_refs").write_text("5", encoding="utf-8")
    found = re.search(r"VmHWM:\s+(\d+)", STATUS.read_text(encoding="utf-8"))
    return 0 if found is None else int(found[1]) >> 10


def one_turn(target: Target, number: int, count: Counter[str]) -> str | None:
    """Some examples of one target. Returns the traceback of a fault, shrunk."""

    @seed(number)
    @settings(
        max_examples=max(TURN // target.cost, 1), deadline=None, database=None, suppress_health_check=CHECKS,
        phases=(Phase.generate, Phase.shrink), print_blob=False,
    )  # fmt: skip
    @given(target.strategy)
    def run(value: object) -> None:
        faulthandler.dump_traceback_later(HANGS, exit=True)
        before = memory_mib()
        try:
            count["taken" if attempt(target, value) == "taken" else "refused"] += 1
        finally:
            faulthandler.cancel_dump_traceback_later()
        grown = memory_mib(peak=True) - before
        count["MiB"] = max(count["MiB"], grown)
        assert grown <= MAX_MIB, f"{grown} MiB of memory for one input"

    try:
        run()
    except (Exception, Flaky, ExceptionGroup):
        count["faults"] += 1
        return traceback.format_exc()
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the first turn")
    parser.add_argument("--only", default="", help="targets whose name holds this, or one of several: a,b")
    args = parser.parse_args()
    targets = [target for target in TARGETS if any(part in target.name for part in args.only.split(","))]
    counts = {target.name: Counter[str]() for target in targets}
    end, number = time.monotonic() + 60 * args.minutes, args.seed
    while time.monotonic() < end:
        for target in targets:
            number += 1
            fault = one_turn(target, number, counts[target.name])
            if fault is not None:
                print(f"== {target.name}, seed {number}\n{fault}", flush=True)
            if time.monotonic() >= end:
                break
    print(f"{'target':32}{'taken':>10}{'refused':>10}{'faults':>8}{'MiB':>6}   (seed {args.seed})")
    for name, count in counts.items():
        print(f"{name:32}{count['taken']:10}{count['refused']:10}{count['faults']:8}{count['MiB']:6}")
    return 1 if any(count["faults"] for count in counts.values()) else 0


if __name__ == "__main__":
    torch.set_num_threads(1)  # the models are tiny, and other processes share the machine
    sys.exit(main())
