"""What requests may hold: the fields that several endpoints share. Unknown fields are ignored; every number has a range
and every list an end. What a field that is not served may still be set to, `refuse` knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from swiftspec.params import MOST
from swiftspec.serve.http.errors import unsupported


def _whole(value: object) -> object:
    """JSON knows no integers: 4.0 is one."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


WHOLE = BeforeValidator(_whole)
Token = Annotated[int, Field(ge=0, le=MOST)]
Count = Annotated[int, Field(ge=0, le=MOST), WHOLE]
Positive = Annotated[int, Field(ge=1, le=MOST), WHOLE]
Stop = Annotated[str, Field(min_length=1, max_length=256)]
Stops = Annotated[list[Stop], Field(max_length=16)]
Text = Annotated[str, Field(max_length=8 << 20)]
Word = Annotated[str, Field(max_length=256)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[dict[Annotated[str, Field(pattern=r"^[0-9]{1,10}$")], Annotated[float, Field(ge=-100, le=100)]], Field(
    max_length=1024
)]  # fmt: skip
Object = dict[str, Any]
Choices = Annotated[list[Annotated[str, Field(min_length=1, max_length=4096)]], Field(min_length=1, max_length=1024)]
Variables = Annotated[dict[str, Any], Field(max_length=32)]


class Body(BaseModel):
    """Strict: no number from text. JSON has no NaN."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=(), allow_inf_nan=False, strict=True)


class Smc(Body):
    """The shape of the population in mode smc, as the server was started with it."""

    particles: Annotated[int, Field(ge=1, le=1024), WHOLE] | None = None
    smc_draft_tokens: Annotated[int, Field(ge=1, le=64), WHOLE] | None = None
    ess_threshold: Annotated[float, Field(ge=0, le=1)] | None = None
    power: Annotated[float, Field(gt=0, le=100)] | None = None
    smc_exact: Annotated[int, Field(ge=0, le=64), WHOLE] | None = None


class Sampled(Body):
    """How an answer is sampled, by vLLM's names. What is left out is the model's own, then vLLM's default."""

    temperature: Annotated[float, Field(ge=0, le=100)] | None = Field(
        None, description="0 is greedy; what lies between 0 and 0.001 is taken as 0.001."
    )
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MOST), WHOLE] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Bias | None = Field(None, description="Added to the logits, by token id.")
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1), WHOLE] | None = Field(
        None, description="Of the noise; a random one where none is given. Below 0 it counts from 2^64 down."
    )
    guidance_scale: Annotated[float, Field(ge=0, le=100)] | None = None
    negative_prompt: Text | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[Token], Field(max_length=256)] | None = None
    verify_batch: Positive | None = Field(
        None, description="Tree nodes verified per round, up to the server's own; 1: without the draft. Never the text."
    )
    draft_steps: Positive | None = Field(
        None, description="Draft forwards per round, up to what the server has room for. Never the text."
    )
    smc: Smc | None = Field(None, description="Only where the server was started with --mode smc, and as it was.")
    replace_key: Annotated[str, Field(min_length=1, max_length=128)] | None = Field(
        None, description="The newest request with a key replaces those with the same one that have not ended."
    )
    best_of: Count | None = Field(None, description="With smc: so many texts are drawn, of which n are left.")
    # What vLLM has and this server does not: see NEVER.
    min_tokens: Count | None = None
    use_beam_search: bool | None = None
    bad_words: Annotated[list[Word], Field(max_length=1024)] | None = None
    allowed_token_ids: Annotated[list[Token], Field(max_length=1 << 20)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=MOST), WHOLE] | None = None
    prompt_logprobs: Annotated[int, Field(ge=-1, le=MOST), WHOLE] | None = None
    logits_processors: list[Any] | None = Field(None, max_length=64)


class Structured(Body):
    """vLLM's `structured_outputs`: one of them."""

    json_: Object | Text | None = Field(None, alias="json")
    regex: Annotated[str, Field(max_length=1 << 16)] | None = None
    choice: Choices | None = None
    grammar: Annotated[str, Field(max_length=1 << 18)] | None = None
    json_object: bool | None = None


class JsonSchema(Body):
    name: Word | None = None
    description: Text | None = None
    schema_: Object | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """OpenAI's: text, any JSON object, or what a schema says."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Constrained(Body):
    """What the answer has to keep to. At most one of them."""

    response_format: ResponseFormat | None = None
    structured_outputs: Structured | None = None
    guided_json: Object | Text | None = None
    guided_regex: Annotated[str, Field(max_length=1 << 16)] | None = None
    guided_choice: Choices | None = None
    guided_grammar: Annotated[str, Field(max_length=1 << 18)] | None = None


class StreamOptions(Body):
    include_usage: bool | None = None


# Fields whose meaning is known and not served, with the values that ask for nothing.
NEVER: Mapping[str, tuple[Any, ...]] = {
    "min_tokens": (0,), "use_beam_search": (False,), "bad_words": ([],),
    "allowed_token_ids": (), "include_stop_str_in_output": (False,), "skip_special_tokens": (True,),
    "truncate_prompt_tokens": (), "prompt_logprobs": (), "logits_processors": ([],),
}  # fmt: skip
ONE_CHOICE: Mapping[str, tuple[Any, ...]] = {"n": (1,), "best_of": (0, 1)}
CHAT_NEVER: Mapping[str, tuple[Any, ...]] = {
    **NEVER, "audio": (), "modalities": (["text"], []), "functions": ([],), "function_call": ("none",),
    "chat_template": (), "documents": ([],), "echo": (False,), "add_generation_prompt": (True,),
    "web_search_options": (),
}  # fmt: skip


def refuse(body: Body, never: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises ApiError where a field that is not served asks for something."""
    for name, harmless in never.items():
        value = getattr(body, name, None)
        if value is not None and value not in harmless:
            only = f" (only {harmless[0]!r} is)" if harmless and harmless[0] != [] else ""
            raise unsupported(name, f"not served here{only}: leave it out")
