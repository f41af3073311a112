"""All checks that need an NVIDIA GPU, in one call of less than nine minutes.

    python -m tools.gpu_check [--output DIR] [--budget 530]     everything once
    python -m tools.gpu_check --compare                         switches alternately off and on
    python -m tools.gpu_check --dry-run                         the steps and their limits

Measures the GPU's constants, builds the extension in place if a usable one is missing, decodes a few tokens, runs
tests/gpu, measures operators, decodes with the demo models and with their width-expanded versions, and checks for
memory errors. Each step is a process with its own time limit; a step that fails, hangs or leaves child processes behind
does not stop the others. The limits of all mandatory steps fit into the budget; a step may also use what the steps
before it have saved, a build all that is left. The optional steps use the remaining time. Requires torch, numpy,
safetensors, setuptools, pytest, hypothesis, cmake, ninja, pybind11, nvcc and a C++ compiler, but no network and none of
the front end's packages. docs/guides/gpu.md explains how to interpret the results.

With several GPUs, optional steps measure projections with their all-reduce over 2, 4 and 8 GPUs, a 70B and a 3B on two
groups of ranks, and, if pydantic is installed, all splits of an 8B and a 1B for three minutes; --budget 1000 is enough
for all of them.

After every step, writes <gpu>-step.json (steps and decodes), <gpu>-kernels.json (operators), <gpu>-constants.json,
<gpu>-many-rows.json and <gpu>-logs.tar.gz to DIR, by default profiles/. At the end, prints the results compared with
the targets.
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

from tools.gpu.processes import read, run_all
from tools.gpu.report import report
from tools.gpu.steps import ROOT, SCRATCH, SIZES, build, comparison, plan, slug

FIRST_LOOK = 120.0  # seconds to import torch and to find the GPU
SLOW_LOOK = 20.0  # seconds; a first look that takes longer means that each of the steps' processes starts slowly
NEEDED = ("torch", "numpy", "safetensors", "pytest", "hypothesis")  # modules; a build needs more (tools/gpu/build.py)

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
        said = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, timeout=FIRST_LOOK).stdout.strip()
    except subprocess.TimeoutExpired:
        raise SystemExit(f"gpu_check: PyTorch did not respond within {FIRST_LOOK:.0f} s") from None
    return json.loads(said) | {"date": time.strftime("%Y-%m-%d")} if said else None


def missing_modules() -> list[str]:
    """Returns the modules that the steps need and this Python lacks."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "profiles", help="folder for the results")
    parser.add_argument("--compare", action="store_true", help="only measure each switch, alternating off and on")
    parser.add_argument("--budget", type=float, default=530.0, help="total seconds for all steps")
    parser.add_argument("--dry-run", action="store_true", help="print the steps and time limits, run nothing")
    args = parser.parse_args()
    if not args.dry_run and (missing := missing_modules()):
        print(f"gpu_check: this Python lacks {', '.join(missing)}: pip install {' '.join(missing)}", file=sys.stderr)
        return 2
    began = time.monotonic()
    found = None if args.dry_run else machine()
    if found is not None and time.monotonic() - began > SLOW_LOOK:
        print("gpu_check: the GPU takes long to start; `nvidia-smi -pm 1` keeps its driver loaded", file=sys.stderr)
    if found is None and not args.dry_run:
        print("gpu_check: PyTorch finds no NVIDIA GPU; list the steps with --dry-run", file=sys.stderr)
        return 2
    output, name = args.output.resolve(), slug(found["gpu"]) if found is not None else "GPU"
    gpus = SIZES[-1] if found is None else found["gpus"]
    steps = [build(), *comparison()] if args.compare else plan(output, name, gpus)
    name += "-compared" if args.compare else ""
    if found is None:
        for step in steps:
            print(f"{step.name:36} {step.limit:4.0f} s{' if left' if step.extra else '':8}  {shlex.join(step.command)}")
        return 0
    output.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the current step on exit
    for old in (step.result for step in steps):
        if old is not None:
            old.unlink(missing_ok=True)
    whole = run_all(steps, args.budget - (time.monotonic() - began), output / f"{name}-step.json", found)
    sums = [read(step.result) for step in steps if step.name.startswith("all-reduce")]
    report(whole, read(SCRATCH / "kernels.json"), read(SCRATCH / "constants.json"), [each for each in sums if each])
    missing = [step for step in whole["steps"] if step["state"] != "ok" and not step["extra"]]
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
