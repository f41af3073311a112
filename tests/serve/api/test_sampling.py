"""Request fields as the engine's sampling parameters."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec
import pytest

from swiftspec.params import SamplingParams
from swiftspec.serve.api.sampling import close_objects
from tests.serve.test_app import CHAT, HELLO, TEXT, refused
from tests.support.grammars import accepts
from tests.support.http import READY, Player


def engine_request(client: httpx.Client, player: Player, path: str = TEXT, **body: Any) -> SamplingParams:
    given = HELLO if path == CHAT else {"prompt": "def"}
    answer = client.post(path, json={**given, **body})
    assert answer.status_code == 200, answer.text
    return player.requests[-1].sampling


def grammar_of(client: httpx.Client, player: Player, **body: Any) -> str:
    return engine_request(client, player, **body).grammar or ""


def test_every_parameter(player: Player, client: httpx.Client) -> None:
    values: dict[str, Any] = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 1,
        "frequency_penalty": -1, "guidance_scale": 2, "ignore_eos": True, "stop_token_ids": [4, 5], "seed": 9,
        "max_tokens": 11, "verify_batch": 4, "draft_steps": 2,
    }  # fmt: skip
    sampling = engine_request(client, player, **values, logit_bias={"7": -5}, negative_prompt="b")
    negative = player.codec.encode("b")
    assert sampling == SamplingParams(**values, logit_bias={7: -5}, negative_prompt_ids=tuple(negative))


def test_defaults_come_from_the_model(player: Player, client: httpx.Client) -> None:
    player.info = msgspec.structs.replace(READY, defaults={"temperature": 0.3, "top_k": 20, "max_tokens": 30})
    assert engine_request(client, player, CHAT, seed=1) == SamplingParams(
        temperature=0.3, top_k=20, max_tokens=30, seed=1
    )
    assert engine_request(client, player, CHAT, temperature=0, max_tokens=9).temperature == 0
    assert engine_request(client, player, CHAT, temperature=1e-7).temperature == 0.001


def test_seeds(player: Player, client: httpx.Client) -> None:
    assert engine_request(client, player).seed != engine_request(client, player).seed
    assert engine_request(client, player, seed=-1).seed == 2**64 - 1
    assert engine_request(client, player, seed=2**63 + 1).seed == 2**63 + 1
    assert engine_request(client, player, seed=4.0).seed == 4, "JSON knows no integers"


def test_max_tokens_is_limited_by_the_context(player: Player, client: httpx.Client) -> None:
    prompt = player.codec.encode_chat(HELLO["messages"])
    bodies: list[dict[str, Any]] = [{}, {"max_tokens": 100_000}, {"max_completion_tokens": 2**31 - 1}]
    for body in bodies:
        assert engine_request(client, player, CHAT, **body).max_tokens == 256 - len(prompt)
    assert engine_request(client, player, CHAT, max_tokens=9, max_completion_tokens=7).max_tokens == 7
    assert engine_request(client, player).max_tokens == 16, "as OpenAI has it"
    long: dict[str, Any] = {"guidance_scale": 2, "negative_prompt": "a b " * 20}
    longer = player.codec.encode_chat([{"role": "user", "content": long["negative_prompt"]}])
    assert engine_request(client, player, CHAT, **long).max_tokens == 256 - len(longer)


def test_a_negative_prompt_is_rendered_like_a_prompt(player: Player, client: httpx.Client) -> None:
    sampling = engine_request(client, player, CHAT, guidance_scale=2, negative_prompt="b")
    assert player.codec.token_text(sampling.negative_prompt_ids) == "<|user|>b<|end|><|bot|>"
    assert engine_request(client, player, CHAT, negative_prompt="b").negative_prompt_ids == ()
    assert engine_request(client, player, guidance_scale=2).negative_prompt_ids == ()


def test_the_population_is_that_of_the_server(player: Player, client: httpx.Client) -> None:
    plan = {"mode": "smc", "population": {"particles": 4, "power": 2.0}}
    player.prepare(info=msgspec.structs.replace(READY, plan=plan), more={"exact": False})
    answer = client.post(CHAT, json={**HELLO, "smc": {"particles": 4, "power": 2.0}}).json()
    assert answer["exact"] is False
    message = refused(client, CHAT, {**HELLO, "smc": {"particles": 8}}, "smc")
    assert message == "smc: particles is 4 on this server, not 8; start the server with --mode smc --particles 8"


def test_grammars(player: Player, client: httpx.Client) -> None:
    bodies: list[dict[str, Any]] = [
        {"guided_regex": "a+"}, {"guided_choice": ["a", "b"]}, {"guided_json": {"type": "object"}},
        {"guided_json": '{"type": "object"}'}, {"guided_grammar": 'start: "a"'}, {"structured_outputs": {"regex": "a"}},
        {"structured_outputs": {"json": {"type": "object"}}}, {"structured_outputs": {"json_object": True}},
        {"response_format": {"type": "json_object"}}, {"grammar": 'root ::= "a"'}, {"ebnf": 'root ::= "a"'},
        {"regex": "a+"}, {"json_schema": {"type": "object"}}, {"json_schema": '{"type": "object"}'},
        {"response_format": {"type": "json_object", "schema": {"type": "array"}}},
    ]  # fmt: skip
    for body in bodies:
        assert engine_request(client, player, **body).grammar, body
    assert "array" in player.grammar
    assert engine_request(client, player, response_format={"type": "text"}).grammar is None


def test_options_of_json(player: Player, client: httpx.Client) -> None:
    """The options of `structured_outputs` for JSON, with each of its constraints that is JSON."""
    item = {"type": "object", "properties": {"b": {"type": "integer"}}}
    schema = {"type": "object", "properties": {"a": item}, "required": ["a"]}
    constraints: list[tuple[str, Any]] = [("json", schema), ("json", json.dumps(schema)), ("json_object", True)]
    for name, constraint in constraints:
        compact: dict[str, Any] = {"structured_outputs": {name: constraint, "disable_any_whitespace": True}}
        grammar = grammar_of(client, player, **compact)
        assert accepts(grammar, '{"a":{"b":1}}') and not accepts(grammar, '{"a": {"b":1}}')
        spaced: dict[str, Any] = {"structured_outputs": {name: constraint, "whitespace_pattern": "_{1,2}"}}
        grammar = grammar_of(client, player, **spaced)
        assert accepts(grammar, '{"a":__{"b":_1}}') and not accepts(grammar, '{"a": {"b":1}}')
    for close in (False, True):
        closed: dict[str, Any] = {"structured_outputs": {"json": schema, "disable_additional_properties": close}}
        grammar = grammar_of(client, player, **closed)
        assert accepts(grammar, '{"a": {"b": 1}}')
        assert accepts(grammar, '{"a": {"c": 1}}') is not close
    assert close_objects({"properties": {"properties": {}}})["properties"] == {"properties": {}}, "a name, no keyword"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({}, "structured_outputs"),
        ({"disable_any_whitespace": True}, "structured_outputs"),
        ({"structural_tag": "{}"}, "structured_outputs.structural_tag"),
        ({"structural_tag": "{}", "regex": "a"}, "structured_outputs.structural_tag"),
        ({"regex": "a", "whitespace_pattern": " "}, "structured_outputs.regex"),
        ({"json": "{", "disable_any_whitespace": True}, "structured_outputs.json"),
        ({"json": "[]", "disable_any_whitespace": True}, "structured_outputs.json"),
        ({"json": {}, "whitespace_pattern": "("}, "structured_outputs.json"),
        ({"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True},
         "structured_outputs.whitespace_pattern"),
    ],
    ids=str,
)  # fmt: skip
def test_structured_outputs_that_are_refused(
    player: Player, client: httpx.Client, options: dict[str, Any], param: str
) -> None:
    for path, body in ((TEXT, {"prompt": "a"}), (CHAT, HELLO)):
        assert param in refused(client, path, {**body, "structured_outputs": options}, param)
    assert not player.requests


def test_filling_in_the_middle(player: Player, client: httpx.Client) -> None:
    vocab = player.codec.vocab
    words = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
    try:
        vocab.update(zip(words, (310, 311, 312)))
        engine_request(client, player, prompt="def f", suffix="return")
        enc = player.codec.encode
        assert player.requests[-1].prompt == [310, *enc("def f"), 311, *enc("return"), 312]
    finally:
        for word in words:
            del vocab[word]


def test_log_probabilities_of_a_prompt_alone(player: Player, client: httpx.Client) -> None:
    """As evaluation tools request them."""
    answer = client.post(TEXT, json={"prompt": [[274, 9]], "max_tokens": 0, "echo": True, "logprobs": 1}).json()
    choice = answer["choices"][0]
    assert choice["text"] == player.codec.decode([274, 9]) and choice["logprobs"]["token_logprobs"] == [None, -0.5]
    assert answer["usage"]["completion_tokens"] == 0 and player.requests[-1].sampling.max_tokens == 1
