"""Registry of model families, by the first entry of `architectures` in config.json. A new family needs a module here
and an entry in ARCHITECTURES."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from swiftspec.errors import UserError, truncated_repr
from swiftspec.file_io import Fields
from swiftspec.model.architectures import (
    arcee,
    cwm,
    draft_heads,
    ernie4_5,
    gemma2,
    gemma3,
    gemma4,
    glm4,
    glm4_moe,
    gpt_oss,
    hunyuan,
    mistral,
    mixtral,
    olmo,
    olmoe,
    phi3,
    qwen2_moe,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
    qwen_vl,
    seed_oss,
    smollm3,
)
from swiftspec.model.architectures.granite import granite_spec
from swiftspec.model.architectures.llama import llama_spec
from swiftspec.model.architectures.qwen2 import qwen2_spec
from swiftspec.model.architectures.qwen3 import qwen3_spec
from swiftspec.model.spec import ModelSpec
from swiftspec.model.tensor_names import HF_NAMES, TensorNames


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model family.

    `model_type`: field of config.json that names the family if `architectures` is missing.
    `read_spec`: builds the spec from config.json. Raises UserError on unsupported features.
    `names`: names of the checkpoint's tensors.
    `defaults`: values of the fields that config.json may omit.
    """

    model_type: str
    read_spec: Callable[[Fields], ModelSpec]
    names: TensorNames = HF_NAMES
    defaults: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def with_defaults(self, fields: Fields) -> Fields:
        """Returns the fields with the family's defaults for those that are missing; a field that is null is not."""
        return replace(fields, data={**self.defaults, **fields.data})

    def spec(self, fields: Fields) -> ModelSpec:
        """Returns the spec of a model. Raises UserError on unsupported features."""
        return self.read_spec(self.with_defaults(fields))


ARCHITECTURES = {
    "LlamaForCausalLM": Architecture("llama", llama_spec),
    "Qwen2ForCausalLM": Architecture("qwen2", qwen2_spec),
    "Qwen3ForCausalLM": Architecture("qwen3", qwen3_spec),
    "Qwen2MoeForCausalLM": Architecture("qwen2_moe", qwen2_moe.qwen2_moe_spec, defaults=qwen2_moe.DEFAULTS),
    "Qwen3MoeForCausalLM": Architecture("qwen3_moe", qwen3_moe.qwen3_moe_spec, defaults=qwen3_moe.DEFAULTS),
    "GptOssForCausalLM": Architecture("gpt_oss", gpt_oss.gpt_oss_spec, gpt_oss.NAMES, gpt_oss.DEFAULTS),
    "Qwen3NextForCausalLM": Architecture(
        "qwen3_next", qwen3_next.qwen3_next_spec, qwen3_next.NAMES, qwen3_next.DEFAULTS
    ),
    "Qwen3_5ForCausalLM": Architecture("qwen3_5_text", qwen3_5.qwen3_5_spec, qwen3_5.NAMES, qwen3_5.DEFAULTS),
    "Qwen3_5MoeForCausalLM": Architecture(
        "qwen3_5_moe_text", qwen3_5_moe.qwen3_5_moe_spec, qwen3_5.NAMES, qwen3_5_moe.DEFAULTS
    ),
    "MistralForCausalLM": Architecture("mistral", mistral.mistral_spec, defaults=mistral.MISTRAL_DEFAULTS),
    "Ministral3ForCausalLM": Architecture("ministral3", mistral.ministral3_spec, defaults=mistral.MINISTRAL3_DEFAULTS),
    "SmolLM3ForCausalLM": Architecture("smollm3", smollm3.smollm3_spec, defaults=smollm3.DEFAULTS),
    "GraniteForCausalLM": Architecture("granite", granite_spec),
    "Olmo2ForCausalLM": Architecture("olmo2", olmo.olmo2_spec, defaults=olmo.OLMO2_DEFAULTS),
    "Olmo3ForCausalLM": Architecture("olmo3", olmo.olmo3_spec, defaults=olmo.OLMO3_DEFAULTS),
    "Phi3ForCausalLM": Architecture("phi3", phi3.phi3_spec, phi3.NAMES, phi3.DEFAULTS),
    "GlmForCausalLM": Architecture("glm", glm4.glm_spec, glm4.GLM_NAMES, glm4.DEFAULTS),
    "Glm4ForCausalLM": Architecture("glm4", glm4.glm4_spec, glm4.GLM4_NAMES, glm4.DEFAULTS),
    "Glm4MoeForCausalLM": Architecture("glm4_moe", glm4_moe.glm4_moe_spec, glm4_moe.NAMES, glm4_moe.DEFAULTS),
    "HunYuanDenseV1ForCausalLM": Architecture(
        "hunyuan_v1_dense", hunyuan.hunyuan_spec, hunyuan.NAMES, hunyuan.DEFAULTS
    ),
    "MinistralForCausalLM": Architecture("ministral", mistral.ministral_spec, defaults=mistral.MISTRAL_DEFAULTS),
    "MixtralForCausalLM": Architecture("mixtral", mixtral.mixtral_spec, mixtral.NAMES, mixtral.DEFAULTS),
    "OlmoeForCausalLM": Architecture("olmoe", olmoe.olmoe_spec, defaults=olmoe.DEFAULTS),
    "SeedOssForCausalLM": Architecture("seed_oss", seed_oss.seed_oss_spec, defaults=seed_oss.DEFAULTS),
    "CwmForCausalLM": Architecture("cwm", cwm.cwm_spec, defaults=cwm.DEFAULTS),
    "ArceeForCausalLM": Architecture("arcee", arcee.arcee_spec, arcee.NAMES, arcee.DEFAULTS),
    "Ernie4_5ForCausalLM": Architecture("ernie4_5", ernie4_5.ernie4_5_spec, defaults=ernie4_5.DEFAULTS),
    "Qwen2VLTextModel": Architecture("qwen2_vl_text", qwen_vl.qwen2_vl_spec, defaults=qwen_vl.QWEN2_DEFAULTS),
    "Qwen2_5_VLTextModel": Architecture("qwen2_5_vl_text", qwen_vl.qwen2_vl_spec, defaults=qwen_vl.QWEN2_DEFAULTS),
    "Qwen3VLTextModel": Architecture("qwen3_vl_text", qwen_vl.qwen3_vl_spec, defaults=qwen_vl.QWEN3_DEFAULTS),
    "Gemma2ForCausalLM": Architecture("gemma2", gemma2.gemma2_spec, gemma3.NAMES, gemma2.DEFAULTS),
    "Gemma3ForCausalLM": Architecture("gemma3_text", gemma3.gemma3_spec, gemma3.NAMES, gemma3.DEFAULTS),
    "Gemma4ForCausalLM": Architecture("gemma4_text", gemma4.gemma4_spec, gemma3.NAMES, gemma4.DEFAULTS),
    "Gemma4UnifiedForCausalLM": Architecture(
        "gemma4_unified_text", gemma4.gemma4_spec, gemma3.NAMES, gemma4.UNIFIED_DEFAULTS
    ),
}
# draft heads, which are drafts only
DRAFT_HEADS = dict.fromkeys(
    ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel"),
    Architecture("eagle3", draft_heads.eagle3_spec, draft_heads.EAGLE3_NAMES),
) | {"DFlashDraftModel": Architecture("dflash", draft_heads.dflash_spec, draft_heads.DFLASH_NAMES)}


@dataclass(frozen=True, slots=True)
class MultimodalArchitecture:
    """A family with other modalities, of which only the text model is used.

    `model_type`: as of `Architecture`.
    `text_type`: `model_type` of the text model if `text_config` in config.json does not name it.
    """

    model_type: str
    text_type: str


MULTIMODAL_ARCHITECTURES = {
    "Mistral3ForConditionalGeneration": MultimodalArchitecture("mistral3", "mistral"),
    "Qwen3_5ForConditionalGeneration": MultimodalArchitecture("qwen3_5", "qwen3_5_text"),
    "Qwen3_5MoeForConditionalGeneration": MultimodalArchitecture("qwen3_5_moe", "qwen3_5_moe_text"),
    "Qwen2VLForConditionalGeneration": MultimodalArchitecture("qwen2_vl", "qwen2_vl_text"),
    "Qwen2_5_VLForConditionalGeneration": MultimodalArchitecture("qwen2_5_vl", "qwen2_5_vl_text"),
    "Qwen3VLForConditionalGeneration": MultimodalArchitecture("qwen3_vl", "qwen3_vl_text"),
    "Gemma3ForConditionalGeneration": MultimodalArchitecture("gemma3", "gemma3_text"),
    "Gemma4ForConditionalGeneration": MultimodalArchitecture("gemma4", "gemma4_text"),
    "Gemma4UnifiedForConditionalGeneration": MultimodalArchitecture("gemma4_unified", "gemma4_unified_text"),
}
# fields of a multimodal config.json that the text model uses if `text_config` does not have them
SHARED_FIELDS = ("dtype", "torch_dtype", "quantization_config", "eos_token_id", "tie_word_embeddings")


def architecture_of(fields: Fields) -> Architecture:
    """Returns the family of a config.json, for a multimodal one that of its text model. Raises UserError if it is not
    supported."""
    name = _name_of(fields)
    if name in MULTIMODAL_ARCHITECTURES:
        kind = fields.object("text_config").string("model_type", MULTIMODAL_ARCHITECTURES[name].text_type)
        architecture = next((each for each in ARCHITECTURES.values() if each.model_type == kind), None)
        if architecture is None:
            raise UserError(f"text model {truncated_repr(kind)} of {name} is not supported")
        return replace(architecture, names=architecture.names.of_text())
    if name in DRAFT_HEADS:
        return DRAFT_HEADS[name]
    if name not in ARCHITECTURES:
        known = relatives(name or "", (*ARCHITECTURES, *MULTIMODAL_ARCHITECTURES))
        raise UserError(f"architecture {truncated_repr(name)} is not supported; {known}")
    return ARCHITECTURES[name]


def relatives(name: str, names: Iterable[str]) -> str:
    """Returns the end of a refusal: which of the `names` of families begin with the same letters as `name`."""
    stem = re.match("[a-z]*", name.lower())
    letters = "" if stem is None else stem[0].partition("for")[0]
    found = dict.fromkeys(each.partition("For")[0] for each in names if letters and each.lower().startswith(letters))
    return f"of its relatives {', '.join(found)} are" if found else "docs/guides/families.md lists those that are"


def text_model_fields(fields: Fields) -> Fields:
    """Returns the fields that describe the text model: those of `text_config` in a multimodal config.json."""
    if _name_of(fields) not in MULTIMODAL_ARCHITECTURES:
        return fields
    text = fields.object("text_config") if fields.data.get("text_config") is not None else fields  # Qwen2-VL had none
    shared = {name: fields.data[name] for name in SHARED_FIELDS if fields.data.get(name) is not None}
    own = {name: value for name, value in text.data.items() if value is not None or name not in SHARED_FIELDS}
    return replace(text, data={**shared, **own})


def _name_of(fields: Fields) -> str | None:
    names, kind = fields.strings("architectures"), fields.string("model_type", "")
    by_type = {each.model_type: name for name, each in (ARCHITECTURES | MULTIMODAL_ARCHITECTURES).items()}
    return names[0] if names else by_type.get(kind, kind or None)
