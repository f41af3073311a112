"""Reasons for which the warps of four operators wait, from Nsight Compute, and their share of the memory bandwidth.

    python -m bench.gpu.stalls [--shape Llama-3-70B] --json out.json

Cycles per issued instruction that a warp waits: for instructions (the code does not fit the instruction cache), at
barriers, for fences of the device's memory, for memory. Runs bench.gpu.profile_target under `ncu`; without that
program, or where it may not read the counters, the exit code is 5. Not run on a GPU.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

SKIPPED = 5  # exit code
NCU = "/usr/local/cuda/bin/ncu"  # where PATH lacks it
STALLS = ("no_instruction", "barrier", "membar", "long_scoreboard", "wait", "math_pipe_throttle")
METRIC = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
OTHER = {"dram__throughput.avg.pct_of_peak_sustained_elapsed": "dram %", "gpu__time_duration.sum": "ns"}
NAMES = {METRIC.format(stall): stall for stall in STALLS} | OTHER


def parse(output: str) -> list[dict[str, Any]]:
    """Returns a table row per launch from the CSV output of ncu: the kernel's name and the metrics of NAMES."""
    lines = [line for line in output.splitlines() if line.startswith('"')]
    launches: dict[str, dict[str, Any]] = {}
    for row in csv.DictReader(lines):
        name = NAMES.get(row["Metric Name"])
        if name is not None:
            launch = launches.setdefault(row["ID"], {"kernel": row["Kernel Name"].partition("(")[0]})
            launch[name] = float(row["Metric Value"].replace(",", ""))
    return list(launches.values())


def command(ncu: str, shape: str) -> list[str]:
    """Returns the command that profiles bench.gpu.profile_target, whose clocks it leaves alone."""
    options = ["--clock-control", "none", "--csv", "--print-units", "base"]
    options += ["--kernel-name", "regex:linear_kernel|attention_kernel"]
    options += ["--metrics", ",".join(NAMES)]
    return [ncu, *options, sys.executable, "-m", "bench.gpu.profile_target", "--shape", shape]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="Llama-3-70B")
    parser.add_argument("--json", type=Path, required=True, help="file for the result")
    args = parser.parse_args()
    ncu = shutil.which("ncu") or shutil.which(NCU)
    if ncu is None:
        print("ncu not found")
        raise SystemExit(SKIPPED)
    done = subprocess.run(command(ncu, args.shape), stdout=subprocess.PIPE, text=True)
    launches = parse(done.stdout)
    if not launches:
        print(done.stdout[-1000:] or "ncu printed nothing")
        raise SystemExit(SKIPPED)
    args.json.write_text(json.dumps({"shape": args.shape, "launches": launches}, indent=1) + "\n", encoding="utf-8")
    for launch in launches:
        print(
            ", ".join(
                f"{name} {value if isinstance(value, str) else round(value, 2)}" for name, value in launch.items()
            )
        )


if __name__ == "__main__":
    main()
