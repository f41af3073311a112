"""GPU operators of Llama-3 and Qwen2 layers, one at a time, compared with kernels of other projects.

    python -m bench.gpu.kernels [--only "Llama-3-(8B|70B) TP1"] [--rows 8] [--budget 90] [--json out.json]

Timing: a CUDA graph of many calls, over copies of weights or caches that together are several times as large as the L2,
is replayed between two events. The result is the median replay divided by the number of calls. It contains no launch
overhead, and every call reads cold memory. `floor` is the bytes that must move divided by the copy speed of this run.
The most important cases come first; cases that do not fit into `--budget` seconds are skipped and listed.

Competitors: `swiftspec` (backends/cuda if available, with norm, activation, residual, RoPE and KV append), the same
with an all-reduce in a group of one (`swiftspec, summed`), `unfused` (the same work through libraries), and kernels
that only compute the product or the attention: `cublas bf16`, `torch int4`, `sdpa` and, if available, those of
bench/baselines/kernels.py. A separate process measures; it is restarted if it crashes or hangs (watchdog.py).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from bench.baselines import kernels as rivals
from bench.gpu import targets
from bench.gpu.cases import COLD, CONTEXTS, OURS, PAIRED, RIVALS, Case, Made, Maker, cases
from bench.gpu.timing import GpuLost, Timer, alive, copy_speed, eager_timer, graph_timer
from bench.gpu.watchdog import FAILED, watch

PATIENCE = 45.0  # timeout in seconds of one competitor in one case
# usual seconds per case; total seconds beyond these, such as for compilation, after which a baseline is skipped
ORDINARY, SLOW_START = 1.0, 10.0
MOST_FAILURES = 3  # of a baseline, before it is skipped
PACKAGES = "other packages"  # value of Findings.at while other packages are imported
LOST = 70  # exit code of the measuring process when the GPU is unusable


@dataclass(frozen=True, slots=True)
class Result:
    name: str
    model: str
    tp: int
    op: str
    rows: int
    competitor: str
    microseconds: float
    moved: int  # bytes read and written
    gigabytes: float  # GB/s, of the bytes that must move
    of_copy: float  # `gigabytes` divided by the copy speed
    over_floor: float  # microseconds above the time that a copy of `moved` bytes takes
    accept: float | None  # microseconds for 8 rows, from the constants measured here if available
    goal: float | None
    quoted: dict[str, float]  # microseconds on an H800 as published in the paper, not measured here


@dataclass(slots=True)
class Findings:
    """All results so far, as stored in the results file. `at`: case and competitor being measured."""

    machine: dict[str, Any] = field(default_factory=dict)
    results: list[dict[str, Any]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    rivals: list[str] = field(default_factory=list)  # available ones, failures, reasons why others are missing
    left_out: list[str] = field(default_factory=list)
    points: list[dict[str, Any]] = field(default_factory=list)  # own operators, 8 rows, for bench/prediction/
    done: list[str] = field(default_factory=list)
    at: str | None = None

    @staticmethod
    def read(file: Path) -> Findings:
        """Reads a file. Returns empty findings if it does not exist."""
        return Findings(**json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else Findings()

    def write(self, file: Path) -> None:
        """Writes atomically: a reader always finds a complete file."""
        whole = file.with_suffix(".part")
        text = json.dumps({part.name: getattr(self, part.name) for part in fields(self)})
        whole.write_text(text + "\n", encoding="utf-8")
        whole.replace(file)

    def add(self, found: Result) -> None:
        self.results.append(asdict(found))
        if found.competitor == OURS and found.rows == 8 and found.op not in ("draw", "children", "resample"):
            op = "attention" if found.op.startswith("attention") else "linear"
            self.points.append({"op": op, "bytes": found.moved, "us": found.microseconds})


def measure(case: Case, competitor: str, make: Made, constants: targets.Constants, timer: Timer) -> Result:
    """Measures one competitor on a case. Exceptions of the competitor propagate."""
    floor, target = case.moved / (1e3 * constants.copy), target_of(case, constants)
    us = timer(make())
    speed = case.moved / (1e3 * us)
    quoted = targets.QUOTED.get((case.model, case.tp, case.op), {}) if case.rows == 8 else {}
    return Result(
        case.name, case.model, case.tp, case.op, case.rows, competitor, us, case.moved, speed, speed / constants.copy,
        us - floor, target and target.accept, target and target.goal, quoted,
    )  # fmt: skip


def target_of(case: Case, constants: targets.Constants) -> targets.Target | None:
    """Returns the target of the case in microseconds, or None if the operator has no target."""
    if case.op in ("draw", "children"):
        return targets.sampling(case.moved // 2, constants)
    if "particles" in case.op or case.op == "resample":
        return None
    return (targets.attention if case.op.startswith("attention") else targets.linear)(case.moved, constants)


@dataclass(slots=True)
class Run:
    """Measurement of cases, with the findings saved to `file` after every step."""

    file: Path
    found: Findings
    constants: targets.Constants
    timer: Timer
    until: float  # deadline on the clock of time.monotonic()
    competitors: Sequence[str] = ()  # only these; empty: all
    spent: dict[str, float] = field(default_factory=dict)  # seconds beyond the ordinary time, by competitor

    def all(self, several: Iterator[Case]) -> None:
        """Measures all cases. Raises GpuLost, after everything is written, if the GPU becomes unusable."""
        self.found.left_out = []
        for case in several:
            if time.monotonic() > self.until:
                self.found.left_out.append(case.name)
                continue
            for competitor, make in case.variants.items():
                wanted = competitor in self.competitors if self.competitors else not self.given_up(competitor)
                if wanted and f"{case.name} {competitor}" not in self.found.done:
                    self.one(case, competitor, make)
        self.found.at = None
        self.found.write(self.file)

    def one(self, case: Case, competitor: str, make: Made) -> None:
        self.found.at = f"{case.name} {competitor}"
        self.found.write(self.file)
        began = time.monotonic()
        try:
            found = measure(case, competitor, make, self.constants, self.timer)
            self.found.add(found)
            print(line(found), flush=True)
        except Exception as error:
            self.fail(competitor, f"{self.found.at}: {rivals.first_line(error)}")
            if isinstance(error, GpuLost) or (torch.cuda.is_available() and not alive()):
                self.found.done.append(self.found.at)
                self.found.write(self.file)
                raise GpuLost(self.found.at) from error
        self.found.done.append(self.found.at)
        beyond = max(time.monotonic() - began - ORDINARY, 0.0)
        self.spent[competitor] = self.spent.get(competitor, 0.0) + beyond

    def fail(self, competitor: str, why: str) -> None:
        """Records a failure. Failures of a baseline do not count as failures of this project."""
        (self.found.rivals if competitor in RIVALS else self.found.failed).append(why)
        print(why, flush=True)

    def given_up(self, competitor: str) -> bool:
        """Returns whether a baseline is skipped because it took too long or failed too often. Records this once."""
        if competitor not in RIVALS:
            return False
        failures = [said for said in self.found.rivals if f" {competitor}: " in said]
        fatal = any(said.endswith(": hung") or ": ended the process" in said for said in failures)
        slow = self.spent.get(competitor, 0.0) > SLOW_START
        if not slow and not fatal and len(failures) < MOST_FAILURES:
            return False
        reason = f"{SLOW_START:.0f} s of compiling" if slow else f"{len(failures)} failures"
        why = f"{competitor}: skipped after {reason}"
        if why not in self.found.rivals:
            self.found.rivals.append(why)
            print(why, flush=True)
        return True


def line(r: Result) -> str:
    numbers = f"{r.microseconds:8.2f} {r.gigabytes:8.0f} {r.of_copy:8.2f} {r.over_floor:8.2f}"
    wanted = "".join(f" {value:8.2f}" if value is not None else f" {'':8}" for value in (r.accept, r.goal))
    quoted = ", ".join(f"{who} {us:.1f}" for who, us in r.quoted.items())
    return f"{r.name:44} {r.competitor:17} {numbers}{wanted}  {quoted}".rstrip()


def head() -> str:
    numbers = "".join(f" {what:>8}" for what in ("us", "GB/s", "of copy", "over", "accept", "goal"))
    return f"{'':44} {'':17}{numbers}  us on an H800 (quoted from the paper)"


def work(args: argparse.Namespace) -> int:
    """Measures the cases that the results file does not contain yet. Returns the exit code."""
    found, began = Findings.read(args.json), time.monotonic()
    if not found.machine:
        copy = round(copy_speed(args.device), 1)
        gpu = torch.cuda.get_device_name() if args.device == "cuda" else "none"
        found.machine = {"gpu": gpu, "torch": torch.__version__, "copy GB/s": copy}
        found.machine["quoted"] = "microseconds on an H800, from the SwiftSpec paper's Tables 3 and 7"
        print(f"{found.machine['gpu']}: copy bandwidth {copy:.0f} GB/s\n{head()}")
    ours_only = args.competitors != [] and {*args.competitors} <= {OURS, PAIRED}
    others = rivals.BaselineKernels() if ours_only else find_baseline_kernels(found, args.json)
    constants = targets.Constants.of(read_json(args.constants), found.machine["copy GB/s"])
    timer = graph_timer if args.device == "cuda" else eager_timer
    run = Run(args.json, found, constants, timer, began + args.budget, args.competitors)
    make = Maker(args.device, others, COLD if args.device == "cuda" else 1)
    several = cases(make, numbers(args.rows), numbers(args.contexts))
    try:
        with torch.inference_mode():
            run.all(case for case in several if re.search(args.only, case.name))
    except GpuLost:
        return LOST
    print(f"{len(found.failed)} failed, {len(found.left_out)} cases skipped after the budget was spent")
    return FAILED if found.failed else 0


def read_json(file: Path | None) -> dict[str, Any] | None:
    """Reads a JSON object. Returns None if the file is missing or invalid."""
    try:
        return None if file is None else json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def find_baseline_kernels(found: Findings, file: Path) -> rivals.BaselineKernels:
    """Imports the kernels of other packages. If the import ends the process, the next process continues without
    them."""
    if PACKAGES in found.done:
        return rivals.BaselineKernels()
    found.at = PACKAGES
    found.write(file)
    others = rivals.find()
    found.rivals += [said for said in others.said if said not in found.rivals]
    print("\n".join(others.said), flush=True)
    return others


def numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def give_up(file: Path, why: str) -> bool:
    """Records that the current case ended the process or hung, so that the next process continues after it.

    Returns False if no case was being measured.
    """
    found = Findings.read(file)
    if found.at is None:
        return False
    if found.at not in found.done:
        theirs = found.at.endswith((*RIVALS, PACKAGES))
        (found.rivals if theirs else found.failed).append(f"{found.at}: {why}")
        found.done.append(found.at)
        found.write(file)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only cases whose name matches this regular expression")
    parser.add_argument("--contexts", default=",".join(map(str, CONTEXTS)), help="keys of attention")
    parser.add_argument("--competitors", type=lambda text: text.split(","), default=[], help="only these, not all")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu stands in for a GPU")
    parser.add_argument("--rows", default="8,1,16,32,4")
    parser.add_argument("--budget", type=float, default=90.0, help="seconds after which no further case starts")
    parser.add_argument("--json", type=Path, help="file for the results, written after every case")
    parser.add_argument("--constants", type=Path, help="constants written by bench.gpu.constants, for the targets")
    parser.add_argument("--resume", action="store_true", help="continue from the results in --json")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("PyTorch finds no NVIDIA GPU")
    if args.worker:
        return work(args)
    with tempfile.TemporaryDirectory() as folder:
        file = args.json or Path(folder) / "found.json"
        if not args.resume:
            file.unlink(missing_ok=True)
        command = [sys.executable, "-m", "bench.gpu.kernels", "--worker", "--only", args.only, "--rows", args.rows]
        command += ["--contexts", args.contexts, "--device", args.device]
        command += ["--competitors", ",".join(args.competitors)] if args.competitors else []
        command += ["--json", str(file)] + (["--constants", str(args.constants)] if args.constants else [])
        return watch(command, file, args.budget, PATIENCE, give_up)


if __name__ == "__main__":
    sys.exit(main())
