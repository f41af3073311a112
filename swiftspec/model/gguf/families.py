"""Registry of the model families of GGUF files, by `general.architecture`: how their metadata become the fields of
config.json that architectures/ reads.

convert_hf_to_gguf.py of llama.cpp writes the metadata, and its src/models/ defines what they mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from swiftspec.errors import UserError, truncated_repr
from swiftspec.model.architectures import relatives
from swiftspec.model.architectures.decoder import FULL, SLIDING
from swiftspec.model.architectures.gemma3 import GELU
from swiftspec.model.architectures.qwen3_5 import LINEAR
from swiftspec.model.gguf.fields import GgufFields
from swiftspec.model.gguf.file import GgufFile
from swiftspec.model.gguf.rope import DEFAULT_THETA
from swiftspec.model.tensor_names import TensorNames

GGUF_NAMES = TensorNames(
    embedding="token_embd",
    layers="blk",
    norm="output_norm",
    head="output",
    input_norm="attn_norm",
    q="attn_q",
    k="attn_k",
    v="attn_v",
    o="attn_output",
    q_norm="attn_q_norm",
    k_norm="attn_k_norm",
    mixer_output_norm="post_attention_norm",
    mlp_norm="ffn_norm",
    mlp_output_norm="post_ffw_norm",
    gate="ffn_gate",
    up="ffn_up",
    down="ffn_down",
)
JOINED_MLP = replace(GGUF_NAMES, gate_up="ffn_up")
DELTA = replace(
    GGUF_NAMES,
    mlp_norm="post_attention_norm",
    delta_qkv="attn_qkv",
    delta_gate="attn_gate",
    update_rate="ssm_beta",
    decay_rate="ssm_alpha",
    delta_o="ssm_out",
    delta_norm="ssm_norm.weight",
    conv="ssm_conv1d.weight",
    decay="ssm_a",
    decay_bias="ssm_dt.bias",
    tiled_value_heads=True,
)


def _with_experts(names: TensorNames) -> TensorNames:
    return replace(
        names,
        router="ffn_gate_inp",
        gate_experts="ffn_gate_exps",
        up_experts="ffn_up_exps",
        down_experts="ffn_down_exps",
        shared_gate="ffn_gate_inp_shexp",
        shared_gate_proj="ffn_gate_shexp",
        shared_up_proj="ffn_up_shexp",
        shared_down_proj="ffn_down_shexp",
        correction="exp_probs_b.bias",
    )


SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = 1, 2, 3  # of `expert_gating_func`
MTP_LAYERS = "nextn_predict_layers"  # layers of multi-token prediction, after the others
SECTIONS = "rope.dimension_sections"
RECURRENT, INTERVAL = "attention.recurrent_layers", "full_attention_interval"
WINDOW, PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
MAX_LAYERS = 1 << 14
GEMMA_27B_LAYERS, GEMMA2_27B_LAYERS = 62, 46
Json = dict[str, Any]


def no_fields(fields: GgufFields, rope: Json) -> Json:
    """Returns the further fields of a family that has none."""
    return {}


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """A model family in GGUF.

    `family`: its entry in architectures/.
    `rotates_pairs`: whether the rows of queries and keys are stored for a RoPE that rotates adjacent rows, instead of
    rows that are half a head apart.
    `partial_rope`: whether RoPE may rotate a part of each head.
    `norms_plus_one`: whether norms are stored as 1 + weight.
    `features`: names in the metadata, after the architecture's, of features that change what a model computes and that
    `read` takes into account.
    `read`: returns further fields of config.json, of which `architectures` and `rope_parameters` replace the usual
    ones. Its arguments are the metadata and the parameters of RoPE. Raises UserError on unsupported features.
    `names`: names of the tensors.
    `known`: further names like those of `features`, which have no field of config.json.
    """

    family: str
    rotates_pairs: bool = False
    partial_rope: bool = False
    norms_plus_one: bool = False
    features: Mapping[str, str] = field(default_factory=dict[str, str])
    read: Callable[[GgufFields, Json], Json] = no_fields
    names: TensorNames = GGUF_NAMES
    known: tuple[str, ...] = ()


def _layer_types(fields: GgufFields, period: int) -> list[str]:
    """Returns the kinds of the layers. If the file has no pattern, every `period`-th has full attention; without a
    window all have."""
    count = fields.number("block_count")
    count = int(count) if 0 < count <= MAX_LAYERS else 0  # other numbers are refused with config.json
    if fields.is_off(WINDOW):
        return [FULL] * count
    pattern = fields.values.get(PATTERN, period)
    if isinstance(pattern, np.ndarray):
        return [SLIDING if each else FULL for each in pattern[: MAX_LAYERS + 1].tolist()]
    if type(pattern) is not int:
        raise fields.unsupported(PATTERN)
    return [SLIDING if pattern == 0 or (index + 1) % pattern else FULL for index in range(count)]


def _gemma3(fields: GgufFields, rope: Json) -> Json:
    """Sliding layers have no scaling, and a base of their own. The scale of queries is not in the metadata: only the
    model with 27 billion parameters, known by its layers, has another one than the head dimension implies."""
    largest = fields.number("block_count") == GEMMA_27B_LAYERS
    return {
        "hidden_act": GELU,
        "layer_types": _layer_types(fields, 6),
        "query_pre_attn_scalar": fields.average_head_dim() if largest else fields.head_dim(),
        "rope_parameters": {FULL: rope, SLIDING: {"rope_theta": _local_theta(fields, DEFAULT_THETA)}},
    }


def _local_theta(fields: GgufFields, default: Any) -> Any:
    theta = fields.scalar("rope.freq_base_swa")
    return default if theta is None else theta


def _smollm3(fields: GgufFields, rope: Json) -> Json:
    return {"no_rope_layer_interval": 4}  # llama.cpp knows no other models


def _granite(fields: GgufFields, rope: Json) -> Json:
    if fields.values.get("rope.scaling.finetuned") is False:  # no layer has RoPE
        raise fields.unsupported("rope.scaling.finetuned")
    usual = fields.is_off("attention.scale") and fields.head_dim() > 0
    return {"attention_multiplier": fields.head_dim() ** -0.5} if usual else {}


def _olmo(fields: GgufFields, rope: Json) -> Json:
    """OLMo 3 is an OLMo 2 with windows. Its sliding layers have no scaling."""
    if fields.is_off(WINDOW):
        return {}
    local = {"rope_theta": _local_theta(fields, rope["rope_theta"])}
    return {
        "architectures": ["Olmo3ForCausalLM"],
        "layer_types": _layer_types(fields, 4),
        "rope_parameters": {FULL: rope, SLIDING: local},
    }


def _mistral3(fields: GgufFields, rope: Json) -> Json:
    """Queries are scaled by their position in units of the trained length, which only YaRN has."""
    if fields.is_off("attention.temperature_scale"):
        return {}
    if rope.get("rope_type") != "yarn":
        raise UserError(f"{fields.architecture}.attention.temperature_scale without YaRN is not supported")
    return {"rope_parameters": {**rope, "llama_4_scaling_beta": fields.scalar("attention.temperature_scale")}}


def _qwen3moe(fields: GgufFields, rope: Json) -> Json:
    """Every layer is a mixture; the probabilities of a token's experts are divided by their sum."""
    inner = fields.scalar("expert_feed_forward_length")
    return {
        "num_experts_per_tok": _experts_per_token(fields, SOFTMAX),
        "moe_intermediate_size": inner,
        "intermediate_size": inner,  # of a dense MLP, which no layer has
        "norm_topk_prob": True,
    }


def _experts_per_token(fields: GgufFields, gating: int) -> Any:
    """Returns the number of experts that a token uses. `gating`: the only kind of probabilities that is supported."""
    if fields.is_off("expert_count"):
        raise fields.unsupported("expert_count")
    if fields.number("expert_gating_func") not in (0, gating):
        raise fields.unsupported("expert_gating_func")
    return fields.scalar("expert_used_count")


def _shared_expert(fields: GgufFields, rope: Json) -> Json:
    """As in Qwen3-MoE, with a shared expert."""
    own, dense = (fields.scalar(f"{name}feed_forward_length") for name in ("expert_shared_", ""))
    return {**_qwen3moe(fields, rope), "shared_expert_intermediate_size": dense if own is None else own}


def _qwen2moe(fields: GgufFields, rope: Json) -> Json:
    """The probabilities of a token's experts are those among all experts."""
    return {**_shared_expert(fields, rope), "norm_topk_prob": False}


def _gpt_oss(fields: GgufFields, rope: Json) -> Json:
    """All layers have the same RoPE. Whether YaRN rounds the bounds of its ramp is not in the metadata; the released
    models do not."""
    if _local_theta(fields, rope["rope_theta"]) != rope["rope_theta"]:
        raise fields.unsupported("rope.freq_base_swa")
    return {
        "num_experts_per_tok": _experts_per_token(fields, SOFTMAX_OF_CHOSEN),
        "intermediate_size": fields.scalar("expert_feed_forward_length"),
        "layer_types": _layer_types(fields, 2),
        "rope_parameters": {**rope, "truncate": False},
    }


def _glm4moe(fields: GgufFields, rope: Json) -> Json:
    """The norms of query and key heads, which the larger models have, are known by their tensors."""
    normed = fields.values.get("expert_weights_norm", False)
    if not isinstance(normed, bool):
        raise fields.unsupported("expert_weights_norm")
    return {
        "num_hidden_layers": _layers_without_mtp(fields),
        "num_experts_per_tok": _experts_per_token(fields, SIGMOID),
        "moe_intermediate_size": fields.scalar("expert_feed_forward_length"),
        "n_shared_experts": fields.scalar("expert_shared_count"),
        "first_k_dense_replace": fields.scalar("leading_dense_block_count") or 0,
        "norm_topk_prob": normed,
    }


def _layers_without_mtp(fields: GgufFields) -> int:
    """Returns the number of layers but those of multi-token prediction, which `block_count` includes."""
    blocks = fields.number("block_count")
    count = blocks - fields.number(MTP_LAYERS)
    if not 0 < count <= blocks <= MAX_LAYERS or count % 1:
        raise fields.unsupported("block_count")
    return int(count)


def _qwen35(fields: GgufFields, rope: Json) -> Json:
    """RoPE has one position per token: in a text those of all sections are equal."""
    sections = fields.values.get(SECTIONS)
    pairs = (fields.number("rope.dimension_count") or fields.head_dim()) // 2
    if sections is not None and not _sections_cover(sections, pairs):
        raise fields.unsupported(SECTIONS)
    return _delta(fields, rope)


def _qwen_vl(fields: GgufFields, rope: Json) -> Json:
    """RoPE as in `_qwen35`. llama.cpp does not rotate two of the 64 pairs of a Qwen3-VL in a text; transformers does,
    and in the training all were rotated."""
    sections = fields.values.get(SECTIONS)
    if not isinstance(sections, np.ndarray) or len(sections) not in (3, 4) or sections[3:].any():
        raise fields.unsupported(SECTIONS)
    if 2 * sections[:3].sum() != fields.head_dim():
        raise fields.unsupported(SECTIONS)
    return {}


def _sections_cover(sections: Any, pairs: float) -> bool:
    """Returns whether the sections for time, height and width, which take turns, have all `pairs` of elements that are
    rotated. llama.cpp does not rotate the others in a text."""
    if not isinstance(sections, np.ndarray) or sections.dtype.kind not in "iu" or len(sections) not in (3, 4):
        return False
    return pairs <= sum(sections.tolist()) and all(
        pairs <= 3 * size + turn for turn, size in enumerate(sections[:3].tolist())
    )


def _delta(fields: GgufFields, rope: Json) -> Json:
    """Models with delta layers. The layers of multi-token prediction are not part of `num_hidden_layers`."""
    heads = fields.number("ssm.time_step_rank")
    size = fields.number("ssm.inner_size")
    if not heads > 0 or size % heads:
        raise fields.unsupported("ssm.inner_size")
    count = _layers_without_mtp(fields)
    found: Json = {
        "num_hidden_layers": count,
        "linear_conv_kernel_dim": fields.scalar("ssm.conv_kernel"),
        "linear_key_head_dim": fields.scalar("ssm.state_size"),
        "linear_num_key_heads": fields.scalar("ssm.group_count"),
        "linear_num_value_heads": fields.scalar("ssm.time_step_rank"),
        "linear_value_head_dim": int(size // heads),
        "full_attention_interval": fields.scalar(INTERVAL) if INTERVAL in fields.values else 4,
    }
    recurrent = fields.values.get(RECURRENT)
    if recurrent is None:
        return found
    if not isinstance(recurrent, np.ndarray):
        raise fields.unsupported(RECURRENT)
    return {**found, "layer_types": [LINEAR if each else FULL for each in recurrent[:count].tolist()]}


def _with_mixture(read: Callable[[GgufFields, Json], Json]) -> Callable[[GgufFields, Json], Json]:
    """Returns the reader of a family with delta layers and mixtures that have a shared expert."""
    return lambda fields, rope: {**read(fields, rope), **_shared_expert(fields, rope)}


def _llama(fields: GgufFields, rope: Json) -> Json:
    """A Llama with experts is a Mixtral."""
    if fields.is_off("expert_count"):
        return {}
    used = _experts_per_token(fields, SOFTMAX)
    return {"architectures": ["MixtralForCausalLM"], "num_experts_per_tok": used}


def _gemma2(fields: GgufFields, rope: Json) -> Json:
    """As Gemma 3, but each second layer has a window, and the same RoPE."""
    shared = _gemma3(fields, rope)
    largest = fields.number("block_count") == GEMMA2_27B_LAYERS
    scale = fields.average_head_dim() if largest else fields.head_dim()
    return {**shared, "layer_types": _layer_types(fields, 2), "query_pre_attn_scalar": scale, "rope_parameters": rope}


def _olmoe(fields: GgufFields, rope: Json) -> Json:
    return {"num_experts_per_tok": _experts_per_token(fields, SOFTMAX)}


EXPERTS = {"expert_count": "num_experts"}
GGUF_ARCHITECTURES = {
    "llama": GgufArchitecture(
        "LlamaForCausalLM", rotates_pairs=True, read=_llama, features={"expert_count": "num_local_experts"},
        names=_with_experts(GGUF_NAMES),
    ),
    "qwen2": GgufArchitecture("Qwen2ForCausalLM"),
    "qwen3": GgufArchitecture("Qwen3ForCausalLM"),
    "qwen2vl": GgufArchitecture("Qwen2VLTextModel", read=_qwen_vl, known=(SECTIONS,)),
    "qwen3vl": GgufArchitecture("Qwen3VLTextModel", read=_qwen_vl, known=(SECTIONS,)),
    "hunyuan-dense": GgufArchitecture("HunYuanDenseV1ForCausalLM"),
    "olmoe": GgufArchitecture("OlmoeForCausalLM", features=EXPERTS, read=_olmoe, names=_with_experts(GGUF_NAMES)),
    "seed_oss": GgufArchitecture("SeedOssForCausalLM", names=replace(GGUF_NAMES, mlp_norm="post_attention_norm")),
    "arcee": GgufArchitecture(
        "ArceeForCausalLM", rotates_pairs=True, read=lambda fields, rope: {"hidden_act": "relu2"},
        names=replace(GGUF_NAMES, gate="ffn_up"),
    ),
    "ernie4_5": GgufArchitecture("Ernie4_5ForCausalLM"),
    "gemma2": GgufArchitecture(
        "Gemma2ForCausalLM", norms_plus_one=True, read=_gemma2, features={
            WINDOW: "sliding_window", "final_logit_softcapping": "final_logit_softcapping",
            "attn_logit_softcapping": "attn_logit_softcapping",
        },
    ),
    "qwen3moe": GgufArchitecture(
        "Qwen3MoeForCausalLM", features=EXPERTS, read=_qwen3moe, names=_with_experts(GGUF_NAMES)
    ),
    "qwen2moe": GgufArchitecture(
        "Qwen2MoeForCausalLM", features=EXPERTS, read=_qwen2moe, names=_with_experts(GGUF_NAMES)
    ),
    "gpt-oss": GgufArchitecture(
        "GptOssForCausalLM", read=_gpt_oss,
        features={"expert_count": "num_local_experts", WINDOW: "sliding_window"},
        names=replace(
            _with_experts(GGUF_NAMES), mlp_norm="post_attention_norm", sinks="attn_sinks.weight"
        ),
    ),
    "qwen35": GgufArchitecture(
        "Qwen3_5ForCausalLM", partial_rope=True, norms_plus_one=True, read=_qwen35, names=DELTA,
        known=(MTP_LAYERS, SECTIONS),
    ),
    "qwen35moe": GgufArchitecture(
        "Qwen3_5MoeForCausalLM", partial_rope=True, norms_plus_one=True, features=EXPERTS, read=_with_mixture(_qwen35),
        names=_with_experts(DELTA), known=(MTP_LAYERS, SECTIONS),
    ),
    "qwen3next": GgufArchitecture(
        "Qwen3NextForCausalLM", partial_rope=True, norms_plus_one=True, features=EXPERTS, read=_with_mixture(_delta),
        names=replace(_with_experts(DELTA), rates="ssm_ba", tiled_value_heads=False), known=(MTP_LAYERS,),
    ),
    "gemma3": GgufArchitecture(
        "Gemma3ForCausalLM", norms_plus_one=True, read=_gemma3,
        features={WINDOW: "sliding_window", "final_logit_softcapping": "final_logit_softcapping"},
    ),
    "smollm3": GgufArchitecture("SmolLM3ForCausalLM", rotates_pairs=True, read=_smollm3),
    "phi3": GgufArchitecture(
        "Phi3ForCausalLM", partial_rope=True, features={WINDOW: "sliding_window"},
        names=replace(JOINED_MLP, qkv="attn_qkv"),
    ),
    "granite": GgufArchitecture(
        "GraniteForCausalLM", rotates_pairs=True, read=_granite,
        features={
            "embedding_scale": "embedding_multiplier", "residual_scale": "residual_multiplier",
            "attention.scale": "attention_multiplier", "logit_scale": "logits_scaling",
        },
    ),
    "olmo2": GgufArchitecture("Olmo2ForCausalLM", read=_olmo, features={WINDOW: "sliding_window"}),
    "glm4": GgufArchitecture("Glm4ForCausalLM", partial_rope=True, names=JOINED_MLP),
    "glm4moe": GgufArchitecture(
        "Glm4MoeForCausalLM", partial_rope=True, read=_glm4moe, known=(MTP_LAYERS,),
        features={
            "expert_count": "n_routed_experts", "expert_weights_scale": "routed_scaling_factor",
            "expert_group_count": "n_group", "expert_group_used_count": "topk_group",
        },
        names=replace(_with_experts(GGUF_NAMES), mlp_norm="post_attention_norm"),
    ),
    "mistral3": GgufArchitecture(
        "Ministral3ForCausalLM", rotates_pairs=True, read=_mistral3,
        features={"attention.temperature_scale": "llama_4_scaling_beta"},
    ),
}  # fmt: skip


def gguf_architecture(file: GgufFile) -> GgufArchitecture:
    """Returns the family of a GGUF file. Raises UserError if it is not supported."""
    return architecture_named(file.metadata.get("general.architecture"))


def architecture_named(name: object) -> GgufArchitecture:
    """Returns the family of a name in the metadata. Raises UserError if it is not supported."""
    if name == "clip":
        raise UserError("the vision part (mmproj) of a multimodal model; use the file of its text model")
    found = GGUF_ARCHITECTURES.get(name) if isinstance(name, str) else None
    if found is None:
        known = relatives(name if isinstance(name, str) else "", GGUF_ARCHITECTURES)
        raise UserError(f"GGUF architecture {truncated_repr(name)} is not supported; {known}")
    return found
