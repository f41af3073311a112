"""Names of a checkpoint's tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Names of the modules of a checkpoint, whose tensors are "MODULE.weight" and "MODULE.bias". The defaults are those
    of most Hugging Face decoders; an architecture overrides what differs (architectures/). The fields from `input_norm`
    on are relative to `layer`."""

    embedding: str = "model.embed_tokens"
    layers: str = "model.layers"
    norm: str = "model.norm"
    head: str = "lm_head"
    input_norm: str = "input_layernorm"
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    o: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    post_norm: str = "post_attention_layernorm"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"

    def layer(self, index: int) -> str:
        """Returns the module name of a layer."""
        return f"{self.layers}.{index}"


HF_NAMES = TensorNames()
