"""Draft heads: EAGLE-3 checkpoints, and the layer of multi-token prediction (MTP) in checkpoints of other families."""

from __future__ import annotations

from dataclasses import replace

from swiftspec.errors import UserError
from swiftspec.file_io import Fields
from swiftspec.model.architectures.llama import llama_spec
from swiftspec.model.config import ModelConfig
from swiftspec.model.spec import AttentionSpec, DraftHeadSpec, ModelSpec
from swiftspec.model.tensor_names import TensorNames

EAGLE3_NAMES = TensorNames(
    embedding="embed_tokens", layers="layers", only_layer="midlayer", norm="norm", input_norm="hidden_norm"
)


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


def mtp_config(target: ModelConfig) -> ModelConfig:
    """Returns the configuration of the MTP layer in the checkpoint of a target, which has the shape of the target's
    attention layers. Whether the checkpoint has one is known when it is read."""
    spec = target.spec
    layer = next(layer for layer in spec.layers if isinstance(layer.mixer, AttentionSpec))
    head = DraftHeadSpec("mtp", target_hidden_size=spec.hidden_size, draft_vocab_size=spec.vocab_size)
    return replace(target, spec=replace(spec, layers=(layer,), draft_head=head))
