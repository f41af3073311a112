"""From the fields of a request to the engine's sampling parameters, and to what the answer has to keep to."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Any

from swiftspec.params import MIN_TEMPERATURE
from swiftspec.serve.http.app_context import check_tokens
from swiftspec.serve.http.engine_link.frames import Ready
from swiftspec.serve.http.errors import ApiError, unsupported
from swiftspec.serve.http.grammar import ANY_OBJECT
from swiftspec.serve.http.schema import ONE_CHOICE, Constrained, Sampled, Smc

AS_GIVEN = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "guidance_scale", "ignore_eos", "stop_token_ids", "verify_batch", "draft_steps",
)  # fmt: skip
Grammar = tuple[str, str, str]  # its kind, its text, and the field of the request that gave it


def sampling_of(
    body: Sampled, about: Ready, prompt: Sequence[int], negative: Sequence[int] | None, limit: int | None
) -> dict[str, Any]:
    """The fields of SamplingParams that are given, those of the model filled in. `limit`: of the answer's tokens, which
    is cut to what fits. Raises ApiError on what the model or the server cannot do."""
    values = dict(about.defaults)
    values |= {name: value for name in AS_GIVEN if (value := getattr(body, name)) is not None}
    if 0 < values.get("temperature", 1.0) < MIN_TEMPERATURE:
        values["temperature"] = MIN_TEMPERATURE
    check_tokens(values.get("stop_token_ids", ()), about, "stop_token_ids")
    if body.logit_bias:
        values["logit_bias"] = {int(token): bias for token, bias in body.logit_bias.items()}
        check_tokens([*values["logit_bias"]], about, "logit_bias")
    if negative is not None:
        values["negative_prompt_ids"] = list(negative)
    values["seed"] = secrets.randbits(63) if body.seed is None else body.seed % 2**64
    longest = max(len(prompt), len(negative or ()))
    room = about.max_model_len - longest
    if room < 1:
        raise too_long(longest, about)
    wanted = limit if limit is not None else values.get("max_tokens")
    values["max_tokens"] = room if wanted is None else min(wanted, room)
    _check_population(body.smc, about)
    return values


def too_long(tokens: int, about: Ready) -> ApiError:
    message = (
        f"the prompt of {tokens} tokens leaves no room for an answer in the context of {about.max_model_len}:"
        " shorten it, or start the server with a larger --max-model-len"
    )
    return ApiError(400, message, code="context_length_exceeded")


def _check_population(asked: Smc | None, about: Ready) -> None:
    if asked is None:
        return
    wanted = asked.model_dump(exclude_none=True)
    start = "; start the server with " + " ".join(
        ["--mode smc", *(f"--{name.replace('_', '-')} {value}" for name, value in wanted.items())]
    )
    if about.plan.get("mode") != "smc":
        raise unsupported("smc", f"this server runs mode {about.plan.get('mode')}{start}")
    shape = about.plan.get("population", {})
    for name, value in wanted.items():
        if shape.get(name) != value:
            raise unsupported("smc", f"{name} is {shape.get(name)} here, not {value}{start}")


def choices_asked(body: Sampled, n: int | None, stream: bool | None, about: Ready) -> tuple[int, int] | None:
    """How many texts of a population are to come back, and of how many that are drawn; None: one text. Raises ApiError
    on what no population gives."""
    asked = {"n": 1 if n is None else n, "best_of": body.best_of or (1 if n is None else n)}
    more = next((name for name, value in asked.items() if value not in ONE_CHOICE[name]), None)
    if more is None:
        return None
    if body.smc is None:
        raise unsupported(more, 'only 1 is served here, but in mode smc with "smc": {} beside it: leave it out')
    _check_population(body.smc, about)
    particles = about.plan.get("population", {}).get("particles", 1)
    if not 1 <= asked["n"] <= asked["best_of"] <= particles:
        most = f"n may be 1..best_of, and best_of n..{particles}, the particles of this server"
        raise ApiError(400, f"{more}: {most}", more)
    if stream:
        raise ApiError(400, f"{more}: which texts come is known at their end alone: leave stream out", more)
    return asked["n"], asked["best_of"]


def grammar_asked(body: Constrained) -> Grammar | None:
    """What the answer has to keep to. Raises ApiError where a request says it twice, or not at all."""
    found: list[Grammar] = []
    form = body.response_format
    if form is not None and form.type == "json_object":
        found.append(("json_schema", ANY_OBJECT, "response_format"))
    elif form is not None and form.type == "json_schema":
        if form.json_schema is None or form.json_schema.schema_ is None:
            raise ApiError(400, "response_format: json_schema.schema is missing", "response_format")
        found.append(("json_schema", json.dumps(form.json_schema.schema_), "response_format"))
    found += _one_of(
        "guided_", json_=body.guided_json, regex=body.guided_regex, choice=body.guided_choice,
        grammar=body.guided_grammar,
    )  # fmt: skip
    asked = body.structured_outputs
    if asked is not None:
        found += _one_of(
            "structured_outputs.", json_=asked.json_, regex=asked.regex, choice=asked.choice, grammar=asked.grammar
        )
        if asked.json_object:
            found.append(("json_schema", ANY_OBJECT, "structured_outputs.json_object"))
    if len(found) > 1:
        raise ApiError(400, f"{found[1][2]} and {found[0][2]} both say what the answer is: give one", found[1][2])
    return found[0] if found else None


def _one_of(
    where: str, json_: dict[str, Any] | str | None, regex: str | None, choice: list[str] | None, grammar: str | None
) -> list[Grammar]:
    found: list[Grammar] = []
    if json_ is not None:
        found.append(("json_schema", json_ if isinstance(json_, str) else json.dumps(json_), f"{where}json"))
    if regex is not None:
        found.append(("regex", regex, f"{where}regex"))
    if choice is not None:
        found.append(("choice", json.dumps(choice), f"{where}choice"))
    if grammar is not None:
        found.append(("grammar", grammar, f"{where}grammar"))
    return found
