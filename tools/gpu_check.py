"""Everything that needs an NVIDIA GPU, in one call of less than nine minutes. Not run on a GPU yet.

    python -m tools.gpu_check [--output profiles] [--dry-run] [--budget 530]

Builds the extension in place, runs tests/gpu, measures the operators and decodes with the embedded pair as it is and
grown to large shapes, then looks for races and stray accesses. Each step is a process with a time limit of its own; one
that fails does not stop the others. Needs torch, numpy, safetensors, pytest, hypothesis, cmake, ninja, pybind11, nvcc
and a C++ compiler, and none of the front end's packages. Writes, after every step, <output>/<gpu>-step.json (steps and
decodes) and <output>/<gpu>-kernels.json (operators), then prints what was reached beside the targets.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench import targets

ROOT = Path(__file__).resolve().parents[1]
NO_TESTS = 5  # what pytest leaves with
TAIL = 1500  # characters of a step's output that are kept


@dataclass(frozen=True, slots=True)
class Step:
    """A process. What it writes to `result` is JSON and becomes part of the whole."""

    name: str
    command: tuple[str, ...]
    limit: float  # seconds
    result: Path | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    name: str
    state: str  # ok, failed, out of time, not begun, nothing to run
    seconds: float
    tail: str


def plan(kernels: Path, scratch: Path) -> list[Step]:
    """The steps, the most telling first."""
    python = sys.executable
    tests = (python, "-m", "pytest", "tests/gpu", "-m", "gpu", "-q")

    def sanitize(tool: str) -> Step:  # the tests of several ranks on this one GPU have "virtual" in their names
        program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
        command = (program, "--error-exitcode", "9", "--tool", tool, *tests, "-k", "virtual")
        return Step(tool, command, 60)

    def decode(pair: str, limit: float, ops: str = "auto") -> Step:
        file = scratch / f"{pair.replace(',', '+')}-{ops}.json"
        command = (python, "-m", "bench.step", "--pair", pair, "--ops", ops, "--json", str(file))
        return Step(f"decode {pair} {ops}", command, limit, file)

    measured = (python, "-m", "bench.kernels_cuda", "--budget", "80", "--json", str(kernels))
    return [
        Step("build", (python, "setup.py", "build_ext", "--inplace"), 150),
        Step("tests", tests, 90),
        decode("demo", 45),
        Step("kernels", measured, 100, kernels),
        decode("Llama-3-70B,Llama-3.2-3B", 90),
        decode("Llama-3-8B,Llama-3.2-1B", 60),
        Step("verify 1 x 8", (python, "-m", "bench.verify", "--gpu", "--batch", "1", "--steps", "8"), 30),
        Step("verify 16 x 5", (python, "-m", "bench.verify", "--gpu", "--batch", "16", "--steps", "5"), 30),
        sanitize("memcheck"),
        sanitize("racecheck"),
        decode("Llama-3-70B,Llama-3.2-3B", 90, "unfused"),  # what the paper's Figure 8 calls the base
        decode("Llama-3-70B,Llama-3.2-1B", 90),
    ]


def run(step: Step, limit: float) -> Outcome:
    """Runs a step for `limit` seconds at most, then ends it and whatever it started."""
    began = time.monotonic()
    environment = {**os.environ, "SWIFTSPEC_CUDA": "1", "PYTHONUNBUFFERED": "1"}
    try:
        process = subprocess.Popen(
            step.command,
            cwd=ROOT,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        return Outcome(step.name, "failed", 0.0, str(error))
    try:
        output, _ = process.communicate(timeout=limit)
        state = {0: "ok", NO_TESTS: "nothing to run"}.get(process.returncode, "failed")
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        state = "out of time"
    return Outcome(step.name, state, time.monotonic() - began, output[-TAIL:])


def run_all(steps: Sequence[Step], budget: float, file: Path, machine: dict[str, Any]) -> dict[str, Any]:
    """Runs the steps one after the other and writes what there is to `file` after each."""
    whole: dict[str, Any] = {"machine": machine, "steps": [], "decodes": []}
    began = time.monotonic()
    for step in steps:
        left = budget - (time.monotonic() - began)
        print(f"== {step.name}: {shlex.join(step.command)}", flush=True)
        outcome = run(step, min(step.limit, left)) if left > 1 else Outcome(step.name, "not begun", 0.0, "")
        print(outcome.tail, flush=True)
        print(f"== {step.name}: {outcome.state}, {outcome.seconds:.0f} s", flush=True)
        whole["steps"].append(asdict(outcome) | {"command": shlex.join(step.command)})
        found = read(step.result)
        if found is not None and step.name.startswith("decode"):
            whole["decodes"].append(found)
        file.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    return whole


def read(file: Path | None) -> dict[str, Any] | None:
    """A JSON object, or None where there is none."""
    try:
        return None if file is None else json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


@dataclass(frozen=True, slots=True)
class Line:
    """Something that has a target; a figure is better when it is lower, unless `more`."""

    what: str
    unit: str
    got: float
    accept: float
    goal: float
    more: bool = False

    def __str__(self) -> str:
        reached = [self.got >= bound if self.more else self.got <= bound for bound in (self.accept, self.goal)]
        verdict = "goal" if reached[1] else "ok" if reached[0] else "MISS"
        return f"{self.what:44} {self.got:9.2f} {self.accept:9.2f} {self.goal:9.2f} {self.unit:6} {verdict}"


def lines(whole: dict[str, Any], kernels: dict[str, Any] | None) -> Iterator[Line]:
    """What was measured and has a target: operators at 8 rows, how they compare, steps, decodes."""
    copy = targets.H200
    if kernels is not None:
        copy = kernels["machine"]["copy GB/s"]
        by_case: dict[str, dict[str, Any]] = {}
        for result in kernels["results"]:
            by_case.setdefault(result["name"], {})[result["competitor"]] = result
        for name, found in by_case.items():
            ours = found.get("swiftspec")
            if ours is None:
                continue
            if ours["rows"] == 8:
                yield Line(name, "us", ours["microseconds"], ours["accept"], ours["goal"])
            for rival, accept, goal in targets.ratios(ours["op"], ours["gigabytes"] * ours["microseconds"] / 1e3):
                if rival in found:
                    ratio = found[rival]["microseconds"] / ours["microseconds"]
                    yield Line(f"{name} against {rival}", "x", ratio, accept, goal, more=True)
        yield from _widths(by_case.values())
    for decoded in whole["decodes"]:
        if "unfused" in decoded["ops"]:  # the baseline
            continue
        for shape, took in decoded["step ms"].items():
            target = targets.step(shape, copy)
            if target is not None:
                yield Line(f"step {shape}", "ms", took, target.accept, target.goal)
        target = targets.decode(decoded["pair"].partition(",")[0], copy)
        if target is not None:
            name = f"decode {decoded['pair']}"
            yield Line(name, "tok/s", decoded["serial"]["tok/s"], target.accept, target.goal, more=True)
            if "async" in decoded:
                both = decoded["async"]["tok/s"]
                yield Line(f"{name} at once", "tok/s", both, target.accept, target.goal, more=True)


def _widths(cases: Iterable[dict[str, dict[str, Any]]]) -> Iterator[Line]:
    """What 16 and 32 rows take beside 8."""
    ours = [found["swiftspec"] for found in cases if "swiftspec" in found]
    eight = {(r["model"], r["tp"], r["op"]): r["microseconds"] for r in ours if r["rows"] == 8}
    for r in ours:
        bound, alone = {16: 1.1, 32: 1.6}.get(r["rows"]), eight.get((r["model"], r["tp"], r["op"]))
        if bound is not None and alone is not None:
            yield Line(f"{r['name']} against x8", "x", r["microseconds"] / alone, bound, bound)


def report(whole: dict[str, Any], kernels: dict[str, Any] | None) -> None:
    print(f"\n{'':44} {'measured':>9} {'accept':>9} {'goal':>9}")
    found = list(lines(whole, kernels))
    for line in found:
        print(line)
    for decoded in whole["decodes"]:
        serial, plain, name = decoded["serial"], decoded["ar"], f"{decoded['pair']} on {' and '.join(decoded['ops'])}"
        print(f"{name}: {serial['tok/s']:.0f} tok/s, {serial['tok/round']:.2f} a round; without a tree", end=" ")
        beside = f", both models at once {decoded['async']['tok/s']:.0f}" if "async" in decoded else ""
        print(f"{plain['tok/s']:.0f}{beside}; {decoded['same text']:.0%} of the text is the small model's in float32")
    for step in whole["steps"]:
        print(f"{step['name']:44} {step['state']}, {step['seconds']:.0f} s")
    print(f"{sum('MISS' in str(line) for line in found)} of {len(found)} targets missed")


def machine() -> dict[str, Any] | None:
    """The GPU and what runs it; None where there is none."""
    import torch

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "memory GB": round(properties.total_memory / 1e9, 1),
        "multiprocessors": properties.multi_processor_count,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
        "date": time.strftime("%Y-%m-%d"),
    }


def slug(gpu: str) -> str:
    """NVIDIA H100 80GB HBM3 -> h100-80gb-hbm3."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower().removeprefix("nvidia ")).strip("-")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "profiles")
    parser.add_argument("--budget", type=float, default=530.0, help="seconds for all steps together")
    parser.add_argument("--dry-run", action="store_true", help="print the steps and their limits, run nothing")
    args = parser.parse_args()
    found = None if args.dry_run else machine()
    if found is None and not args.dry_run:
        print("gpu_check: PyTorch finds no NVIDIA GPU here; --dry-run lists what would be run", file=sys.stderr)
        return 2
    output, name = args.output.resolve(), slug(found["gpu"]) if found is not None else "GPU"
    kernels, scratch = output / f"{name}-kernels.json", ROOT / "build" / "gpu-check"
    steps = plan(kernels, scratch)
    if found is None:
        for step in steps:
            print(f"{step.name:36} {step.limit:4.0f} s  {shlex.join(step.command)}")
        return 0
    output.mkdir(parents=True, exist_ok=True)
    scratch.mkdir(parents=True, exist_ok=True)
    for old in (step.result for step in steps):
        if old is not None:
            old.unlink(missing_ok=True)
    whole = run_all(steps, args.budget, output / f"{name}-step.json", found)
    report(whole, read(kernels))
    return 0 if all(step["state"] == "ok" for step in whole["steps"]) else 1


if __name__ == "__main__":
    sys.exit(main())
