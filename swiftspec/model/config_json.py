"""Parser of a checkpoint's config.json. An unsupported feature raises UserError, which names it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swiftspec.errors import UserError, truncated_repr
from swiftspec.file_io import Fields
from swiftspec.model.architectures import architecture_of, text_model_fields
from swiftspec.model.architectures.decoder import MOST_POSITIONS
from swiftspec.model.config import ModelConfig

Json = Mapping[str, Any]
DTYPES = ("bfloat16", "float16", "float32", "float64")


def parse_config(data: Json) -> ModelConfig:
    """Parses a config.json of transformers 4 or 5. Raises UserError on unsupported features."""
    whole = Fields(data)
    architecture = architecture_of(whole)
    fields = architecture.with_defaults(text_model_fields(whole))
    return ModelConfig(
        spec=architecture.read_spec(fields),
        names=architecture.names,
        max_position_embeddings=fields.integer("max_position_embeddings", 2048, ge=2, le=MOST_POSITIONS),
        dtype=_dtype(fields),
        quantization=_quantization(whole, fields),
        eos_token_ids=stop_tokens(fields),
    )


def _quantization(whole: Fields, fields: Fields) -> Json:
    """Returns `quantization_config`. Raises UserError for a model in the format of MLX, which names no method."""
    found = fields.object("quantization_config").data
    if whole.object("quantization").integer("group_size", 0) and "quant_method" not in found:
        raise UserError("quantised by MLX, which is not supported; use the original model, or a GGUF, AWQ or GPTQ file")
    return found


def stop_tokens(fields: Fields) -> tuple[int, ...]:
    """Returns the token ids of `eos_token_id`, a number or a list; empty if it is missing. Negative ids are ignored."""
    ids = fields.integers("eos_token_id", ge=-1, le=2**31 - 1)
    return tuple(token for token in ids if token >= 0)


def _dtype(fields: Fields) -> str:
    name = fields.string("dtype", fields.string("torch_dtype", "float32")).removeprefix("torch.")
    if name not in DTYPES:
        raise UserError(f"dtype {truncated_repr(name)} is not supported; {', '.join(DTYPES)} are")
    return name
