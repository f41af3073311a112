"""The trials of a sweep: splits, depths, and which candidates are dropped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swiftspec.config import PopulationConfig
from swiftspec.errors import UserError
from swiftspec.lab import sweep_runs
from swiftspec.lab.profile import PROMPTS, read_prompts, seconds
from swiftspec.model.checkpoint_files import read_config
from swiftspec.model.config import ModelConfig
from swiftspec.profiles import store
from tests.support.profiles import run
from tests.support.toy_pair import make_pair


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelConfig, ModelConfig]:
    target, draft = make_pair(tmp_path_factory.mktemp("pair"))  # four heads each
    return read_config(target), read_config(draft)


def test_all_splits_including_impossible_ones(configs: tuple[ModelConfig, ModelConfig]) -> None:
    assert sweep_runs.splits("all", 4, *configs) == ([(3, 1), (2, 2), (1, 3)], [])
    splits, reasons = sweep_runs.splits("all", 6, *configs)
    assert splits == [(4, 2), (3, 3), (2, 4)]
    assert len(reasons) == 2 and "5+1: 4 query heads cannot be sharded over 5 ranks" in reasons[0]
    assert sweep_runs.splits("2+2, 3+1", 4, *configs)[0] == [(2, 2), (3, 1)]


@pytest.mark.parametrize("text", ["", "3", "3+1+1", "4+0", "2+1", "a+b", "3+1,", "5+1"])
def test_invalid_splits_are_refused(text: str, configs: tuple[ModelConfig, ModelConfig]) -> None:
    with pytest.raises(UserError, match="--splits"):
        sweep_runs.splits(text, 6 if text == "5+1" else 4, *configs)


def test_depths_are_floor_and_ceiling() -> None:
    assert sweep_runs.depths(10.48, 3.25) == (3, 4)
    assert sweep_runs.depths(9.0, 3.0) == (3,)
    assert sweep_runs.depths(1.0, 3.0) == (1,)
    assert sweep_runs.depths(100.0, 1.0) == (16,)


def test_losers_are_dropped_but_every_mode_keeps_its_best() -> None:
    runs = [
        run("async", 3, 1, 100, 110, d=4), run("async", 2, 2, 80, 96, d=4), run("async", 1, 3, 50, 60, d=4),
        run("serial", 4, 4, 40, d=2), run("serial", 4, 4, 30, d=3), run("smc", 1, 1, 5), run("serial", 1, 1, 900, d=2),
    ]  # fmt: skip
    assert sweep_runs.dominated_runs(runs) == [2, 4]
    assert sweep_runs.dominated_runs([]) == []


def test_variations_change_one_thing_at_a_time() -> None:
    made = sweep_runs.variations(run("async", 3, 1, 100, d=5, draft_leaves=4)["plan"])
    assert {(t.verify_batch, t.draft_leaves) for t in made} == {
        (2, 4), (4, 4), (16, 4), (32, 4), (8, 2), (8, 8), (8, 16), (8, 32),
    }  # fmt: skip
    assert all((t.target_tp, t.draft_tp, t.steps) == (3, 1, (5,)) for t in made)
    assert sweep_runs.variations(run("ar", 4, 0, 100)["plan"]) == []


def test_the_winner_is_tried_with_other_leaves_and_another_calibration() -> None:
    """At its own bs, mode, split and d; a calibration is part of the plan, and of the settings of `serve`."""
    winner = run("async", 1, 0, 100, d=5, verify_batch=16)["plan"]
    made = sweep_runs.leaf_trials(winner)
    assert [(t.verify_batch, t.draft_leaves) for t in made] == [(16, 2), (16, 4), (16, 16), (16, 32)]
    made = sweep_runs.calibration_trial(winner, 0.5)
    assert (made.mode, made.draft_tp, made.draft_leaves, made.steps) == ("async", 0, 8, (5,))
    row = made.row(5)
    assert sweep_runs.Trial.of(row, steps=(5,)) == made and made.plan(5).calibration == 0.5
    assert store.plan_settings(row)["calibration"] == 0.5 and "calibration" not in store.plan_settings(winner)
    assert store.plan_title(row) == "async 1+0 bs 16 w 8 d 5 c 0.5"
    assert sweep_runs.leaf_trials(run("ar", 4, 0, 100)["plan"]) == []


def test_prompts_are_taken_from_all_families_in_turn(tmp_path: Path) -> None:
    families = [json.loads(line)["family"] for line in PROMPTS.read_text().splitlines()]
    by_prompt = {json.loads(line)["prompt"]: json.loads(line)["family"] for line in PROMPTS.read_text().splitlines()}
    found = [by_prompt[text] for text in read_prompts(PROMPTS)]
    assert len(found) == len(families) and sorted(found) == sorted(families)
    assert len({*found[:6]}) == len({*families}) == 6
    assert {by_prompt[text] for text in read_prompts(PROMPTS, "gsm8k", 3)} == {"gsm8k"}
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n{"prompt": "c"}\n')
    assert read_prompts(tmp_path / "p.jsonl", None, 2) == ["a", "b"]


def test_the_ablation_takes_the_best_of_both_modes() -> None:
    runs = [run("async", 3, 1, 90, d=4), run("async", 2, 2, 95, d=6), run("serial", 4, 4, 40, d=2), run("ar", 4, 0, 9),
            run("async", 2, 2, 99, d=6, draft_leaves=32, variation=True)]  # fmt: skip
    made = sweep_runs.ablation(runs)
    assert [(t.mode, t.target_tp, t.steps, t.ops) for t in made] == [
        ("serial", 4, (2,), "reference"), ("async", 2, (6,), "reference"),
    ]  # fmt: skip
    assert {trial.ops for trial in sweep_runs.ablation(runs, "unfused")} == {"unfused"}


@pytest.mark.parametrize(("text", "wanted"), [("90s", 90), ("10m", 600), ("1.5h", 5400)])
def test_budgets(text: str, wanted: float) -> None:
    assert seconds(text) == wanted


@pytest.mark.parametrize("text", ["", "10", "m", "-1m", "0s", "1d"])
def test_invalid_budgets_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="--budget"):
        seconds(text)


@pytest.mark.parametrize("text", ["", "nonsense", "{}", '{"prompt": ""}', "[1]"])
def test_invalid_prompts_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(text)
    with pytest.raises(UserError, match="--prompts"):
        read_prompts(tmp_path / "p.jsonl")


def test_populations_change_one_thing_at_a_time() -> None:
    assert sweep_runs.populations([run("serial", 1, 1, 100, d=3), run("smc", 1, 1)]) == []
    made = sweep_runs.populations([run("smc", 1, 1, 50)])
    shapes = [(t.particles, t.smc_draft_tokens, t.smc_groups) for t in made]
    assert shapes == [(1, 4, 1), (2, 4, 1), (8, 4, 1), (16, 4, 1), (4, 1, 1), (4, 2, 1), (4, 8, 1),
                      (4, 4, 2), (4, 4, 4), (4, 4, 8)]  # fmt: skip
    row = made[-1].row(None)
    assert sweep_runs.Trial.of(row) == made[-1] and made[-1].plan(None).population == PopulationConfig(smc_groups=8)
    assert store.plan_title(row) == "smc 1 N 4 K 4 G 8" and "particles" not in sweep_runs.Trial("ar", 1, 0, "auto").row(
        None
    )
    assert store.plan_title(run("smc", 1, 1)["plan"]) == "smc 1", "one of an older profile"


def test_the_throughput_of_many_groups_does_not_exclude_other_modes() -> None:
    """The speed of several groups is that of all requests together."""
    several = run("smc", 1, 1, 900, variation=True)
    assert sweep_runs.dominated_runs([run("serial", 1, 1, 100, d=3), several, run("smc", 1, 1, 20)]) == []
