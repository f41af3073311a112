"""Registry of model families, by the first entry of `architectures` in config.json. A new family needs a module here
and an entry in ARCHITECTURES."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from swiftspec.errors import UserError, truncated_repr
from swiftspec.file_io import Fields
from swiftspec.model.architectures.llama import llama_spec
from swiftspec.model.architectures.qwen2 import qwen2_spec
from swiftspec.model.architectures.qwen3 import qwen3_spec
from swiftspec.model.spec import ModelSpec
from swiftspec.model.tensor_names import HF_NAMES, TensorNames


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model family.

    `model_type`: field of config.json that names the family if `architectures` is missing.
    `spec`: builds the spec from config.json. Raises UserError on unsupported features.
    `names`: names of the checkpoint's tensors.
    """

    model_type: str
    spec: Callable[[Fields], ModelSpec]
    names: TensorNames = HF_NAMES


ARCHITECTURES = {
    "LlamaForCausalLM": Architecture("llama", llama_spec),
    "Qwen2ForCausalLM": Architecture("qwen2", qwen2_spec),
    "Qwen3ForCausalLM": Architecture("qwen3", qwen3_spec),
}


def architecture_of(fields: Fields) -> Architecture:
    """Returns the family of a config.json. Raises UserError if it is not supported."""
    names, kind = fields.strings("architectures"), fields.string("model_type", "")
    by_type = {each.model_type: name for name, each in ARCHITECTURES.items()}
    name = names[0] if names else by_type.get(kind, kind or None)
    if name not in ARCHITECTURES:
        *most, last = ARCHITECTURES
        known = f"{', '.join(most)} and {last}"
        raise UserError(f"architecture {truncated_repr(name)} is not supported; {known} are")
    return ARCHITECTURES[name]
