"""What a GPU trial has tuned, for benchmarks that run without a trial of their own."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from swiftspec.backends.cuda.tuner import Tuning


def add_tuned_option(parser: argparse.ArgumentParser) -> None:
    """Adds the option `--tuned`, the result of tools.gpu.trial."""
    parser.add_argument("--tuned", type=Path, help="result of tools.gpu.trial whose tilings and kernels are used")


def is_tuned(trial: Path | None) -> bool:
    """Returns whether `with_tuning` finds a result: the trial of a queue may have failed, and later steps still run."""
    return trial is not None and trial.is_file()


def with_tuning(ops: Any, trial: Path | None) -> Any:
    """Returns the operators with what a trial has tuned. `trial`: its result; without one, the operators stay as they
    are."""
    if trial is None or not is_tuned(trial):
        return ops
    tuning = Tuning.from_json(json.loads(trial.read_text(encoding="utf-8"))["tuning"])
    return ops.with_operators(tilings=tuning.tilings, kernel_shapes=tuning.kernel_shapes) if tuning else ops
