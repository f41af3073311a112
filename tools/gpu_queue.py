"""All that a GPU decides, in one call of nine minutes.

    python -m tools.gpu_queue [--output DIR] [--budget 540]     the questions: experiments, operators, decodes
    python -m tools.gpu_queue --plan checks                     tests, sanitizers, and what needs several GPUs
    python -m tools.gpu_queue --resume profiles/h100-queue.json the steps that are not done there
    python -m tools.gpu_queue --dry-run                         steps, limits and decisions

Each step is a process with its own time limit; one that fails, hangs or leaves child processes behind does not stop the
others. The most important steps come first; those for which the budget does not suffice are skipped. Requires torch,
numpy and safetensors and an extension that was built for this GPU (`--build` builds it in place first), for the checks
also pytest and hypothesis; no network and none of the front end's packages. Steps that record stamps need an extension
with SWIFTSPEC_STAMPS in build/stamps (bench/gpu/stamps.py) and are skipped without it. docs/guides/gpu.md explains all.

After every step, writes <gpu>-queue.json with all results, clocks and power to DIR, by default profiles/, next to
<gpu>-kernels.json, <gpu>-constants.json and <gpu>-logs.tar.gz. At the end, prints what each figure decides.
`--stand-in` runs the same steps on a CPU with small shapes and writes no profile but `stand-in-queue.json`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tools.gpu import decisions
from tools.gpu.queue import Queue, ResumeError, results_of, resumed, write
from tools.gpu.steps import ROOT, SCRATCH, SIZES, Step, build, checks, questions, slug, stand_in
from tools.gpu.telemetry import find_sensor

FIRST_LOOK_S = 120.0  # to import torch and to find the GPU
SLOW_LOOK_S = 20.0  # a first look that takes longer means that each of the steps' processes starts slowly
NEEDED = {"questions": ("torch", "numpy", "safetensors"), "checks": ("torch", "numpy", "pytest", "hypothesis")}

MACHINE = """
import json, sys, torch
if torch.cuda.is_available():
    found = torch.cuda.get_device_properties(0)
    print(json.dumps({
        "gpu": found.name, "memory GB": round(found.total_memory / 1e9, 1),
        "multiprocessors": found.multi_processor_count, "capability": f"{found.major}.{found.minor}",
        "torch": torch.__version__, "cuda": torch.version.cuda, "python": sys.version.split()[0],
        "gpus": torch.cuda.device_count(),
    }))
"""


def machine() -> dict[str, Any] | None:
    """Returns a description of the GPU and the software, or None without a GPU.

    A separate process collects it, so that this one does not hold the GPU.
    """
    command = [sys.executable, "-c", MACHINE]
    try:
        said = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, timeout=FIRST_LOOK_S).stdout.strip()
    except subprocess.TimeoutExpired:
        raise SystemExit(f"gpu_queue: PyTorch did not respond within {FIRST_LOOK_S:.0f} s") from None
    return json.loads(said) | {"date": time.strftime("%Y-%m-%d")} if said else None


def missing_modules(plan: str) -> list[str]:
    """Returns the modules that the steps need and this Python lacks."""
    return [name for name in NEEDED[plan] if importlib.util.find_spec(name) is None]


def planned(args: argparse.Namespace, gpu: str, gpus: int) -> list[Step]:
    """Returns the steps of a plan."""
    steps = questions(args.output, gpu) if args.plan == "questions" else checks(gpus)
    if args.stand_in:
        return stand_in(steps)
    return [build(), *steps] if args.build else steps


def describe(args: argparse.Namespace) -> None:
    """Prints the steps with their limits, and the rules."""
    for step in planned(args, "GPU", SIZES[-1]):
        print(f"{step.name:44} {step.limit:4.0f} s  {shlex.join(step.command)}")
    print(decisions.formatted(decisions.outlook(args.plan)))


def found_machine(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the description of this machine. Raises SystemExit with one line if the steps cannot run on it."""
    if missing := missing_modules(args.plan):
        raise SystemExit(f"gpu_queue: this Python lacks {', '.join(missing)}: pip install {' '.join(missing)}")
    if args.stand_in:
        return {"gpu": "stand-in", "gpus": 0, "date": time.strftime("%Y-%m-%d")}
    began = time.monotonic()
    found = machine()
    if found is None:
        raise SystemExit("gpu_queue: PyTorch finds no NVIDIA GPU; list the steps with --dry-run")
    if time.monotonic() - began > SLOW_LOOK_S:
        print("gpu_queue: the GPU takes long to start; `nvidia-smi -pm 1` keeps its driver loaded", file=sys.stderr)
    return found


def run(args: argparse.Namespace) -> int:
    """Runs the steps. Returns the exit code: 1 if one of them failed."""
    began, found = time.monotonic(), found_machine(args)
    name = slug(found["gpu"])
    file = args.output / f"{name}-{'queue' if args.plan == 'questions' else 'checks'}.json"
    steps = planned(args, name, found["gpus"])
    try:
        whole = {"machine": found, "steps": []} if args.resume is None else resumed(args.resume, found)
    except ResumeError as error:
        raise SystemExit(f"gpu_queue: {error}") from None
    args.output.mkdir(parents=True, exist_ok=True)
    (SCRATCH / "telemetry.jsonl").unlink(missing_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the current step on exit
    left, sensor = args.budget - (time.monotonic() - began), None if args.stand_in else find_sensor()
    whole = Queue(file, left, sensor, times_kernels=args.plan == "questions").run_all(steps, whole)
    whole["decisions"] = decisions.table(results_of(whole), args.plan)
    write(file, whole)
    print(f"\nexpected of an H100, and thresholds for this GPU\n{decisions.formatted(whole['decisions'])}")
    print(f"{file}: {sum(entry['state'] == 'ok' for entry in whole['steps'])} of {len(whole['steps'])} steps done")
    return 1 if any(entry["state"] in ("failed", "out of time") for entry in whole["steps"]) else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "profiles", help="folder for the results")
    parser.add_argument("--plan", choices=tuple(NEEDED), default="questions", help="what to run")
    parser.add_argument("--budget", type=float, default=540.0, help="total seconds for all steps")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="results of an earlier run, whose steps are kept")
    parser.add_argument("--build", action="store_true", help="build the extension in place, unless it is usable")
    parser.add_argument("--stand-in", action="store_true", help="run on a CPU with small shapes")
    parser.add_argument("--dry-run", action="store_true", help="print steps, limits and rules, run nothing")
    args = parser.parse_args()
    args.output = args.output.resolve()
    if args.dry_run:
        describe(args)
        return 0
    return run(args)


if __name__ == "__main__":
    sys.exit(main())
