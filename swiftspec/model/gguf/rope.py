"""RoPE of a GGUF file: its metadata and tensors as the `rope_parameters` of config.json."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from swiftspec.errors import UserError, truncated_repr
from swiftspec.model.gguf.fields import GgufFields
from swiftspec.model.gguf.file import GgufFile

ROPE_FREQS = "rope_freqs.weight"  # factors by which Llama 3.1 and later divide the frequencies of RoPE
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"  # of longrope
ROPE_TENSORS = (ROPE_FREQS, SHORT_FACTORS, LONG_FACTORS)
DEFAULT_THETA = 10000.0
MAX_HEAD_DIM = 1 << 14
YARN_FIELDS = {  # of config.json, by the name after "rope.scaling."
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
    "attn_factor": "attention_factor",
    "yarn_attn_factor": "attention_factor",
}


def rope_parameters(file: GgufFile, head_dim: float, *, partial: bool) -> dict[str, Any]:
    """Returns the parameters of RoPE as config.json has them. `partial`: whether the family rotates a part of a head.
    Raises UserError if they are not supported."""
    fields = GgufFields.of(file)
    theta = fields.scalar("rope.freq_base")
    found: dict[str, Any] = {"rope_theta": DEFAULT_THETA if theta is None else theta}
    rotated = fields.number("rope.dimension_count") or head_dim
    if rotated != head_dim:
        if not partial or not 0 < rotated < head_dim:
            raise UserError(f"RoPE of {rotated:.0f} of {head_dim:.0f} dimensions of a head is not supported")
        share = rotated / head_dim
        # the product with head_dim is rounded down, and must be `rotated`
        found["partial_rotary_factor"] = share if int(head_dim * share) == rotated else math.nextafter(share, 1)
    return found | _scaling(file, fields, rotated)


def _scaling(file: GgufFile, fields: GgufFields, rotated: float) -> dict[str, Any]:
    """Returns the frequency scaling. Tensors of factors determine it, whatever the type in the metadata: files of
    Phi-3 do not name it."""
    kind = fields.values.get("rope.scaling.type", "linear")
    if not isinstance(kind, str):
        raise fields.unsupported("rope.scaling.type")
    own = [name for name in ROPE_TENSORS if name in file.tensors]
    if own and kind == "yarn":
        raise UserError(f"RoPE type 'yarn' with tensor {own[0]} is not supported")
    if LONG_FACTORS in own or SHORT_FACTORS in own or kind == "longrope":
        return _longrope(file, fields, rotated)
    if ROPE_FREQS in own:
        return {**_factor_fields(file, fields, rotated, (ROPE_FREQS, ROPE_FREQS)), "attention_factor": 1.0}
    if fields.number("rope.scale_linear") not in (0, 1):  # of old files
        raise fields.unsupported("rope.scale_linear")
    factor = 1.0 if fields.is_off("rope.scaling.factor") else fields.scalar("rope.scaling.factor")
    if kind == "none" or (kind == "linear" and factor == 1):
        return {}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return {"rope_type": "yarn", "factor": factor, **_yarn(fields)}
    raise UserError(
        f"RoPE type {truncated_repr(kind)} is not supported in GGUF files; none, linear, yarn and longrope are"
    )


def _yarn(fields: GgufFields) -> dict[str, Any]:
    """Returns the parameters of YaRN, as the model's config.json has them: llama.cpp's converter copies them, although
    its runtime does not read all of them for every architecture."""
    if fields.number("rope.scaling.yarn_ext_factor") not in (0, 1, -1):  # -1: not set
        raise fields.unsupported("rope.scaling.yarn_ext_factor")
    found = {"original_max_position_embeddings": _trained_length(fields)}
    for ours, theirs in YARN_FIELDS.items():
        if not fields.is_off(f"rope.scaling.{ours}"):
            found[theirs] = fields.scalar(f"rope.scaling.{ours}")
    if not fields.is_off("rope.scaling.yarn_log_multiplier"):
        found |= {"mscale": 1.0, "mscale_all_dim": fields.scalar("rope.scaling.yarn_log_multiplier")}
    return found


def _trained_length(fields: GgufFields) -> Any:
    own = fields.scalar("rope.scaling.original_context_length")
    return fields.scalar("context_length") if own is None else own


def _longrope(file: GgufFile, fields: GgufFields, rotated: float) -> dict[str, Any]:
    found = _factor_fields(file, fields, rotated, (SHORT_FACTORS, LONG_FACTORS))
    if not fields.is_off("rope.scaling.attn_factor"):
        found["attention_factor"] = fields.scalar("rope.scaling.attn_factor")
    return found


def _factor_fields(file: GgufFile, fields: GgufFields, rotated: float, tensors: tuple[str, str]) -> dict[str, Any]:
    """Returns RoPE whose frequencies are divided by the factors in `tensors`, within the trained length and beyond it.
    The factors of Llama 3 are the same for both."""
    found: dict[str, Any] = {"rope_type": "longrope", "original_max_position_embeddings": _trained_length(fields)}
    for tensor, name in zip(tensors, ("short_factor", "long_factor"), strict=True):
        factors = _factors(file, tensor, rotated)
        if factors is None:
            raise UserError(f"RoPE needs tensor {tensor} with half as many numbers as are rotated")
        found[name] = [float(str(factor)) for factor in factors]
    return found


def _factors(file: GgufFile, name: str, rotated: float) -> np.ndarray | None:
    """Returns the tensor `name` [rotated / 2]; None if it is missing or has another shape or type."""
    tensor = file.tensors.get(name)
    if tensor is None or tensor.type != "F32" or tensor.shape != (rotated // 2,) or rotated > MAX_HEAD_DIM:
        return None
    with file.path.open("rb") as stream:
        stream.seek(tensor.offset)
        found = np.frombuffer(stream.read(tensor.nbytes), "<f4")
    return found if found.shape == tensor.shape else None
