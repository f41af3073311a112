"""The effect of a profile in ./profiles on the start: it sets unset options, or is skipped with a note."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from swiftspec.cli.terminal import StartupProgress
from swiftspec.errors import UserError
from swiftspec.profiles import store
from swiftspec.settings.settings import Settings, UsageError
from swiftspec.startup.built_in_models import DEMO_DIR
from swiftspec.startup.model_resolution import apply_profile
from swiftspec.startup.session import open_session
from tests.support.profiles import profile, run
from tests.support.toy_pair import make_pair

TARGET, DRAFT = DEMO_DIR / "target", DEMO_DIR / "draft"


class Log(StartupProgress):
    """Records the messages."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)

    def warn(self, text: str) -> None:
        self.lines.append(text)


def plan(log: Log, ranks: int = 1, **given: Any) -> Mapping[str, Any]:
    """The values of the profile that is found."""
    settings = Settings(dtype="float32", device="cpu", **given)
    return apply_profile(settings, TARGET, DRAFT, settings.choices(True, ranks), log).profile


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "profiles").mkdir()
    return tmp_path / "profiles"


def write(folder: Path, name: str, *runs: dict[str, Any], ranks: int = 1) -> None:
    key = asdict(store.ProfileKey.of("cpu", ranks, TARGET, DRAFT, "float32", "auto", None))
    (folder / name).write_text(json.dumps(profile(*runs, key=key)))


def test_a_matching_profile_is_used(folder: Path) -> None:
    write(folder, "a.json", run("serial", 1, 1, 50.0, d=5))
    log = Log()
    assert plan(log)["draft_steps"] == 5 and log.lines[0].startswith("plan: serial 1 bs 8 w 8 d 5")


def test_an_unusable_profile_is_reported_and_the_start_continues(folder: Path) -> None:
    os.mkfifo(folder / "pipe.json")
    (folder / "deep.json").write_text("[" * 100_000 + "]" * 100_000)
    (folder / "bare.json").write_text('{"swiftspec_profile": 1, "runs": [{}]}')
    write(folder, "huge.json", run("serial", 1, 1, 50.0, d=10**9))
    (folder / "something.json").write_text("{}")
    log = Log()
    found = plan(log)
    assert found == {} and len(log.lines) == 4
    for name, words in (("huge", "draft_steps must lie in 1..64"), ("pipe", "cannot be read"), ("deep", "is damaged")):
        assert any(f"{name}.json" in line and words in line for line in log.lines)
        with pytest.raises(UserError, match=words):
            plan(Log(), plan=str(folder / f"{name}.json"))


@pytest.mark.parametrize("requests", [1, 2])
@pytest.mark.parametrize("value", [math.nan, 1.0], ids=["NaN", "sound"])
def test_a_draft_of_nan_is_reported_at_the_warm_up(tmp_path: Path, value: float, requests: int) -> None:
    target, draft = make_pair(tmp_path)
    weights = load_file(draft / "model.safetensors")
    save_file({name: tensor * value for name, tensor in weights.items()}, draft / "model.safetensors")
    log = Log()
    given = {"model": str(target), "draft_model": str(draft), "device": "cpu", "raw": True, "max_num_seqs": requests}
    settings = Settings.model_validate(given)
    open_session(settings, log, warm_up=True)
    reported = [line for line in log.lines if "proposes no tokens, so its logits are not finite" in line]
    assert len(reported) == math.isnan(value)


def test_an_unusable_plan_is_not_reported_as_a_flag_error(folder: Path) -> None:
    """An asynchronous plan for one rank needs a GPU."""
    write(folder, "a.json", run("async", 1, 0, 50.0, d=4))
    log = Log()
    assert plan(log) == {} and "a.json is not used: one rank is not supported in mode async" in log.lines[0]
    with pytest.raises(UserError, match=r"--plan .*a\.json cannot be used: one rank is not supported in mode async"):
        plan(Log(), plan=str(folder / "a.json"))


def test_a_named_profile_without_a_matching_run_is_reported(folder: Path) -> None:
    write(folder, "a.json", run("serial", 1, 1, 50.0, d=5))
    log = Log()
    with pytest.raises(UsageError, match=r"a\.json has no lossless run with --verify-batch 3"):
        plan(log, plan=str(folder / "a.json"), verify_batch=3)
