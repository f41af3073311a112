"""Settings: validation, and conversion to EngineConfig and SamplingParams.

Imports must stay cheap (no torch, no transformers), because `--help` needs this module.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, create_model, field_validator

from swiftspec.builder.rules import Choices, Resolution
from swiftspec.capabilities import NotSupported, check_features, features_in, ignored_features
from swiftspec.config import EngineConfig, PopulationConfig
from swiftspec.drafter_kinds import DRAFTER_OF_FEATURE, GRAFTED, MODEL_FREE
from swiftspec.errors import UserError, truncated_repr
from swiftspec.file_io import expand_user, parse_json
from swiftspec.params import SamplingParams
from swiftspec.settings.flags import (
    COMMAND_SETTINGS,
    SETTINGS,
    ModelSettings,
    PlanSettings,
    PromptSettings,
    ServerSettings,
    WorkerSettings,
    flag_name,
)
from swiftspec.settings.json_flags import JSON_FLAGS, expand_json_flags, json_object

ENV_PREFIX = "SWIFTSPEC_"
CHOICE_NAMES = {"mode", "target_tp", "draft_tp", "self_switch", "adapt"} | {
    flag.name for flag in SETTINGS.values() if flag.config in (EngineConfig, PopulationConfig)
}
MODEL_TREE_SETTINGS = ("draft_leaves", "draft_steps", "proposal", "calibration")  # of trees that a draft model expands

if TYPE_CHECKING:

    class SettingsFields(ModelSettings, PromptSettings, ServerSettings, WorkerSettings, PlanSettings, BaseModel):
        """Type declarations of the fields. Fields of the engine have type Any."""

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...
else:
    SettingsFields = create_model(
        "SettingsFields", **{flag.name: (flag.value_type, Field(flag.default)) for flag in SETTINGS.values()}
    )


class UsageError(UserError):
    """Invalid flag, environment variable or settings file: exit code 2."""


class Settings(SettingsFields):
    """All settings of a command. A sampling value of None means that of the model's generation_config.json, else vLLM's
    default."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True)

    @classmethod
    def create(cls, values: Mapping[str, object], label: Callable[[str], str]) -> Settings:
        """Creates the settings from the given values by name. Raises a UsageError that names the offending value.
        `label`: returns the name under which a message shows a setting."""
        try:
            return cls.model_validate(expand_json_flags(values))
        except ValidationError as error:
            raise UsageError(describe_validation_error(error, label)) from None
        except UserError as error:
            raise UsageError(str(error)) from None

    @field_validator("*", mode="before")
    @classmethod
    def _from_text(cls, value: object, info: ValidationInfo) -> object:
        """Converts the text of a list or dict field: from JSON, and for a list also from one text or numbers separated
        by commas."""
        name = str(info.field_name)
        kind = SETTINGS[name].value_type
        if name in JSON_FLAGS and isinstance(value, str):
            try:
                return json_object(name, value)
            except UserError as error:  # pydantic expects a ValueError
                raise ValueError(str(error)) from None
        if get_origin(kind) is list:
            return _as_list(value, of_text=get_args(kind)[0] is str)
        if get_origin(kind) is dict and isinstance(value, str):
            decoded = _from_json(value)
            return value if decoded is None else decoded
        return value

    @field_validator("*")
    @classmethod
    def _check(cls, value: Any, info: ValidationInfo) -> Any:
        """Checks a value: an engine setting by creating the dataclass that declares it, any other one by its rule."""
        flag = SETTINGS[str(info.field_name)]
        if value is None:
            return None
        values = {flag.name: _for_config(value)}
        other = flag.setting.rule.depends_on
        if other in info.data:
            values[other] = info.data[other]
        try:
            if flag.config in COMMAND_SETTINGS:
                flag.setting.rule.check(flag.name, value)
            else:
                flag.config(**values)
        except UserError as error:  # pydantic expects a ValueError
            raise ValueError(str(error)) from None
        return value

    def choices(
        self, has_draft: bool, ranks: int = 1, profile: Mapping[str, Any] | None = None, profile_file: str = ""
    ) -> Choices:
        """Returns what the settings choose for an engine of `ranks` ranks. `has_draft`: whether there is a local or
        remote draft. `profile`: values of a profile, from `profile_file`."""
        given = {name: _for_config(getattr(self, name)) for name in self.model_fields_set & CHOICE_NAMES}
        if self.graft_suffix is not None:
            given["drafter"] = GRAFTED if self.graft_suffix else "model"
        given |= {"target_remote": self.target_url is not None, "draft_remote": self.draft_url is not None}

        def features(mode: str) -> Mapping[str, str]:
            found = self.features(mode, has_draft=has_draft, ranks=ranks)
            return {name: text for name, text in found.items() if name != "profile" or not profile}

        return Choices(
            {name: value for name, value in given.items() if value is not None},
            self.draft_model or "model" if has_draft else None,
            ranks,
            profile or {},
            profile_file,
            overlaps=self.runs_on_gpu,
            features=features,
            serves=self.port is not None,
        )

    def make_plan(self, has_draft: bool, ranks: int = 1) -> EngineConfig:
        """Returns the configuration that follows from the settings alone; see `resolve_choices`."""
        return resolve_choices(self.choices(has_draft, ranks))

    def features(self, mode: str | None, *, has_draft: bool = True, ranks: int = 1, device: str = "") -> dict[str, str]:
        """Returns the features of the capability table (capabilities.py) that these settings have in a mode; None: not
        known yet. The values are the names of settings where a feature stands for several of them, otherwise empty.
        `device`: type of the device, if it is known."""
        given = self.model_fields_set
        drafts = mode != "ar"
        found = {
            f"mode {mode}": mode is not None,
            "no draft": not has_draft,
            "verify reject": drafts and self.verify == "reject",
            "adaptation": mode in ("serial", "async") and "adapt" in given and self.adapt,
            "given shape": {"draft_steps", "verify_batch"} <= given,
            **{feature: drafts and self.draft_model == name for feature, name in DRAFTER_OF_FEATURE.items()},
            "grafting": drafts and bool(self.graft_suffix),
            "several requests": self.max_num_seqs > 1,
            "several ranks": ranks > 1,
            "target worker": self.target_url is not None,
            "draft worker": self.draft_url is not None,
            "local target": self.model is not None,
            "local draft": self.draft_model is not None,
            "profile": self.plan not in ("auto", "none") and (self.mode is None or "mode" in given),
            "server": self.port is not None,
            "KV events": self.kv_events_config.enabled,
            "no prefix cache": self.prefix_cache_memory == 0,
            "shared GPUs": self.share_gpus,
            "CPU": device == "cpu",
        }
        groups = {"draft forwards": [*MODEL_TREE_SETTINGS]}
        for name, flag in SETTINGS.items():
            if flag.setting.applies_to is not None:
                groups.setdefault(flag.setting.applies_to, []).append(name)
        shown = {part: ", ".join(f"{{{name}}}" for name in names if name in given) for part, names in groups.items()}
        return {name: "" for name, used in found.items() if used} | {part: text for part, text in shown.items() if text}

    def check_features(self, mode: str | None, *, has_draft: bool = True, ranks: int = 1) -> None:
        """Raises UsageError if two of the settings are not supported together. See `features`."""
        check_usage(self.features(mode, has_draft=has_draft, ranks=ranks))

    @property
    def drafts_without_model(self) -> bool:
        """Whether a drafter without a draft model is selected, such as suffix lookup."""
        return self.draft_model in MODEL_FREE

    def runs_on_gpu(self) -> bool:
        """Returns whether the models run on a GPU. Imports torch if the device is auto."""
        if self.device != "auto":
            return self.device == "cuda"
        from swiftspec.builder.hardware import resolve_device

        return resolve_device("auto").type == "cuda"

    def ignored_settings(self, mode: str, device: str = "") -> list[str]:
        """Returns notes on settings that were given but have no effect in this mode. Obvious cases, such as the seed of
        a greedy answer, are left out."""
        return ignored_features(self.features(mode, device=device), flag_name)

    @property
    def chat_template_file(self) -> Path | None:
        """The file of --chat-template. Raises UserError if its `~` cannot be expanded."""
        return None if self.chat_template is None else expand_user(self.chat_template)

    def guidance_note(self) -> str | None:
        """Returns a note on guidance settings that may be unintended; None if there is none."""
        if self.guidance_scale != 1 and self.negative_prompt is None:
            return "guidance without a negative prompt uses an empty one"
        found = {"no guidance": self.guidance_scale == 1, "negative prompt": self.negative_prompt is not None}
        return next(iter(ignored_features(features_in(found), flag_name)), None)

    def sampling_params(self, model_defaults: Mapping[str, Any], negative: Sequence[int] = ()) -> SamplingParams:
        """Creates the sampling parameters. `model_defaults`: values for settings that are not set, see
        `generation_defaults`. `negative`: tokens of the negative prompt."""
        mine = {name: getattr(self, name) for name, flag in SETTINGS.items() if flag.config is SamplingParams}
        values = {**model_defaults, **{name: _for_config(value) for name, value in mine.items() if value is not None}}
        return SamplingParams(**values, negative_prompt_ids=tuple(negative))


def resolve_choices(choices: Choices) -> EngineConfig:
    """Returns the configuration that follows from choices without their models. Raises UsageError, with flags as names
    of settings, if the mode needs a draft and there is none, if the split does not match the number of ranks, or if a
    given setting does not apply to the mode."""
    try:
        return Resolution(choices).config()
    except NotSupported as error:
        raise UsageError(error.shown(flag_name)) from None
    except UserError as error:
        raise UsageError(str(error)) from None


def check_usage(found: Collection[str]) -> None:
    """Raises UsageError, with flags as names of settings, if two features are not supported together (see
    `check_features`)."""
    try:
        check_features(found)
    except NotSupported as error:
        raise UsageError(error.shown(flag_name)) from None


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


def env_name(name: str) -> str:
    """Returns the environment variable of a setting: port -> SWIFTSPEC_PORT."""
    return ENV_PREFIX + name.upper()


def describe_validation_error(error: ValidationError, label: Callable[[str], str] = str) -> str:
    """Describes the first error in one line: `--top-p must be a number, not 'much'`. `label`: returns the name under
    which a field is shown."""
    first = error.errors(include_url=False)[0]
    name, *field = [str(part) for part in first["loc"]] or ["a value"]
    kind, context = first["type"], first.get("ctx", {})
    if kind == "extra_forbidden" and field:
        known = ", ".join(sorted(SETTINGS[name].value_type.model_fields))
        return f"{label(name)}: unknown field {truncated_repr(field[0])}; known are {known}"
    shown = ".".join([label(name), *field]) if name in JSON_FLAGS else label(name)
    if kind == "value_error":  # a message of the engine, which begins with the name of the field, or a rule
        message = str(context["error"])
        if message.startswith("must "):
            return f"{shown} {message}, not {truncated_repr(first['input'])}"
        return label(name) + message.removeprefix(name) if message.startswith(name) else f"{label(name)}: {message}"
    wanted = {
        "float": "be a number",
        "int": "be a whole number",
        "bool": "be true or false",
        "string": "be text",
        "dict": "be a JSON object from token id to number",
        "model": "be a JSON object",
        "list": "be a list",
        "literal": f"be one of {context.get('expected', '')}".replace("'", "").replace(" or ", ", "),
    }.get(kind.partition("_")[0], f"be valid ({first['msg']})")
    return f"{shown} must {wanted}, not {truncated_repr(first['input'])}"
