"""Sources of settings, in order of precedence: command line, environment, YAML file, default."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from swiftspec import file_io
from swiftspec.errors import UserError, truncated_repr
from swiftspec.settings.flags import FLAGS, RENAMED_SETTINGS
from swiftspec.settings.other_flags import flag_hint
from swiftspec.settings.settings import (
    ENV_PREFIX,
    Settings,
    UsageError,
    env_name,
    flag_name,
)

NON_SETTING_VARIABLES = (  # read by the build, the tests and the kernels
    "SWIFTSPEC_CUDA", "SWIFTSPEC_CUDA_ARCHS", "SWIFTSPEC_WERROR", "SWIFTSPEC_EARLY_STARTS",
    "SWIFTSPEC_PEERS",
    "SWIFTSPEC_EMULATED", "SWIFTSPEC_EMULATED_CASES", "SWIFTSPEC_EMULATED_SEED", "SWIFTSPEC_TEST_EPOCHS",
)  # fmt: skip


def load_settings(cli: Mapping[str, object], file: Path | None = None) -> Settings:
    """Merges command line, environment and --config file into settings. Raises a UsageError that names the offending
    flag, variable or key.

    `cli`: values that were given on the command line, by field name. `file`: the --config file.
    """
    for old, new in RENAMED_SETTINGS.items():
        if os.environ.get(env_name(old)):
            raise UsageError(f"the environment variable {env_name(old)} was renamed to {env_name(new)}")
    from_file = {} if file is None else _read_yaml(file)
    by_env = {name: text for name in FLAGS if (text := os.environ.get(env_name(name)))}

    def label(name: str) -> str:
        if name in cli:
            return flag_name(name)
        return env_name(name) if name in by_env else f"{flag_name(name)[2:]} in {file}"

    return Settings.create({**from_file, **by_env, **cli}, label)


def unknown_variable_warnings() -> list[str]:
    """Returns warnings about environment variables whose names begin with SWIFTSPEC_ but are not those of settings."""
    known = [env_name(name) for name in (*FLAGS, *RENAMED_SETTINGS)]
    names = sorted(name for name, value in os.environ.items() if name.startswith(ENV_PREFIX) and value)
    return [
        f"the environment variable {name[:80]} is not a setting{_hint(name, known)}"
        for name in names
        if name not in known and name not in NON_SETTING_VARIABLES
    ]


def _read_yaml(file: Path) -> dict[str, object]:
    """Returns the values of the --config file by field name: text as on the command line, and lists and mappings of
    text. Null values are left out. Raises UsageError if the file cannot be read or has an unknown key."""
    from swiftspec.serve.cli.plain_yaml import UnsupportedYaml, parse_mapping  # yaml is not needed for --help

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
        if field in RENAMED_SETTINGS:
            raise UsageError(f"{name}: {key} was renamed to {flag_name(RENAMED_SETTINGS[field])[2:]}")
        if field not in FLAGS:
            hint = flag_hint(flag_name(field), [flag_name(known) for known in FLAGS])
            words = "" if hint is None else f" ({hint.replace('--', '')})"  # keys are written without dashes
            raise UsageError(f"{name}: unknown key {truncated_repr(key)}{words}")
        if field in values:
            raise UsageError(f"{name}: {flag_name(field)[2:]} is given twice: remove one of them")
        values[field] = value
    return {field: value for field, value in values.items() if value is not None}


def _hint(key: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(key[:80], known, 1)
    return f" (did you mean {near[0]!r}?)" if near else ""
