"""Gemma 4, dense: like Gemma 3, with plain norm weights, a norm of values, another head dimension in the layers with
full attention, whose values may be their keys, and a scale of each layer's output. The E models also have per-layer
embeddings, and last layers that share the keys and values of earlier ones."""

from __future__ import annotations

from dataclasses import replace

from swiftspec.errors import UserError, truncated_repr
from swiftspec.file_io import Fields
from swiftspec.model.architectures.decoder import (
    FULL,
    check_head_dim,
    check_rope,
    decoder_spec,
    kv_heads_of,
    layer_kinds,
    parse_rope,
    replace_mixers,
    sliding_every,
    windows_of,
)
from swiftspec.model.architectures.gemma3 import GELU, soft_cap_of
from swiftspec.model.spec import AttentionSpec, LayerSpec, ModelSpec, RopeSpec

DEFAULTS = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "max_position_embeddings": 131072,
    "sliding_window": 512,
    "tie_word_embeddings": True,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
}
UNIFIED_DEFAULTS = DEFAULTS | {
    "max_position_embeddings": 262144,
    "sliding_window": 1024,
    "hidden_size_per_layer_input": 0,
}
FULL_ROPE = RopeSpec(1e6, "proportional", share=0.25)
SLIDING_ROPE = RopeSpec(1e4)


def gemma4_spec(fields: Fields) -> ModelSpec:
    """Returns the spec of a Gemma4ForCausalLM. Raises UserError for the models with experts."""
    _refuse_unsupported(fields)
    kinds = layer_kinds(fields, sliding_every(fields, 6))
    kinds[-1] = FULL
    bias = fields.boolean("attention_bias")
    spec = decoder_spec(
        fields,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        norms="both",
        activation=GELU,
        windows=windows_of(fields, kinds),
    )
    mixers = {
        index: _mixer(fields, layer.attention, kind, index)
        for index, (layer, kind) in enumerate(zip(spec.layers, kinds, strict=True))
    }
    spec = replace_mixers(spec, mixers)
    layers = [replace(layer, output_scale=True) for layer in spec.layers]
    return replace(
        spec,
        layers=tuple(_with_shared_kv(fields, layers)),
        embedding_multiplier=spec.hidden_size**0.5,
        logit_softcap=soft_cap_of(fields, "final_logit_softcapping"),
        per_layer_size=_per_layer_size(fields),
    )


def _with_shared_kv(fields: Fields, layers: list[LayerSpec]) -> list[LayerSpec]:
    """Returns the layers with `shares_kv` in the last ones, whose MLP may be twice as wide."""
    first = len(layers) - fields.integer("num_kv_shared_layers", 0, ge=0, le=len(layers))
    own, wide = layers[:first], 2 if fields.boolean("use_double_wide_mlp") else 1
    shared: list[LayerSpec] = []
    for layer in layers[first:]:
        if layer.mixer not in [each.mixer for each in own]:
            raise UserError("num_kv_shared_layers leaves no layer whose keys and values a layer could share")
        mlp = replace(layer.mlp, intermediate_size=wide * layer.mlp.intermediate_size)
        shared.append(replace(layer, mixer=replace(layer.attention, shares_kv=True), mlp=mlp))
    return own + shared


def _per_layer_size(fields: Fields) -> int:
    """Returns the size of the per-layer embeddings, 0 without them. Raises UserError if their vocabulary is another."""
    size = fields.integer("hidden_size_per_layer_input", 0, ge=0, le=2**18)
    vocab = fields.integer("vocab_size", ge=1, le=2**26)
    own = fields.integer("vocab_size_per_layer_input", vocab, ge=1, le=2**26)
    if size and own != vocab:
        raise UserError(f"vocab_size_per_layer_input {own} other than vocab_size {vocab} is not supported")
    return size


def _mixer(fields: Fields, mixer: AttentionSpec, kind: str, index: int) -> AttentionSpec:
    """Returns the attention of layer `index`. `mixer`: that of a sliding layer."""
    given = kind in fields.object("rope_parameters").data
    rope = parse_rope(fields.data, kind) if given else FULL_ROPE if kind == FULL else SLIDING_ROPE
    shared = kind == FULL and fields.boolean("attention_k_eq_v")
    own = _overrides(fields, kind, index, shared=shared)
    head_dim = own.integer("head_dim", mixer.head_dim, ge=1, le=2**14)
    kv_heads = mixer.num_kv_heads
    if own.data.get("num_key_value_heads") is not None:
        kv_heads = kv_heads_of(own, "num_key_value_heads", mixer.num_heads)
    check_head_dim(head_dim)
    mixer = replace(
        mixer, num_kv_heads=kv_heads, head_dim=head_dim, rope=rope, scale=1.0, v_norm=True, keys_as_values=shared
    )
    check_rope(mixer)
    return mixer


def _overrides(fields: Fields, kind: str, index: int, *, shared: bool) -> Fields:
    """Returns the head dimension and the number of KV heads of a layer where they differ from the model's: from
    `per_layer_config`, which recent versions of transformers write, or from the fields of the layers with full
    attention."""
    if fields.data.get("per_layer_config") is not None:
        layers = fields.object("per_layer_config")
        own = layers.object(str(index)) if str(index) in layers.data else layers.object(kind)
        unknown = own.data.keys() - {"head_dim", "num_key_value_heads"}
        if unknown:
            raise UserError(f"per_layer_config with {truncated_repr(min(unknown))} is not supported")
        return own
    if kind != FULL:
        return Fields({})
    names = {"head_dim": "global_head_dim"} | ({"num_key_value_heads": "num_global_key_value_heads"} if shared else {})
    return Fields({name: fields.data.get(source) for name, source in names.items()})


def _refuse_unsupported(fields: Fields) -> None:
    if fields.string("use_bidirectional_attention", "vision") == "all":
        raise UserError("bidirectional attention (use_bidirectional_attention) is not supported")
    if fields.boolean("enable_moe_block"):
        raise UserError("Gemma 4 with experts (enable_moe_block) is not supported; the dense models are")
