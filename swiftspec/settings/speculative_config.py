"""vLLM's `speculative_config`: one JSON object instead of several flags."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swiftspec.drafter_kinds import DRAFTER_KINDS, MODEL_FREE, MTP_HEAD
from swiftspec.errors import UserError, truncated_repr
from swiftspec.file_io import parse_json

NAME = "speculative_config"
MODEL_FREE_METHODS = {method: name for name, kind in DRAFTER_KINDS.items() for method in kind.methods}
MODEL_METHODS = ("draft_model", "eagle3", "dflash")  # methods whose draft is the field `model`
FIELDS = {"model": "draft_model", "draft_tensor_parallel_size": "draft_tp"}  # fields that are a setting
WITHOUT_EFFECT = ("prompt_lookup_min", "prompt_lookup_max", "suffix_decoding_max_tree_depth")  # lookup has no bounds


def expand_speculative_config(values: Mapping[str, object]) -> dict[str, object]:
    """Returns settings by name in which `speculative_config`, if given, is replaced by the settings that it stands for:
    `model` is draft_model, `num_speculative_tokens` draft_steps, and with lookup one less than verify_batch. Raises
    UserError if it is invalid, or contradicts another setting."""
    others = {name: value for name, value in values.items() if name != NAME}
    given = values.get(NAME)
    if given is None:
        return others
    found = _settings(parse_json(given, NAME) if isinstance(given, str) else given)
    for name in found:
        if others.get(name) is not None:
            raise UserError(f"{NAME} and {name} set the same value: remove one of them")
    return {**others, **found}


def _settings(config: object) -> dict[str, object]:
    if not isinstance(config, Mapping):
        raise UserError(f"{NAME} must be a JSON object, not {truncated_repr(config)}")
    known = {*FIELDS, "method", "num_speculative_tokens", *WITHOUT_EFFECT}
    for name in config:
        if name not in known:
            raise UserError(f"{NAME}: unknown field {truncated_repr(name)}; known are {', '.join(sorted(known))}")
    found: dict[str, object] = {ours: config[name] for name, ours in FIELDS.items() if config.get(name) is not None}
    draft = _draft_of(config.get("method"), config.get("model"))
    if draft is not None:
        found["draft_model"] = draft
    if "draft_model" not in found:
        raise UserError(f"{NAME} needs a model or a method; methods are {', '.join(_METHODS)}")
    tokens: Any = config.get("num_speculative_tokens")
    if tokens is not None:
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
            raise UserError(f"{NAME}: num_speculative_tokens must be at least 1, not {truncated_repr(tokens)}")
        lookup = found["draft_model"] in MODEL_FREE
        found |= {"verify_batch": tokens + 1} if lookup else {"draft_steps": tokens}
    return found


def _draft_of(method: object, model: object) -> str | None:
    """Returns the draft model that a method stands for; None if the field `model` names it."""
    if isinstance(method, str) and method in MODEL_FREE_METHODS:
        return MODEL_FREE_METHODS[method]
    if method == MTP_HEAD or (isinstance(method, str) and method.endswith("_mtp")):
        return MTP_HEAD if model is None else None
    if method in (None, *MODEL_METHODS):
        if method is not None and model is None:
            raise UserError(f"{NAME}: method {method} needs the field model")
        return None
    raise UserError(f"{NAME}: method {truncated_repr(method)} is not supported; use one of {', '.join(_METHODS)}")


_METHODS = (*MODEL_FREE_METHODS, MTP_HEAD, *MODEL_METHODS)
