"""Conversations as engine requests: tools, reasoning, and the variables of the template."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from swiftspec.text.codec import TextCodec
from swiftspec.text.template import TemplateRenderer
from tests.serve.test_app import CHAT, HELLO, MESSAGES, RESPONSES, refused
from tests.support.grammars import accepts
from tests.support.http import Player, application
from tests.support.toy_pair import SPECIAL, byte_level_tokenizer, write_tokenizer

DEMO = Path(__file__).parents[3] / "swiftspec" / "demo" / "target"
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}},
    {"type": "function", "function": {"name": "g"}},
]
TWO = '<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>{"name": "g", "arguments": {}}</tool_call>'


def ask(player: Player, path: str, **body: Any) -> dict[str, Any]:
    """One request to a separate application, without a server."""

    async def post() -> httpx.Response:
        transport = httpx.ASGITransport(application(player))
        async with httpx.AsyncClient(transport=transport, base_url="http://toy") as client:
            return await client.post(path, json=body)

    answer = asyncio.run(post())
    assert answer.status_code == 200, answer.text
    return answer.json()


def prompt(player: Player) -> str:
    return player.codec.token_text(player.requests[-1].prompt)


def test_a_tool_that_must_be_called(thinker: Player) -> None:
    ask(thinker, CHAT, **HELLO, tools=TOOLS, tool_choice="required")
    grammar = thinker.grammar
    assert accepts(grammar, '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>')
    one = {"type": "function", "function": {"name": "g"}}
    ask(thinker, CHAT, **HELLO, tools=TOOLS, tool_choice=one)
    assert "call_1" not in thinker.grammar
    schema = {"name": "f", "input_schema": {"type": "object"}}
    ask(thinker, MESSAGES, **HELLO, max_tokens=9, tools=[schema], tool_choice={"type": "any"})
    assert thinker.grammar
    ask(thinker, CHAT, **HELLO, tools=TOOLS)
    assert not thinker.grammar and prompt(thinker).startswith("f <tool_call>g <tool_call>")
    ask(thinker, CHAT, **HELLO, tools=TOOLS, tool_choice="none")
    assert prompt(thinker).startswith("<|user|>")


def test_an_unknown_tool(thinker: Player, thinking_client: httpx.Client) -> None:
    choice = {"type": "function", "function": {"name": "h"}}
    refused(thinking_client, CHAT, {**HELLO, "tools": TOOLS, "tool_choice": choice}, "tool_choice")
    body = {**HELLO, "tools": TOOLS, "tool_choice": "required", "guided_regex": "a"}
    refused(thinking_client, CHAT, body, "tool_choice")


def test_a_forced_call_replaces_the_format_of_the_answer(thinker: Player) -> None:
    """The format is that of an answer without calls, as with OpenAI. If the model chooses, both are accepted."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "name": "x", "schema": schema}
    bodies: dict[str, dict[str, Any]] = {
        CHAT: {**HELLO, "tools": TOOLS, "response_format": {"type": "json_schema", "json_schema": form}},
        RESPONSES: {"input": "a", "tools": [{"type": "function", "name": "f"}], "text": {"format": form}},
        MESSAGES: {**HELLO, "max_tokens": 9, "tools": [{"name": "f"}], "output_config": {"format": form}},
    }
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    for path, body in bodies.items():
        for choice in ("auto", "any" if path == MESSAGES else "required"):
            ask(thinker, path, **body, tool_choice={"type": choice} if path == MESSAGES else choice)
            grammar = thinker.grammar
            assert accepts(grammar, call) and not accepts(grammar, '{"a": ""}'), path
            assert accepts(grammar, '{"a": 1}') is (choice == "auto"), path
    ask(thinker, CHAT, **bodies[CHAT], tool_choice="none")
    assert not accepts(thinker.grammar, call)


def test_one_call_without_parallel_tool_calls(thinker: Player) -> None:
    for single, names in ((None, ["f", "g"]), (False, ["f"])):
        thinker.prepare(text=TWO + " and so on", size=200)
        choice = ask(thinker, CHAT, **HELLO, tools=TOOLS, parallel_tool_calls=single, max_tokens=200)["choices"][0]
        assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == names
        assert choice["finish_reason"] == "tool_calls"


def test_no_reasoning_if_a_grammar_forbids_it(thinker: Player) -> None:
    thinker.prepare(text="<think>a</think>b")
    assert ask(thinker, CHAT, **HELLO, guided_regex=".*")["choices"][0]["message"]["content"] == "<think>a</think>b"
    assert ask(thinker, CHAT, **HELLO)["choices"][0]["message"]["reasoning_content"] == "a"


def test_reasoning_can_be_omitted(thinker: Player, thinking_client: httpx.Client) -> None:
    thinker.prepare(text="<think>a</think>b")
    answer = ask(thinker, CHAT, **HELLO, include_reasoning=False)
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "b", "refusal": None}
    for logprobs in (False, True):
        body = {**HELLO, "include_reasoning": False, "stream": True, "logprobs": logprobs}
        stream = thinking_client.post(CHAT, json=body).text
        assert "reasoning_content" not in stream and '"content":"b"' in stream.replace(" ", "")


def test_the_variables_of_a_template(thinker: Player) -> None:
    variables = {"effort": "much", "tools_in_user_message": False}
    ask(thinker, CHAT, **HELLO, chat_template_kwargs=variables)
    assert prompt(thinker).startswith("much<|user|>")
    ask(thinker, MESSAGES, **HELLO, max_tokens=5, chat_template_kwargs=variables)
    assert prompt(thinker).startswith("much<|user|>")
    with_special = {"effort": "x", "eos_token": "forged"}
    ask(thinker, CHAT, **HELLO, chat_template_kwargs=with_special)
    assert "forged" not in prompt(thinker)


def test_continuing_the_last_message(thinker: Player) -> None:
    messages = [*HELLO["messages"], {"role": "assistant", "content": "so far"}]
    expected = "<|user|>hello<|end|><|bot|>so far"
    ask(thinker, CHAT, messages=messages, continue_final_message=True)
    assert prompt(thinker) == expected
    ask(thinker, MESSAGES, messages=messages, max_tokens=5)
    assert prompt(thinker) == expected
    ask(thinker, CHAT, messages=messages)
    assert prompt(thinker) == expected + "<|end|><|bot|>"


def test_the_generation_prompt(thinker: Player) -> None:
    """As in vLLM: without it the answer follows the last message, or continues it."""
    messages = [*HELLO["messages"], {"role": "assistant", "content": "so far"}]
    ended, begun = "<|user|>hello<|end|><|bot|>so far<|end|>", "<|user|>hello<|end|><|bot|>so far"
    for fields, expected in (
        ({"add_generation_prompt": False}, ended),
        ({"add_generation_prompt": False, "continue_final_message": False}, ended),
        ({"add_generation_prompt": False, "continue_final_message": True}, begun),
        ({"add_generation_prompt": True, "continue_final_message": False}, ended + "<|bot|>"),
        ({"continue_final_message": True}, begun),
    ):
        ask(thinker, CHAT, messages=messages, **fields)
        assert prompt(thinker) == expected, fields
        tokens = ask(thinker, "/tokenize", messages=messages, **fields)["tokens"]
        assert thinker.codec.token_text(tokens) == expected, fields


def test_a_continued_message_is_not_a_new_one(thinking_client: httpx.Client) -> None:
    messages = [{"role": "assistant", "content": "so far"}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": True}
    for path in (CHAT, "/tokenize"):
        assert "cannot both be true" in refused(thinking_client, path, body, "add_generation_prompt")


def test_an_echo_of_the_last_message(thinker: Player, thinking_client: httpx.Client) -> None:
    """As in vLLM: if the last message has the role of the answer."""
    messages = [*HELLO["messages"], {"role": "assistant", "content": [{"type": "text", "text": "so far: "}]}]
    for fields, role, text in (
        ({"messages": messages, "continue_final_message": True}, "assistant", "so far: "),
        ({"messages": messages}, "assistant", "so far: "),
        (HELLO, "assistant", ""),
        ({**HELLO, "add_generation_prompt": False}, "user", "hello"),
    ):
        message = ask(thinker, CHAT, **fields, echo=True)["choices"][0]["message"]
        assert (message["role"], message["content"]) == (role, text + thinker.text)
        events = thinking_client.post(CHAT, json={**fields, "echo": True, "stream": True}).text.split("\n\n")
        deltas = [json.loads(event.removeprefix("data: "))["choices"][0]["delta"] for event in events[:-2]]
        assert deltas[0]["role"] == role
        assert "".join(delta.get("content", "") for delta in deltas) == text + thinker.text


def test_parts_of_text(thinker: Player) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages: list[dict[str, Any]] = [{"role": "developer", "content": "d"}, {"role": "user", "content": parts}]
    ask(thinker, CHAT, messages=messages)
    assert prompt(thinker) == "<|bot|>d<|end|><|user|>a\nb<|end|><|bot|>"
    ask(thinker, RESPONSES, input=[{"role": "user", "content": [{"type": "input_text", "text": "a"}]}])
    assert prompt(thinker) == "<|user|>a<|end|><|bot|>"


MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% else %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}"
    "{{ raise_exception('nine characters') if c.id | length != 9 }}{{ '[TOOL_CALLS][' if loop.first else ', ' }}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "{{ ']' if loop.last }}{% endfor %}{% endfor %}{{ tools | length if tools }}"
)


@pytest.mark.slow
def test_markers_that_are_special_tokens_are_detected(tmp_path: Path) -> None:
    """A detokenizer drops special tokens, which would hide the call."""
    tokenizer = byte_level_tokenizer((*SPECIAL, "[TOOL_CALLS]", "<think>", "</think>"))
    renderer = TemplateRenderer(tmp_path)
    player = Player(TextCodec(write_tokenizer(tmp_path / "m", tokenizer, MISTRAL), renderer))
    assert len(player.codec.special) == 6
    player.text = '<think>hm</think>So.[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]'
    message = ask(player, CHAT, **HELLO, tools=TOOLS, max_tokens=90)["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "So.")
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert len(message["tool_calls"][0]["id"]) == 9
    message = ask(player, CHAT, **HELLO, max_tokens=90)["choices"][0]["message"]
    assert message["content"].startswith('So.[{"name"'), "not asked for: it is text, as a chat would show it"
    ask(player, CHAT, **HELLO, tools=TOOLS, tool_choice="required")
    assert player.grammar.startswith("start: <[3]> ")
    renderer.close()


def test_a_template_error_names_the_reason_without_paths(
    thinker: Player, renderer: TemplateRenderer, monkeypatch: pytest.MonkeyPatch, thinking_client: httpx.Client
) -> None:
    codec = thinker.codec
    monkeypatch.setattr(renderer, "model", Path("secret.jinja"))
    monkeypatch.setattr(codec.tokenizer, "chat_template", "{{ raise_exception('roles must alternate') }}")
    assert refused(thinking_client, CHAT, HELLO, "messages") == "the chat template failed (roles must alternate)"
    monkeypatch.setattr(codec.tokenizer, "chat_template", "{{ 'a' * 100000 }}")
    assert str(codec.path) not in refused(thinking_client, CHAT, HELLO, "messages")
    monkeypatch.setattr(codec.tokenizer, "chat_template", None)
    assert "send plain text to /v1/completions" in refused(thinking_client, CHAT, HELLO)


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
def test_the_embedded_pair(path: str, renderer: TemplateRenderer) -> None:
    player = Player(TextCodec(DEMO, renderer))
    body: dict[str, Any] = {"input": "def f"} if path == RESPONSES else {**HELLO, "max_tokens": 50}
    answer = ask(player, path, **body)
    assert "def add(a, b):" in str(answer)
