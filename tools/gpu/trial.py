"""Runs the GPU trial on the shapes of the benchmarks' models, and records what it decides and what the GPU holds.

    python -m tools.gpu.trial [--models Llama-3-8B,Llama-3-70B,Llama-3.2-1B] [--json out.json]

The first step of tools.gpu_queue: operators that fail must not be timed. With `--device cpu` the same checks run on the
operators in torch, in this process.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from bench.data.heldout import DEMO
from swiftspec import _C
from swiftspec.backends.cuda.trial import TrialRequest, run_checks
from swiftspec.backends.cuda.trial_checks import TreeShape, TrialDevice, TrialPlan, trial_checks
from swiftspec.backends.unfused import unfused
from swiftspec.builder.gpu_trial import GpuVerdict, run_trial
from swiftspec.builder.trial_plan import TrialModel, make_trial_plan
from swiftspec.model.config_json import parse_config
from tools.width_expand.shapes import grown_config, read_shape

CAPACITY = 1300  # slots of the KV caches
TREE = TreeShape(slots=64, children=8, leaves=8)


def plan_of(models: list[str]) -> TrialPlan:
    """Returns the plan of width-expanded models in int4. Raises UserError for an unknown shape."""
    configs = [parse_config(grown_config(DEMO / "target", read_shape(name), "int4")) for name in models]
    trial_models = [TrialModel(config, 1, CAPACITY, torch.bfloat16, False) for config in configs]
    return make_trial_plan(trial_models, TREE, 0)


def stand_in(plan: TrialPlan) -> tuple[GpuVerdict, str | None]:
    """Runs all checks on the operators in torch. Returns the verdict as `run_trial`."""
    names = [check.name for check in trial_checks(plan)]
    request = TrialRequest(plan, "cpu", True, [], names)
    reasons: dict[str, str] = {}
    for line in run_checks(request, unfused, TrialDevice(torch.device("cpu"))):
        if line.get("reason") is not None:
            reasons[str(line["check"])] = str(line["reason"])
    return GpuVerdict(), "; ".join(f"{name}: {why}" for name, why in reasons.items()) or None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="Llama-3-8B,Llama-3-70B,Llama-3.2-1B")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path, required=True, help="file for the result")
    args = parser.parse_args()
    plan = plan_of(args.models.split(","))
    verdict, problem = stand_in(plan) if args.device == "cpu" else run_trial(plan, args.device)
    whole: dict[str, Any] = {**verdict.to_json(), "problem": problem, "checks": len(trial_checks(plan))}
    if args.device == "cuda":
        whole["device"] = _C.cuda_device()
    args.json.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(whole, indent=1))
    return 0 if problem is None and not verdict.fallbacks else 1


if __name__ == "__main__":
    raise SystemExit(main())
