"""The application around all endpoints: states, errors, request ids, and bad input, which is answered in one line."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from msgspec import structs

from swiftspec.serve.link.engine_client import EngineState, GenerationFailedError, InvalidRequestError
from swiftspec.serve.link.frames import RankState
from tests.support.http import Player

CHAT, TEXT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}


def refused(client: httpx.Client, path: str, body: Any, param: str | None = None, status: int = 400) -> str:
    """The error message of a refused request: one line of bounded length."""
    answer = client.post(path, json=body) if not isinstance(body, bytes) else client.post(
        path, content=body, headers={"content-type": "application/json"}
    )  # fmt: skip
    error = answer.json()["error"]
    assert answer.status_code == status, answer.text
    assert error["param"] == param
    assert "\n" not in error["message"] and len(error["message"]) <= 600
    return str(error["message"])


def test_requests_while_the_server_loads(player: Player, client: httpx.Client) -> None:
    player.state, player.info = EngineState("loading", "target weights 1 of 2 GB", 0, 0), None
    assert client.get("/v1/models").json()["data"][0]["id"] == "toy"
    for path in ("/health", "/health/generate"):
        answer = client.get(path)
        assert answer.status_code == 503 and answer.json()["error"]["type"] == "unavailable_error"
    assert client.get("/health").json()["status"] == "loading"
    answer = client.post(CHAT, json=HELLO)
    assert answer.json()["error"]["message"] == "Loading model: target weights 1 of 2 GB"
    assert int(answer.headers["retry-after"]) >= 1 and "x-should-retry" not in answer.headers


def test_requests_during_and_after_shutdown(player: Player, client: httpx.Client) -> None:
    player.state = EngineState("draining", "", 1, 0)
    assert client.post(CHAT, json=HELLO).status_code == 503
    player.state = EngineState("dead", "rank 1 is gone", 0, 0)
    answer = client.post(TEXT, json={"prompt": "a"})
    assert answer.status_code == 503 and answer.headers["x-should-retry"] == "false"
    assert "rank 1 is gone" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("phase", "ready", "live"),
    [
        ("loading", 503, 200),
        ("ready", 200, 200),
        ("recovering", 503, 200),
        ("unavailable", 503, 200),
        ("draining", 503, 200),
        ("dead", 503, 503),
    ],
)
def test_probes(player: Player, client: httpx.Client, phase: str, ready: int, live: int) -> None:
    player.state = EngineState(phase, "", 0, 0)
    assert client.get("/ready").status_code == client.get("/health").status_code == ready
    assert client.get("/live").status_code == live


def test_requests_while_a_rank_restarts(player: Player, client: httpx.Client) -> None:
    """Without rank 0, requests are accepted and wait; without the draft, they are decoded."""
    lost = [RankState(0, "target", 7, "lost", 1), RankState(1, "draft", 8, "up", 0)]
    player.state = EngineState("recovering", "rank 0 has exited", 0, 0, lost)
    expected_ranks = [{"rank": 0, "role": "target", "pid": 7, "state": "lost", "restarts": 1},
            {"rank": 1, "role": "draft", "pid": 8, "state": "up", "restarts": 0}]  # fmt: skip
    health = client.get("/health")
    assert health.status_code == 503 and "retry-after" in health.headers
    assert (health.json()["status"], health.json()["ranks"]) == ("recovering", expected_ranks)
    assert "rank 0 has exited" in health.json()["error"]["message"]
    assert client.get("/health/generate").status_code == 503
    assert client.post(TEXT, json={"prompt": "a"}).status_code == 200
    for states, status in ((("up", "loading"), "degraded"), (("up", "up"), "ok")):
        player.state = EngineState("ready", "", 0, 0, [structs.replace(r, state=s) for r, s in zip(lost, states)])
        health = client.get("/health")
        assert health.status_code == 200 and health.json()["status"] == status
        assert [rank["state"] for rank in health.json()["ranks"]] == list(states)


@pytest.mark.parametrize("path", [CHAT, TEXT, MESSAGES, RESPONSES])
def test_an_interrupted_answer_reports_its_number_of_tokens(player: Player, client: httpx.Client, path: str) -> None:
    """In a stream the error is the last event, in the schema of the endpoint."""
    line = "the answer was interrupted after 6 tokens: rank 1 is gone"
    player.prepare(raises=GenerationFailedError(line, "engine_error"), after=2)
    body = {TEXT: {"prompt": "a"}, RESPONSES: {"input": "a"}}.get(path, {**HELLO, "max_tokens": 50})
    whole = client.post(path, json=body)
    assert whole.status_code == 500 and whole.json()["error"]["message"] == line
    player.prepare(raises=GenerationFailedError(line, "engine_error"), after=2)
    events = client.post(path, json={**body, "stream": True}).text.strip().split("\n\n")
    name, _, last = events[-1].rpartition("data: ")
    error = json.loads(last)["response"]["error"] if path == RESPONSES else json.loads(last)["error"]
    assert error["message"] == line and len(events) > 1
    if path == MESSAGES:
        assert name == "event: error\n" and json.loads(last)["type"] == "error"


def test_the_server_describes_itself(player: Player, client: httpx.Client) -> None:
    assert client.get("/health").json()["status"] == "ok"
    assert client.get("/health/generate").json()["status"] == "ok"
    for site, status in (("cross-site", 403), ("same-site", 403), ("same-origin", 200)):
        assert client.get("/health/generate", headers={"sec-fetch-site": site}).status_code == status
    assert player.requests[0].sampling.max_tokens == 1
    assert client.get("/version").json()["version"]
    assert client.get("/ping").json() == client.post("/ping").json() == client.get("/health").json()
    player.state = EngineState("ready", "", 1, 2)
    assert client.get("/load").json() == {"server_load": 3}
    card = client.get("/v1/models/other").json()
    assert (card["id"], card["root"], card["parent"], card["permission"]) == ("other", "toy", None, [])
    assert card["max_model_len"] == 256
    assert client.get("/v1/models/none").status_code == 404


@pytest.mark.parametrize("path", ["/health/generate", CHAT, TEXT, MESSAGES, RESPONSES])
@pytest.mark.parametrize("stream", [False, True])
def test_every_generated_answer_is_measured(player: Player, client: httpx.Client, path: str, stream: bool) -> None:
    def count() -> float:
        return sum(
            float(line.rpartition(" ")[2])
            for line in client.get("/metrics").text.splitlines()
            if line.startswith("swiftspec:request_success_total")
        )

    before = count()
    if path == "/health/generate":
        client.get(path)
    else:
        body = {TEXT: {"prompt": "a"}, RESPONSES: {"input": "a"}}.get(path, {**HELLO, "max_tokens": 50})
        client.post(path, json={**body, "stream": stream})
    assert count() == before + 1


def test_tokens_and_text(player: Player, client: httpx.Client) -> None:
    assert client.post("/tokenize", json={"prompt": "a"}).json()["token_strs"] is None
    answer = client.post("/tokenize", json={"prompt": "def é", "return_token_strs": True}).json()
    assert set(answer) == {"count", "max_model_len", "tokens", "token_strs"}
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"]) and answer["max_model_len"] == 256
    assert client.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": "def é"}
    whole = client.post("/tokenize", json=HELLO).json()["tokens"]
    assert player.codec.token_text(whole) == "<|user|>hello<|end|><|bot|>"
    assert refused(client, "/tokenize", {}, "prompt") == "prompt: specify either prompt or messages"
    assert "token 999 is outside the vocabulary of 320" in refused(client, "/detokenize", {"tokens": [999]}, "tokens")


def test_the_tokenizer_is_described(player: Player, client: httpx.Client) -> None:
    info = client.get("/tokenizer_info").json()
    assert info["tokenizer_class"] == type(player.codec.tokenizer).__name__
    assert info["chat_template"] == player.codec.template_source()
    assert not {"name_or_path", "tokenizer_file"} & set(info) and str(player.codec.path) not in str(info)


def test_valid_request_ids_are_returned_and_invalid_ones_replaced(player: Player, client: httpx.Client) -> None:
    assert client.get("/health", headers={"x-request-id": "mine"}).headers["x-request-id"] == "mine"
    for odd in ("a b", "x" * 200):
        given = client.get("/health", headers={"x-request-id": odd}).headers["x-request-id"]
        assert given != odd and len(given) == 32
    with client.stream("POST", CHAT, json={**HELLO, "stream": True}, headers={"x-request-id": "s"}) as answer:
        assert answer.headers["x-request-id"] == "s"


def test_the_newest_request_of_a_key_replaces_the_earlier_ones(player: Player, client: httpx.Client) -> None:
    client.post(TEXT, json={"prompt": "a", "replace_key": "k"})
    client.post(TEXT, json={"prompt": "a"}, headers={"x-replace-key": "h"})
    client.post(TEXT, json={"prompt": "a"})
    assert [ask.replace_key for ask in player.requests] == ["k", "h", None]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "the body is not JSON: "),
        (b"\xff\xfe{}", "body"),
        (b'{"prompt": "\xff"}', "body"),
        (b"[" * 100_000, "body"),
        (b'{"x": ' * 100_000, "body"),
        (b"[]", "the body must be a JSON object"),
        (b"", "the body must be a JSON object"),
        (b"7" * 5000, "body"),
        (b'{"prompt": "a", "temperature": NaN}', "temperature"),
    ],
)
def test_invalid_bodies_are_refused(player: Player, client: httpx.Client, body: bytes, message: str) -> None:
    assert message in refused(client, TEXT, body, "temperature" if message == "temperature" else None)


def test_lone_surrogates_are_refused(player: Player, client: httpx.Client) -> None:
    for path, body in (
        (TEXT, b'{"prompt": "\\ud800"}'),
        (CHAT, b'{"messages": [{"role": "user", "content": "\\ud800"}]}'),
        (CHAT, b'{"messages": [{"role": "user", "content": "a"}], "model": "\\ud800"}'),
        (CHAT, b'{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"\\ud800": 1}}'),
        (CHAT, b'{"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json_schema",'
         b' "json_schema": {"schema": {"const": "\\ud800"}}}}'),
        (RESPONSES, b'{"input": "a", "metadata": {"a": "\\ud800"}}'),
    ):  # fmt: skip
        answer = client.post(path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400, answer.text


def test_bodies_that_are_not_json(client: httpx.Client) -> None:
    answer = client.post(CHAT, content=b"{}", headers={"content-type": "text/plain"})
    assert answer.status_code == 400 and "Content-Type: application/json" in answer.json()["error"]["message"]
    assert client.get(CHAT).status_code == 405 and client.get(CHAT).headers["allow"] == "POST"
    message = "GET /v1/chat/completions is not an endpoint of this server (allowed: POST): see /openapi.json"
    assert client.get(CHAT).json()["error"]["message"] == message
    error = client.post("/v1/nothing", json={}).json()["error"]
    assert error["message"] == "POST /v1/nothing is not an endpoint of this server: see /openapi.json"
    assert error["type"] == "not_found_error"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (RESPONSES, {"input": "a", "n": 2}, "n"),
        (RESPONSES, {"input": "a", "best_of": 3}, "best_of"),
        (TEXT, {"prompt": "a", "min_tokens": 17}, "min_tokens"),
        (TEXT, {"prompt": "a", "allowed_token_ids": [5, 320]}, "allowed_token_ids"),
        (TEXT, {"prompt": "a", "bad_words": [" "]}, "bad_words"),
        (TEXT, {"prompt": "a", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (TEXT, {"prompt": "a", "logprob_token_ids": [3]}, "logprob_token_ids"),
        (TEXT, {"prompt": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        (TEXT, {"prompt": "a", "structured_outputs": {}}, "structured_outputs"),
        (TEXT, {"prompt": "a", "grammar": 'root ::= "a"', "regex": "a"}, "grammar"),
        (TEXT, {"prompt": "a", "use_beam_search": True}, "use_beam_search"),
        (TEXT, {"prompt": []}, "prompt"),
        (TEXT, {"prompt": "a", "suffix": "b"}, "suffix"),
        (TEXT, {"prompt": [1, 999]}, "prompt"),
        (TEXT, {"prompt": ""}, "prompt"),
        (TEXT, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
        (TEXT, {"prompt": "a", "stop": ["x"] * 17}, "stop"),
        (TEXT, {"prompt": "a", "logit_bias": {"999": 1}}, "logit_bias"),
        (TEXT, {"prompt": "a", "stop_token_ids": [999]}, "stop_token_ids"),
        (TEXT, {"prompt": "a", "temperature": -1}, "temperature"),
        (TEXT, {"prompt": "a", "logprobs": 21}, "logprobs"),
        (TEXT, {"prompt": "a", "seed": "5.5"}, "seed"),
        (TEXT, {"prompt": "a", "temperature": "nan"}, "temperature"),
        (TEXT, {"prompt": [1, "2"]}, "prompt.1"),
        (TEXT, {"prompt": "a", "guided_regex": "(", "guided_choice": ["a"]}, "guided_choice"),
        (TEXT, {"prompt": "a", "guided_regex": "("}, "guided_regex"),
        (TEXT, {"prompt": "a", "smc": {"particles": 4}}, "smc"),
        (CHAT, {}, "messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {**HELLO, "top_logprobs": 2}, "top_logprobs"),
        (CHAT, {**HELLO, "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        (CHAT, {**HELLO, "chat_template": "{{ 1 }}"}, "chat_template"),
        (CHAT, {**HELLO, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        (CHAT, {**HELLO, "chat_template_kwargs": {"a": "x" * 20_000}}, "chat_template_kwargs"),
        (CHAT, {**HELLO, "response_format": {"type": "json_schema"}}, "response_format"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
        (RESPONSES, {"input": "a", "previous_response_id": "x"}, "previous_response_id"),
        (RESPONSES, {"input": "a", "tools": [{"type": "function"}]}, "tools.0.name"),
        (RESPONSES, {"input": [{"type": "item_reference"}]}, "input.0"),
    ],
)
def test_fields_that_are_refused(
    player: Player, client: httpx.Client, path: str, body: dict[str, Any], param: str
) -> None:
    assert refused(client, path, body, param).startswith(param)
    assert not player.requests


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"text": "a"}]}]},
            "messages.0.content.0.type: field required",
        ),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages.0.content: input should be a valid string"),
        (CHAT, {**HELLO, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.type: input should be 'function'"),
        (CHAT, {**HELLO, "tool_choice": {"type": "function"}}, "tool_choice.function: field required"),
        (CHAT, {**HELLO, "stop": [""]}, "stop.0: string should have at least 1 character"),
        (CHAT, {**HELLO, "tools": [{"function": {}}]}, "tools.0.function.name: field required"),
        (TEXT, {"prompt": [-1]}, "prompt.0: input should be greater than or equal to 0"),
        (TEXT, {"prompt": "a", "stop": 5}, "stop: input should be a valid string"),
        (TEXT, {"prompt": "a", "logit_bias": {"7": 101}}, "logit_bias.7: input should be less than or equal to 100"),
        (RESPONSES, {"input": []}, "input: list should have at least 1 item after validation, not 0"),
        (RESPONSES, {"input": [{"role": "robot", "content": "a"}]}, "input.0.role: input should be 'system', "),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": 5}]}]}, "input.0.content.0.type: input should be"),
    ],
    ids=str,
)
def test_errors_of_fields_with_several_shapes_name_the_shape_that_fits(
    client: httpx.Client, path: str, body: dict[str, Any], message: str
) -> None:
    assert refused(client, path, body, message.partition(":")[0]).startswith(message)


def test_usage_in_every_chunk(player: Player, client: httpx.Client) -> None:
    """With vLLM's option; the fingerprint is the same in each response."""
    for path, body in ((CHAT, HELLO), (TEXT, {"prompt": "a", "max_tokens": 50})):
        for continuous in (False, True):
            options = {"include_usage": True, "continuous_usage_stats": continuous}
            text = client.post(path, json={**body, "stream": True, "stream_options": options}).text
            events = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n")[:-2]]
            usages = [event.get("usage") for event in events]
            assert all(usages) if continuous else usages[:-1] == [None] * (len(events) - 1)
            counts = [usage["completion_tokens"] for usage in usages if usage]
            assert counts == sorted(counts) and counts[-1] == 14
            assert events[0]["choices"] and events[-1]["choices"] == []
            whole = client.post(path, json=body).json()
            assert usages[-1] == whole["usage"]
            assert {event["system_fingerprint"] for event in events} == {whole["system_fingerprint"]}
            assert whole["system_fingerprint"].startswith("fp_")
        only = {**body, "stream": True, "stream_options": {"continuous_usage_stats": True}}
        assert '"usage"' not in client.post(path, json=only).text
        for stream in ({}, {"stream": False}):
            unused = {**body, **stream, "stream_options": {"include_usage": True}}
            assert "only allowed with stream: true" in refused(client, path, unused, "stream_options")


def test_fields_that_are_ignored(player: Player, client: httpx.Client) -> None:
    """Unknown fields, and unsupported fields with values that change nothing."""
    body = {**HELLO, "n": 1, "user": "u", "store": True, "made_up": {"a": 1}, "min_tokens": 0, "modalities": ["text"]}
    assert client.post(CHAT, json={**body, "functions": [], "audio": None}).status_code == 200


def test_a_prompt_that_does_not_fit(player: Player, client: httpx.Client) -> None:
    for text in ("ab" * 300, "ab" * 300_000):
        for path, body in ((TEXT, {"prompt": text}), (CHAT, {"messages": [{"role": "user", "content": text}]})):
            answer = client.post(path, json=body)
            assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"


def test_errors_of_the_engine(player: Player, client: httpx.Client) -> None:
    for error, status in (
        (InvalidRequestError("no guidance in mode smc"), 400),
        (GenerationFailedError("out of time", "timeout"), 504),
        (GenerationFailedError("a newer request has this key", "replaced"), 409),
        (ZeroDivisionError("a bug"), 500),
    ):
        player.prepare(raises=error)
        for stream in (False, True):
            answer = client.post(CHAT, json={**HELLO, "stream": stream})
            assert answer.status_code == status
            assert ("a bug" in answer.text) is False


def test_errors_during_a_stream(player: Player, client: httpx.Client) -> None:
    player.prepare(raises=GenerationFailedError("out of time", "timeout"), after=1)
    lines = client.post(CHAT, json={**HELLO, "stream": True}).text.strip().split("\n\n")
    assert json.loads(lines[-1].removeprefix("data: "))["error"]["type"] == "timeout"
    lines = client.post(MESSAGES, json={**HELLO, "stream": True, "max_tokens": 9}).text.strip().split("\n\n")
    assert lines[-1].startswith('event: error\ndata: {"type":"error","error":{"type":"timeout_error"')
    player.prepare(raises=ZeroDivisionError("a bug"), after=1)
    assert "see the server's log" in client.post(CHAT, json={**HELLO, "stream": True}).text


def test_errors_of_the_anthropic_endpoint(client: httpx.Client) -> None:
    answer = client.post(MESSAGES, json=HELLO)
    assert answer.json() == {
        "type": "error", "error": {"type": "invalid_request_error", "message": "max_tokens: field required"}
    }  # fmt: skip
    block = {"type": "image", "source": {}}
    answer = client.post(MESSAGES, json={"messages": [{"role": "user", "content": [block]}], "max_tokens": 5})
    assert "messages.0.content: blocks of type 'image' are not supported" in answer.json()["error"]["message"]
