"""Request fields that several endpoints share.

Unknown fields are ignored. Every number has a range and every list and text a maximum length. Fields that OpenAI or
vLLM define but this server does not support are accepted only with values that change nothing (`reject_unsupported`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from swiftspec.params import MAX_TOKEN_COUNT
from swiftspec.serve.http.errors import ApiError, unsupported


def _integral(value: object) -> object:
    """Converts 4.0 to 4: JSON does not distinguish integers from floats."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


INTEGRAL = BeforeValidator(_integral)
Token = Annotated[int, Field(ge=0, le=MAX_TOKEN_COUNT)]
Count = Annotated[int, Field(ge=0, le=MAX_TOKEN_COUNT), INTEGRAL]
Positive = Annotated[int, Field(ge=1, le=MAX_TOKEN_COUNT), INTEGRAL]
Stop = Annotated[str, Field(min_length=1, max_length=256)]
Stops = Annotated[list[Stop], Field(max_length=16)]
Text = Annotated[str, Field(max_length=8 << 20)]
ShortText = Annotated[str, Field(max_length=256)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[dict[Annotated[str, Field(pattern=r"^[0-9]{1,10}$")], Annotated[float, Field(ge=-100, le=100)]], Field(
    max_length=1024
)]  # fmt: skip
JsonObject = dict[str, Any]
Choices = Annotated[list[Annotated[str, Field(min_length=1, max_length=4096)]], Field(min_length=1, max_length=1024)]
Variables = Annotated[dict[str, Any], Field(max_length=32)]


class Body(BaseModel):
    """Base of request models. Strict: numbers in strings, NaN and infinities are rejected."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=(), allow_inf_nan=False, strict=True)


class Smc(Body):
    """Parameters of the particle population in mode smc. Each must have the value that the server was started with."""

    particles: Annotated[int, Field(ge=1, le=1024), INTEGRAL] | None = None
    smc_draft_tokens: Annotated[int, Field(ge=1, le=64), INTEGRAL] | None = None
    ess_threshold: Annotated[float, Field(ge=0, le=1)] | None = None
    power: Annotated[float, Field(gt=0, le=100)] | None = None
    smc_exact: Annotated[int, Field(ge=0, le=64), INTEGRAL] | None = None


class SamplingFields(Body):
    """Sampling parameters with vLLM's names. Missing values default to the server's flags, then to the model's
    generation config, then to vLLM's defaults."""

    temperature: Annotated[float, Field(ge=0, le=100)] | None = Field(
        None, description="0 is greedy; values between 0 and 0.001 become 0.001."
    )
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOKEN_COUNT), INTEGRAL] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Bias | None = Field(None, description="Added to the logits, by token id.")
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1), INTEGRAL] | None = Field(
        None, description="Seed of the noise; random by default. A negative seed is reduced modulo 2^64."
    )
    guidance_scale: Annotated[float, Field(ge=0, le=100)] | None = None
    negative_prompt: Text | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[Token], Field(max_length=256)] | None = None
    verify_batch: Positive | None = Field(
        None, description="Nodes verified per round, up to the server's value; 1: no draft. Does not change the text."
    )
    draft_steps: Positive | None = Field(
        None, description="Expansions per round, up to the server's limit. Does not change the text."
    )
    smc: Smc | None = Field(None, description="Only with --mode smc; the values must be those of the server.")
    replace_key: Annotated[str, Field(min_length=1, max_length=128)] | None = Field(
        None, description="A request replaces unfinished requests with the same key."
    )
    best_of: Count | None = Field(
        None, description="With smc: number of texts that are sampled, of which n are returned."
    )
    # Fields of vLLM that this server does not support: see UNSUPPORTED.
    min_tokens: Count | None = None
    use_beam_search: bool | None = None
    bad_words: Annotated[list[ShortText], Field(max_length=1024)] | None = None
    allowed_token_ids: Annotated[list[Token], Field(max_length=1 << 20)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=MAX_TOKEN_COUNT), INTEGRAL] | None = None
    prompt_logprobs: Annotated[int, Field(ge=-1, le=MAX_TOKEN_COUNT), INTEGRAL] | None = None
    logits_processors: list[Any] | None = Field(None, max_length=64)


class StructuredOutputs(Body):
    """vLLM's `structured_outputs`: exactly one constraint, and for JSON the options below it."""

    json_: JsonObject | Text | None = Field(None, alias="json")
    regex: Annotated[str, Field(max_length=1 << 16)] | None = None
    choice: Choices | None = None
    grammar: Annotated[str, Field(max_length=1 << 18)] | None = None
    json_object: bool | None = None
    structural_tag: Any = Field(None, description="Not supported.")
    disable_any_whitespace: bool | None = Field(None, description="JSON without white space between its tokens.")
    whitespace_pattern: Annotated[str, Field(max_length=1024)] | None = Field(
        None, description="Regular expression of the white space between two tokens of JSON."
    )
    disable_additional_properties: bool | None = Field(
        None, description="Objects in JSON have no properties beyond those of their schema."
    )


class JsonSchema(Body):
    name: ShortText | None = None
    description: Text | None = None
    schema_: JsonObject | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """OpenAI's `response_format`: text, any JSON object, or JSON that matches a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ConstraintFields(Body):
    """Output constraints; at most one may be set."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonObject | Text | None = None
    guided_regex: Annotated[str, Field(max_length=1 << 16)] | None = None
    guided_choice: Choices | None = None
    guided_grammar: Annotated[str, Field(max_length=1 << 18)] | None = None


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(
        None, description="With include_usage: the usage so far in every chunk, as in vLLM."
    )


@dataclass(frozen=True, slots=True)
class StreamUsage:
    """Usage in a stream. `at_end`: in the last chunk; `in_chunks`: in all chunks, the usage so far."""

    at_end: bool
    in_chunks: bool


def stream_usage(stream: bool | None, options: StreamOptions | None, always: bool) -> StreamUsage:
    """Returns the usage that a stream contains. `always`: also if the request does not ask for it. Raises ApiError if
    there are options without a stream."""
    if options is not None and not stream:
        raise ApiError(400, "stream_options: only allowed with stream: true", "stream_options")
    at_end = always or bool(options and options.include_usage)
    return StreamUsage(at_end, at_end and bool(options and options.continuous_usage_stats))


# Unsupported fields, each with the values that are accepted because they change nothing.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "min_tokens": (0,), "use_beam_search": (False,), "bad_words": ([],),
    "allowed_token_ids": (), "include_stop_str_in_output": (False,), "skip_special_tokens": (True,),
    "truncate_prompt_tokens": (), "prompt_logprobs": (), "logits_processors": ([],),
}  # fmt: skip
SINGLE_CHOICE: Mapping[str, tuple[Any, ...]] = {"n": (1,), "best_of": (0, 1)}
CHAT_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    **UNSUPPORTED, "audio": (), "modalities": (["text"], []), "functions": ([],), "function_call": ("none",),
    "chat_template": (), "documents": ([],),
    "web_search_options": (),
}  # fmt: skip


def reject_unsupported(body: Body, unsupported_fields: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises ApiError if a field of `body` has a value that `unsupported_fields` does not list as accepted."""
    for name, allowed in unsupported_fields.items():
        value = getattr(body, name, None)
        if value is not None and value not in allowed:
            only = f" (except {allowed[0]!r})" if allowed and allowed[0] != [] else ""
            raise unsupported(name, f"not supported{only}; omit it")
