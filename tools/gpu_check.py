"""Everything that needs an NVIDIA GPU, in one call of less than nine minutes. Not run on a GPU yet.

    python -m tools.gpu_check [--output profiles] [--dry-run] [--budget 530]

Builds the extension in place, runs tests/gpu, measures constants and operators, decodes with the embedded pair as it is
and grown to large shapes, and looks for stray accesses and races among virtual ranks. Each step is a process with a
time limit of its own; one that fails, hangs or leaves children behind does not stop the others. The limits of all that
must be done fit the budget; the steps after these have what is left. Needs torch, numpy, safetensors, setuptools,
pytest, pytest-timeout, hypothesis, cmake, ninja, pybind11, nvcc and a C++ compiler, no network and none of the front
end's packages.

Writes, after every step, <output>/<gpu>-step.json (steps and decodes), <gpu>-kernels.json (operators) and
<gpu>-constants.json, then prints what was reached beside the targets. Logs are in build/gpu-check.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tools.gpu_report import report

ROOT = Path(__file__).resolve().parents[1]
SCRATCH = ROOT / "build" / "gpu-check"
NO_TESTS = 5  # what pytest leaves with
TAIL, WHOLE_TAIL = 600, 6000  # characters of the output that are kept of a step that went well, and of another
FIRST_LOOK = 120.0  # seconds to import torch and see the GPU
LAST_WORDS = 4.0  # seconds for an interrupted process to say what it was at
LAST_WAIT = 5.0  # seconds for a killed process to end; one that the driver holds may not
SECONDS, MARGIN = "{seconds}", 12.0  # in a command: its limit less what its end takes
PATIENCE = 30  # seconds for one test
EPOCHS = "6"  # of each test under the sanitizer: every number of rows once
PAIR, SMALL_PAIR = "Llama-3-70B,Llama-3.2-3B", "Llama-3-8B,Llama-3.2-1B"


@dataclass(frozen=True, slots=True)
class Step:
    """A process. What it writes to `result` is JSON; where there are results or constants in it, `keep` gets it too."""

    name: str
    command: tuple[str, ...]
    limit: float  # seconds
    result: Path | None = None
    keep: Path | None = None
    environment: dict[str, str] = field(default_factory=dict)
    extra: bool = False  # done if time is left


@dataclass(frozen=True, slots=True)
class Outcome:
    name: str
    state: str  # ok, failed, out of time, not begun, nothing to run
    seconds: float
    tail: str


def plan(output: Path, gpu: str) -> list[Step]:
    """The steps, the most telling first."""
    python, kernels = sys.executable, SCRATCH / "kernels.json"
    constants = SCRATCH / "constants.json"
    bench = (python, "-m", "bench.kernels_cuda", "--budget", SECONDS, "--json", str(kernels))
    bench += ("--constants", str(constants))
    kept = output / f"{gpu}-kernels.json"
    verify = (python, "-m", "bench.verify", "--gpu", "--batch")
    measure = (python, "-m", "bench.constants", "--json", str(constants))
    return [
        Step("build", (python, "setup.py", "build_ext", "--inplace"), 65),
        *tests(),
        decode("demo", 25),
        Step("constants", measure, 30, constants, output / f"{gpu}-constants.json"),
        Step("kernels", bench, 65, kernels, kept),
        decode(PAIR, 70),
        decode(SMALL_PAIR, 40),
        sanitize("memcheck", "virtual"),
        sanitize("racecheck", "virtual and 4"),  # four ranks, for it takes long
        decode(PAIR, 70, "unfused", extra=True),  # what the paper's Figure 8 calls the base
        decode("Llama-3-70B,Llama-3.2-1B", 60, extra=True),
        Step("verify 1 x 8", (*verify, "1", "--steps", "8"), 20, extra=True),
        Step("verify 16 x 5", (*verify, "16", "--steps", "5"), 20, extra=True),
        decode(SMALL_PAIR, 40, early=False, extra=True),
        profile(),
        Step("kernels, the rest", (*bench, "--resume"), 300, kernels, kept, extra=True),
    ]


def tests() -> list[Step]:
    """Three processes, so that an error of the device, which stays until its process ends, takes few tests with it."""
    files = sorted((ROOT / "tests" / "gpu").glob("test_*.py"))
    groups: dict[str, tuple[str, ...]] = {
        "operators": ("test_linear", "test_cuda_ops"),
        "ranks": ("test_sums", "test_peers"),
    }
    named = [stem for stems in groups.values() for stem in stems]
    groups["engine"] = tuple(file.stem for file in files if file.stem not in named)
    return [
        Step(f"tests of {name}", pytest(*(f"tests/gpu/{stem}.py" for stem in groups[name])), limit)
        for name, limit in (("operators", 35.0), ("engine", 55.0), ("ranks", 45.0))
    ]


def pytest(*arguments: str) -> tuple[str, ...]:
    """Names each test as it begins. One that hangs says where, be it in the driver, and ends the process if it can."""
    limits = ("-o", f"faulthandler_timeout={PATIENCE - 5}", "-o", f"timeout={PATIENCE}", "-o", "timeout_method=thread")
    return (sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "-vv", *limits, *arguments)


def decode(pair: str, limit: float, ops: str = "auto", early: bool = True, extra: bool = False) -> Step:
    name = f"{pair} {ops}" + ("" if early else ", nothing early")
    file = SCRATCH / f"{slug(name)}.json"
    command = (sys.executable, "-m", "bench.step", "--pair", pair, "--ops", ops, "--json", str(file))
    environment = {} if early else {"SWIFTSPEC_EARLY_STARTS": "0"}
    return Step(f"decode {name}", command, limit, file, environment=environment, extra=extra)


def tool(name: str) -> str:
    """A program of the CUDA toolkit."""
    return shutil.which(name) or f"/usr/local/cuda/bin/{name}"


def sanitize(kind: str, which: str) -> Step:
    """The tests of several ranks on this one GPU, those that `which` chooses as pytest's -k does; of all kernels only
    ours are looked at. Each tensor is an allocation of its own, so that what lies beside it is nobody's."""
    options = ("--error-exitcode", "9", "--kernel-name", "kns=swiftspec")
    command = (
        tool("compute-sanitizer"),
        "--tool",
        kind,
        *options,
        *pytest("tests/gpu/test_sums.py", "-k", which),
    )
    environment = {"SWIFTSPEC_TEST_EPOCHS": EPOCHS, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return Step(kind, command, 40, environment=environment)


def profile() -> Step:
    """Whether the profiler works here, and what it says of one projection."""
    metric = "dram__throughput.avg.pct_of_peak_sustained_elapsed"
    options = ("--clock-control", "none", "--kernel-name", "regex:linear_kernel", "--launch-count", "1")
    test = pytest("tests/gpu/test_linear.py", "-k", "bitwise and 128")
    return Step("profile", (tool("ncu"), *options, "--metrics", metric, *test), 40, extra=True)


def run(step: Step, limit: float) -> Outcome:
    """Runs a step for `limit` seconds at most, then ends it and whatever it started."""
    began = time.monotonic()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background, which the step would take over
        signal.signal(signal.SIGINT, signal.default_int_handler)
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))  # cmake and ninja
    environment = {**os.environ, "PATH": path, "SWIFTSPEC_CUDA": "1", "PYTHONUNBUFFERED": "1", **step.environment}
    command = [part.replace(SECONDS, f"{max(limit - MARGIN, 1.0):.0f}") for part in step.command]
    log = SCRATCH / f"{slug(step.name)}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    # a file, not a pipe, whose end would be waited for as long as any child has it open
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        except OSError as error:
            return Outcome(step.name, "failed", 0.0, str(error))
        try:
            state = {0: "ok", NO_TESTS: "nothing to run"}.get(process.wait(limit), "failed")
        except subprocess.TimeoutExpired:
            state = "out of time"
            interrupt(process)
        finally:
            end(process)
    said = log.read_text(encoding="utf-8", errors="replace")
    last = said.strip().rpartition("\n")[2]
    if state == "ok" and " skipped" in last and " passed" not in last:
        state = "nothing to run"
    kept = TAIL if state == "ok" else WHOLE_TAIL
    return Outcome(step.name, state, time.monotonic() - began, said[-kept:])


def interrupt(process: subprocess.Popen[bytes]) -> None:
    """As Ctrl-C does, at which pytest tells what has failed so far."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(LAST_WORDS)


def end(process: subprocess.Popen[bytes]) -> None:
    """Kills a process and its children, and does not wait for ever."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(LAST_WAIT)


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
        whole["steps"].append(asdict(outcome) | {"command": shlex.join(step.command), "extra": step.extra})
        found = read(step.result)
        if found is not None and step.name.startswith("decode"):
            whole["decodes"].append(found)
        if found is not None and step.keep is not None and (found.get("results") or found.get("constants")):
            step.keep.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        file.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    return whole


def read(file: Path | None) -> dict[str, Any] | None:
    """A JSON object, or None where there is none."""
    try:
        return None if file is None else json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


MACHINE = """
import json, sys, torch
if torch.cuda.is_available():
    found = torch.cuda.get_device_properties(0)
    print(json.dumps({
        "gpu": found.name, "memory GB": round(found.total_memory / 1e9, 1),
        "multiprocessors": found.multi_processor_count, "capability": f"{found.major}.{found.minor}",
        "torch": torch.__version__, "cuda": torch.version.cuda, "python": sys.version.split()[0],
    }))
"""


def machine() -> dict[str, Any] | None:
    """The GPU and what runs it, told by a process that leaves the GPU to the others; None where there is none."""
    command = [sys.executable, "-c", MACHINE]
    try:
        said = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, timeout=FIRST_LOOK).stdout.strip()
    except subprocess.TimeoutExpired:
        raise SystemExit(f"gpu_check: PyTorch did not answer within {FIRST_LOOK:.0f} s") from None
    return json.loads(said) | {"date": time.strftime("%Y-%m-%d")} if said else None


def slug(gpu: str) -> str:
    """NVIDIA H100 80GB HBM3 -> h100, as `profile predict --hardware` has it; others by all their name."""
    name = re.sub(r"[^a-z0-9]+", "-", gpu.lower().removeprefix("nvidia ")).strip("-")
    return re.sub(r"-\d+gb-hbm\d\w*$", "", name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "profiles")
    parser.add_argument("--budget", type=float, default=530.0, help="seconds for all steps together")
    parser.add_argument("--dry-run", action="store_true", help="print the steps and their limits, run nothing")
    args = parser.parse_args()
    began = time.monotonic()
    found = None if args.dry_run else machine()
    if found is None and not args.dry_run:
        print("gpu_check: PyTorch finds no NVIDIA GPU here; --dry-run lists what would be run", file=sys.stderr)
        return 2
    output, name = args.output.resolve(), slug(found["gpu"]) if found is not None else "GPU"
    steps = plan(output, name)
    if found is None:
        for step in steps:
            print(f"{step.name:36} {step.limit:4.0f} s{' if left' if step.extra else '':8}  {shlex.join(step.command)}")
        return 0
    output.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the step that runs is ended on the way
    for old in (step.result for step in steps):
        if old is not None:
            old.unlink(missing_ok=True)
    whole = run_all(steps, args.budget - (time.monotonic() - began), output / f"{name}-step.json", found)
    report(whole, read(SCRATCH / "kernels.json"), read(SCRATCH / "constants.json"))
    missing = [step for step in whole["steps"] if step["state"] != "ok" and not step["extra"]]
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
