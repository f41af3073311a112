"""Draft heads: EAGLE-3 and DFlash checkpoints, and the layer of multi-token prediction (MTP) in checkpoints of other
families."""

from __future__ import annotations

from dataclasses import replace

from swiftspec.errors import UserError, truncated_repr
from swiftspec.file_io import Fields
from swiftspec.model.architectures.decoder import FULL, decoder_spec, layer_count, layer_kinds, windows_of
from swiftspec.model.architectures.llama import llama_spec
from swiftspec.model.config import ModelConfig
from swiftspec.model.spec import AttentionSpec, BlockSpec, DraftHeadSpec, ModelSpec
from swiftspec.model.tensor_names import TensorNames

EAGLE3_NAMES = TensorNames(
    embedding="embed_tokens", layers="layers", only_layer="midlayer", norm="norm", input_norm="hidden_norm"
)
DFLASH_NAMES = TensorNames(layers="layers", norm="norm")  # embedding and LM head are the target's
# fields of `dflash_config`; the first six may also be fields of config.json
DFLASH_FIELDS = (
    "block_size", "mask_token_id", "target_layer_ids", "final_logit_softcapping", "output_multiplier",
    "input_embedding_scale", "causal", "use_swa", "attention_sink_bias", "use_aux_hidden_state",
)  # fmt: skip
LARGEST_BLOCK = 64  # positions, as many as a round can verify


def eagle3_spec(fields: Fields) -> ModelSpec:
    """Returns the spec of an EAGLE-3 head with Llama layers, as SpecForge and the authors of EAGLE-3 write it, or as
    the library speculators does, which has the fields of the decoder in `transformer_layer_config`."""
    inner = fields.object("transformer_layer_config")
    whole = replace(fields, data={**inner.data, **fields.data})
    spec = llama_spec(whole)
    if len(spec.layers) != 1:
        raise UserError(f"an EAGLE-3 head of {len(spec.layers)} layers is not supported; those of one layer are")
    if not whole.object("eagle_config").boolean("use_aux_hidden_state", default=True):
        raise UserError("an EAGLE-3 head without auxiliary hidden states (use_aux_hidden_state) is not supported")
    name = "eagle_aux_hidden_state_layer_ids"
    ids = whole.integers(name, ge=1, le=2**14) or whole.object("eagle_config").integers(name, ge=1, le=2**14)
    hidden = spec.hidden_size
    head = DraftHeadSpec(
        "eagle3",
        target_hidden_size=whole.integer("target_hidden_size", hidden, ge=1, le=2**18),
        draft_vocab_size=whole.integer("draft_vocab_size", spec.vocab_size, ge=1, le=spec.vocab_size),
        target_layer_ids=tuple(ids),
        norm_before_residual=whole.boolean("norm_before_residual"),
    )
    return replace(spec, draft_head=head, tie_word_embeddings=False)


def dflash_spec(fields: Fields) -> ModelSpec:
    """Returns the spec of a DFlash head, which has Qwen3 layers, as its authors write it (z-lab)."""
    own = fields.object("dflash_config")
    _refuse_dflash_variants(fields, own)
    given = {name: value for name, value in own.data.items() if value is not None}
    both = replace(fields, data={**fields.data, **given})
    windows, causal = windows_of(fields, layer_kinds(fields, [FULL] * layer_count(fields))), _causal(fields, own)
    if any(windows) and causal is False:
        raise UserError("a DFlash head with sliding windows that are not causal is not supported")
    if any(windows) and not fields.boolean("use_sliding_window"):
        raise UserError("layer_types has sliding windows, which use_sliding_window excludes")
    bias = fields.boolean("attention_bias")
    spec = decoder_spec(fields, qkv_bias=bias, o_bias=bias, qk_norm="head", windows=windows)
    ids, most = both.integers("target_layer_ids", ge=0, le=2**14), spec.vocab_size - 1
    if not ids:
        raise fields.error("target_layer_ids", "be a list of layers")
    known = fields.integer("num_target_layers", 0, ge=0, le=2**14) or None
    size, mask = both.integer("block_size", 16, ge=2, le=LARGEST_BLOCK), both.integer("mask_token_id", ge=0, le=most)
    head = DraftHeadSpec(
        "dflash",
        target_hidden_size=fields.integer("target_hidden_size", spec.hidden_size, ge=1, le=2**18),
        draft_vocab_size=spec.vocab_size,
        target_layer_ids=tuple(ids),
        block=BlockSpec(size, mask, causal is True, known),
    )
    return replace(
        spec,
        draft_head=head,
        tie_word_embeddings=False,
        embedding_multiplier=both.number("input_embedding_scale", 1.0, ge=1e-6, le=1e6),
        logit_multiplier=both.number("output_multiplier", 1.0, ge=1e-6, le=1e6),
        logit_softcap=both.number("final_logit_softcapping", 0.0, ge=0.0, le=1e6) or None,
    )


def _causal(fields: Fields, own: Fields) -> bool | None:
    """Returns whether all layers are causal or none is; None: those with a sliding window are."""
    for where, name in ((fields, "is_causal"), (own, "causal")):
        if where.data.get(name) is not None:
            return where.boolean(name)
    return None


def _refuse_dflash_variants(fields: Fields, own: Fields) -> None:
    """Raises UserError if config.json describes a variant of DFlash that is not supported."""
    if fields.data.get("speculators_model_type") is not None:
        raise UserError("a DFlash head in the layout of the library speculators is not supported; that of z-lab is")
    unknown = sorted({*own.data} - {*DFLASH_FIELDS})
    if unknown:
        raise UserError(f"field {truncated_repr(unknown[0])} of dflash_config is not supported")
    variants = (own, "use_swa"), (own, "attention_sink_bias"), (fields, "add_swa_attention_sink_bias")
    named = next((name for where, name in variants if where.boolean(name)), None)
    if named is not None:
        raise UserError(f"a DFlash head with {named} is not supported")
    if not own.boolean("use_aux_hidden_state", default=True):
        raise UserError("a DFlash head without auxiliary hidden states (use_aux_hidden_state) is not supported")
    if not fields.boolean("is_neox_style", default=True):
        raise UserError("a DFlash head with interleaved RoPE (is_neox_style) is not supported")
    vocab = fields.integer("vocab_size", ge=1, le=2**26)
    if fields.integer("draft_vocab_size", vocab, ge=1, le=2**26) != vocab:
        raise UserError("a DFlash head with a part of the vocabulary (draft_vocab_size) is not supported")


def mtp_config(target: ModelConfig) -> ModelConfig:
    """Returns the configuration of the MTP layer in the checkpoint of a target, which has the shape of the target's
    attention layers. Whether the checkpoint has one is known when it is read."""
    spec = target.spec
    layer = next(layer for layer in spec.layers if isinstance(layer.mixer, AttentionSpec))
    head = DraftHeadSpec("mtp", target_hidden_size=spec.hidden_size, draft_vocab_size=spec.vocab_size)
    return replace(target, spec=replace(spec, layers=(layer,), draft_head=head))
