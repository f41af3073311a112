"""Text models of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: Qwen2 and Qwen3. RoPE has three positions per token (M-RoPE), which
are equal in a text, where it is the usual one."""

from __future__ import annotations

from dataclasses import replace

from swiftspec.file_io import Fields
from swiftspec.model.architectures.qwen2 import qwen2_spec
from swiftspec.model.architectures.qwen3 import qwen3_spec
from swiftspec.model.spec import ModelSpec

QWEN2_DEFAULTS = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_position_embeddings": 32768}
QWEN3_DEFAULTS = {"num_key_value_heads": 32, "head_dim": 128, "rope_theta": 5e6, "max_position_embeddings": 128000}


def qwen2_vl_spec(fields: Fields) -> ModelSpec:
    """Returns the spec of the text model of a Qwen2VLForConditionalGeneration or Qwen2_5_VLForConditionalGeneration."""
    return qwen2_spec(_with_plain_rope(fields))


def qwen3_vl_spec(fields: Fields) -> ModelSpec:
    """Returns the spec of the text model of a Qwen3VLForConditionalGeneration."""
    return qwen3_spec(_with_plain_rope(fields))


def _with_plain_rope(fields: Fields) -> Fields:
    """Returns the fields without RoPE type "mrope", which the first files have."""
    scaling = fields.object("rope_scaling")
    if scaling.string("rope_type", scaling.string("type", "default")) != "mrope":
        return fields
    plain = {**scaling.data, "rope_type": "default", "type": "default"}
    return replace(fields, data={**fields.data, "rope_scaling": plain})
