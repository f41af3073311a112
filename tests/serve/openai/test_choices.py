"""Several choices and prompts: independent samples, texts of a population with their weights, and invalid requests."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec
import pytest

from swiftspec.serve.link.engine_client import GenerationFailedError
from swiftspec.text.outputs import choice_seed
from tests.serve.test_app import CHAT, HELLO, MESSAGES, TEXT, refused
from tests.support.http import READY, TIMINGS, Player

PLAN = {"mode": "smc", "population": {"particles": 4, "power": 1.0}}
POPULATION = msgspec.structs.replace(READY, plan=PLAN)
ASK: dict[str, Any] = {"prompt": "a", "max_tokens": 50, "smc": {}}
ANSWER = [("return a + b\n", "stop", 0.5), ("return a - b", "length", 0.25), ("pass", "stop", 0.25)]


BATCH = msgspec.structs.replace(READY, max_num_seqs=2)
TEXTS = [("return a", -0.75), ("pass", -0.25), ("def f", -0.5), ("x = 1", -1.0)]


@pytest.fixture
def particles(player: Player) -> None:
    player.prepare(info=POPULATION, text="return a", choices=ANSWER, more={"exact": False})


@pytest.mark.usefixtures("particles")
def test_completions_have_a_choice_for_each_text(player: Player, client: httpx.Client) -> None:
    answer = client.post(TEXT, json={**ASK, "n": 3}).json()
    assert [choice["text"] for choice in answer["choices"]] == [text for text, _, _ in ANSWER]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop", "length", "stop"]
    assert [choice["weight"] for choice in answer["choices"]] == [0.5, 0.25, 0.25]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2] and answer["exact"] is False
    assert answer["usage"]["completion_tokens"] == sum(len(player.tokens(text)) for text, _, _ in ANSWER)
    assert player.requests[-1].choices == (3, 3)
    echoed = client.post(TEXT, json={**ASK, "n": 3, "echo": True}).json()
    assert [choice["text"] for choice in echoed["choices"]] == [f"a{text}" for text, _, _ in ANSWER]


@pytest.mark.usefixtures("particles")
def test_chat_has_a_message_for_each_text(player: Player, client: httpx.Client) -> None:
    answer = client.post(CHAT, json={**HELLO, "smc": {"particles": 4}, "n": 2, "best_of": 4}).json()
    assert [choice["message"]["content"] for choice in answer["choices"]] == [text for text, _, _ in ANSWER[:2]]
    assert all(choice["message"]["role"] == "assistant" for choice in answer["choices"])
    assert answer["choices"][1]["weight"] == 0.25 and player.requests[-1].choices == (2, 4)


def test_reasoning_and_tool_calls_are_separate_for_each_text(thinker: Player, thinking_client: httpx.Client) -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    texts = [("<think>one</think>first", "stop", 0.75), (f"<think>two</think>{call}", "stop", 0.25)]
    thinker.prepare(info=POPULATION, text="<think>", choices=texts)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    answer = thinking_client.post(CHAT, json={**HELLO, "tools": tools, "smc": {}, "n": 2}).json()
    first, second = (choice["message"] for choice in answer["choices"])
    assert (first["reasoning_content"], first["content"]) == ("one", "first") and "tool_calls" not in first
    assert second["reasoning_content"] == "two" and second["tool_calls"][0]["function"]["name"] == "f"
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop", "tool_calls"]
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


def test_a_stop_string_in_the_common_prefix_leaves_one_choice(player: Player, client: httpx.Client) -> None:
    player.prepare(info=POPULATION, text="return a", more={"exact": False})
    (choice,) = client.post(TEXT, json={**ASK, "n": 3, "stop": "turn"}).json()["choices"]
    assert (choice["text"], choice["weight"]) == ("re", 1.0)


@pytest.mark.usefixtures("particles")
def test_a_stop_string_cuts_each_text(player: Player, client: httpx.Client) -> None:
    choices = client.post(TEXT, json={**ASK, "n": 3, "stop": [" + ", "ass"]}).json()["choices"]
    assert [choice["text"] for choice in choices] == ["return a", "return a - b", "p"]
    assert [choice["stop_reason"] for choice in choices] == [" + ", None, "ass"]
    assert [choice["finish_reason"] for choice in choices] == ["stop", "length", "stop"]


@pytest.mark.usefixtures("particles")
def test_one_choice_equals_an_ordinary_answer(player: Player, client: httpx.Client) -> None:
    for same in ({}, {"n": 1}, {"best_of": 1}, {"n": 1, "best_of": 0}):
        (choice,) = client.post(TEXT, json={**ASK, **same}).json()["choices"]
        assert choice["text"] == "return a" and "weight" not in choice and player.requests[-1].choices is None
    assert client.post(TEXT, json={**ASK, "best_of": 4}).status_code == 200 and player.requests[-1].choices == (1, 4)


@pytest.mark.parametrize(
    ("path", "more", "param", "error"),
    [
        (TEXT, {"n": 5}, "n", "n must be in 1..best_of, and best_of at most 4, the particles of this server"),
        (TEXT, {"n": 2, "best_of": 5}, "n", "best_of at most 4"),
        (TEXT, {"best_of": 5}, "best_of", "best_of at most 4"),
        (TEXT, {"n": 3, "best_of": 2}, "n", "1..best_of"),
        (TEXT, {"n": 0}, "n", "1..best_of"),
        (TEXT, {"n": 2, "stream": True}, "n", "omit stream"),
        (TEXT, {"n": 2, "smc": {"particles": 9}}, "smc", "particles is 4 on this server, not 9"),
        (CHAT, {"n": 5}, "n", "best_of at most 4"),
        (CHAT, {"n": 2, "stream": True}, "n", "omit stream"),
        (CHAT, {"best_of": 3, "smc": None}, "best_of", "only supported by /v1/completions, or in mode smc"),
        (TEXT, {"best_of": 3, "smc": None}, "best_of", "is not supported in mode smc; use n"),
        (MESSAGES, {"n": 2, "max_tokens": 5}, None, "n: not supported"),
        (MESSAGES, {"best_of": 3, "max_tokens": 5}, None, "best_of: not supported"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("particles")
def test_invalid_numbers_of_texts_of_a_population_are_refused(
    player: Player, client: httpx.Client, path: str, more: dict[str, Any], param: str | None, error: str
) -> None:
    body = ASK if path == TEXT else {**HELLO, "smc": {}}
    if path == MESSAGES:
        message = client.post(path, json={**body, **more}).json()["error"]["message"]
    else:
        message = refused(client, path, {**body, **more}, param)
    assert error in message and not player.requests


def test_texts_of_a_population_require_mode_smc(player: Player, client: httpx.Client) -> None:
    assert "this server runs mode serial; start the server with --mode smc" in refused(
        client, TEXT, {**ASK, "n": 2}, "smc"
    )


def streamed(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = client.post(path, json={**body, "stream": True})
    *events, done = answer.text.strip().split("\n\n")
    assert answer.status_code == 200 and done == "data: [DONE]", answer.text
    return [json.loads(event.removeprefix("data: ")) for event in events]


def seeds(player: Player) -> list[int]:
    return [request.sampling.seed for request in player.requests]


@pytest.mark.parametrize("info", [READY, BATCH, POPULATION], ids=["serial", "batch", "smc"])
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_independent_samples(player: Player, client: httpx.Client, path: str, info: Any) -> None:
    """In every mode, whole and streamed."""
    body: dict[str, Any] = {**(HELLO if path == CHAT else {"prompt": "a"}), "seed": 7, "n": 3, "max_tokens": 50}
    player.prepare(info=info, texts=TEXTS, size=2)
    answer = client.post(path, json=body).json()
    texts = [choice["text"] if path == TEXT else choice["message"]["content"] for choice in answer["choices"]]
    assert texts == [text for text, _ in TEXTS[:3]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert all(choice["timings"] == TIMINGS and choice["finish_reason"] == "stop" for choice in answer["choices"])
    usage = answer["usage"]
    assert usage["completion_tokens"] == sum(len(player.tokens(text)) for text in texts)
    assert usage["prompt_tokens"] == len(player.requests[0].prompt)
    assert answer["timings"]["predicted_n"] == 3 * TIMINGS["predicted_n"] and "metrics" not in answer
    assert seeds(player) == [7, choice_seed(7, 1), choice_seed(7, 2)] and len({*seeds(player)}) == 3

    player.prepare(info=info, texts=TEXTS, size=2)
    *chunks, last = streamed(client, path, {**body, "stream_options": {"include_usage": True}})
    assert (last["choices"], last["usage"], last["timings"]) == ([], usage, answer["timings"])
    parts: dict[int, list[Any]] = {0: [], 1: [], 2: []}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        parts[choice["index"]].append(choice)
    for index, text in enumerate(texts):
        found = [part["text"] if path == TEXT else part["delta"].get("content", "") for part in parts[index]]
        assert "".join(found) == text
        reasons = [part["finish_reason"] for part in parts[index]]
        assert reasons == [None] * (len(reasons) - 1) + ["stop"] and parts[index][-1]["timings"] == TIMINGS
        assert path == TEXT or parts[index][0]["delta"] == {"role": "assistant", "content": ""}
    order = [chunk["choices"][0]["index"] for chunk in chunks]
    assert (order == sorted(order)) == (info is not BATCH), "a batch decodes them concurrently"


def test_without_a_seed_each_choice_has_its_own(player: Player, client: httpx.Client) -> None:
    client.post(TEXT, json={"prompt": ["a", "b"], "n": 2})
    assert len({*seeds(player)}) == 4
    player.prepare()
    client.post(TEXT, json={"prompt": ["a", "b"], "n": 2, "seed": 7})
    assert seeds(player) == [7, choice_seed(7, 1)] * 2, "a prompt has the answer that it has alone"


def test_the_statistics_are_in_the_last_chunk(player: Player, client: httpx.Client) -> None:
    player.prepare(texts=TEXTS)
    chunks = streamed(client, CHAT, {**HELLO, "n": 2})
    assert [number for number, chunk in enumerate(chunks) if "timings" in chunk] == [len(chunks) - 1]


@pytest.mark.parametrize("stream", [False, True])
def test_each_prompt_has_its_choices(player: Player, client: httpx.Client, stream: bool) -> None:
    """With the echo and the log-probabilities of its own prompt, as evaluation tools request them."""
    body: dict[str, Any] = {"prompt": [[274, 9], [5, 6, 7]], "n": 2, "echo": True, "logprobs": 1, "max_tokens": 9}
    player.prepare(texts=TEXTS)
    if stream:
        chunks = streamed(client, TEXT, body)
        choices = [[chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == at] for at in range(4)]
        texts = ["".join(part["text"] for part in parts) for parts in choices]
        logprobs = [[one for part in parts if part["logprobs"] for one in part["logprobs"]["token_logprobs"]]
                    for parts in choices]  # fmt: skip
        offsets = [parts[0]["logprobs"]["text_offset"] for parts in choices]
    else:
        answer = client.post(TEXT, json=body).json()
        texts = [choice["text"] for choice in answer["choices"]]
        logprobs = [choice["logprobs"]["token_logprobs"] for choice in answer["choices"]]
        offsets = [choice["logprobs"]["text_offset"] for choice in answer["choices"]]
        assert answer["usage"]["prompt_tokens"] == 5
    prompts = [player.codec.decode(prompt) for prompt in body["prompt"]]
    assert texts == [prompts[at // 2] + text for at, (text, _) in enumerate(TEXTS)]
    assert [request.prompt for request in player.requests] == [[274, 9]] * 2 + [[5, 6, 7]] * 2
    for at, (text, logprob) in enumerate(TEXTS):
        expected = [None, *[-0.5] * (len(body["prompt"][at // 2]) - 1), *[logprob] * len(player.tokens(text))]
        assert logprobs[at] == expected and offsets[at][0] == 0


def test_texts_as_prompts(player: Player, client: httpx.Client) -> None:
    answer = client.post(TEXT, json={"prompt": ["a", "b c"], "max_tokens": 0, "echo": True}).json()
    assert [choice["text"] for choice in answer["choices"]] == ["a", "b c"]
    assert answer["usage"]["completion_tokens"] == 0
    assert client.post(TEXT, json={"prompt": ["a"] * 128, "n": 4, "max_tokens": 1}).status_code == 200


def test_each_prompt_has_texts_of_its_population(player: Player, client: httpx.Client) -> None:
    """Their index is that of clients that expect n choices per prompt."""
    player.prepare(info=POPULATION, choices=ANSWER, more={"exact": False})
    choices = client.post(TEXT, json={**ASK, "prompt": ["a", "b"], "n": 4}).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 4, 5, 6]
    assert [choice["weight"] for choice in choices] == [0.5, 0.25, 0.25] * 2 and choices[0]["exact"] is False


def test_best_of_returns_the_most_likely_choices(player: Player, client: httpx.Client) -> None:
    player.prepare(texts=TEXTS)
    answer = client.post(TEXT, json={"prompt": "a", "n": 2, "best_of": 4, "max_tokens": 50}).json()
    assert [choice["text"] for choice in answer["choices"]] == ["pass", "def f"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["choices"][0]["logprobs"] is None, "not requested"
    assert answer["usage"]["completion_tokens"] == sum(len(player.tokens(text)) for text, _ in TEXTS)
    player.prepare()
    answer = client.post(TEXT, json={"prompt": ["a", "b"], "n": 1, "best_of": 2, "logprobs": 2}).json()
    assert len(answer["choices"]) == 2 and len(answer["choices"][0]["logprobs"]["top_logprobs"][0]) == 2
    player.prepare(texts=TEXTS)
    assert len(streamed(client, TEXT, {"prompt": "a", "n": 2, "best_of": 2})) > 2
    assert all(request.sampling.logprobs is None for request in player.requests)


def test_a_failure_of_one_choice_is_one_error(player: Player, client: httpx.Client) -> None:
    failure = GenerationFailedError("the answer was interrupted", "engine_error")
    for info, number in ((READY, 1), (BATCH, 2)):
        player.prepare(info=info, raises=failure, after=1)
        answer = client.post(TEXT, json={"prompt": "a", "n": 2})
        assert answer.status_code == 500 and len(player.closed) == len(player.requests) == number
    player.prepare(raises=failure, after=1)
    assert client.post(CHAT, json={**HELLO, "n": 2, "stream": True}).text.count("error") == 2, "type and engine_error"


@pytest.mark.parametrize(
    ("path", "more", "param", "error"),
    [
        (TEXT, {"n": 0}, "n", "n: must be at least 1"),
        (CHAT, {"n": 0}, "n", "n: must be at least 1"),
        (TEXT, {"n": 513}, "n", "n: 513 choices are more than 512 in total; send several requests"),
        (TEXT, {"prompt": ["a"] * 128, "n": 5}, "n", "n: 5 choices for each of 128 prompts are more than 512 in total"),
        (TEXT, {"best_of": 600}, "best_of", "best_of: 600 choices are more than 512 in total"),
        (TEXT, {"prompt": ["a"] * 129}, "prompt", "prompt: 129 prompts are more than 128; send several requests"),
        (TEXT, {"prompt": ["a", ""]}, "prompt", "prompt 1: prompt: must not be empty"),
        (TEXT, {"prompt": [[1], [2, 999]]}, "prompt", "prompt 1: prompt: token 999 is outside the vocabulary"),
        (TEXT, {"n": 3, "best_of": 2}, "best_of", "must be at least n, which is 3"),
        (TEXT, {"n": 2, "best_of": 3, "stream": True}, "best_of", "not supported with stream, since"),
        (CHAT, {"best_of": 3}, "best_of", "only supported by /v1/completions"),
    ],
    ids=str,
)
def test_invalid_numbers_of_choices_are_refused(
    player: Player, client: httpx.Client, path: str, more: dict[str, Any], param: str, error: str
) -> None:
    body = {"prompt": "a"} if path == TEXT else HELLO
    assert error in refused(client, path, {**body, **more}, param) and not player.requests
