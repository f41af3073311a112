"""Determines from the code which operators run which model family on a CPU and on a GPU.

A family is represented by the default configuration of its model type in transformers. No model is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import AutoConfig

from swiftspec.backends import cpu, cuda
from swiftspec.errors import UserError
from swiftspec.model.architectures import ARCHITECTURES
from swiftspec.model.config_json import parse_config
from swiftspec.model.spec import ModelSpec

# fields that make the default configuration of a type one of its dense models
CHANGES: Mapping[str, Mapping[str, Any]] = {"gemma4_text": {"hidden_size_per_layer_input": 0}}
HEAD = ("`architectures`", "on a CPU", "on a GPU")
PAGE = """\
<!-- Made by `python -m tools.docs`: do not edit. -->
# Which operators run which model family

Each row is the default configuration of the family's model type in transformers, in bfloat16. *native* and *CUDA* are
this project's operators; a model that they do not support runs on torch's own operators, for the reason in
parentheses. [paths.md](paths.md) lists which executors each of them has. Sizes decide too: the CUDA operators, for
example, need heads of 64 or 128. The CUDA operators were never run on a GPU.

"""


def family_spec(name: str) -> ModelSpec:
    """Returns the spec of the default configuration of a family in ARCHITECTURES."""
    kind = ARCHITECTURES[name].model_type
    config = AutoConfig.for_model(kind, **CHANGES.get(kind, {})).to_dict()
    return parse_config({**config, "architectures": [name]}).spec


def rows() -> Iterator[list[str]]:
    """Yields the rows of the table: a family and its operators on a CPU and on a GPU."""
    for name in ARCHITECTURES:
        spec = family_spec(name)
        yield [f"`{name}`", _operators("native", cpu.check_spec, spec), _operators("CUDA", cuda.check_spec, spec)]


def _operators(name: str, check_spec: Any, spec: ModelSpec) -> str:
    try:
        check_spec(spec, torch.bfloat16)
    except UserError as error:
        return f"torch's own ({str(error).partition('; ')[0]})"
    return name
