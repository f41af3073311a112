"""Unmodified client libraries against the endpoints."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from swiftspec.sampling.grammar_process import bound_whitespace, lenient
from swiftspec.serve.link.engine_client import GenerationFailedError, RequestRejectedError
from tests.support.clients import anthropic, openai
from tests.support.http import TIMINGS, Player

TEXT = "def add(a, b):\n    return a + b\n"
HELLO: Any = [{"role": "user", "content": "hello"}]
WEATHER: Any = {
    "name": "weather",
    "description": "of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = 'I ask.\n<tool_call>\n{"name": "weather", "arguments": {"city": "中"}}\n</tool_call>'


def theirs(url: str, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="-", **options)


def anthropics(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key="-")


def test_chat(player: Player, plain_url: str) -> None:
    answer = theirs(plain_url).chat.completions.create(model="toy", messages=HELLO, seed=5, extra_body={"top_k": 4})
    assert answer.choices[0].message.content == TEXT and answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.completion_tokens == 14
    assert (player.requests[0].sampling.seed, player.requests[0].sampling.top_k) == (5, 4)
    assert answer.to_dict()["timings"] == TIMINGS


def test_chat_as_a_stream(player: Player, plain_url: str) -> None:
    player.prepare(size=5)
    with theirs(plain_url).chat.completions.create(
        model="toy", messages=HELLO, stream=True, stream_options={"include_usage": True}, logprobs=True, top_logprobs=2
    ) as stream:
        chunks = list(stream)
    assert [len(chunk.choices) for chunk in chunks] == [1] * (len(chunks) - 1) + [0]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == TEXT
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert len(chunks) == 1 + 3 + 1 + 1, "the role, three rounds, the end, and the usage"
    items = [len(c.choices[0].logprobs.content or ()) for c in chunks[:-1] if c.choices[0].logprobs]
    assert items == [5, 5, 4]
    assert chunks[-1].usage is not None and chunks[-1].usage.total_tokens == 14 + len(player.requests[0].prompt)


def test_concurrent_messages_with_async_clients(player: Player, plain_url: str) -> None:
    async def all_of_them() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{plain_url}/v1", api_key="-") as client:
            requests = [client.chat.completions.create(model="other", messages=HELLO) for _ in range(8)]
            return await asyncio.gather(*requests)

    assert {answer.choices[0].message.content for answer in asyncio.run(all_of_them())} == {TEXT}


def test_completions(player: Player, plain_url: str) -> None:
    client = theirs(plain_url)
    answer = client.completions.create(model="toy", prompt=["def f"], echo=True, logprobs=2, max_tokens=3, stop=["q"])
    choice = answer.choices[0]
    assert choice.text == "def fdef add" and choice.finish_reason == "length"
    assert choice.logprobs is not None and choice.logprobs.tokens is not None
    assert "".join(choice.logprobs.tokens) == choice.text and choice.logprobs.text_offset == [0, 3, 4, 5, 8, 11]
    assert choice.logprobs.token_logprobs is not None and choice.logprobs.token_logprobs[0] is None
    stream = client.completions.create(model="toy", prompt=[274, 5], max_tokens=100, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == TEXT
    assert player.requests[-1].prompt == [274, 5]


def test_tools(thinker: Player, hermes_url: str) -> None:
    thinker.prepare(text=CALL)
    client = theirs(hermes_url)
    tools: Any = [{"type": "function", "function": WEATHER}]
    answer = client.chat.completions.create(model="toy", messages=HELLO, tools=tools)
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls" and message.tool_calls and message.content == "I ask."
    assert message.tool_calls[0].to_dict()["function"] == {"name": "weather", "arguments": '{"city": "中"}'}
    conversation: Any = [*HELLO, message.to_dict(), {"role": "tool", "tool_call_id": "x", "content": "rain"}]
    with client.chat.completions.stream(model="toy", messages=conversation, tools=tools) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].finish_reason == "tool_calls"
    prompt = thinker.codec.token_text(thinker.requests[-1].prompt)
    assert prompt.startswith('weather <tool_call><|user|>hello<|end|><|bot|>I ask.\n<tool_call>\n{"name": "weather"')


def test_reasoning(thinker: Player, hermes_url: str) -> None:
    thinker.prepare(text="<think>\nhm, 中\n</think>\n\nfine", size=4)
    answer = theirs(hermes_url).chat.completions.create(model="toy", messages=HELLO)
    assert answer.choices[0].message.to_dict()["reasoning_content"] == "hm, 中"
    assert answer.choices[0].message.content == "fine"
    assert answer.usage and answer.usage.completion_tokens_details
    assert 10 < (answer.usage.completion_tokens_details.reasoning_tokens or 0) < answer.usage.completion_tokens


def test_responses(thinker: Player, hermes_url: str) -> None:
    client = theirs(hermes_url)
    answer = client.responses.create(model="toy", input="hello", instructions="be brief")
    assert answer.output_text == TEXT and answer.status == "completed"
    assert thinker.codec.token_text(thinker.requests[0].prompt) == "<|bot|>be brief<|end|><|user|>hello<|end|><|bot|>"
    thinker.prepare(text=f"<think>hm</think>{CALL}", size=4)
    tools: Any = [{"type": "function", **WEATHER}]
    with client.responses.stream(model="toy", input=[{"role": "user", "content": "hello"}], tools=tools) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert {"response.reasoning_text.delta", "response.function_call_arguments.done"} <= set(kinds)
    given: Any = [*(item.to_dict() for item in final.output), {"type": "function_call_output", "output": "rain"}]
    given[-1]["call_id"] = given[2]["call_id"]
    client.responses.create(model="toy", input=[*HELLO, *given])
    prompt = thinker.codec.token_text(thinker.requests[-1].prompt)
    assert 'I ask.\n<tool_call>\n{"name": "weather"' in prompt


def test_stored_responses(player: Player, plain_url: str) -> None:
    client = theirs(plain_url, max_retries=0)
    first = client.responses.create(model="toy", input="hello")
    assert client.responses.retrieve(first.id) == first
    second = client.responses.create(model="toy", input="more", previous_response_id=first.id)
    prompt = f"<|user|>hello<|end|><|bot|>{TEXT}<|end|><|user|>more<|end|><|bot|>"
    assert player.codec.token_text(player.requests[-1].prompt) == prompt
    items = list(client.responses.input_items.list(second.id, limit=1))  # reads three pages
    assert [item.to_dict()["role"] for item in items] == ["user", "assistant", "user"]
    counted = client.responses.input_tokens.count(model="toy", input="more", previous_response_id=first.id)
    assert second.usage is not None and counted.input_tokens == second.usage.input_tokens
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match=r"Response with id .* not found"):
        client.responses.retrieve(first.id)
    player.prepare(raises=GenerationFailedError("rank 1 is gone", "engine_error"), after=1)
    with pytest.raises(openai.APIError, match="rank 1 is gone"):
        list(client.responses.create(model="toy", input="hello", stream=True))


@pytest.mark.slow
def test_anthropic_messages(thinker: Player, hermes_url: str) -> None:
    client = anthropics(hermes_url)
    answer = client.messages.create(
        model="toy", max_tokens=100, messages=HELLO, system="be brief", stop_sequences=["b):", "return"]
    )
    assert answer.content[0].to_dict() == {"type": "text", "text": "def add(a, "}
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "b):")
    assert thinker.stopped == thinker.requests and not thinker.closed, "the request was ended early"
    thinker.prepare(text=f"<think>hm</think>{CALL}", size=4)
    tools: Any = [{"name": "weather", "input_schema": WEATHER["parameters"]}]
    with client.messages.stream(model="toy", max_tokens=200, messages=HELLO, tools=tools) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == "I ask." and final.stop_reason == "tool_use"
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
    assert final.content[2].to_dict()["input"] == {"city": "中"}
    result = {"type": "tool_result", "tool_use_id": "x", "content": [{"type": "text", "text": "rain"}]}
    conversation: list[Any] = [*HELLO, {"role": "assistant", "content": [block.to_dict() for block in final.content]}]
    conversation.append({"role": "user", "content": [result]})
    count = client.messages.count_tokens(model="toy", messages=conversation)
    assert count.input_tokens > 30
    assert client.models.list().data[0].id == "toy"


def test_several_choices_and_prompts(player: Player, plain_url: str) -> None:
    client = theirs(plain_url)
    chat = client.chat.completions.create(model="toy", messages=HELLO, n=2, seed=5, temperature=0.5)
    assert [choice.message.content for choice in chat.choices] == [TEXT, TEXT]
    with client.chat.completions.stream(model="toy", messages=HELLO, n=2) as stream:
        final = stream.get_final_completion()
    assert [(choice.message.content, choice.finish_reason) for choice in final.choices] == [(TEXT, "stop")] * 2
    text = client.completions.create(model="toy", prompt=[[274, 5], [274, 6]], n=2, max_tokens=100)
    assert [(choice.index, choice.text) for choice in text.choices] == [(at, TEXT) for at in range(4)]
    assert text.usage and (text.usage.prompt_tokens, text.usage.completion_tokens) == (4, 56)


@pytest.mark.slow
def test_langchain(player: Player, plain_url: str) -> None:
    from langchain_openai import ChatOpenAI, OpenAI  # takes seconds

    model = ChatOpenAI(model="toy", base_url=f"{plain_url}/v1", api_key="-")  # pyright: ignore[reportArgumentType]
    assert model.invoke("hello").content == TEXT
    assert "".join(str(chunk.content) for chunk in model.stream("hello")) == TEXT
    newer = model.model_copy(update={"use_responses_api": True})
    assert newer.invoke("hello").text == TEXT
    completions = OpenAI(model="toy", base_url=f"{plain_url}/v1", api_key="-")  # pyright: ignore[reportArgumentType]
    player.prepare()
    assert completions.batch(["a", "b", "c"]) == [TEXT] * 3
    assert [player.codec.token_text(request.prompt) for request in player.requests] == ["a", "b", "c"]


@pytest.mark.slow
def test_errors_have_the_types_of_the_libraries(player: Player, plain_url: str) -> None:
    client = theirs(plain_url, max_retries=0)
    with pytest.raises(openai.NotFoundError, match="The model 'gpt' does not exist: use toy, other"):
        client.chat.completions.create(model="gpt", messages=HELLO)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="toy", messages=HELLO, extra_body={"use_beam_search": True})
    assert (caught.value.param, caught.value.code) == ("use_beam_search", "unsupported_parameter")
    player.prepare(raises=RequestRejectedError("the queue is full", 429, 1.5))
    with pytest.raises(openai.RateLimitError) as refused:
        client.chat.completions.create(model="toy", messages=HELLO, stream=True)
    headers = refused.value.response.headers
    assert (headers["retry-after"], headers["retry-after-ms"]) == ("2", "1500")
    player.prepare(raises=GenerationFailedError("rank 1 is gone", "engine_error"), after=1)
    with pytest.raises(openai.APIError, match="rank 1 is gone"):
        list(client.chat.completions.create(model="toy", messages=HELLO, stream=True))
    with pytest.raises(anthropic.NotFoundError, match="model: 'gpt'"):
        anthropics(plain_url).messages.create(model="gpt", max_tokens=5, messages=HELLO)
    with (
        pytest.raises(anthropic.APIStatusError, match="rank 1 is gone"),
        anthropics(plain_url).messages.stream(model="toy", max_tokens=9, messages=HELLO) as stream,
    ):
        list(stream)


def test_retryable_errors_are_retried(player: Player, plain_url: str) -> None:
    for after, tries in ((0.001, 3), (None, 1)):
        player.prepare(raises=RequestRejectedError("not now", 503, after))
        with pytest.raises(openai.InternalServerError, match="not now"):
            theirs(plain_url, max_retries=2).chat.completions.create(model="toy", messages=HELLO)
        assert len(player.requests) == tries


def test_a_json_schema(player: Player, plain_url: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    client = theirs(plain_url)
    client.chat.completions.create(model="toy", messages=HELLO, response_format=form)
    bounded = bound_whitespace(lenient(schema))  # without `strict`
    assert json.loads(player.grammar)["grammars"][0]["json_schema"] == bounded
    text: Any = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    client.responses.create(model="toy", input="hello", text=text)
    assert json.loads(player.grammar)["grammars"][0]["json_schema"] == bounded
    form = {"type": "json_schema", "schema": schema}
    config: Any = {"format": form}
    anthropics(plain_url).messages.create(model="toy", max_tokens=9, messages=HELLO, output_config=config)
    assert json.loads(player.grammar)["grammars"][0]["json_schema"] == bounded
