"""The layers that settings come from: command line > environment > YAML file > default."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from swiftspec.serve.settings import ENV_PREFIX, Settings, UsageError, env_name, explain, flag_name

NO_SETTINGS = (  # variables of the build, the tests and the kernels
    "SWIFTSPEC_CUDA", "SWIFTSPEC_WERROR", "SWIFTSPEC_EARLY_STARTS", "SWIFTSPEC_EMULATED", "SWIFTSPEC_EMULATED_SEED",
    "SWIFTSPEC_TEST_EPOCHS",
)  # fmt: skip


def load(cli: Mapping[str, object], file: Path | None = None, kind: type[Settings] = Settings) -> Settings:
    """Puts the layers together. `cli`: only what was given there, by field name. Raises UsageError with the culprit."""
    known = list(kind.model_fields)
    below = _read_yaml(file, known) if file is not None else {}
    by_env = {name for name in known if os.environ.get(env_name(name))}
    given = {name: value for name, value in below.items() if name not in by_env} | dict(cli)

    def label(name: str) -> str:
        if name in cli:
            return flag_name(name)
        return env_name(name) if name in by_env else f"{flag_name(name)[2:]} in {file}"

    try:
        return kind(**given)  # pyright: ignore[reportArgumentType]
    except ValidationError as error:
        raise UsageError(explain(error, label)) from None


def strays(kind: type[Settings] = Settings) -> list[str]:
    """Lines on variables of the environment that look like settings and are none."""
    known = [env_name(name) for name in kind.model_fields]
    names = sorted(name for name, value in os.environ.items() if name.startswith(ENV_PREFIX) and value)
    return [
        f"the environment variable {name[:80]} is no setting{_hint(name, known)}"
        for name in names if name not in known and name not in NO_SETTINGS
    ]  # fmt: skip


def _read_yaml(file: Path, known: Sequence[str]) -> dict[str, object]:
    """The file's values by field name; empty ones count as left out."""
    import yaml  # not needed for --help

    try:
        data = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {file} cannot be read: {getattr(error, 'strerror', None) or 'not UTF-8'}") from None
    except yaml.YAMLError as error:
        raise UsageError(f"--config {file} is not YAML: {' '.join(str(error).split())}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise UsageError(f"--config {file} must hold `flag: value` lines, not a {type(data).__name__}")
    values = {str(key).replace("-", "_"): value for key, value in data.items()}
    unknown = [str(key) for key in data if str(key).replace("-", "_") not in known]
    dashed = [name.replace("_", "-") for name in known]
    if unknown:
        raise UsageError(f"--config {file}: unknown key {unknown[0]!r}{_hint(unknown[0].replace('_', '-'), dashed)}")
    return {name: value for name, value in values.items() if value is not None}


def _hint(key: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(key, known, 1)
    return f" (did you mean {near[0]!r}?)" if near else ""
