"""No setting is ignored silently: in every mode it is used, refused, or named as having no effect."""

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from swiftspec.capabilities import TABLE
from swiftspec.cli import generate
from swiftspec.cli.config_sources import load_settings, unknown_variable_warnings
from swiftspec.cli.terminal import StartupProgress
from swiftspec.config import DRAFT, LOOKAHEAD, MODES, POPULATION, TREE
from swiftspec.errors import UserError
from swiftspec.profiles import store
from swiftspec.serve.__main__ import main
from swiftspec.settings.flags import SETTINGS, flag_name
from swiftspec.settings.settings import UsageError, env_name
from swiftspec.startup.model_resolution import ResolvedModels
from tests.support import profiles
from tests.support.toy_pair import make_pair

PARTS = {name: flag.setting.applies_to for name, flag in SETTINGS.items() if flag.setting.applies_to is not None}
VALUES = {"verify": "match", "proposal": "top", "calibration": 1.0, "draft_model": "draft", "draft_steps": 3}


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK", *map(env_name, SETTINGS)):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_pair(tmp_path_factory.mktemp("pair"))


def flags(pair: tuple[Path, Path]) -> list[str]:
    return ["--model", str(pair[0]), "--draft-model", str(pair[1]), "--raw", "--prompt", "a", "--max-tokens", "2"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", PARTS)
def test_every_setting_is_used_refused_or_named_as_ignored(mode: str, name: str) -> None:
    has = {"ar": (), "serial": (DRAFT, TREE), "async": (DRAFT, TREE, LOOKAHEAD), "smc": (DRAFT, POPULATION)}
    settings = load_settings({"mode": mode, name: VALUES.get(name, SETTINGS[name].default)})
    part = PARTS[name]
    conflict = TABLE[f"mode {mode}"].get(str(part))
    ignored, refused = (conflict is not None and conflict.ignored is kind for kind in (True, False))
    if refused:
        with pytest.raises(
            UsageError, match=f"{flag_name(name)} is not supported in mode {mode}, which has no .*; remove it"
        ):
            settings.make_plan(True, ranks=2)
    else:
        settings.make_plan(True, ranks=2)
        lines = settings.ignored_settings(mode)
        assert [flag_name(name) in line for line in lines] == [True] * ignored
    assert (part in has[mode]) + refused + ignored == 1


def test_several_settings_are_named_in_one_line() -> None:
    settings = load_settings({"mode": "ar", "draft_steps": 2, "verify_batch": 4})
    assert settings.ignored_settings("ar") == [
        "--verify-batch, --draft-steps have no effect in mode ar, which has no draft tree"
    ]
    assert (
        load_settings({}).ignored_settings("ar") == load_settings({"draft_steps": 2}).ignored_settings("serial") == []
    )
    fixed = load_settings({"adapt": True, "draft_steps": 2, "verify_batch": 4})
    assert fixed.ignored_settings("serial") == ["--adapt has no effect with --draft-steps and --verify-batch"]
    assert load_settings({"adapt": False, "draft_steps": 2, "verify_batch": 4}).ignored_settings("serial") == []


def test_rejection_sampling_with_requested_adaptation() -> None:
    for given in ({"adapt": False}, {}):
        assert not load_settings({"verify": "reject", **given}).make_plan(True).adapts_shape
    with pytest.raises(UsageError, match=r"--adapt .* --verify reject, .*; remove one of them"):
        load_settings({"verify": "reject", "adapt": True}).make_plan(True)


def stored(pair: tuple[Path, Path], file: Path) -> Path:
    """A stored profile with one serial run of this pair on this machine."""
    key = store.ProfileKey.of("cpu", 1, *pair, "float32", "auto", None)
    plan = {"mode": "serial", "target_tp": 1, "draft_tp": 1, "verify_batch": 6, "draft_leaves": 4, "draft_steps": 2}
    one = {**profiles.run("serial", 1, 1, 100.0), "plan": plan}
    file.write_text(json.dumps(profiles.profile(one) | {"key": asdict(key)}))
    return file


def test_a_named_plan_is_used_or_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    named = {"model": str(pair[0]), "plan": str(stored(pair, tmp_path / "p.json")), "device": "cpu"}

    def found(**given: Any) -> ResolvedModels:
        return ResolvedModels.resolve(load_settings({**named, **given}), 1, StartupProgress(quiet=True))

    draft = {"draft_model": str(pair[1])}
    plan = found(**draft, draft_leaves=4).plan
    assert (plan.verify_batch, plan.draft_leaves, plan.draft_steps) == (6, 4, 2)
    for given, why in (
        ({**draft, "verify_batch": 5}, "p.json has no lossless run with --verify-batch 5; remove one"),
        ({**draft, "mode": "ar"}, "is not supported in mode ar, which has no draft tree; remove it"),
        ({**draft, "mode": "smc"}, "is not supported in mode smc, which has no draft tree"),
        ({}, "--plan is not supported without a draft model; remove it, or specify one"),
    ):
        with pytest.raises(UserError, match=why):
            found(**given)


def test_a_revision_of_a_directory(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*flags(pair), "--revision", "v2"]) == 2
    assert "--revision is not supported with a model on this machine, " in capsys.readouterr().err


def test_messages_of_a_run(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWIFTSPEC_PROT", "9")
    monkeypatch.setenv("SWIFTSPEC_WERROR", "1")
    given = ["--mode", "ar", "--share-gpus", "--device", "cpu", "--threads", "1000"]
    assert main([*flags(pair), *given]) == 0
    err = capsys.readouterr().err
    assert "swiftspec: --draft-model has no effect in mode ar, which has no draft\n" in err
    assert "swiftspec: --share-gpus has no effect on a CPU\n" in err
    assert err.count("swiftspec: warning: --threads 1000 exceeds the ") == 1
    stray = "warning: the environment variable SWIFTSPEC_PROT is not a setting (did you mean 'SWIFTSPEC_PORT'?)\n"
    assert err.startswith(f"swiftspec: {stray}") and "WERROR" not in err
    assert main([*flags(pair), "--max-model-len", "0"]) == 1
    assert "max_model_len must lie in 2..256 for this target, not 0" in capsys.readouterr().err


def test_environment_variables_that_are_not_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWIFTSPEC_TOP_P", "0.9")
    monkeypatch.setenv("SWIFTSPEC_EMPTY", "")
    monkeypatch.setenv("SWIFTSPEC_" + "X" * 5000, "1")
    lines = [line for line in unknown_variable_warnings() if "XXX" in line or "TOP_P" in line or "EMPTY" in line]
    assert len(lines) == 1 and len(lines[0]) < 200


def test_prompts_of_unbounded_size(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    argv = [*flags(pair)[:5], "--prompt-file", "/dev/zero"]
    assert main(argv) == 2
    assert "--prompt-file /dev/zero cannot be read: it is larger than 64 MiB" in capsys.readouterr().err
    assert generate.MAX_TEXT_BYTES == 64 << 20


def test_variables_of_the_build_and_the_kernels_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).resolve().parents[3]
    sources = "".join(file.read_text() for file in root.glob("csrc/cuda/**/*.cu*"))
    names = {*re.findall(r'getenv\("(SWIFTSPEC_\w+)"\)', sources), "SWIFTSPEC_CUDA", "SWIFTSPEC_CUDA_ARCHS"}
    assert {"SWIFTSPEC_EARLY_STARTS", "SWIFTSPEC_PEERS"} < names
    for name in names:
        monkeypatch.setenv(name, "1")
    assert not [line for line in unknown_variable_warnings() if any(f" {name} " in line for name in names)]
