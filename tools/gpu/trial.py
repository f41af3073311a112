"""Runs the GPU trial on the shapes of the benchmarks' models, and records what it decides and what the GPU holds.

    python -m tools.gpu.trial [--models Llama-3-8B,Llama-3-70B,Llama-3.2-1B] [--json out.json]

The first step of tools.gpu_queue. Beside the verdict, the result has the lines of all processes of the trial, their
tracebacks go to standard error, and "unusable" names the families whose kernels hung or ended their process: none of
them must be timed. Limits are longer than at the start of a server, so that all shapes are tuned. With `--device cpu`
the same checks run on the operators in torch, in this process.
"""

from __future__ import annotations

import argparse
import json
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.data.heldout import DEMO
from swiftspec import _C
from swiftspec.backends.cuda.trial import TUNING, TrialRequest, run_checks
from swiftspec.backends.cuda.trial_checks import TreeShape, TrialDevice, TrialPlan, trial_checks
from swiftspec.backends.unfused import unfused
from swiftspec.builder.gpu_trial import DIED, HUNG, CheckProcess, GpuVerdict, TrialLimits, run_trial
from swiftspec.builder.trial_plan import TrialModel, make_trial_plan
from swiftspec.model.config_json import parse_config
from tools.width_expand.shapes import grown_config, read_shape

CAPACITY = 1300  # slots of the KV caches
TREE = TreeShape(slots=64, children=8, leaves=8)
LIMITS = TrialLimits(trial_s=45.0, repeated_check_s=10.0, tune_s=12.0)
Lines = list[dict[str, Any]]


def plan_of(models: list[str]) -> TrialPlan:
    """Returns the plan of width-expanded models in int4. Raises UserError for an unknown shape."""
    configs = [parse_config(grown_config(DEMO / "target", read_shape(name), "int4")) for name in models]
    trial_models = [TrialModel(config, 1, CAPACITY, torch.bfloat16, False) for config in configs]
    return make_trial_plan(trial_models, TREE, 0)


class RecordedProcess(CheckProcess):
    """A process of a trial whose lines are added to `lines`."""

    def __init__(self, lines: Lines, request: TrialRequest) -> None:
        super().__init__(request, stderr=None)
        self._recorded = lines

    def next_line(self, timeout_s: float) -> str | None:
        line = super().next_line(timeout_s)
        with suppress(ValueError, RecursionError):  # something else that the process has printed
            found = json.loads(line or "null")
            if isinstance(found, dict):
                self._recorded.append(found)
        return line


def stand_in(plan: TrialPlan) -> tuple[GpuVerdict, str | None, Lines]:
    """Runs all checks on the operators in torch. Returns the verdict as `run_trial`, and the lines."""
    names = [check.name for check in trial_checks(plan)]
    request = TrialRequest(plan, "cpu", True, [], [*names, TUNING])
    lines = [*run_checks(request, unfused, TrialDevice(torch.device("cpu")))]
    failed = [f"{line['check']}: {line['reason']}" for line in lines if line.get("reason") is not None]
    return GpuVerdict(), "; ".join(failed) or None, lines


def summary(verdict: GpuVerdict, problem: str | None, lines: Lines) -> dict[str, Any]:
    """Returns the result. `tuned`: whether the tuner has run to its end, maybe without finding anything faster."""
    lost = [family for family in sorted(verdict.on_library)
            if any(word in verdict.fallbacks[family] for word in (HUNG, DIED))]  # fmt: skip
    tuned = any(line.get("check") == TUNING and line["reason"] is None for line in lines)
    return {**verdict.to_json(), "problem": problem, "unusable": lost, "tuned": tuned, "lines": lines}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="Llama-3-8B,Llama-3-70B,Llama-3.2-1B")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path, required=True, help="file for the result")
    args = parser.parse_args()
    plan = plan_of(args.models.split(","))
    if args.device == "cpu":
        verdict, problem, lines = stand_in(plan)
    else:
        lines = Lines()
        verdict, problem = run_trial(plan, args.device, partial(RecordedProcess, lines), limits=LIMITS)
    whole = summary(verdict, problem, lines)
    args.json.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({name: value for name, value in whole.items() if name != "lines"}, indent=1), flush=True)
    if args.device == "cuda" and problem is None:  # last: it might hang if a check has wedged the GPU
        args.json.write_text(json.dumps(whole | {"device": _C.cuda_device()}, indent=1) + "\n", encoding="utf-8")
    return 0 if problem is None and not verdict.fallbacks else 1


if __name__ == "__main__":
    raise SystemExit(main())
