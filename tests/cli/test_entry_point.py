"""A new setting is one entry: a field of a config, or one of the command's own settings."""

import re
from typing import Any

import pytest

from swiftspec.cli.arguments import build_parser, parse_command
from swiftspec.cli.config_sources import load_settings
from swiftspec.config import EngineConfig, PopulationConfig
from swiftspec.params import SamplingParams
from swiftspec.settings.flags import COMMAND_SETTINGS, FLAGS, SETTINGS, Flag, flag_name
from swiftspec.settings.settings import Settings, UsageError, env_name
from swiftspec.settings_schema import declared_settings

ENGINE_SETTINGS = [flag for flag in SETTINGS.values() if flag.config not in COMMAND_SETTINGS]
SAMPLES: dict[Any, tuple[str, Any]] = {  # by type of the value: as text, and as the config has it
    int: ("2", 2), float: ("0.5", 0.5), str: ("x", "x"), list[str]: ("x", ("x",)), list[int]: ("3", (3,)),
    dict[int, float]: ('{"1": 2}', {1: 2.0}),
}  # fmt: skip
SOURCES = (*COMMAND_SETTINGS, EngineConfig, PopulationConfig, SamplingParams)


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SETTINGS:
        monkeypatch.delenv(env_name(name), raising=False)


def test_the_help_line() -> None:
    page = " ".join(build_parser().format_help().split())
    assert "--verify-batch BS Tree nodes verified per round, including the root. [default: 8]" in page
    assert "[env: SWIFTSPEC_PORT]" in page
    assert "--top-k K Keep the K most likely tokens. [default: the model's own, else off]" in page
    assert "--device auto|cpu|cuda Device that runs the models. [default: auto: cuda if PyTorch" in page
    assert "--mode ar|serial|async|smc async: the draft group" in page
    assert "--share-gpus, --no-share-gpus Allow several ranks to use one GPU. [default: off]" in page
    assert re.search(r"models:.*--device.*speculation:.*--mode.*--adapt.*sampling:.*--seed.*length and stopping:", page)


def other_value(flag: Flag) -> tuple[str, Any]:
    """Returns a valid value that is not the default, as text and as the config has it."""
    if flag.choices:
        return flag.choices[-1], flag.choices[-1]
    if flag.is_boolean:
        return str(not flag.default), not flag.default
    if flag.name == "ess_threshold":
        return "0.25", 0.25
    if flag.name == "synthetic_acceptance_length":
        return "2.5", 2.5
    return next(sample for kind, sample in SAMPLES.items() if flag.value_type in (kind, kind | None))


@pytest.mark.parametrize("flag", ENGINE_SETTINGS, ids=lambda flag: flag.name)
def test_the_field_of_the_config(flag: Flag) -> None:
    text, value = other_value(flag)
    argv = [flag_name(flag.name), text]
    if flag.is_boolean and flag.setting.has_flag:
        argv = [argv[0] if value else "--no-" + argv[0][2:]]
    mode = "smc" if flag.config is PopulationConfig else "async" if flag.name == "catch_up" else "serial"
    settings = parse_command(["--mode", mode, *argv]).settings
    plan = settings.make_plan(has_draft=True, ranks=2)
    config = {EngineConfig: plan, PopulationConfig: plan.population, SamplingParams: settings.sampling_params({})}
    assert getattr(config[flag.config], flag.name) == value != flag.default
    if flag.setting.from_model is not None:
        assert getattr(parse_command([]).settings.sampling_params({flag.name: value}), flag.name) == value


@pytest.mark.parametrize("flag", SETTINGS.values(), ids=lambda flag: flag.name)
def test_the_check_of_values(flag: Flag) -> None:
    """The rule that the documentation names is the rule that is checked."""
    for end, step in (("ge", -1), ("gt", 0), ("le", 1)):
        limit = getattr(flag.setting.rule, end)
        if limit is not None:
            if end != "gt":
                load_settings({flag.name: limit})
            rule = re.escape(f"{flag_name(flag.name)} must {flag.setting.rule.text}, not ")
            with pytest.raises(UsageError, match=f"^{rule}"):
                load_settings({flag.name: limit + step})
    if flag.choices:
        with pytest.raises(UsageError, match=f"must be one of {', '.join(flag.choices)}, not 'dull'$"):
            load_settings({flag.name: "dull"})


def test_every_setting_is_one_flag() -> None:
    """No setting is declared twice, and none is missing."""
    found = [
        item.name
        for source in SOURCES
        for item, declaration in declared_settings(source)
        if declaration.help is not None
    ]
    assert sorted(found) == sorted(SETTINGS) == sorted(Settings.model_fields)
    options = {text for action in build_parser()._actions for text in action.option_strings}
    assert {flag_name(name) for name in FLAGS} <= options
