"""Fields about tokens: rules of sampling, truncation, token ids and log-probabilities in the response, ends of the
text."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec
import pytest

from swiftspec.serve.format.logprobs import LogprobFormatter
from swiftspec.serve.link.frames import TokenLogprob
from tests.serve.api.test_sampling import engine_request
from tests.serve.test_app import CHAT, HELLO, TEXT, refused
from tests.support.http import Player

PATHS = pytest.mark.parametrize("path", [TEXT, CHAT])
Json = dict[str, Any]


def answer(client: httpx.Client, path: str, **body: Any) -> Json:
    found = client.post(path, json={**(HELLO if path == CHAT else {"prompt": "def"}), "max_tokens": 64, **body})
    assert found.status_code == 200, found.text
    return found.json()


def chunks(client: httpx.Client, path: str, **body: Any) -> list[Json]:
    given = {**(HELLO if path == CHAT else {"prompt": "def"}), "max_tokens": 64, **body, "stream": True}
    lines = client.post(path, json=given).text.strip().split("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def text_of(response: Json) -> str:
    choice = response["choices"][0]
    return choice["message"]["content"] if "message" in choice else choice["text"]


@PATHS
def test_rules_reach_the_engine(player: Player, client: httpx.Client, path: str) -> None:
    words = {"bad_words": ["def", " def", "add ("]}
    sampling = engine_request(
        client, player, path, min_tokens=4, max_tokens=16, allowed_token_ids=[3, 5], top_k=10**6, **words
    )
    assert (sampling.min_tokens, sampling.allowed_token_ids, sampling.top_k) == (4, (3, 5), 10**6)
    encoded = [tuple(player.codec.encode(word, None, False)) for word in ("def", " def", "add (", " add (")]
    assert sampling.bad_words_ids == tuple(encoded)
    assert engine_request(client, player, path, max_tokens=300, min_tokens=300).min_tokens < 256, "what fits"


@PATHS
@pytest.mark.parametrize("stream", [False, True])
def test_rules_that_leave_no_token_are_refused(player: Player, client: httpx.Client, path: str, stream: bool) -> None:
    """By the front end: the engine does not see the request."""
    (token,) = player.codec.encode("def", None, False)
    given: dict[str, Any] = HELLO if path == CHAT else {"prompt": ["a", "b"]}
    message = refused(client, path, {**given, "allowed_token_ids": [token], "bad_words": ["def"], "stream": stream})
    assert "no token is left" in message and message.startswith("prompt 0: ") == (path == TEXT)
    assert player.requests == []


def test_all_invalid_keys_of_logit_bias_are_named(player: Player, client: httpx.Client) -> None:
    biases = {"5": 1, "-1": 1, "x": 1, "320": 1, "1.5": 2, "٣": 1}
    message = refused(client, TEXT, {"prompt": "a", "logit_bias": biases}, "logit_bias")
    assert message == "logit_bias: '-1', 'x', '320', '1.5', '٣': a key must be a token id below the vocabulary size 320"
    many = refused(client, TEXT, {"prompt": "a", "logit_bias": {f"k{i}": 1 for i in range(40)}}, "logit_bias")
    assert "'k15' and 24 more" in many
    assert engine_request(client, player, logit_bias={"319": -100, "007": 100}).logit_bias == {319: -100, 7: 100}
    message = refused(client, TEXT, {"prompt": "a", "logit_bias": {"5": 101}}, "logit_bias.5")
    assert "less than or equal to 100" in message


@pytest.mark.parametrize("side", ["left", pytest.param("right", marks=pytest.mark.slow)])
def test_a_long_text_is_cut_before_it_is_encoded(
    player: Player, client: httpx.Client, side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizer, which serves one client at a time, sees no more text than the longest prompt that fits."""
    text, encoded = "".join(f"{number} " for number in range(100_000)), list[int]()
    whole, encode = player.codec.encode(text), player.codec.tokenizer.encode
    kept = whole[:5] if side == "right" else whole[-5:]

    def measured(text: str, **options: Any) -> Any:
        encoded.append(len(text))
        return encode(text, **options)

    monkeypatch.setattr(player.codec.tokenizer, "encode", measured)
    cut = {"truncate_prompt_tokens": 5, "truncation_side": side}
    answer(client, TEXT, prompt=text, max_tokens=1, **cut, echo=True)
    assert player.requests[-1].prompt == kept
    for path, body in ((f"{TEXT}/render", {"prompt": text}), (CHAT, {"messages": [{"role": "user", "content": text}]})):
        assert client.post(path, json={**body, **cut}).status_code == 200
    assert max(encoded) <= 256 * player.codec.longest_token_bytes < len(text)


@PATHS
@pytest.mark.parametrize(("count", "side"), [(3, None), (3, "left"), (3, "right"), (250, None), (-1, "right")])
def test_truncation(player: Player, client: httpx.Client, path: str, count: int, side: str | None) -> None:
    text = "ab " * 700
    messages = [{"role": "user", "content": text}]
    body: Json = {"messages": messages} if path == CHAT else {"prompt": text}
    whole = player.codec.encode_chat(messages) if path == CHAT else player.codec.encode(text)
    kept = 256 - 6 if count < 0 else count
    response = answer(client, path, **body, max_tokens=6, truncate_prompt_tokens=count, truncation_side=side)
    assert player.requests[-1].prompt == (whole[:kept] if side == "right" else whole[-kept:])
    assert response["usage"]["prompt_tokens"] == kept


def test_truncation_that_leaves_no_prompt_is_refused(player: Player, client: httpx.Client) -> None:
    nothing = {"prompt": "a", "truncate_prompt_tokens": 0}
    assert "at least 1" in refused(client, TEXT, nothing, "truncate_prompt_tokens")
    full = {"prompt": "a", "truncate_prompt_tokens": -1, "max_tokens": 256}
    assert "use a smaller max_tokens" in refused(client, TEXT, full, "truncate_prompt_tokens")


def test_a_truncated_prompt_is_echoed(player: Player, client: httpx.Client) -> None:
    response = answer(client, TEXT, prompt="a = b + c", truncate_prompt_tokens=2, echo=True, max_tokens=0, logprobs=0)
    assert text_of(response) == player.codec.decode(player.requests[-1].prompt) and len(player.requests[-1].prompt) == 2
    assert len(response["choices"][0]["logprobs"]["tokens"]) == 2
    refused(client, TEXT, {"prompt": "a", "truncate_prompt_tokens": 2, "suffix": "b"}, "truncate_prompt_tokens")


def prompt_owner(response: dict[str, Any], path: str) -> dict[str, Any]:
    """The object with the fields of the prompt."""
    return response if path == CHAT else response["choices"][0]


@PATHS
def test_token_ids(player: Player, client: httpx.Client, path: str) -> None:
    response = answer(client, path, return_token_ids=True)
    choice, prompt = response["choices"][0], player.requests[-1].prompt
    assert choice["token_ids"] == player.tokens()
    assert prompt_owner(response, path)["prompt_token_ids"] == prompt
    first, *others = chunks(client, path, return_token_ids=True)
    assert (first if path == CHAT else first["choices"][0])["prompt_token_ids"] == prompt
    assert not any("prompt_token_ids" in json.dumps(chunk) for chunk in others)
    streamed = [token for chunk in others for token in chunk["choices"][0].get("token_ids") or ()]
    assert streamed == player.tokens()
    assert "token_ids" not in json.dumps(chunks(client, path))
    plain = answer(client, path)
    assert (plain["choices"][0]["token_ids"], prompt_owner(plain, path)["prompt_token_ids"]) == (None, None)


@PATHS
def test_usage_in_every_chunk(player: Player, client: httpx.Client, path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks(client, path, stream_options=options)]
    assert counts == sorted(counts) and counts[-1] == len(player.tokens()) and len({*counts}) > 3
    alone = chunks(client, path, stream_options={"continuous_usage_stats": True})
    assert not any("usage" in chunk for chunk in alone)


@PATHS
def test_prompt_log_probabilities(player: Player, client: httpx.Client, path: str) -> None:
    response = answer(client, path, prompt_logprobs=2)
    found = prompt_owner(response, path)["prompt_logprobs"]
    prompt = player.requests[-1].prompt
    assert found[0] is None and len(found) == len(prompt)
    for token, entry in zip(prompt[1:], found[1:], strict=True):
        text = player.codec.token_text([token])
        assert entry[str(token)] == {"logprob": -0.5, "rank": 1, "decoded_token": text}
        assert [each["rank"] for each in entry.values()] == [1, 2] or token == 1
    assert prompt_owner(answer(client, path), path)["prompt_logprobs"] is None
    assert player.requests[-2].sampling.prompt_logprobs == 2
    assert engine_request(client, player, path, prompt_logprobs=-1).prompt_logprobs == -1


def test_prompt_log_probabilities_without_an_answer(player: Player, client: httpx.Client) -> None:
    response = answer(client, TEXT, prompt_logprobs=0, max_tokens=0)
    assert text_of(response) == "" and len(response["choices"][0]["prompt_logprobs"]) == len(player.requests[-1].prompt)
    echoed = answer(client, TEXT, prompt_logprobs=3, max_tokens=0, echo=True, logprobs=1)["choices"][0]
    assert player.requests[-1].sampling.prompt_logprobs == 3
    assert all(len(entry) <= 2 for entry in echoed["logprobs"]["top_logprobs"][1:])


def test_counts_of_log_probabilities(player: Player, client: httpx.Client) -> None:
    for count, length in ((0, 0), (2, 2), (-1, 30)):
        content = answer(client, CHAT, logprobs=True, top_logprobs=count)["choices"][0]["logprobs"]["content"]
        assert player.requests[-1].sampling.logprobs == count
        assert {len(item["top_logprobs"]) for item in content} == {length}
        logprobs = answer(client, TEXT, logprobs=count)["choices"][0]["logprobs"]
        assert player.requests[-1].sampling.logprobs == count
        assert all(len(entry) <= max(length, 1) for entry in logprobs["top_logprobs"])
    sampling = engine_request(client, player, CHAT, logprobs=True, top_logprobs=3, logprob_token_ids=[7, 7, 9])
    assert (sampling.logprobs, sampling.logprob_token_ids) == (0, (7, 9))


def test_the_sampled_token_is_listed_beside_the_requested_ones(player: Player) -> None:
    formatter = LogprobFormatter(player.codec, list_sampled=True)
    listed = TokenLogprob(-0.5, [(7, -1.0), (9, -2.0)], 1)
    for token, others in ((7, [7, 9]), (8, [8, 7, 9])):
        (item,) = formatter.chat_logprobs([token], [listed], 99)
        top = msgspec.json.decode(item["top_logprobs"])
        assert [each["logprob"] for each in top] == [-0.5, -1.0, -2.0][-len(others) :]


def test_one_choice_computes_the_prompt(player: Player, client: httpx.Client) -> None:
    response = answer(client, TEXT, n=2, prompt_logprobs=1)
    assert sorted(request.sampling.prompt_logprobs is None for request in player.requests[-2:]) == [False, True]
    one, two = (choice["prompt_logprobs"] for choice in response["choices"])
    assert one == two and len(one) == len(player.requests[-1].prompt)


@pytest.mark.parametrize(
    "body",
    [{"logprobs": -1, "max_tokens": 99}, {"logprobs": -1, "max_tokens": 2, "n": 2}, {"prompt_logprobs": -1}],
)
def test_the_log_probabilities_of_all_tokens_are_limited(
    player: Player, client: httpx.Client, body: Json, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swiftspec.serve.api.token_fields.MAX_LOGPROB_VALUES", 3 * 320)
    name = next(iter(body))
    message = refused(client, TEXT, {"prompt": "a = b + c", **body}, name)
    assert message.startswith(f"{name}: -1 returns 320 values per token, so ")
    assert "at most 3 tokens together, not " in message


def test_tokens_as_token_ids(player: Player, client: httpx.Client) -> None:
    names = [f"token_id:{token}" for token in player.tokens()]
    body: Json = {"return_tokens_as_token_ids": True}
    content = answer(client, CHAT, logprobs=True, top_logprobs=1, **body)["choices"][0]["logprobs"]["content"]
    assert [item["token"] for item in content] == names == [item["top_logprobs"][0]["token"] for item in content]
    assert bytes(byte for item in content for byte in item["bytes"]).decode() == player.text
    logprobs = answer(client, TEXT, logprobs=1, **body)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == names and [*logprobs["top_logprobs"][0]] == names[:1]


@PATHS
def test_stop_strings_can_be_included(player: Player, client: httpx.Client, path: str) -> None:
    body: Json = {"stop": ["b):"], "include_stop_str_in_output": True}
    response = answer(client, path, **body)
    assert text_of(response) == "def add(a, b):" and response["choices"][0]["stop_reason"] == "b):"
    parts = [chunk["choices"][0] for chunk in chunks(client, path, **body)]
    assert "".join(part["delta"].get("content") or "" if path == CHAT else part["text"] for part in parts) == (
        "def add(a, b):"
    )


@PATHS
def test_no_stop_string_ends_an_answer_shorter_than_min_tokens(player: Player, client: httpx.Client, path: str) -> None:
    tokens = player.tokens()
    text = player.codec.decode(tokens)
    for count in (0, 5, len(tokens) - 1, len(tokens)):
        ends = [n for n in range(count + 1, len(tokens) + 1) if "a" in player.codec.decode(tokens[n - 1 : n])]
        for size in (1, 3, 50):
            player.prepare(size=size)
            response = answer(client, path, stop=["a"], min_tokens=count)
            assert response["usage"]["completion_tokens"] == (ends[0] if ends else len(tokens))
            shown = text_of(response)
            assert text.startswith(shown) and (not ends or text[len(shown)] == "a")


@PATHS
def test_a_stop_token_has_no_text(player: Player, client: httpx.Client, path: str) -> None:
    """The scripted engine ends with the last token of its text, which is then the stop token."""
    last = player.tokens()[-1]
    before = player.codec.decode(player.tokens()[:-1])
    response = answer(client, path, stop_token_ids=[last], return_token_ids=True)
    assert text_of(response) == before and response["choices"][0]["stop_reason"] == last
    assert response["choices"][0]["token_ids"] == player.tokens()
    assert chunks(client, path, stop_token_ids=[last])[-1]["choices"][0]["stop_reason"] == last
    assert text_of(answer(client, path, stop_token_ids=[last], include_stop_str_in_output=True)) == player.text
    assert answer(client, path, stop_token_ids=[last], max_tokens=3)["choices"][0]["stop_reason"] is None


@PATHS
def test_special_tokens_can_be_shown(player: Player, client: httpx.Client, path: str) -> None:
    player.prepare(text="a<|user|>b<|end|>")
    assert text_of(answer(client, path)) == "ab"
    assert text_of(answer(client, path, skip_special_tokens=False)) == "a<|user|>b", "without the end token"
    body: Json = {"skip_special_tokens": False, "include_stop_str_in_output": True}
    assert text_of(answer(client, path, **body)) == player.text


def test_offsets_of_an_echoed_prompt_with_special_tokens(player: Player, client: httpx.Client) -> None:
    prompt = "<|user|>def add<|end|><|bot|>"
    choice = answer(client, TEXT, prompt=prompt, echo=True, logprobs=0)["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"] == prompt + player.text
    ends = [*logprobs["text_offset"][1:], len(choice["text"])]
    codec, shown = player.codec, [*player.requests[-1].prompt, *player.tokens()]
    for token, start, end in zip(shown, logprobs["text_offset"], ends, strict=True):
        assert choice["text"][start:end] == codec.token_text([token])
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
