"""Profiles on disk: written atomically, refused with the reason, and their recommendations."""

from __future__ import annotations

import copy
import csv
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from swiftspec import file_io
from swiftspec.cli.config_sources import load_settings as load_settings
from swiftspec.errors import UserError
from swiftspec.lab import results
from swiftspec.profiles import store
from tests.support.profiles import KEY, profile, run


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"swiftspec_profile": 1, "ru', "is damaged"),
        ("[]", "is not a profile"),
        ('{"rounds": []}', "is not a profile"),
        ('{"swiftspec_profile": 0}', "has version 0, not 1"),
        ('{"swiftspec_profile": 1}', "is damaged"),
        (json.dumps(profile({"plan": {}})), "is damaged"),
        (json.dumps(profile(key={})), "is damaged"),
        (json.dumps(profile(key={"emulate": {"target": {"points": [[1]]}}})), "is damaged"),
        (json.dumps(profile(run("ar", 4, 0, -3.0))), "is damaged"),
        (json.dumps(profile(run("ar", 4, 0))), "is damaged"),
        (json.dumps(profile(steps=[{"side": "target", "tp": 1, "rows": 8, "seconds": []}])), "is damaged"),
    ],
)
def test_an_invalid_profile_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        store.load(tmp_path / "p.json")
    assert "\n" not in str(caught.value)


COMPLETE = profile(
    run("async", 3, 1, 300, d=4), steps=[{"side": "target", "tp": 1, "rows": 8, "seconds": [0.5]}],
    rounds=[{"plan": {"mode": "serial", "verify_batch": 8, "draft_leaves": 8, "draft_steps": 1}, "rounds": [[1, 1]]}],
    lanes=[{"wait": [0.0, 0.1], "target": {"verify": [0.1, 1.0]}, "path": [0]}], around={"verify": 0.1},
    key={**KEY, "emulate": {"target": {"points": [[1, 8, 0.01]]}, "draft": None}},
)  # fmt: skip


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("runs", 0, "plan", "draft_steps"), 10**9), (("runs", 0, "plan", "draft_steps"), "4"),
        (("runs", 0, "plan", "mode"), "else"), (("runs", 0, "plan", "target_tp"), 10**9),
        (("runs", 0, "plan", "draft_tp"), 0), (("runs", 0, "plan", "verify_batch"), True),
        (("runs", 0, "ops"), ...), (("runs", 0, "speeds"), ["300"]), (("runs", 0, "speeds"), [10**400]),
        (("runs", 0, "tokens_per_round"), None), (("runs", 0, "target_busy"), "x"), (("runs", 0, "steps"), [1]),
        (("runs", 0, "dropped"), 5), (("steps", 0, "tp"), "1"), (("steps", 0, "rows"), 0), (("steps", 0, "side"), []),
        (("steps", 0, "seconds"), [0]), (("rounds", 0, "rounds"), [[1]]), (("rounds", 0, "rounds"), [[1, -1]]),
        (("rounds", 0, "plan", "draft_steps"), None), (("lanes", 0, "wait"), None), (("lanes", 0, "path"), []),
        (("lanes", 0, "target"), {}), (("around", "verify"), "x"), (("around", "else"), 1), (("around",), None),
        (("orchestration",), {"seconds": 1}), (("stopped",), 5), (("settings", "prompts"), ...), (("runs",), {}),
        (("key", "hardware"), None), (("key", "hardware", "count"), "2"), (("key", "ranks"), "4"), (("key",), []),
        (("key", "target"), 5), (("key", "emulate", "target", "points"), []), (("key", "emulate", "else"), {}),
        (("key", "emulate", "target", "points", 0), [1, 8, -1.0]), (("environment",), {"torch": {}}),
    ],
)  # fmt: skip
def test_every_field_is_typed(place: tuple[Any, ...], value: object, tmp_path: Path) -> None:
    data = copy.deepcopy(COMPLETE)
    file_io.write_text(tmp_path / "p.json", json.dumps(data))
    assert store.load(tmp_path / "p.json") == COMPLETE
    holder: Any = data
    for step in place[:-1]:
        holder = holder[step]
    if value is ...:
        del holder[place[-1]]
    else:
        holder[place[-1]] = value
    file_io.write_text(tmp_path / "p.json", json.dumps(data))
    with pytest.raises(UserError, match=r"is damaged .*: measure again") as caught:
        store.load(tmp_path / "p.json")
    assert str(caught.value).isprintable() and len(str(caught.value)) < 600


def test_a_folder_with_damaged_profiles_gives_reasons(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "deep.json").write_text("[" * 100_000 + "]" * 100_000)
    (tmp_path / "nan.json").write_text('{"swiftspec_profile": NaN}')
    (tmp_path / "keys.json").write_text('{"swiftspec_profile": 1, "runs": []}')
    found, _, reasons = store.find(tmp_path, store.ProfileKey(**KEY))
    assert found is None and [reason.partition(".json ")[2][:14] for reason in reasons] == [
        "is damaged (it", "cannot be read", "is damaged (ke", "is damaged (it", "cannot be read",
    ]  # fmt: skip
    file_io.write_text(tmp_path / "sound.json", json.dumps(profile()))
    assert store.find(tmp_path, store.ProfileKey(**KEY))[0] == profile()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"draft": "cc"}, "another pair"),
        ({"hardware": {"kind": "cpu", "name": "else", "count": 64}}, "another machine (64 x else, not 2 x test)"),
        ({"ranks": 8}, "a different value of ranks (8, not 4)"),
        ({"dtype": "float32"}, "a different value of dtype (float32, not bfloat16)"),
        ({"emulate": {"target": {"points": []}, "draft": None}}, "a different value of emulate"),
        ({"hardware": None}, "another machine"),
    ],
)
def test_a_mismatching_profile_is_refused_with_the_reason(change: dict[str, object], reason: str | None) -> None:
    found = store.ProfileKey(**KEY).difference({**KEY, **change})
    assert found is None if reason is None else found is not None and reason in found


def test_the_best_run_is_exact_and_uses_all_ranks() -> None:
    runs = [
        run("smc", 1, 1, 900), run("serial", 1, 1, 800, d=3), run("async", 3, 1, 300, 500, 400, d=4),
        run("async", 2, 2, 390, d=5), run("ar", 4, 0, 200), run("async", 3, 1, 999, d=4, ops="reference"),
        run("serial", 4, 4, dropped="cannot be sharded", d=2),
    ]  # fmt: skip
    whole = profile(*runs)
    assert store.best_run(whole) is runs[2]
    assert store.best_run(whole, {"mode": "async", "target_tp": 2}) is runs[3]
    assert store.best_run(whole, {"mode": "ar"}) is runs[4]
    assert store.best_run(whole, {"mode": "serial"}) is None
    assert store.best_run(profile()) is None


def test_the_matching_profile_of_a_folder_is_used(tmp_path: Path) -> None:
    key = store.ProfileKey(**KEY)
    file_io.write_text(tmp_path / "a.json", json.dumps(profile(key={**KEY, "ranks": 2})))
    file_io.write_text(tmp_path / "b.json", json.dumps(profile(key={**KEY, "target": "other"})))
    file_io.write_text(tmp_path / "kernels.json", "{}")
    file_io.write_text(tmp_path / "x.partial.json", json.dumps(profile()))
    found, _, reasons = store.find(tmp_path, key)
    assert found is None
    assert len(reasons) == 1 and "a different value of ranks (2," in reasons[0]
    file_io.write_text(tmp_path / "c.json", json.dumps(profile()))
    assert store.find(tmp_path, key) == (profile(), tmp_path / "c.json", [])


def test_a_profile_of_emulated_times_is_ignored_by_other_runs(tmp_path: Path) -> None:
    """Such a profile is in every checkout and does not apply to a run without emulation."""
    emulated = {**KEY, "emulate": {"target": {"points": [[1, 8, 0.01]]}, "draft": None}}
    other_machine = {**emulated, "hardware": {"kind": "cpu", "name": "else", "count": 64}}
    file_io.write_text(tmp_path / "a.json", json.dumps(profile(key=other_machine)))
    assert store.find(tmp_path, store.ProfileKey(**KEY)) == (None, None, [])
    _, _, reasons = store.find(tmp_path, store.ProfileKey(**emulated))
    assert len(reasons) == 1 and "another machine (64 x else" in reasons[0]


def test_titles_name_the_fixed_parameters() -> None:
    assert store.plan_title(run("async", 3, 1, d=4)["plan"]) == "async 3+1 bs 8 w 8 d 4"
    assert store.plan_title(run("serial", 1, 1)["plan"]) == "serial 1 bs 8 w 8"
    assert store.plan_title(run("ar", 4, 0)["plan"]) == "ar 4"


def test_settings_and_table_contain_the_result(tmp_path: Path) -> None:
    best = run("async", 3, 1, 300, 500, d=4)
    whole = profile(run("ar", 4, 0, 200), best, run("async", 1, 3, dropped="too slow"))
    settings = tmp_path / "best.yaml"
    settings.write_text(results.as_yaml(best, "p.json"))
    plan = load_settings({}, settings).make_plan(has_draft=True, ranks=4)
    assert (plan.mode, plan.target_tp, plan.draft_tp, plan.draft_steps) == ("async", 3, 1, 4)
    assert yaml.safe_load(results.as_yaml(whole["runs"][0], "p")) == {"mode": "ar", "target-tp": 4}
    assert results.format_profile(whole).splitlines()[1].split()[:9] == [
        "*",
        "async",
        "3+1",
        "bs",
        "8",
        "w",
        "8",
        "d",
        "4",
    ]
    assert results.format_profile(profile(run("smc", 1, 1, 900))).splitlines()[1].endswith("approximate")
    rows = list(csv.DictReader(io.StringIO(results.as_csv(whole))))
    assert [(row["mode"], row["tokens_per_second"]) for row in rows] == [
        ("ar", "200"),
        ("async", "400.0"),
        ("async", ""),
    ]
