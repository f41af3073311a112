"""Measures the constants of bench/gpu/targets.py on this machine's GPU and derives the target figures from them.

    python -m bench.gpu.constants [--json out.json]

Compiles constants.cu with nvcc and runs it. If a measurement fails, its constant and those after it keep their assumed
values.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bench.baselines.kernels import BaselineKernels
from bench.gpu import targets
from bench.gpu.cases import Maker
from bench.gpu.targets import ASSUMED, Constants

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "build" / "constants"
SOURCES = (Path(__file__).with_name("constants.cu"), ROOT / "csrc/cuda/device/device.cu")
BUILDING, RUNNING = 18.0, 8.0  # seconds; their sum is below the limit of this step in tools/gpu/steps.py


def build() -> str | None:
    """Compiles constants.cu. Returns an error message if nvcc is missing or fails, else None."""
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    compilers = [os.environ.get("CUDACXX"), "nvcc", *(f"{home}/bin/nvcc" for home in homes if home)]
    nvcc = next((found for name in compilers if name and (found := shutil.which(name))), None)
    if nvcc is None:
        return "nvcc not found"
    PROGRAM.parent.mkdir(parents=True, exist_ok=True)
    arch = "native" if torch.cuda.is_available() else "sm_90"  # without a GPU it still checks that the program compiles
    command = [nvcc, "-std=c++20", "-O3", f"-arch={arch}", "-I", str(ROOT / "csrc"), "-o", str(PROGRAM)]
    said, wrong = run([*command, *map(str, SOURCES)], BUILDING)
    return None if wrong is None else f"nvcc: {wrong} {said.strip()}".strip()


def run(command: list[str], limit: float) -> tuple[str, str | None]:
    """Runs `command` for at most `limit` seconds. Returns its output, and an error message or None."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            said, complaint = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            process.kill()
            said, _ = process.communicate()
            return said, f"timed out after {limit:.0f} s"
    return said, complaint.strip() or f"exit code {process.returncode}" if process.returncode else None


def parse(said: str) -> dict[str, Any]:
    """Parses the output of the program.

    Returns {"gpu": name, "constants": the values that the targets use, "more": the other values, by name and unit}.
    """
    found: dict[str, Any] = {"constants": {}, "more": {}}
    for name, _, rest in (line.partition(" ") for line in said.splitlines()):
        if name == "gpu":
            found["gpu"] = rest
        elif name:
            value, _, unit = rest.partition(" ")
            kind = "constants" if hasattr(ASSUMED, name) else "more"
            found[kind][name if kind == "constants" else f"{name}, {unit}"] = float(value)
    return found


def derived(on: Constants) -> dict[str, list[float]]:
    """Returns [accept, goal] by name, for the operators of Llama-3-70B on one of four ranks and for whole steps."""
    make, made = Maker("cpu", BaselineKernels()), dict[str, list[float]]()
    cases = [make.linear("Llama-3-70B", 4, op, 8) for op in targets.INT4]
    wanted = [targets.linear(case.moved, on) for case in cases]
    cases.append(make.attention("Llama-3-70B", 4, 1000, 8))
    wanted.append(targets.attention(cases[-1].moved, on))
    for case, target in zip(cases, wanted, strict=True):
        made[f"{case.name}, us"] = [target.accept, target.goal]
    for shape in targets.STEPS:
        step = targets.step(shape, on)
        assert step is not None
        made[f"step {shape}, ms"] = [step.accept, step.goal]
    return made


def report(found: dict[str, Any], on: Constants) -> None:
    print(f"{'':44} {'assumed':>16} {'here':>16}")
    for name, value in asdict(on).items():
        measured = f"{value:.2f}" if name in found["constants"] else "not measured"
        print(f"{name:44} {getattr(ASSUMED, name):16.2f} {measured:>16}")
    for name, value in found["more"].items():
        print(f"{name:44} {'':16} {value:16.2f}")
    for name, then in derived(ASSUMED).items():
        pairs = [f"{a:.2f} / {b:.2f}" for a, b in (then, found["targets"][name])]
        print(f"{name:44} {pairs[0]:>16} {pairs[1]:>16}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the constants")
    args = parser.parse_args()
    problem = build()
    if problem is not None:
        print(f"constants: {problem}", file=sys.stderr)
        return 2
    said, problem = run([str(PROGRAM)], RUNNING)
    found = parse(said)
    if found["constants"]:
        on = Constants.of(found, found["constants"].get("copy", ASSUMED.copy))
        found["targets"] = derived(on)
        if args.json is not None:
            args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        report(found, on)
    if problem is not None:
        print(f"constants: {problem}", file=sys.stderr)
    return 0 if problem is None else 2


if __name__ == "__main__":
    sys.exit(main())
