"""Request fields that several endpoints share.

Unknown fields are ignored. Every number has a range and every list and text a maximum length. Fields that other servers
define but this server does not are accepted only with values that change nothing (known_fields.py).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, create_model
from pydantic_core import CoreSchema

from swiftspec.params import FILTERS, MAX_LOGPROBS, MAX_TOKEN_COUNT, PENALTIES, SamplingParams
from swiftspec.serve.errors import ApiError
from swiftspec.settings_schema import declared_settings

# Strict: the prompt ["1", "2"] is two texts, and [1, 2] is one list of token ids.
Token = Annotated[int, Field(strict=True, ge=0, le=MAX_TOKEN_COUNT)]
Count = Annotated[int, Field(ge=0, le=MAX_TOKEN_COUNT)]
Positive = Annotated[int, Field(ge=1, le=MAX_TOKEN_COUNT)]
Stop = Annotated[str, Field(min_length=1, max_length=256)]
Stops = Annotated[list[Stop], Field(max_length=16)]
Text = Annotated[str, Field(max_length=8 << 20)]
ShortText = Annotated[str, Field(max_length=256)]
Bias = Annotated[dict[ShortText, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=1024)]
Word = Annotated[str, Field(min_length=1, max_length=256)]
LogprobCount = Annotated[int, Field(ge=-1, le=MAX_LOGPROBS)]
JsonObject = dict[str, Any]
Choices = Annotated[list[Annotated[str, Field(min_length=1, max_length=4096)]], Field(min_length=1, max_length=1024)]
Variables = Annotated[dict[str, Any], Field(max_length=32)]


def _fail_fast(schema: Any) -> None:
    """Sets `fail_fast` in all schemas of collections inside a core schema of pydantic."""
    if isinstance(schema, dict):
        if schema.get("type") in ("list", "tuple", "set", "frozenset", "dict"):
            schema["fail_fast"] = True
        for part in schema.values():
            _fail_fast(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            _fail_fast(part)


class Body(BaseModel):
    """Base of request models. As in vLLM, numbers and booleans can be strings, such as "0.7", and integers can be
    floats, such as 4.0. NaN and infinities are rejected.

    The validation of each list and object ends at its first invalid item. pydantic would otherwise collect an error for
    each item, which takes seconds and a kilobyte per item, although only one error is returned.
    """

    model_config = ConfigDict(extra="ignore", protected_namespaces=(), allow_inf_nan=False)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _fail_fast(schema)
        return schema


class ExtensibleBody(Body):
    """A `Body` that keeps undeclared fields, so that `known_fields.reject_unsupported` can check them."""

    model_config = ConfigDict(extra="allow")


class Smc(Body):
    """Parameters of the particle population in mode smc. Each must have the value that the server was started with."""

    particles: Annotated[int, Field(ge=1, le=1024)] | None = None
    smc_draft_tokens: Annotated[int, Field(ge=1, le=64)] | None = None
    ess_threshold: Annotated[float, Field(ge=0, le=1)] | None = None
    power: Annotated[float, Field(gt=0, le=100)] | None = None
    smc_exact: Annotated[int, Field(ge=0, le=64)] | None = None


def _optional_fields(names: Collection[str]) -> dict[str, Any]:
    """Returns optional fields for `create_model` with type, range and help of the fields `names` of SamplingParams."""
    return {
        item.name: (
            cast(Any, item.type) | None,
            Field(
                None,
                ge=declaration.rule.ge,
                gt=declaration.rule.gt,
                le=declaration.rule.le,
                description=declaration.help,
            ),
        )
        for item, declaration in declared_settings(SamplingParams)
        if item.name in names
    }


LogitsFields = create_model("LogitsFields", __base__=ExtensibleBody, **_optional_fields(FILTERS + PENALTIES))


class SamplingFields(LogitsFields):
    """Sampling parameters with vLLM's names. Missing values default to the server's flags, then to the model's
    generation config, then to vLLM's defaults.

    The class is flat, since a request is one JSON object with all of them.
    """

    temperature: Annotated[float, Field(ge=0, le=100)] | None = Field(
        None, description="0 is greedy; values between 0 and 0.001 become 0.001."
    )
    logit_bias: Bias | None = Field(None, description="Added to the logits; the keys are token ids.")
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None = Field(
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
    suffix_memory: bool | None = Field(
        None, description="false: suffix lookup neither reads nor keeps the texts of other requests."
    )
    smc: Smc | None = Field(None, description="Only with --mode smc; the values must be those of the server.")
    replace_key: Annotated[str, Field(min_length=1, max_length=128)] | None = Field(
        None, description="A request replaces unfinished requests with the same key."
    )
    best_of: Count | None = Field(
        None, description="Number of choices that are sampled, of which the n best are returned."
    )
    min_tokens: Count | None = Field(
        None, description="End-of-text tokens, stop_token_ids and stop strings do not end a shorter output."
    )
    bad_words: Annotated[list[Word], Field(max_length=1024)] | None = Field(
        None, description="Words that the output does not contain, with and without a space before them."
    )
    allowed_token_ids: Annotated[list[Token], Field(min_length=1, max_length=1 << 20)] | None = Field(
        None, description="The only tokens that are sampled."
    )
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=MAX_TOKEN_COUNT)] | None = Field(
        None, description="Maximum number of prompt tokens; -1: as many as the context holds with room for max_tokens."
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="The end of the prompt at which truncate_prompt_tokens removes tokens; left by default."
    )


class ScoringFields(ExtensibleBody):
    """vLLM's fields for log-probabilities and token ids in the response."""

    prompt_logprobs: LogprobCount | None = Field(None, description="-1: of all tokens. Not with stream.")
    logprob_token_ids: Annotated[list[Token], Field(min_length=1, max_length=1024)] | None = Field(
        None,
        description="Tokens that are listed with the sampled one, instead of the most likely ones; needs logprobs.",
    )
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = Field(None, description='In logprobs, "token_id:29" instead of text.')


class StructuredOutputs(ExtensibleBody):
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
    schema_: JsonObject | None = Field(None, alias="schema", description="Schema of a json_object, as in llama.cpp.")


class ConstraintFields(ExtensibleBody):
    """Output constraints with the names of OpenAI, vLLM, llama.cpp and SGLang; at most one may be set."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonObject | Text | None = None
    guided_regex: Annotated[str, Field(max_length=1 << 16)] | None = None
    guided_choice: Choices | None = None
    guided_grammar: Annotated[str, Field(max_length=1 << 18)] | None = None
    grammar: Annotated[str, Field(max_length=1 << 18)] | None = None
    json_schema: JsonObject | Text | None = None
    regex: Annotated[str, Field(max_length=1 << 16)] | None = None
    ebnf: Annotated[str, Field(max_length=1 << 18)] | None = None


class StreamOptions(ExtensibleBody):
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


N_DESCRIPTION = "Number of choices: independent samples, or with smc texts of the population with their weights."
