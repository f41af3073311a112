"""Names of a checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Names of the modules of a checkpoint, whose tensors are "MODULE.weight" and "MODULE.bias". The defaults are those
    of most Hugging Face decoders; an architecture overrides what differs (architectures/). The fields from `input_norm`
    on are relative to `layer`. One field is one row of the table of names."""

    embedding: str = "model.embed_tokens"
    layers: str = "model.layers"
    norm: str = "model.norm"
    head: str = "lm_head"
    # of per-layer embeddings, all layers together
    per_layer_table: str = "model.embed_tokens_per_layer"
    per_layer_model_projection: str = "model.per_layer_model_projection"
    per_layer_model_norm: str = "model.per_layer_projection_norm"
    only_layer: str = ""  # the module of the only layer, instead of `layers` and a number
    input_norm: str = "input_layernorm"
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    qkv: str = ""  # one module for queries, keys and values, instead of the three before
    o: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    delta_qkv: str = "linear_attn.in_proj_qkv"  # of a delta layer, up to `decay_bias`; the last four are tensors
    delta_gate: str = "linear_attn.in_proj_z"
    update_rate: str = "linear_attn.in_proj_b"
    decay_rate: str = "linear_attn.in_proj_a"
    # one module for queries, keys, values and gate, and one for both rates, instead of two before each: the rows that
    # belong to a key head are adjacent
    delta_qkv_gate: str = ""
    rates: str = ""
    delta_o: str = "linear_attn.out_proj"
    delta_norm: str = "linear_attn.norm.weight"
    conv: str = "linear_attn.conv1d.weight"
    decay_log: str = "linear_attn.A_log"
    decay_bias: str = "linear_attn.dt_bias"
    decay: str = ""  # the tensor -exp(A_log), instead of `decay_log`
    # whether the value heads of a delta layer are in the order of a GGUF file: the first one of each key head, then the
    # second one of each, instead of all those of the first key head, then those of the next one
    tiled_value_heads: bool = False
    mixer_output_norm: str = "post_attention_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    mlp_output_norm: str = "post_feedforward_layernorm"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    gate_up: str = ""  # one module for gate and up, instead of the two before
    down: str = "mlp.down_proj"
    # of a mixture of experts: the router, and before the modules of expert N, such as N.gate_proj
    router: str = "mlp.gate"
    correction: str = "mlp.gate.e_score_correction_bias"  # the name of the tensor
    experts: str = "mlp.experts"
    expert_gate: str = "gate_proj"
    expert_up: str = "up_proj"
    expert_down: str = "down_proj"
    # whether those of all experts may be in two tensors [num_experts, inputs, outputs], with outputs of gate and up
    # alternately
    alternating_experts: bool = False
    # instead of these modules, those with the projections of all experts of a layer, one below the other
    gate_experts: str = ""
    up_experts: str = ""
    down_experts: str = ""
    sinks: str = "self_attn.sinks"  # the name of the tensor
    shared_gate_proj: str = "mlp.shared_expert.gate_proj"
    shared_up_proj: str = "mlp.shared_expert.up_proj"
    shared_down_proj: str = "mlp.shared_expert.down_proj"
    shared_gate: str = "mlp.shared_expert_gate"
    output_scale: str = "layer_scalar"  # the name of the tensor
    per_layer_gate: str = "per_layer_input_gate"
    per_layer_projection: str = "per_layer_projection"
    per_layer_norm: str = "post_per_layer_input_norm"
    mtp_layer: bool = False  # whether a layer of multi-token prediction, which is not used, may follow the others
    # of a multimodal checkpoint: names in files with another layout, and prefixes of the text model's tensors, beyond
    # which tensors belong to other modalities
    alternative: TensorNames | None = None
    text_prefixes: tuple[str, ...] = ("",)

    def layer(self, index: int) -> str:
        """Returns the module name of a layer."""
        return self.only_layer or f"{self.layers}.{index}"

    def found_in(self, tensors: Container[str]) -> TensorNames:
        """Returns these names, or the alternative ones if only those have an embedding in `tensors`."""
        if self.alternative is None or f"{self.embedding}.weight" in tensors:
            return self
        other = self.alternative.found_in(tensors)
        return other if f"{other.embedding}.weight" in tensors else self

    def of_text(self) -> TensorNames:
        """Returns the names of a text model inside a multimodal checkpoint: those that transformers 5 writes, and as
        alternatives those of earlier versions, of which Qwen2-VL's are the ones of a model alone."""
        alone = replace(self, text_prefixes=(f"{self.embedding.partition('.')[0]}.", f"{self.head}."))
        first, second = (
            replace(
                self,
                embedding=f"{root}.embed_tokens",
                layers=f"{root}.layers",
                norm=f"{root}.norm",
                head=head,
                per_layer_table=f"{root}.embed_tokens_per_layer",
                per_layer_model_projection=f"{root}.per_layer_model_projection",
                per_layer_model_norm=f"{root}.per_layer_projection_norm",
                text_prefixes=(f"{root}.", f"{head}."),
            )
            for root, head in (
                ("model.language_model", "lm_head"),
                ("language_model.model", "language_model.lm_head"),
            )
        )
        return replace(first, alternative=replace(second, alternative=alone))


HF_NAMES = TensorNames()
