"""Conversion of request fields to the engine's sampling parameters and to a grammar request."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from swiftspec.params import FILTERS, MIN_TEMPERATURE, PENALTIES
from swiftspec.sampling.grammar_process import ANY_OBJECT, lenient
from swiftspec.serve.app_context import check_tokens
from swiftspec.serve.errors import CONTEXT_EXCEEDED, ApiError, unsupported
from swiftspec.serve.link.frames import EngineInfo
from swiftspec.serve.schema import (
    ConstraintFields,
    JsonObject,
    SamplingFields,
    Smc,
    StructuredOutputs,
)

PASSED_THROUGH = (
    "temperature",
    *FILTERS,
    *PENALTIES,
    "guidance_scale",
    "ignore_eos",
    "stop_token_ids",
    "allowed_token_ids",
    "verify_batch",
    "draft_steps",
    "suffix_memory",
)
SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")  # keys of a JSON schema
MAX_LISTED_KEYS = 16  # invalid keys of logit_bias that an error message names
GrammarRequest = tuple[str, str, str]  # kind, text (see `build_grammar`), and the request field that contained it


def sampling_params(
    body: SamplingFields, info: EngineInfo, prompt: Sequence[int], negative: Sequence[int] | None, limit: int | None
) -> dict[str, Any]:
    """Returns the fields of SamplingParams that a request sets, completed with the server's defaults.

    `prompt`: token ids.
    `negative`: token ids of the negative prompt; None without guidance.
    `limit`: maximum number of output tokens; None: the server's default. The result is at most what fits into
        the context.
    Raises ApiError on values that the model or the server does not support.
    """
    values = dict(info.defaults)
    values |= {name: value for name in PASSED_THROUGH if (value := getattr(body, name)) is not None}
    if 0 < values.get("temperature", 1.0) < MIN_TEMPERATURE:
        values["temperature"] = MIN_TEMPERATURE
    for name in ("stop_token_ids", "allowed_token_ids"):
        check_tokens(values.get(name, ()), info, name)
    if body.logit_bias:
        values["logit_bias"] = token_biases(body.logit_bias, info)
    if negative is not None:
        values["negative_prompt_ids"] = list(negative)
    values["seed"] = secrets.randbits(63) if body.seed is None else body.seed % 2**64
    longest_prompt = max(len(prompt), len(negative or ()))
    max_new_tokens = info.max_model_len - longest_prompt
    if max_new_tokens < 1:
        raise context_exceeded_error(longest_prompt, info)
    requested_max = limit if limit is not None else values.get("max_tokens")
    values["max_tokens"] = max_new_tokens if requested_max is None else min(requested_max, max_new_tokens)
    if body.min_tokens:
        if requested_max is not None and body.min_tokens > requested_max:
            raise ApiError(400, f"min_tokens: {body.min_tokens} exceeds max_tokens {requested_max}", "min_tokens")
        values["min_tokens"] = min(body.min_tokens, values["max_tokens"])
    check_population(body.smc, info)
    return values


def stop_list(stop: str | list[str] | None) -> list[str]:
    """Returns the stop strings of OpenAI's field `stop`."""
    return [stop] if isinstance(stop, str) else stop or []


def token_biases(biases: Mapping[str, float], info: EngineInfo) -> dict[int, float]:
    """Converts the keys of `logit_bias` to token ids. Raises ApiError, which names all invalid keys."""
    valid = {key: int(key) for key in biases if key.isascii() and key.isdecimal() and int(key) < info.vocab_size}
    wrong = [key for key in biases if key not in valid]
    if wrong:
        names = ", ".join(map(repr, (key[:20] for key in wrong[:MAX_LISTED_KEYS])))
        more = f" and {len(wrong) - MAX_LISTED_KEYS} more" if len(wrong) > MAX_LISTED_KEYS else ""
        message = f"logit_bias: {names}{more}: a key must be a token id below the vocabulary size {info.vocab_size}"
        raise ApiError(400, message, "logit_bias")
    return {token: biases[key] for key, token in valid.items()}


def context_exceeded_error(tokens: int | None, info: EngineInfo, param: str | None = None) -> ApiError:
    """Returns the error for a prompt that leaves no room for an answer, in the words by which clients recognise it.
    `tokens`: its length; None if it is certainly too long to be tokenized."""
    count = "more" if tokens is None else tokens
    message = (
        f"This model's maximum context length is {info.max_model_len} tokens. However, your prompt has {count} tokens"
        " and leaves no room for an answer: shorten it, or start the server with a larger --max-model-len"
    )
    anthropic = f"prompt is too long: {tokens or f'over {info.max_model_len}'} tokens > {info.max_model_len} maximum"
    return ApiError(400, message, param, CONTEXT_EXCEEDED, anthropic_message=anthropic)


def check_population(smc: Smc | None, info: EngineInfo) -> None:
    """Raises ApiError if the server does not run the requested particle population."""
    if smc is None:
        return
    requested = smc.model_dump(exclude_none=True)
    hint = "; start the server with " + " ".join(
        ["--mode smc", *(f"--{name.replace('_', '-')} {value}" for name, value in requested.items())]
    )
    if info.plan.get("mode") != "smc":
        raise unsupported("smc", f"this server runs mode {info.plan.get('mode')}{hint}")
    population = info.plan.get("population", {})
    for name, value in requested.items():
        if population.get(name) != value:
            raise unsupported("smc", f"{name} is {population.get(name)} on this server, not {value}{hint}")


def grammar_request(body: ConstraintFields) -> GrammarRequest | None:
    """Returns the grammar that constrains the output, or None if there is no constraint. Raises ApiError if the request
    contains two constraints, or an incomplete one."""
    requests: list[GrammarRequest] = []
    response_format = body.response_format
    if response_format is not None and response_format.type == "json_object":
        schema = ANY_OBJECT if response_format.schema_ is None else response_format.schema_
        requests.append(("json_schema", json.dumps(schema), "response_format"))
    elif response_format is not None and response_format.type == "json_schema":
        if response_format.json_schema is None or response_format.json_schema.schema_ is None:
            raise ApiError(400, "response_format: json_schema.schema is missing", "response_format")
        schema = response_format.json_schema.schema_
        schema = schema if response_format.json_schema.strict else lenient(schema)
        requests.append(("json_schema", json.dumps(schema), "response_format"))
    requests += _requested_constraints(
        "guided_",
        json_=body.guided_json,
        regex=body.guided_regex,
        choice=body.guided_choice,
        grammar=body.guided_grammar,
    )
    requests += _requested_constraints(
        "", json_=body.json_schema, regex=body.regex, choice=None, grammar=body.grammar or None, json_name="json_schema"
    )
    requests += [] if body.ebnf is None else [("grammar", body.ebnf, "ebnf")]
    if body.structured_outputs is not None:
        requests += _structured_constraints(body.structured_outputs)
    if len(requests) > 1:
        raise ApiError(
            400, f"{requests[1][2]} and {requests[0][2]} both constrain the answer; omit one of them", requests[1][2]
        )
    return requests[0] if requests else None


def _structured_constraints(structured: StructuredOutputs) -> list[GrammarRequest]:
    if structured.structural_tag is not None:
        raise unsupported("structured_outputs.structural_tag", "not supported; use json, regex, choice or grammar")
    requests = _requested_constraints(
        "structured_outputs.",
        json_=structured.json_,
        regex=structured.regex,
        choice=structured.choice,
        grammar=structured.grammar,
    )
    if structured.json_object:
        requests.append(("json_schema", json.dumps(ANY_OBJECT), "structured_outputs.json_object"))
    if not requests and structured.json_object is None:
        message = "structured_outputs: needs one of json, json_object, regex, choice and grammar"
        raise ApiError(400, message, "structured_outputs")
    return [_with_json_options(request, structured) for request in requests]


def _with_json_options(request: GrammarRequest, structured: StructuredOutputs) -> GrammarRequest:
    """Returns the request with the options for JSON, which other constraints do not have. Raises ApiError if such an
    option is used with another constraint."""
    kind, text, param = request
    options: JsonObject = {}
    if structured.disable_any_whitespace:
        options["whitespace_flexible"] = False
    if structured.whitespace_pattern is not None:
        options["whitespace_pattern"] = structured.whitespace_pattern
    if not options and not structured.disable_additional_properties:
        return request
    if len(options) > 1:
        name = "structured_outputs.whitespace_pattern"
        raise ApiError(400, f"{name}: not together with disable_any_whitespace; omit one of them", name)
    if kind != "json_schema":
        raise ApiError(400, f"{param}: the other options of structured_outputs are for JSON only", param)
    try:
        schema = json.loads(text)
        if structured.disable_additional_properties:
            schema = close_objects(schema)
        if not isinstance(schema, dict):
            raise ValueError("must be a JSON object")
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"{param}: {error}", param) from None
    given = schema.get("x-guidance")
    options = {**given, **options} if isinstance(given, dict) else options
    return kind, json.dumps({**schema, "x-guidance": options} if options else schema), param


def close_objects(schema: Any) -> Any:
    """Returns a JSON schema whose objects have no properties beyond those that the schema names, as vLLM's
    `disable_additional_properties`. An object with a value of `additionalProperties` keeps it."""
    if isinstance(schema, list):
        return [close_objects(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {
        name: {key: close_objects(item) for key, item in value.items()}
        if name in SCHEMAS_BY_NAME and isinstance(value, dict)
        else close_objects(value)
        for name, value in schema.items()
    }
    if "properties" in schema or "patternProperties" in schema:
        closed.setdefault("additionalProperties", False)
    return closed


def _requested_constraints(
    prefix: str,
    json_: dict[str, Any] | str | None,
    regex: str | None,
    choice: list[str] | None,
    grammar: str | None,
    json_name: str = "json",
) -> list[GrammarRequest]:
    requests: list[GrammarRequest] = []
    if json_ is not None:
        requests.append(("json_schema", json_ if isinstance(json_, str) else json.dumps(json_), f"{prefix}{json_name}"))
    if regex is not None:
        requests.append(("regex", regex, f"{prefix}regex"))
    if choice is not None:
        requests.append(("choice", json.dumps(choice), f"{prefix}choice"))
    if grammar is not None:
        requests.append(("grammar", grammar, f"{prefix}grammar"))
    return requests
