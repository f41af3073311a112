"""What a GPU trial has tuned, for benchmarks that run without a trial of their own."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from swiftspec.backends.cuda.tuner import Tuning

UNTUNED = Tuning()


def add_tuned_option(parser: argparse.ArgumentParser) -> None:
    """Adds the option `--tuned`, the result of tools.gpu.trial."""
    parser.add_argument("--tuned", type=Path, help="result of tools.gpu.trial whose tilings and kernels are used")


def read_tuning(trial: Path | None) -> Tuning:
    """Returns what a trial has tuned. `trial`: its result; nothing is tuned without one, since the trial of a queue may
    have failed, and later steps still run. Raises SystemExit with one line if the file is something else."""
    if trial is None or not trial.is_file():
        return UNTUNED
    try:
        return Tuning.from_json(json.loads(trial.read_text(encoding="utf-8"))["tuning"])
    except (ValueError, KeyError, TypeError):
        raise SystemExit(f"{trial} is no result of tools.gpu.trial") from None


def with_tuning(ops: Any, tuning: Tuning) -> Any:
    """Returns the operators with what a trial has tuned."""
    return ops.with_operators(tilings=tuning.tilings, kernel_shapes=tuning.kernel_shapes) if tuning else ops
