"""A new setting is one entry: a field of a config, or one of the front end's own settings."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from swiftspec.config import SPECULATION, TREE, EngineConfig, PopulationConfig
from swiftspec.errors import UserError
from swiftspec.params import SAMPLING, SamplingParams
from swiftspec.serve.cli.arguments import build_parser, parse_command
from swiftspec.serve.settings.flags import MODELS, CommandSettings, SettingsTable
from swiftspec.serve.settings.settings import Settings, UsageError, env_name, with_fields_of
from swiftspec.settings_schema import declared_settings, setting


@dataclass(frozen=True, slots=True)
class LongerConfig(EngineConfig):
    retries: int = setting(3, "Proposals sent again.", SPECULATION, "R", ge=1, le=9, applies_to=TREE)


@dataclass(frozen=True, slots=True)
class LongerSampling(SamplingParams):
    warmth: float = setting(0.5, "How warm it is.", SAMPLING, "W", gt=0, le=2, finite=True, from_model="warmth")
    banned: tuple[int, ...] = setting((), "Tokens that never come.", SAMPLING, "ID[,ID]", "none")


@dataclass
class LongerOwn(CommandSettings):
    colour: str = setting("plain", "How it looks.", MODELS, choices=("plain", "loud"))


WIDER = with_fields_of(SettingsTable(LongerOwn, LongerConfig, sampling=LongerSampling))(Settings)


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in WIDER.model_fields:
        monkeypatch.delenv(env_name(name), raising=False)


def test_flag_variable_and_yaml_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("retries: 4\nwarmth: 0.7\ncolour: loud\n")
    monkeypatch.setenv("SWIFTSPEC_BANNED", "5,6")
    monkeypatch.setenv("SWIFTSPEC_WARMTH", "0.8")
    settings = parse_command(["--config", str(file), "--retries", "5"], WIDER).settings
    assert (settings.retries, settings.warmth, settings.colour, settings.banned) == (5, 0.8, "loud", [5, 6])
    file.write_text("retires: 4\n")
    with pytest.raises(UsageError, match="unknown key 'retires' \\(did you mean 'retries'\\?\\)"):
        parse_command(["--config", str(file)], WIDER)


def test_the_help_line() -> None:
    page = " ".join(build_parser(WIDER).format_help().split())
    assert "--retries R Proposals sent again. [default: 3] [env: SWIFTSPEC_RETRIES]" in page
    assert "--warmth W How warm it is. [default: the model's own, else 0.5] [env: SWIFTSPEC_WARMTH]" in page
    assert "--banned ID[,ID] Tokens that never come. [default: none] [env: SWIFTSPEC_BANNED]" in page
    assert "--colour plain|loud How it looks. [default: plain] [env: SWIFTSPEC_COLOUR]" in page
    assert re.search(r"models:.*--colour.*speculation:.*--retries.*sampling:.*--warmth.*length and stopping:", page)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--retries", "0"], "--retries must lie in 1..9, not 0"),
        (["--retries", "many"], "--retries must be a whole number, not 'many'"),
        (["--warmth", "0"], "--warmth must be above 0 and at most 2, not 0.0"),
        (["--warmth", "nan"], "--warmth must be a finite number"),
        (["--colour", "dull"], "--colour must be one of plain, loud, not 'dull'"),
        (["--banned", "x"], "--banned must be a whole number, not 'x'"),
    ],
)
def test_the_check_of_values(argv: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=f"^{re.escape(message)}$"):
        parse_command(argv, WIDER)


def test_the_field_of_the_config() -> None:
    settings = parse_command(["--retries", "7", "--banned", "1,2"], WIDER).settings
    assert settings.make_plan(has_draft=True) == LongerConfig(
        "serial", retries=7, self_switch=True, adapt_steps=True, adapt_batch=True
    )
    assert settings.sampling_params({}) == LongerSampling(warmth=0.5, banned=(1, 2))
    assert settings.sampling_params({"warmth": 0.9}) == LongerSampling(warmth=0.9, banned=(1, 2))
    with pytest.raises(UserError, match="retries must lie in 1"):
        LongerConfig(retries=10)
    with pytest.raises(UsageError, match="--retries is not supported in mode smc, which has no draft tree; remove it"):
        parse_command(["--mode", "smc", "--retries", "7"], WIDER).settings.make_plan(has_draft=True)


def test_every_setting_is_one_flag() -> None:
    """No setting is declared twice, and none is missing."""
    sources = (CommandSettings, EngineConfig, PopulationConfig, SamplingParams)
    found = [
        item.name
        for source in sources
        for item, declaration in declared_settings(source)
        if declaration.help is not None
    ]
    assert sorted(found) == sorted(Settings.table.flags) == sorted(Settings.model_fields)
    assert "retries" not in found
