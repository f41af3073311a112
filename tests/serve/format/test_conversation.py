"""Conversations as chat templates get them: texts in every message, arguments as objects, tools as they were sent."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.serve.test_app import CHAT, HELLO, MESSAGES, RESPONSES, refused
from tests.support.http import Player

TOOLS = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{# <tool_call> #}"
END = "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
# Like QwQ and Qwen3: they split the content of every message of the assistant, and write arguments as JSON.
SPLITS = (
    TOOLS + "{% for m in messages %}[{{ m.role }}]{{ m.content.split('</think>')[-1].strip('\n') }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}" + END
)
# Like DeepSeek-R1: content and arguments are concatenated with text.
CONCATENATES = (
    TOOLS + "{% for m in messages %}{{ '[' + m.role + ']' + m['content'] }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name + '(' + c.function.arguments + ')' }}{% endfor %}" + END
)
# Like GLM and Command-R: they print the content, and iterate over the arguments.
PRINTS = (
    TOOLS + "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name + '({' }}"
    "{% for k, v in c.function.arguments.items() %}{{ k | tojson }}: {{ v | tojson }}{% endfor %}{{ '})' }}"
    "{% endfor %}" + END
)
# Like Kimi-K2: both types of arguments are possible.
CHECKS = SPLITS.replace(
    "c.function.arguments | tojson",
    "c.function.arguments if c.function.arguments is string else c.function.arguments | tojson",
)
ROUND_TRIP = '[user]1+2?[assistant]add({"a": 1})[tool]3[assistant]'
CHAT_BODY: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": "1+2?"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]},
        {"role": "tool", "tool_call_id": "x", "content": [{"type": "text", "text": "3"}]},
    ]
}  # fmt: skip
RESPONSES_BODY: dict[str, Any] = {
    "input": [
        {"role": "user", "content": "1+2?"},
        {"type": "function_call", "call_id": "x", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "x", "output": "3"},
    ]
}
MESSAGES_BODY: dict[str, Any] = {
    "max_tokens": 5,
    "messages": [
        {"role": "user", "content": "1+2?"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "add", "input": {"a": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": "3"}]},
    ],
}


def prompt(player: Player, client: httpx.Client, path: str, **body: Any) -> str:
    """The prompt that the engine gets."""
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return player.codec.token_text(player.requests[-1].prompt)


@pytest.mark.parametrize("template", [SPLITS, CONCATENATES, PRINTS, CHECKS], ids=["splits", "adds", "prints", "checks"])
def test_a_tool_round_trip(
    thinker: Player, thinking_client: httpx.Client, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    """The answer to a call, sent back with its result, in each chat endpoint."""
    monkeypatch.setattr(thinker.codec.tokenizer, "chat_template", template)
    for path, body in ((CHAT, CHAT_BODY), (RESPONSES, RESPONSES_BODY), (MESSAGES, MESSAGES_BODY)):
        assert prompt(thinker, thinking_client, path, **body) == ROUND_TRIP, path


def test_messages_without_content_have_an_empty_text(
    thinker: Player, thinking_client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thinker.codec.tokenizer, "chat_template", PRINTS)
    for message in ({}, {"content": None}, {"content": []}, {"content": [{"type": "text", "text": ""}]}):
        messages = [
            {"role": "user", "content": "a"},
            {"role": "assistant", **message},
            {"role": "user", "content": "b"},
        ]
        assert prompt(thinker, thinking_client, CHAT, messages=messages) == "[user]a[assistant][user]b[assistant]"


def test_text_parts_of_every_role(
    thinker: Player, thinking_client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thinker.codec.tokenizer, "chat_template", PRINTS)
    roles, parts = ("developer", "user", "assistant", "tool"), [{"type": "text", "text": text} for text in "ab"]
    messages = [{"role": role, "content": parts} for role in roles]
    expected = "[system]a\nb[user]a\nb[assistant]a\nb[tool]a\nb[assistant]"
    assert prompt(thinker, thinking_client, CHAT, messages=messages) == expected


def test_text_documents(thinker: Player, thinking_client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anthropic's documents of plain text, in messages and in results of tools."""
    monkeypatch.setattr(thinker.codec.tokenizer, "chat_template", PRINTS)
    plain = {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "one"}}
    blocks = {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "two"}]}}
    content = [{"type": "tool_result", "tool_use_id": "x", "content": [blocks]}, plain, {"type": "text", "text": "?"}]
    messages = [{"role": "user", "content": content}]
    rendered = prompt(thinker, thinking_client, MESSAGES, max_tokens=5, messages=messages)
    assert rendered == "[tool]two[user]T\none\n?[assistant]"
    plain["source"] = {"type": "base64", "media_type": "application/pdf", "data": ""}
    answer = thinking_client.post(MESSAGES, json={"max_tokens": 5, "messages": messages})
    assert "documents from a source of type 'base64' are not supported" in answer.json()["error"]["message"]


def test_roles_that_the_template_renders(
    thinker: Player, thinking_client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = [{"role": "ipython", "content": " 3 "}]
    monkeypatch.setattr(thinker.codec.tokenizer, "chat_template", PRINTS)
    assert prompt(thinker, thinking_client, CHAT, messages=messages) == "[ipython] 3 [assistant]"
    some = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    monkeypatch.setattr(thinker.codec.tokenizer, "chat_template", some)
    message = refused(thinking_client, CHAT, {"messages": messages}, "messages")
    assert message == "the chat template does not render messages of role 'ipython'"


TOOL: dict[str, Any] = {  # fields in another order than OpenAI's, an unknown one, and no description
    "type": "function",
    "function": {"strict": True, "parameters": {"type": "object", "properties": {}}, "name": "f", "x": [1]},
}


def test_tools_reach_the_template_as_they_were_sent(
    thinker: Player, thinking_client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in transformers, in /tokenize, too."""
    monkeypatch.setattr(thinker.codec.tokenizer, "chat_template", SPLITS.replace("{{ c.f", "<call>{{ c.f", 1))
    tools = [TOOL, {"type": "function", "function": {"name": "g", "description": None}}]
    theirs = thinker.codec.tokenizer.apply_chat_template(
        HELLO["messages"], tools=tools, tokenize=False, add_generation_prompt=True
    )
    assert prompt(thinker, thinking_client, CHAT, **HELLO, tools=tools) == theirs
    tokens = thinking_client.post("/tokenize", json={**HELLO, "tools": tools}).json()["tokens"]
    assert thinker.codec.token_text(tokens) == theirs
    flat = [{"type": "function", **tool["function"]} for tool in tools]
    assert prompt(thinker, thinking_client, RESPONSES, input="hello", tools=flat) == theirs
    short = '{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}'
    mine = [{"name": "f", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}]
    assert prompt(thinker, thinking_client, MESSAGES, **HELLO, max_tokens=5, tools=mine).startswith(short + "[user]")


@pytest.mark.parametrize("arguments", ["[]", "{", '{"a": NaN}', '{"a": 1e400}', '{"a": -Infinity}'])
def test_arguments_that_are_no_json_object_are_empty(
    thinker: Player, thinking_client: httpx.Client, arguments: str
) -> None:
    """A client cannot mend a call that the server has cut."""
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    assert '{"name": "f", "arguments": {}}' in prompt(thinker, thinking_client, CHAT, messages=messages)
    item = {"type": "function_call", "call_id": "x", "name": "f", "arguments": arguments, "status": "incomplete"}
    assert '{"name": "f", "arguments": {}}' in prompt(thinker, thinking_client, RESPONSES, input=[item])


HEADER = "x-anthropic-billing-header: cc_version=2.1; cch=aaaaa;"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (MESSAGES, {**HELLO, "max_tokens": 5, "system": f"{HEADER}\nBe brief."}),
        (MESSAGES, {**HELLO, "max_tokens": 5, "system": [{"type": "text", "text": f"{HEADER}\n\nBe brief."}]}),
        (MESSAGES, {"messages": [{"role": "system", "content": f"{HEADER}\nBe brief."}, *HELLO["messages"]],
                    "max_tokens": 5, "system": HEADER}),
        (CHAT, {"messages": [{"role": "system", "content": f"{HEADER}\nBe brief."}, *HELLO["messages"]]}),
        (CHAT, {"messages": [{"role": "developer", "content": f"{HEADER}\nBe brief."}, *HELLO["messages"]]}),
        (RESPONSES, {"input": "hello", "instructions": f"{HEADER}\n\nBe brief."}),
    ],
)  # fmt: skip
def test_the_line_with_a_hash_is_left_out(
    thinker: Player, thinking_client: httpx.Client, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thinker.codec.tokenizer, "chat_template", PRINTS)
    assert prompt(thinker, thinking_client, path, **body) == "[system]Be brief.[user]hello[assistant]"
