"""gpt-oss: mixtures of experts with biases and clamped SwiGLU in all layers, attention sinks, and a sliding window in
every other layer."""

from __future__ import annotations

from dataclasses import replace

from swiftspec.errors import UserError
from swiftspec.file_io import Fields
from swiftspec.model.architectures.decoder import decoder_spec, layer_kinds, sliding_every, windows_of
from swiftspec.model.spec import SWIGLU_ALPHA, SWIGLU_LIMIT, ExpertsSpec, LayerSpec, MlpSpec, ModelSpec
from swiftspec.model.tensor_names import TensorNames

NAMES = TensorNames(router="mlp.router", alternating_experts=True)
DEFAULTS = {
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 201088,
    "sliding_window": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "max_position_embeddings": 131072,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "attention_bias": True,
    "swiglu_alpha": SWIGLU_ALPHA,
    "swiglu_limit": SWIGLU_LIMIT,
    "torch_dtype": "bfloat16",
}
YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
MAX_EXPERTS = 2**14
WINDOW_PERIOD = 2  # every second layer has full attention


def gpt_oss_spec(fields: Fields) -> ModelSpec:
    """Returns the spec of a GptOssForCausalLM."""
    for name, value in (("swiglu_alpha", SWIGLU_ALPHA), ("swiglu_limit", SWIGLU_LIMIT)):
        if fields.number(name, ge=0.0, le=1e6) != value:
            raise UserError(f"{name} {fields.data[name]} is not supported; only {value} is")
    if not fields.data.get("rope_parameters") and not fields.data.get("rope_scaling"):
        fields = replace(fields, data={**fields.data, "rope_parameters": YARN})
    bias = fields.boolean("attention_bias")
    windows = windows_of(fields, layer_kinds(fields, sliding_every(fields, WINDOW_PERIOD)))
    spec = decoder_spec(fields, qkv_bias=bias, o_bias=bias, windows=windows)
    mlp = _mixture(fields, spec.layers[0].mlp)
    return replace(spec, layers=tuple(_layer(layer, mlp) for layer in spec.layers))


def _layer(layer: LayerSpec, mlp: MlpSpec) -> LayerSpec:
    return replace(layer, mixer=replace(layer.attention, sinks=True), mlp=mlp)


def _mixture(fields: Fields, dense: MlpSpec) -> MlpSpec:
    """Returns the mixture of experts of every layer. The softmax of the chosen experts' logits equals their
    probabilities among all experts divided by their sum."""
    experts = fields.integer("num_local_experts", ge=1, le=MAX_EXPERTS)
    chosen = fields.integer("num_experts_per_tok", ge=1, le=MAX_EXPERTS)
    if chosen > experts:
        raise UserError(f"num_experts_per_tok {chosen} exceeds num_local_experts {experts}")
    mixture = ExpertsSpec(experts, chosen, norm_topk_prob=True)
    return replace(dense, bias=True, activation="clamped_swiglu", experts=mixture)
