"""What can be set, how it is checked, and what it makes: a plan and sampling parameters.

Importing this must stay cheap (no torch, no transformers): `--help` goes through here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from swiftspec.errors import UserError
from swiftspec.params import MAX_TREE, EngineConfig, PopulationConfig, SamplingParams, split_ranks

ENV_PREFIX = "SWIFTSPEC_"
MODELS, TREE, SAMPLING, STOPPING = "models", "speculation", "sampling", "length and stopping"
PARTICLES = "mode smc: a population of particles, approximate"
TREE_ONLY = ("verify_batch", "draft_leaves", "draft_steps", "verify", "proposal", "calibration", "catch_up",
             "self_switch", "adapt")  # fmt: skip
NUMBERS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
           "guidance_scale", "seed", "max_tokens")  # fmt: skip
SMC_ONLY = ("particles", "smc_draft_tokens", "ess_threshold", "power", "smc_exact")


class UsageError(UserError):
    """A flag, variable or file of settings that makes no sense: exit code 2."""


@dataclass(frozen=True, slots=True)
class Flag:
    """How a setting is shown in --help: its group, the word for its value, its default in words if None says little."""

    group: str
    metavar: str | None = None
    default: str | None = None


FROM_MODEL = "the model's own, else {}"  # its generation_config.json


class Settings(BaseSettings):
    """Every setting. None for a sampling value means: the model's own, else vLLM's default."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_ignore_empty=True, extra="forbid", validate_assignment=True, protected_namespaces=()
    )

    model: Annotated[str | None, Flag(MODELS, "PATH|HUB_ID", "the embedded code model")] = Field(
        None, description="The target model: a Hugging Face directory or hub id, safetensors."
    )
    draft_model: Annotated[str | None, Flag(MODELS, "PATH|HUB_ID", "the embedded one with the embedded target")] = (
        Field(None, description="The draft model: same tokenizer, much smaller.")
    )
    revision: Annotated[str | None, Flag(MODELS, "NAME", "main")] = Field(
        None, description="Branch, tag or commit of --model when that is a hub id."
    )
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16", "float64"],
        Flag(MODELS, default="auto: bfloat16 for 16-bit weights where the CPU has it, else the checkpoint's"),
    ] = Field("auto", description="Type of activations and dense weights.")
    device: Annotated[
        Literal["auto", "cpu", "cuda"], Flag(MODELS, default="auto: cuda where PyTorch finds an NVIDIA GPU, else cpu")
    ] = Field("auto", description="Where the models run.")
    share_gpus: Annotated[bool, Flag(MODELS)] = Field(False, description="Let several ranks run on one GPU.")
    max_model_len: Annotated[int | None, Flag(MODELS, "N", "what the target was made for")] = Field(
        None, description="Longest context in tokens, prompt and answer together."
    )
    threads: Annotated[int | None, Flag(MODELS, "N", "the rank's share of the physical cores, at most 8")] = Field(
        None, ge=1, le=1024, description="CPU threads inside one operation."
    )
    ops: Annotated[
        Literal["auto", "reference", "unfused", "cuda"], Flag(MODELS, default="auto: the fastest that fit")
    ] = Field("auto", description="Operators: plain torch; its libraries, int4 as int4; or the CUDA kernels.")
    emulate: Annotated[str | None, Flag(MODELS, "SPEC", "off")] = Field(
        None,
        description="Take at least these step times, as a large pair would: target=10.48ms,draft=3.25ms; names of the"
        " paper's Table 1 (target=llama3-70b,draft=llama3-3b); or a .json file by TP size and rows.",
    )
    trace: Annotated[str | None, Flag(MODELS, "FILE.jsonl", "off")] = Field(
        None, description="Record every round of both lanes here; read it with `python -m swiftspec.profile trace`."
    )
    raw: Annotated[bool, Flag(MODELS)] = Field(False, description="Continue the prompt as it stands: no chat template.")
    mode: Annotated[
        Literal["ar", "serial", "async", "smc"] | None,
        Flag(TREE, default="with a draft model async on several ranks, serial on one; else ar"),
    ] = Field(
        None,
        description="async: the draft group grows the tree while the target group verifies. serial: in turns, on one"
        " group. ar: one token per forward, no draft. smc: weighted particles in place of verification, approximate.",
    )
    plan: Annotated[str, Flag(TREE, "auto|none|FILE.json")] = Field(
        "auto",
        description="Fill what is open of mode, split and tree from a profile of this machine and pair: the one in"
        " ./profiles where there is one (auto), or this one.",
    )
    target_tp: Annotated[int | None, Flag(TREE, "X", "the ranks that the draft leaves")] = Field(
        None, ge=1, description="Ranks that share the target model."
    )
    draft_tp: Annotated[int | None, Flag(TREE, "Y", "a quarter of the ranks, at least 1")] = Field(
        None, ge=1, description="Ranks that share the draft."
    )
    verify_batch: Annotated[int, Flag(TREE, "BS")] = Field(
        8, description="Tree nodes verified per round, the root counted."
    )
    draft_leaves: Annotated[int, Flag(TREE, "W")] = Field(8, description="Leaves expanded per draft forward.")
    draft_steps: Annotated[int | None, Flag(TREE, "D", "async: as many as fit into a target forward; serial: 3")] = (
        Field(None, description="Draft forwards per round.")
    )
    verify: Annotated[Literal["match", "reject"], Flag(TREE)] = Field(
        "match",
        description="match: the target draws, and drafts that it drew are kept; the same text as without a draft."
        " reject: rejection sampling of drawn drafts; a text of the same distribution.",
    )
    proposal: Annotated[
        Literal["top", "coupled", "sample"] | None, Flag(TREE, default="coupled; sample with --verify reject")
    ] = Field(
        None,
        description="How the draft chooses. top: the likeliest. coupled: those under the target's own noise."
        " sample: drawn from its distribution.",
    )
    calibration: Annotated[float | None, Flag(TREE, "C", "what fits the embedded pair")] = Field(
        None, description="How much the draft's confidence counts: below 1 its first choices count more."
    )
    catch_up: Annotated[bool, Flag(TREE)] = Field(
        True, description="async: expand on after a result while that is worth its time; off: the paper's rule."
    )
    self_switch: Annotated[bool, Flag(TREE)] = Field(
        True,
        description="Decode plainly for a while where that is measured to be faster than the draft's help. With"
        " --verify reject only if given: its text follows the rounds.",
    )
    adapt: Annotated[bool, Flag(TREE)] = Field(
        True, description="While serving, let d and bs follow what is measured, where not given here."
    )
    particles: Annotated[int, Flag(PARTICLES, "N")] = Field(4, description="Texts that grow side by side.")
    smc_draft_tokens: Annotated[int, Flag(PARTICLES, "K")] = Field(
        4, description="Draft tokens per particle and round; the target adds one."
    )
    ess_threshold: Annotated[float, Flag(PARTICLES, "X")] = Field(
        0.5, description="Resample when the effective sample size falls below this share of N."
    )
    power: Annotated[float, Flag(PARTICLES, "A")] = Field(
        1.0, description="The text follows the target's probability of whole texts to this power."
    )
    smc_exact: Annotated[int, Flag(PARTICLES, "K")] = Field(
        0, description="Draft tokens of a round that are verified exactly, by rejection; the rest is weighted."
    )
    seed: Annotated[int, Flag(SAMPLING, "N")] = Field(
        0, description="Of the noise: same seed and prompt, same text, in every exact mode that verifies by match."
    )
    temperature: Annotated[float | None, Flag(SAMPLING, "T", FROM_MODEL.format(1))] = Field(
        None, description="0 is greedy."
    )
    top_p: Annotated[float | None, Flag(SAMPLING, "P", FROM_MODEL.format(1))] = Field(
        None, description="Keep the likeliest tokens that reach this mass."
    )
    top_k: Annotated[int | None, Flag(SAMPLING, "K", FROM_MODEL.format("off"))] = Field(
        None, description="Keep the K likeliest tokens."
    )
    min_p: Annotated[float | None, Flag(SAMPLING, "P", FROM_MODEL.format(0))] = Field(
        None, description="Drop tokens less likely than P times the likeliest."
    )
    repetition_penalty: Annotated[float | None, Flag(SAMPLING, "X", FROM_MODEL.format(1))] = Field(
        None, description="Above 1: tokens of prompt and answer become less likely."
    )
    presence_penalty: Annotated[float, Flag(SAMPLING, "X")] = Field(
        0.0, description="Off the logit of a token that the answer holds."
    )
    frequency_penalty: Annotated[float, Flag(SAMPLING, "X")] = Field(
        0.0, description="Off the logit for each time that the answer holds a token."
    )
    logit_bias: Annotated[dict[int, float], NoDecode, Flag(SAMPLING, "JSON", "{}")] = Field(
        default_factory=dict, description='Added to the logits, by token id: {"42": -5}.'
    )
    guidance_scale: Annotated[float, Flag(SAMPLING, "S")] = Field(
        1.0, description="Above 1: away from what --negative-prompt leads to (classifier-free guidance)."
    )
    negative_prompt: Annotated[str | None, Flag(SAMPLING, "TEXT", "an empty one")] = Field(
        None, description="What to guide away from; it stands in for the whole prompt."
    )
    max_tokens: Annotated[int | None, Flag(STOPPING, "N", FROM_MODEL.format("to the end of the context"))] = Field(
        None, description="Longest answer in tokens."
    )
    stop: Annotated[list[str], NoDecode, Flag(STOPPING, "TEXT", "none")] = Field(
        default_factory=list, description="End before this text. May be given several times."
    )
    stop_token_ids: Annotated[list[int], NoDecode, Flag(STOPPING, "ID[,ID]", "none")] = Field(
        default_factory=list, description="End after one of these tokens."
    )
    ignore_eos: Annotated[bool, Flag(STOPPING)] = Field(False, description="Go on after an end-of-text token.")

    @field_validator("stop", "stop_token_ids", "logit_bias", mode="before")
    @classmethod
    def _decode(cls, value: object, info: ValidationInfo) -> object:
        """Text from the command line or the environment: JSON, or for lists the bare value(s)."""
        if isinstance(value, list) and info.field_name == "stop_token_ids":
            return [part for item in value for part in (item.split(",") if isinstance(item, str) else [item])]
        if not isinstance(value, str):
            return [value] if isinstance(value, int) and info.field_name == "stop_token_ids" else value
        try:
            decoded = json.loads(value)
        except ValueError:
            decoded = None
        if info.field_name == "logit_bias":
            return value if decoded is None else decoded
        if isinstance(decoded, list):
            return decoded
        return [value] if info.field_name == "stop" else value.split(",")

    @field_validator(*NUMBERS, "logit_bias", "stop")
    @classmethod
    def _sampling_value(cls, value: Any, info: ValidationInfo) -> Any:
        if value is not None:
            one: dict[str, Any] = {str(info.field_name): tuple(value) if isinstance(value, list) else value}
            _as_value_error(lambda: SamplingParams(**one))
        return value

    @field_validator("verify_batch", "draft_leaves", "draft_steps", "calibration")
    @classmethod
    def _plan_value(cls, value: float | str | None, info: ValidationInfo) -> float | str | None:
        one: dict[str, Any] = {str(info.field_name): value}
        _as_value_error(lambda: EngineConfig(**one))
        return value

    @field_validator(*SMC_ONLY)
    @classmethod
    def _population_value(cls, value: float, info: ValidationInfo) -> float:
        one: dict[str, Any] = {str(info.field_name): value}
        if info.field_name == "smc_exact":  # its bound is K, which comes before it among the fields
            one["smc_draft_tokens"] = info.data.get("smc_draft_tokens", MAX_TREE)
        _as_value_error(lambda: PopulationConfig(**one))
        return value

    def make_plan(self, has_draft: bool, ranks: int = 1) -> EngineConfig:
        """The shape of tree or population, and what is left open of mode and split. Raises UserError where the mode
        needs a draft and has none, where the split does not add up, and where the mode has no use for a setting."""
        mode = self.mode or ("ar" if not has_draft else "async" if ranks > 1 else "serial")
        if mode != "ar" and not has_draft:
            raise UserError(f"--mode {mode} needs a draft model: name one with --draft-model, or take --mode ar")
        idle, what = (TREE_ONLY, "draft tree") if mode == "smc" else (SMC_ONLY, "population")
        for name in idle:
            if name in self.model_fields_set:
                raise UsageError(f"{flag_name(name)} shapes a {what}, which mode {mode} has not: leave it out")
        try:
            target_tp, draft_tp = split_ranks(mode, ranks, self.target_tp, self.draft_tp, gpu=self.device == "cuda")
            fixed = self.verify == "reject"  # its text follows the rounds, so these do not follow the clock unasked
            adapts = self.adapt and mode in ("serial", "async") and not fixed
            switches = self.self_switch and (not fixed or "self_switch" in self.model_fields_set)
            return EngineConfig(
                mode, self.verify_batch, self.draft_leaves, self.draft_steps, self.verify, self.proposal,
                self.calibration, catch_up=self.catch_up, self_switch=switches,
                adapt_steps=adapts and "draft_steps" not in self.model_fields_set, target_tp=target_tp,
                adapt_batch=adapts and "verify_batch" not in self.model_fields_set, draft_tp=draft_tp,
                population=PopulationConfig(**{name: getattr(self, name) for name in SMC_ONLY}),
            )  # fmt: skip
        except UserError as error:
            raise UsageError(str(error)) from None

    def note(self) -> str | None:
        """What of guidance is not as one might think."""
        if self.guidance_scale != 1 and self.negative_prompt is None:
            return "guidance without a negative prompt takes an empty one"
        if self.guidance_scale == 1 and self.negative_prompt is not None:
            return "a negative prompt does nothing at guidance scale 1"
        return None

    def sampling(self, model_defaults: Mapping[str, Any], negative: Sequence[int] = ()) -> SamplingParams:
        """The sampling parameters, holes filled from the model's defaults (which `generation_defaults` reads);
        `negative`: the tokens of the negative prompt."""
        values = {name: getattr(self, name) for name in NUMBERS if getattr(self, name) is not None}
        return SamplingParams(
            **{**model_defaults, **values},
            logit_bias=dict(self.logit_bias),
            stop=tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            negative_prompt_ids=tuple(negative),
        )


def _as_value_error(check: Callable[[], object]) -> None:
    """Ranges live in params.py; pydantic wants them refused with a ValueError."""
    try:
        check()
    except UserError as error:
        raise ValueError(str(error)) from None


def flag_name(name: str) -> str:
    """top_p -> --top-p."""
    return "--" + name.replace("_", "-")


def env_name(name: str) -> str:
    """top_p -> SWIFTSPEC_TOP_P."""
    return ENV_PREFIX + name.upper()


def explain(error: ValidationError, label: Callable[[str], str] = str) -> str:
    """The first complaint in one line: `--top-p must be a number, not 'much'`."""
    first = error.errors(include_url=False)[0]
    name = str(first["loc"][0]) if first["loc"] else "a value"
    kind, context = first["type"], first.get("ctx", {})
    if kind == "value_error":  # words of params.py, which begin with the field's name
        message = str(context["error"])
        return label(name) + message.removeprefix(name) if message.startswith(name) else f"{label(name)}: {message}"
    wanted = {
        "float": "be a number", "int": "be a whole number",
        "bool": "be true or false", "string": "be text", "dict": "be a JSON object from token id to number",
        "list": "be a list", "greater": f"be at least {context.get('ge')}", "less": f"be at most {context.get('le')}",
        "literal": f"be one of {context.get('expected', '')}".replace("'", "").replace(" or ", ", "),
    }.get(kind.partition("_")[0], f"be otherwise ({first['msg']})")  # fmt: skip
    return f"{label(name)} must {wanted}, not {first['input']!r}"
