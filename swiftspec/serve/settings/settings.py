"""Settings: validation, and conversion to EngineConfig and SamplingParams.

Imports must stay cheap (no torch, no transformers), because `--help` needs this module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar, get_args, get_origin

from pydantic import Field, ValidationError, ValidationInfo, create_model, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from swiftspec.config import EngineConfig
from swiftspec.errors import UserError, truncated_repr
from swiftspec.file_io import parse_json
from swiftspec.params import SamplingParams
from swiftspec.serve.rank_plan import split_ranks
from swiftspec.serve.settings.flags import IGNORED_PARTS, UNSUPPORTED_PARTS, CommandSettings, Flag, SettingsTable

ENV_PREFIX = "SWIFTSPEC_"
S = TypeVar("S", bound="Settings")

if TYPE_CHECKING:

    class SettingsAttributes(CommandSettings, BaseSettings):
        """Type declarations of the fields that `with_fields_of` adds, for type checkers. Fields of the engine have type
        Any."""

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...
else:
    SettingsAttributes = BaseSettings


class UsageError(UserError):
    """Invalid flag, environment variable or settings file: exit code 2."""


def with_fields_of(table: SettingsTable) -> Callable[[type[S]], type[S]]:
    """Returns a class decorator that adds a field for every flag of the table."""

    def filled(kind: type[S]) -> type[S]:
        values: dict[str, Any] = {flag.name: _field(flag) for flag in table.flags.values()}
        made = create_model(kind.__name__, __base__=kind, __module__=kind.__module__, __doc__=kind.__doc__, **values)
        made.table = table
        return made

    return filled


def _field(flag: Flag) -> tuple[Any, Any]:
    """Returns type and pydantic field of a flag.

    Only a setting of the command declares its range here; the range of an engine setting is checked by `_as_in_config`.
    NoDecode leaves the conversion of text to lists and dicts to `_from_text`.
    """
    limits: dict[str, Any] = {} if flag.config else {"ge": flag.setting.ge, "le": flag.setting.le}
    return Annotated[flag.value_type, NoDecode, flag], Field(flag.default, description=flag.setting.help, **limits)


@with_fields_of(SettingsTable())
class Settings(SettingsAttributes):
    """All settings of a command. A sampling value of None means that of the model's generation_config.json, else vLLM's
    default."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_ignore_empty=True, extra="forbid", validate_assignment=True, protected_namespaces=()
    )
    table: ClassVar[SettingsTable]

    @field_validator("*", mode="before")
    @classmethod
    def _from_text(cls, value: object, info: ValidationInfo) -> object:
        """Converts the text of a list or dict field: from JSON, and for a list also from one text or numbers separated
        by commas."""
        kind = cls.table.flags[str(info.field_name)].value_type
        if get_origin(kind) is list:
            return _as_list(value, of_text=get_args(kind)[0] is str)
        if get_origin(kind) is dict and isinstance(value, str):
            decoded = _from_json(value)
            return value if decoded is None else decoded
        return value

    @field_validator("*")
    @classmethod
    def _as_in_config(cls, value: Any, info: ValidationInfo) -> Any:
        """Validates the value of an engine setting by creating the dataclass that declares it."""
        flag = cls.table.flags[str(info.field_name)]
        if value is None or flag.config is None:
            return value
        values = {flag.name: _for_config(value)}
        if flag.setting.depends_on in info.data:
            values[flag.setting.depends_on] = info.data[flag.setting.depends_on]
        try:
            flag.config(**values)
        except UserError as error:  # pydantic expects a ValueError
            raise ValueError(str(error)) from None
        return value

    def make_plan(self, has_draft: bool, ranks: int = 1) -> EngineConfig:
        """Creates the EngineConfig for `ranks` ranks; selects mode and split where they are not set. `has_draft`:
        whether there is a local or remote draft.

        Raises UserError if the mode needs a draft and there is none, if the split does not match the number of ranks,
        or if a given setting does not apply to the mode.
        """
        remote = {"target_remote": self.target_url is not None, "draft_remote": self.draft_url is not None}
        apart = any(remote.values())
        mode = self.mode or ("ar" if not has_draft else "async" if ranks > 1 or apart else "serial")
        if mode != "ar" and not has_draft:
            raise UserError(f"--mode {mode} requires a draft model: specify one with --draft-model, or use --mode ar")
        for part in UNSUPPORTED_PARTS[mode]:
            for name in self._explicitly_set(part):
                raise UsageError(f"{flag_name(name)} is not supported in mode {mode}, which has no {part}; remove it")
        trees = ("verify_batch", "draft_leaves") if self.max_num_seqs > 1 else ()
        for name in trees:
            if name in self.model_fields_set:
                chains = "--max-num-seqs above 1, which verifies chains of --draft-steps tokens"
                raise UsageError(f"{flag_name(name)} is not supported with {chains}; remove it")
        if mode != "ar" and self.verify == "reject" and self.adapt and "adapt" in self.model_fields_set:
            raise UsageError(
                "--adapt is not supported with --verify reject, because the text would depend on measured times;"
                " remove one of them"
            )
        table = self.table
        try:
            target_tp, draft_tp = split_ranks(
                mode, ranks, self.target_tp, self.draft_tp, single_rank_ok=self.device == "cuda" or apart
            )
            population = table.population(**self._config_values(table.population))
            return table.engine(
                mode=mode, target_tp=target_tp, draft_tp=draft_tp, population=population,
                **remote, **self._adaptive_options(mode), **self._config_values(table.engine),
            )  # fmt: skip
        except UserError as error:
            raise UsageError(str(error)) from None

    def _explicitly_set(self, part: str) -> list[str]:
        """Returns the names of the settings that were given explicitly and that apply to a part of the engine, such as
        "draft"."""
        shaping = [name for name, flag in self.table.flags.items() if flag.setting.applies_to == part]
        return [name for name in shaping if name in self.model_fields_set]

    def ignored_settings(self, mode: str) -> list[str]:
        """Returns notes on settings that were given but have no effect in this mode. Obvious cases, such as the seed of
        a greedy answer, are left out."""
        notes = []
        for part in IGNORED_PARTS[mode]:
            flags = [flag_name(name) for name in self._explicitly_set(part)]
            if flags:
                notes.append(
                    f"mode {mode} has no {part}: {', '.join(flags)} {'have' if flags[1:] else 'has'} no effect"
                )
        if (
            mode in ("serial", "async")
            and {"adapt", "draft_steps", "verify_batch"} <= self.model_fields_set
            and self.adapt
        ):
            notes.append("--adapt has no effect: --draft-steps and --verify-batch are set")
        return notes

    def _adaptive_options(self, mode: str) -> dict[str, bool]:
        """Returns the EngineConfig options that let rounds depend on measured times.

        `adapt_steps` and `adapt_batch` are off if d or bs is given. Unless requested, all options are off with --verify
        reject, whose text depends on the rounds, and if several requests share a round.
        """
        fixed = self.verify == "reject" or self.max_num_seqs > 1
        adapts = self.adapt and mode in ("serial", "async") and (not fixed or "adapt" in self.model_fields_set)
        return {
            "self_switch": self.self_switch and (not fixed or "self_switch" in self.model_fields_set),
            "adapt_steps": adapts and "draft_steps" not in self.model_fields_set,
            "adapt_batch": adapts and "verify_batch" not in self.model_fields_set,
        }

    def _config_values(self, config: type) -> dict[str, Any]:
        """Returns the settings that are not None and that the engine dataclass `config` declares."""
        mine = {name: getattr(self, name) for name, flag in self.table.flags.items() if flag.config is config}
        return {name: _for_config(value) for name, value in mine.items() if value is not None}

    def guidance_note(self) -> str | None:
        """Returns a note on guidance settings that may be unintended; None if there is none."""
        if self.guidance_scale != 1 and self.negative_prompt is None:
            return "guidance without a negative prompt uses an empty one"
        if self.guidance_scale == 1 and self.negative_prompt is not None:
            return "a negative prompt has no effect at guidance scale 1"
        return None

    def sampling_params(self, model_defaults: Mapping[str, Any], negative: Sequence[int] = ()) -> SamplingParams:
        """Creates the sampling parameters. `model_defaults`: values for settings that are not set, see
        `generation_defaults`. `negative`: tokens of the negative prompt."""
        values = {**model_defaults, **self._config_values(self.table.sampling)}
        return self.table.sampling(**values, negative_prompt_ids=tuple(negative))


def _for_config(value: Any) -> Any:
    """Returns a copy of a value in the form that the engine dataclasses contain: lists become tuples."""
    if isinstance(value, list):
        return tuple(value)
    return dict(value) if isinstance(value, dict) else value


def _as_list(value: object, of_text: bool) -> object:
    """Parses a list from JSON, from one text, or from numbers separated by commas. `of_text`: whether its items are
    text."""
    if isinstance(value, str):
        decoded = _from_json(value)
        if isinstance(decoded, list):
            return decoded
        return [value] if of_text else value.split(",")
    if of_text:
        return value
    if isinstance(value, list):
        return [part for item in value for part in (item.split(",") if isinstance(item, str) else [item])]
    return [value] if isinstance(value, int) else value


def _from_json(text: str) -> Any:
    """Parses JSON. Returns None if the text is not JSON."""
    try:
        return parse_json(text, "it")
    except UserError:
        return None


def flag_name(name: str) -> str:
    """Returns the flag of a setting: top_p -> --top-p."""
    return "--" + name.replace("_", "-")


def env_name(name: str) -> str:
    """Returns the environment variable of a setting: top_p -> SWIFTSPEC_TOP_P."""
    return ENV_PREFIX + name.upper()


def describe_validation_error(error: ValidationError, label: Callable[[str], str] = str) -> str:
    """Describes the first error in one line: `--top-p must be a number, not 'much'`. `label`: returns the name under
    which a field is shown."""
    first = error.errors(include_url=False)[0]
    name = str(first["loc"][0]) if first["loc"] else "a value"
    kind, context = first["type"], first.get("ctx", {})
    if kind == "value_error":  # a message of the engine, which begins with the name of the field
        message = str(context["error"])
        return label(name) + message.removeprefix(name) if message.startswith(name) else f"{label(name)}: {message}"
    wanted = {
        "float": "be a number", "int": "be a whole number",
        "bool": "be true or false", "string": "be text", "dict": "be a JSON object from token id to number",
        "list": "be a list", "greater": f"be at least {context.get('ge')}", "less": f"be at most {context.get('le')}",
        "literal": f"be one of {context.get('expected', '')}".replace("'", "").replace(" or ", ", "),
    }.get(kind.partition("_")[0], f"be valid ({first['msg']})")  # fmt: skip
    return f"{label(name)} must {wanted}, not {truncated_repr(first['input'])}"
