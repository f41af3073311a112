"""vLLM's `speculative_config` and `override_generation_config`: one JSON object instead of several flags."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from swiftspec.config import SPECULATIVE_CONFIG
from swiftspec.drafter_kinds import DRAFTER_KINDS, MODEL_FREE, MTP_HEAD
from swiftspec.errors import UserError, truncated_repr
from swiftspec.file_io import parse_json
from swiftspec.params import OVERRIDE_GENERATION_CONFIG, SamplingParams
from swiftspec.settings.flags import SETTINGS

JSON_FLAGS = tuple(name for name, flag in SETTINGS.items() if flag.setting.has_flag and flag.metavar == "JSON")
EXPERIMENTAL = tuple(name for name, flag in SETTINGS.items() if flag.setting.json_flag == SPECULATIVE_CONFIG)
MODEL_FREE_METHODS = {method: name for name, kind in DRAFTER_KINDS.items() for method in kind.methods}
MODEL_METHODS = ("draft_model", "eagle3", "dflash")  # methods whose draft is the field `model`
FIELDS = {"model": "draft_model", "draft_tensor_parallel_size": "draft_tp"}  # fields that are a setting
TOKENS = "num_speculative_tokens"
WITHOUT_EFFECT = ("prompt_lookup_min", "prompt_lookup_max", "suffix_decoding_max_tree_depth")  # lookup has no bounds


def expand_json_flags(values: Mapping[str, object]) -> dict[str, object]:
    """Returns settings by name in which `speculative_config` and `override_generation_config`, if given, are replaced
    by the settings that their fields stand for. Raises UserError if one is invalid, or contradicts another setting."""
    result = {name: value for name, value in values.items() if name not in READERS}
    for name, read in READERS.items():
        given = values.get(name)
        if given is None:
            continue
        found = read(json_object(name, given))
        for field in found:
            if result.get(field) is not None:
                raise UserError(f"{name} and {field} set the same value: remove one of them")
        result |= found
    return result


def json_object(name: str, value: object) -> Mapping[str, Any]:
    """Returns the value of a JSON flag as an object. Raises UserError if it is something else."""
    value = parse_json(value, name) if isinstance(value, str) else value
    if not isinstance(value, Mapping):
        raise UserError(f"{name} must be a JSON object, not {truncated_repr(value)}")
    return value


def _check_fields(name: str, config: Mapping[str, Any], known: Collection[str]) -> None:
    for field in config:
        if field not in known:
            raise UserError(f"{name}: unknown field {truncated_repr(field)}; known are {', '.join(sorted(known))}")


def _generation_config(config: Mapping[str, Any]) -> dict[str, object]:
    """Returns the sampling settings of `override_generation_config`, whose fields have their names or those of
    generation_config.json."""
    known = {name: name for name, flag in SETTINGS.items() if flag.config is SamplingParams}
    known |= {flag.setting.from_model: name for name, flag in SETTINGS.items() if flag.setting.from_model is not None}
    _check_fields(OVERRIDE_GENERATION_CONFIG, config, known)
    return {known[field]: value for field, value in config.items() if value is not None}


def _speculative_config(config: Mapping[str, Any]) -> dict[str, object]:
    """Returns the settings of `speculative_config`: `model` is draft_model, `num_speculative_tokens` draft_steps, and
    with lookup one less than verify_batch; the fields that only experiments set have their own names."""
    vllm = {*FIELDS, "method", TOKENS, *WITHOUT_EFFECT}
    _check_fields(SPECULATIVE_CONFIG, config, {*vllm, *EXPERIMENTAL})
    given = {field: value for field, value in config.items() if value is not None}
    found: dict[str, object] = {name: given[name] for name in EXPERIMENTAL if name in given}
    if not vllm & given.keys():
        return found
    found |= {ours: given[field] for field, ours in FIELDS.items() if field in given}
    draft = _draft_of(given.get("method"), given.get("model"))
    if draft is not None:
        found["draft_model"] = draft
    if "draft_model" not in found:
        raise UserError(f"{SPECULATIVE_CONFIG} needs a model or a method; methods are {', '.join(_METHODS)}")
    if TOKENS in given:
        tokens = _count(given[TOKENS])
        lookup = found["draft_model"] in MODEL_FREE
        found |= {"verify_batch": tokens + 1} if lookup else {"draft_steps": tokens}
    return found


def _count(value: object) -> int:
    """Returns the value of `num_speculative_tokens`, which is text if a YAML file or a flag has it."""
    number = int(value) if isinstance(value, str) and value.isdecimal() and len(value) < 10 else value
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise UserError(f"{SPECULATIVE_CONFIG}: {TOKENS} must be at least 1, not {truncated_repr(value)}")
    return number


def _draft_of(method: object, model: object) -> str | None:
    """Returns the draft model that a method stands for; None if the field `model` names it."""
    if isinstance(method, str) and method in MODEL_FREE_METHODS:
        return MODEL_FREE_METHODS[method]
    if method == MTP_HEAD or (isinstance(method, str) and method.endswith("_mtp")):
        return MTP_HEAD if model is None else None
    if method in (None, *MODEL_METHODS):
        if method is not None and model is None:
            raise UserError(f"{SPECULATIVE_CONFIG}: method {method} needs the field model")
        return None
    raise UserError(
        f"{SPECULATIVE_CONFIG}: method {truncated_repr(method)} is not supported; use one of {', '.join(_METHODS)}"
    )


_METHODS = (*MODEL_FREE_METHODS, MTP_HEAD, *MODEL_METHODS)
READERS: dict[str, Callable[[Mapping[str, Any]], dict[str, object]]] = {
    SPECULATIVE_CONFIG: _speculative_config,
    OVERRIDE_GENERATION_CONFIG: _generation_config,
}
