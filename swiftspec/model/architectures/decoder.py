"""Parser of the config.json fields that decoder families share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

from swiftspec.errors import UserError, truncated_repr
from swiftspec.file_io import Fields
from swiftspec.model.spec import Activation, AttentionSpec, LayerSpec, MlpSpec, ModelSpec, RopeKind, RopeSpec

MOST_POSITIONS = 2**31 - 1  # the bounds in this file exceed the values of real models and exclude overflow
LONGEST_ROPE_FACTORS = 2**13  # half of the largest head dimension
FULL, SLIDING = "full_attention", "sliding_attention"  # of `layer_types`
ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh", "relu2": "relu"}


def decoder_spec(
    fields: Fields,
    *,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: Literal["none", "head", "projection"] = "none",
    norms: Literal["before", "after", "both"] = "before",
    activation: str = "silu",
    partial_rope: bool = False,
    windows: Sequence[int | None] = (),
) -> ModelSpec:
    """Returns the spec of a decoder whose layers are alike, apart from their sliding windows. The keyword arguments are
    what a family determines; see `AttentionSpec`, `MlpSpec` and `LayerSpec`.

    `activation`: the only value of `hidden_act` that the family has. `partial_rope`: whether the family reads
    `partial_rotary_factor`. `windows`: of each layer; empty: none has one.
    Raises UserError on unsupported features.
    """
    named = fields.string("hidden_act", fields.string("hidden_activation", activation))
    if named != activation:
        raise UserError(f"hidden_act {truncated_repr(named)} is not supported; only {activation!r} is")
    hidden = fields.integer("hidden_size", ge=1, le=2**18)
    heads = fields.integer("num_attention_heads", ge=1, le=2**14)
    head_dim = fields.integer("head_dim", max(hidden // heads, 1), ge=1, le=2**14)
    kv_heads = kv_heads_of(fields, "num_key_value_heads", heads)
    check_head_dim(head_dim)
    mixer = AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope=parse_rope(fields.data),
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        qk_norm=qk_norm,
    )
    check_rope(mixer)
    if mixer.rope.share != 1 and not partial_rope:
        raise UserError("a partial_rotary_factor other than 1 is not supported in this architecture")
    mlp = MlpSpec(fields.integer("intermediate_size", ge=1, le=2**22), mlp_bias, ACTIVATIONS[activation])
    count = layer_count(fields)
    layers = [LayerSpec(replace(mixer, window=window), mlp, norms) for window in windows or [None] * count]
    return ModelSpec(
        vocab_size=fields.integer("vocab_size", ge=1, le=2**26),
        hidden_size=hidden,
        layers=tuple(layers),
        norm_eps=fields.number("rms_norm_eps", 1e-6, ge=1e-30, le=1.0),
        tie_word_embeddings=fields.boolean("tie_word_embeddings"),
    )


def replace_mixers(spec: ModelSpec, mixers: Mapping[int, AttentionSpec]) -> ModelSpec:
    """Returns the spec with other mixers in some layers, by index."""
    layers = (replace(layer, mixer=mixers.get(index, layer.mixer)) for index, layer in enumerate(spec.layers))
    return replace(spec, layers=tuple(layers))


def layer_count(fields: Fields) -> int:
    return fields.integer("num_hidden_layers", ge=1, le=2**14)


def kv_heads_of(fields: Fields, name: str, heads: int) -> int:
    """Returns the field `name`, a number of KV heads that must divide `heads` and defaults to it."""
    kv_heads = fields.integer(name, heads, ge=1, le=2**14)
    if heads % kv_heads:
        raise UserError(f"num_attention_heads {heads} is not a multiple of {name} {kv_heads}")
    return kv_heads


def check_head_dim(head_dim: int) -> None:
    if head_dim % 2:
        raise UserError(f"head_dim {head_dim} is odd")


def sliding_window(fields: Fields) -> int | None:
    """Returns the size of the sliding window in tokens, or None if `sliding_window` is missing or null."""
    if fields.data.get("sliding_window") is None:
        return None
    return fields.integer("sliding_window", ge=1, le=MOST_POSITIONS)


def layer_kinds(fields: Fields, default: Sequence[str], allowed: tuple[str, str] = (FULL, SLIDING)) -> list[str]:
    """Returns `layer_types`, or `default`: for each layer one of the `allowed` kinds."""
    kinds = list(fields.strings("layer_types") or default)
    unknown = next((kind for kind in kinds if kind not in allowed), None)
    if unknown is not None:
        raise UserError(f"layer type {truncated_repr(unknown)} is not supported; {' and '.join(allowed)} are")
    if len(kinds) != layer_count(fields):
        raise UserError(f"layer_types has {len(kinds)} entries for {layer_count(fields)} layers")
    return kinds


def sliding_every(fields: Fields, period: int) -> list[str]:
    """Returns kinds of layers of which every `period`-th has full attention and the others have a sliding window."""
    return [SLIDING if (index + 1) % period else FULL for index in range(layer_count(fields))]


def windows_of(fields: Fields, kinds: Sequence[str]) -> list[int | None]:
    """Returns the sliding window of each layer. Raises UserError if a sliding layer has no `sliding_window`."""
    window = sliding_window(fields)
    if window is None and SLIDING in kinds:
        raise fields.error("sliding_window", "be a whole number")
    return [window if kind == SLIDING else None for kind in kinds]


def refuse_sliding_windows(fields: Fields) -> None:
    """Raises UserError if config.json names a sliding window, which this family does not have."""
    if fields.boolean("use_sliding_window") or SLIDING in fields.strings("layer_types"):
        raise UserError("sliding window attention is not supported in this architecture")


def parse_rope(data: Mapping[str, Any], kind: str | None = None) -> RopeSpec:
    """Parses `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling` (transformers 4).

    `kind`: layer type whose parameters are wanted, if `rope_parameters` has separate ones for each layer type.
    """
    fields = Fields(data)
    newer, older = fields.object("rope_parameters"), fields.object("rope_scaling")
    if kind is not None and any(name in newer.data for name in (FULL, SLIDING)):
        newer = newer.object(kind)
    scaling = newer if newer.data else older
    both = Fields({**data, **{name: value for name, value in scaling.data.items() if value is not None}})
    name = scaling.string("rope_type", scaling.string("type", "default"))
    name = "longrope" if name == "su" else name  # of the first files of Phi-3
    named: RopeKind | None = next((each for each in get_args(RopeKind) if each == name and each != "none"), None)
    if named is None:
        known = ", ".join(each for each in get_args(RopeKind)[:-1])
        raise UserError(f"RoPE type {truncated_repr(name)} is not supported; {known} are")
    share = both.number("partial_rotary_factor", 1.0, ge=0.0, le=1.0)
    rope = RopeSpec(both.number("rope_theta", 10000.0, ge=1.0, le=1e15), named, share=share)
    parsers = {"llama3": _llama3, "yarn": _yarn, "longrope": _longrope}
    if named in ("linear", "llama3", "yarn"):
        rope = replace(rope, factor=scaling.number("factor", ge=0.01, le=1e6))
    if named == "proportional":
        rope = replace(rope, factor=scaling.number("factor", 1.0, ge=0.01, le=1e6))
    return parsers[named](rope, scaling, fields) if named in parsers else rope


def _original(scaling: Fields, fields: Fields) -> int:
    """Returns the trained length, which Phi names outside the RoPE parameters."""
    where = fields if scaling.data.get("original_max_position_embeddings") is None else scaling
    return where.integer("original_max_position_embeddings", ge=2, le=MOST_POSITIONS)


def _llama3(rope: RopeSpec, scaling: Fields, fields: Fields) -> RopeSpec:
    low, high = (scaling.number(f"{end}_freq_factor", ge=1e-3, le=1e6) for end in ("low", "high"))
    if low >= high:
        raise UserError(f"RoPE low_freq_factor {low} must be below high_freq_factor {high}")
    return replace(rope, low_freq_factor=low, high_freq_factor=high, original_max_position=_original(scaling, fields))


def _yarn(rope: RopeSpec, scaling: Fields, fields: Fields) -> RopeSpec:
    def weight(name: str) -> float:
        return scaling.number(name, 0.0, ge=0.0, le=1e3)

    def periods(name: str, default: float) -> float:
        return scaling.number(name, ge=1e-6, le=1e6) if scaling.data.get(name) else default

    def scale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.theta <= 1:
        raise UserError(f"RoPE type 'yarn' needs a rope_theta above 1, not {rope.theta:g}")
    factor = scale(1.0)
    if weight("mscale") and weight("mscale_all_dim"):
        factor = scale(weight("mscale")) / scale(weight("mscale_all_dim"))
    return replace(
        rope,
        original_max_position=_original(scaling, fields),
        beta_fast=periods("beta_fast", 32.0),
        beta_slow=periods("beta_slow", 1.0),
        truncate=scaling.boolean("truncate", default=True),
        attention_factor=scaling.number("attention_factor", factor, ge=1e-3, le=1e3),
    )


def _longrope(rope: RopeSpec, scaling: Fields, fields: Fields) -> RopeSpec:
    original = _original(scaling, fields)
    longest = fields.integer("max_position_embeddings", original, ge=2, le=MOST_POSITIONS)
    factor = scaling.number("factor", longest / original, ge=1e-3, le=1e6)
    scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return replace(
        rope,
        original_max_position=original,
        short_factors=_numbers(scaling, "short_factor"),
        long_factors=_numbers(scaling, "long_factor"),
        attention_factor=scaling.number("attention_factor", scale, ge=1e-3, le=1e3),
    )


def _numbers(fields: Fields, name: str) -> tuple[float, ...]:
    """Returns a list of numbers above 0. Raises UserError if the field is missing or contains anything else."""
    values = fields.data.get(name)
    if not isinstance(values, list) or not 0 < len(values) <= LONGEST_ROPE_FACTORS:
        raise fields.error(name, "be a list of numbers")
    each = Fields({f"{name}[{index}]": value for index, value in enumerate(values)}, fields.where)
    return tuple(each.number(index, ge=1e-6, le=1e6) for index in each.data)


def check_rope(mixer: AttentionSpec) -> None:
    """Raises UserError if RoPE does not fit the head dimension."""
    rope, count = mixer.rope, mixer.rope.rotated(mixer.head_dim)
    if count < 2 or count % 2:
        raise UserError(f"partial_rotary_factor {rope.share:g} of head_dim {mixer.head_dim} is not an even number")
    if rope.kind == "longrope":
        for name, factors in (("short_factor", rope.short_factors), ("long_factor", rope.long_factors)):
            if len(factors) != count // 2:
                raise UserError(f"RoPE {name} has {len(factors)} numbers instead of {count // 2}")
