"""The figures of the report of a profile: which runs they show."""

from __future__ import annotations

from typing import Any

import pytest

from swiftspec.lab import html_report, trials
from swiftspec.lab.trials import Trial
from tests.support.profiles import profile, run


def measured(trial: Trial) -> dict[str, Any]:
    """The run of a trial that depends on earlier ones."""
    plan = trial.row(trial.steps[0])
    rounds = plan["verify_batch"] / 10 + plan["draft_leaves"] / 100
    return run("serial", 1, 1, 90.0, variation=True, tokens_per_round=rounds) | {"plan": plan, "ops": trial.ops}


@pytest.mark.parametrize("w", [4, 8])
def test_the_compression_curves_have_all_their_points(w: int) -> None:
    """Figure 2 of the paper, with the default w of a CPU and of a GPU. The trials of the winner are no points of it."""
    first = run("serial", 1, 1, 100.0, d=3, draft_leaves=w, tokens_per_round=0.8 + w / 100)
    others = [run("serial", 1, 1, 80.0, d=2, draft_leaves=w), run("ar", 1, 0, 50.0)]
    curve = [measured(trial) for trial in trials.variations(first["plan"])]
    winner = {**first["plan"], "verify_batch": 16}
    tuned = [measured(trial) for trial in (*trials.leaf_trials(winner), trials.calibration_trial(winner, 0.5))]
    base = [measured(trial) for trial in trials.ablation([first], "unfused")]
    curves = html_report.compression_curves(profile(first, *others, *curve, *tuned, *base))
    assert list(curves) == [f"bs (w {w})", "w (bs 8)"]
    by_nodes, by_leaves = curves.values()
    assert by_nodes == [(bs, pytest.approx(bs / 10 + w / 100)) for bs in trials.BATCHES]
    assert by_leaves == [(leaves, pytest.approx(0.8 + leaves / 100)) for leaves in trials.BATCHES]
    assert html_report.compression_curves(profile(first, *others)) == {}


def test_the_base_of_the_ablation_is_that_of_the_sweep() -> None:
    """On a GPU the operators of torch's libraries."""

    class Axes:
        def __init__(self) -> None:
            self.heights: list[float] = []

        def bar(self, place: int, height: float, **style: Any) -> None:
            self.heights.append(height)

        def __getattr__(self, name: str) -> Any:
            return lambda *args, **kwargs: None

    axes: Any = Axes()
    runs = [run("serial", 4, 4, 40.0, d=2), run("async", 3, 1, 90.0, d=4)]
    bases = [run("serial", 4, 4, 20.0, d=2), run("async", 3, 1, 30.0, d=4)]
    for base in bases:
        base.update(ops="unfused", variation=True)
    assert html_report.draw_ablation(profile(*runs, *bases), axes)
    assert axes.heights == [20.0, 30.0, 40.0, 90.0]
    assert not html_report.draw_ablation(profile(*runs), axes)
