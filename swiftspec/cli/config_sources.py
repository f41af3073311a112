"""Sources of settings, in order of precedence: command line, environment, YAML file, default."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path

from swiftspec import file_io
from swiftspec.errors import UserError, truncated_repr
from swiftspec.settings.flags import FLAGS, SETTINGS, flag_name
from swiftspec.settings.other_flags import OLD_SETTINGS, flag_hint
from swiftspec.settings.settings import (
    ENV_PREFIX,
    Settings,
    UsageError,
    env_name,
)

NON_SETTING_VARIABLES = (  # read by the build, the tests and the kernels
    "SWIFTSPEC_CUDA", "SWIFTSPEC_CUDA_ARCHS", "SWIFTSPEC_WERROR", "SWIFTSPEC_EARLY_STARTS",
    "SWIFTSPEC_PEERS",
    "SWIFTSPEC_EMULATED", "SWIFTSPEC_EMULATED_CASES", "SWIFTSPEC_EMULATED_SEED", "SWIFTSPEC_TEST_EPOCHS",
)  # fmt: skip


VARIABLES = [name for name, flag in SETTINGS.items() if flag.setting.variable]


def load_settings(cli: Mapping[str, object], file: Path | None = None) -> Settings:
    """Merges command line, environment and --config file into settings. Raises a UsageError that names the offending
    flag, variable or key.

    `cli`: values that were given on the command line, by field name. `file`: the --config file.
    """
    for name in (*SETTINGS, *OLD_SETTINGS):
        if name not in VARIABLES and os.environ.get(env_name(name)):
            raise UsageError(f"the environment variable {env_name(name)} is no setting any more: {_instead(name)}")
    from_file = {} if file is None else _read_yaml(file)
    by_env = {name: text for name in VARIABLES if (text := os.environ.get(env_name(name)))}

    def label(name: str) -> str:
        if name in by_env and name not in cli:
            return env_name(name)
        return f"{flag_name(name)[2:]} in {file}" if name in from_file and name not in cli else flag_name(name)

    return Settings.create({**from_file, **by_env, **cli}, label)


def unknown_variable_warnings() -> list[str]:
    """Returns warnings about environment variables whose names begin with SWIFTSPEC_ but are not those of settings."""
    known = [env_name(name) for name in (*SETTINGS, *OLD_SETTINGS)]  # old ones raise an error
    names = sorted(name for name, value in os.environ.items() if name.startswith(ENV_PREFIX) and value)
    return [
        f"the environment variable {name[:80]} is not a setting{_hint(name)}"
        for name in names
        if name not in known and name not in NON_SETTING_VARIABLES
    ]


def _read_yaml(file: Path) -> dict[str, object]:
    """Returns the values of the --config file by field name: text as on the command line, and lists and mappings of
    text. Null values are left out. Raises UsageError if the file cannot be read or has an unknown key."""
    from swiftspec.cli.plain_yaml import UnsupportedYaml, parse_mapping  # yaml is not needed for --help

    name = f"--config {file}"
    try:
        data = parse_mapping(file_io.read_text(file, name, file_io.SMALL_FILE_BYTES))
    except UnsupportedYaml as error:
        raise UsageError(f"{name} {error}") from None
    except UserError as error:
        raise UsageError(str(error)) from None
    values: dict[str, object] = {}
    for key, value in data.items():
        field = key.replace("-", "_")
        if field not in FLAGS:
            hint = flag_hint(f"--{field}", [flag_name(known) for known in FLAGS])
            words = "" if hint is None else f" ({hint.replace('--', '')})"  # keys are written without dashes
            raise UsageError(f"{name}: unknown key {truncated_repr(key)}{words}")
        if field in values:
            raise UsageError(f"{name}: {flag_name(field)[2:]} is given twice: remove one of them")
        values[field] = value
    return {field: value for field, value in values.items() if value is not None}


def _instead(name: str) -> str:
    """Returns what replaces an environment variable that was a setting."""
    if name in FLAGS:
        return f"use {flag_name(name)}, or {flag_name(name)[2:]} in a --config file"
    return str(flag_hint(f"--{name}", ()))


def _hint(key: str) -> str:
    near = difflib.get_close_matches(key[:80], map(env_name, VARIABLES), 1)
    return f" (did you mean {near[0]!r}?)" if near else ""
