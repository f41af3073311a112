"""The trial of the queue: what its result says of a verdict, and its files on a machine without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu.tuning import UNTUNED, read_tuning
from swiftspec.backends.cuda.trial import TUNING
from swiftspec.backends.cuda.tuner import Tuning
from swiftspec.builder.gpu_trial import DIED, HUNG, GpuVerdict
from tools.gpu import trial

TUNED = Tuning(kernel_shapes={"2/1 heads of 64, short": "paired"})


def test_kernels_that_cost_a_process_its_gpu_are_unusable() -> None:
    """Wrong results are no reason not to time an operator, and an early start is off afterwards."""
    fallbacks = {
        "attention": f"a layer: {HUNG} for 5 s", "projections": f"head: {DIED} (SIGABRT)",
        "sampling": "a difference of 0.5", "early_starts": f"a layer: {HUNG} for 5 s",
    }  # fmt: skip
    found = trial.summary(GpuVerdict(fallbacks), None, [])
    assert found["unusable"] == ["attention", "projections"] and found["fallbacks"] == fallbacks


@pytest.mark.parametrize(
    ("last", "tuned"), [({"reason": None, "tuning": {}}, True), ({"reason": "CUDA error"}, False), (None, False)]
)
def test_the_result_says_whether_the_tuner_has_run(last: dict[str, object] | None, tuned: bool, tmp_path: Path) -> None:
    lines = [{"begins": TUNING}, *([] if last is None else [{"check": TUNING, **last}])]
    found = trial.summary(GpuVerdict(tuning=TUNED), "a problem", lines)
    assert (found["tuned"], found["problem"], found["lines"]) == (tuned, "a problem", lines)
    file = tmp_path / "trial.json"
    assert read_tuning(None) == read_tuning(file) == UNTUNED
    file.write_text(json.dumps(found))
    assert read_tuning(file) == TUNED
    for broken in ("", "[]", "{}", '{"tuning": 1}'):
        file.write_text(broken)
        with pytest.raises(SystemExit, match=r"trial.json is no result of tools.gpu.trial$"):
            read_tuning(file)


@pytest.mark.slow
def test_without_a_gpu_the_problem_is_recorded(tmp_path: Path) -> None:
    """The real process of a trial starts, and its lines are kept."""
    file = tmp_path / "trial.json"
    command = [sys.executable, "-m", "tools.gpu.trial", "--models", "Llama-3.2-1B", "--json", str(file)]
    code = subprocess.run(command, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, check=False).returncode
    found = json.loads(file.read_text())
    assert code == 1 and found["lines"] == [{"problem": found["problem"]}] and not found["tuned"]
