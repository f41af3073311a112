"""Requests in the shapes that agents send, answered by a model whose template takes one system message at the start
and writes each argument of a call between tags, as Qwen3.5's does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from msgspec import structs

from swiftspec.text.codec import TextCodec
from swiftspec.text.template import TemplateRenderer
from tests.serve.http.test_app import CHAT, MESSAGES, RESPONSES
from tests.support.http import READY, Player, application
from tests.support.toy_pair import byte_level_tokenizer, write_tokenizer

TEMPLATE = (
    "{% if tools %}[tools]{% for t in tools %}{{ t.function.name }} {% endfor %}{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('only first') }}{% endif %}"
    "[{{ m.role }}]{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '\n<tool_call>' }}\n<function={{ c.function.name }}>\n"
    "{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>\n{{ v if v is string else v | tojson }}\n"
    "</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}[end]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]<think>\n{% endif %}"
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, renderer: TemplateRenderer) -> Iterator[tuple[Player, TestClient]]:
    folder = write_tokenizer(tmp_path_factory.mktemp("agents"), byte_level_tokenizer(), TEMPLATE)
    player = Player(TextCodec(folder, renderer))
    with TestClient(application(player)) as client:
        yield player, client


@pytest.fixture
def player(made: tuple[Player, TestClient]) -> Player:
    made[0].prepare(info=structs.replace(READY, max_model_len=2048))
    return made[0]


@pytest.fixture
def client(made: tuple[Player, TestClient]) -> TestClient:
    return made[1]


def prompt(player: Player) -> str:
    return player.codec.token_text(player.requests[-1].prompt)


def call(name: str, **arguments: str) -> str:
    """A call as the model writes it."""
    values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"\n<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


def post(client: TestClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(client: TestClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream."""
    answer = client.post(path, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}


def test_codex(player: Player, client: TestClient) -> None:
    """Tools that are no functions are passed over, functions of a namespace are offered, two system messages merged."""
    user = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "list"}]}
    body: dict[str, Any] = {
        "model": "toy", "instructions": "Be brief.", "store": False, "parallel_tool_calls": True,
        "prompt_cache_key": "x",
        "include": ["reasoning.encrypted_content"], "reasoning": {"effort": "medium", "summary": "auto"},
        "tool_choice": "auto", "text": {"verbosity": "low"},
        "tools": [
            {"type": "function", "name": "shell", "strict": False, "parameters": SCHEMA},
            {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark"}},
            {"type": "namespace", "name": "mcp__docs", "tools": [
                {"type": "function", "name": "find", "parameters": SCHEMA}]},
            {"type": "web_search", "external_web_access": False}, {"type": "local_shell"},
        ],
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandbox."}]}, user,
        ],
    }  # fmt: skip
    player.text = f"I list.\n</think>\n\nSure.{call('shell', command='ls -l')}{call('mcp__docs__find', command='3')}"
    done = events(client, RESPONSES, body)
    start = "[tools]shell mcp__docs__find [system]Be brief.\n\nSandbox.[end][user]list[end]"
    assert prompt(player) == f"{start}[assistant]<think>\n"
    output = done[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call", "function_call"]
    named = [(item["name"], item.get("namespace"), item["arguments"]) for item in output[2:]]
    assert named == [("shell", None, '{"command": "ls -l"}'), ("find", "mcp__docs", '{"command": "3"}')]
    assert [event["name"] for event in done if event["type"].endswith("arguments.done")] == ["shell", "find"]
    assert done[-1]["response"]["usage"]["input_tokens_details"]["cache_write_tokens"] == 0
    results = [{"type": "function_call_output", "call_id": item["call_id"], "output": "a"} for item in output[2:]]
    player.text = "Done.</think>ok"
    post(client, RESPONSES, {**body, "input": [*body["input"], *output, *results]})
    text = f"Sure.{call('shell', command='ls -l')}{call('mcp__docs__find', command='3')}"
    assert prompt(player) == (
        f"{start}[assistant]<think>\nI list.\n</think>\n\n{text}[end][tool]a[end][tool]a[end][assistant]<think>\n"
    )


def test_ai_sdk_refers_to_stored_items(player: Player, client: TestClient) -> None:
    player.text = "hm</think>Hello."
    first = post(client, RESPONSES, {"input": [{"role": "user", "content": "hi"}]})
    references = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
    later = {"input": [{"role": "user", "content": "hi"}, *references, {"role": "user", "content": "more"}]}
    post(client, RESPONSES, later)
    assert "[assistant]<think>\nhm\n</think>\n\nHello.[end][user]more" in prompt(player)
    client.delete(f"{RESPONSES}/{first['id']}")
    missing = client.post(RESPONSES, json=later)
    assert missing.status_code == 400 and "not found" in missing.json()["error"]["message"]


def test_claude_code(player: Player, client: TestClient) -> None:
    """Five turns with a system block that changes, reminders between turns, and a tool of Anthropic's server."""
    tools = [{"name": "Bash", "input_schema": SCHEMA}, {"type": "web_search_20250305", "name": "web_search"}]
    messages: list[dict[str, Any]] = []
    prompts: list[str] = []
    for turn in range(5):
        content = [{"type": "text", "text": f"q{turn}"}]
        if turn:
            content.insert(0, {"type": "tool_result", "tool_use_id": messages[-1]["content"][-1]["id"], "content": "r"})
        messages += [
            {"role": "user", "content": content},
            {"role": "system", "content": [{"type": "text", "text": "now"}]},
        ]
        header = f"x-anthropic-billing-header: cc_version=2.1; cch={turn}{turn}a;"
        body = {
            "model": "toy", "max_tokens": 200, "messages": messages, "tools": tools, "metadata": {"user_id": "u"},
            "system": [{"type": "text", "text": header}, {"type": "text", "text": "You code.", "cache_control": {}}],
            "thinking": {"type": "adaptive"}, "context_management": {"edits": []}, "output_config": {"effort": "high"},
        }  # fmt: skip
        player.text = f"t</think>Ok{call('Bash', command=f'ls {turn}')}"
        got = events(client, MESSAGES, body)
        prompts.append(prompt(player))
        start, last = got[0]["message"]["usage"], next(one for one in got if one["type"] == "message_delta")
        assert {**start, "output_tokens": last["usage"]["output_tokens"]} == last["usage"]
        assert last["delta"]["stop_reason"] == "tool_use"
        arguments = json.loads(next(one["delta"]["partial_json"] for one in got if "partial_json" in str(one)))
        assert arguments == {"command": f"ls {turn}"}
        opened = [one["content_block"] for one in got if one["type"] == "content_block_start"]
        messages.append({"role": "assistant", "content": [
            {"type": "thinking", "thinking": "t", "signature": ""}, {"type": "text", "text": "Ok"},
            {**opened[-1], "input": arguments},
        ]})  # fmt: skip
    assert all(text.startswith("[tools]Bash [system]You code.\n\nnow") and "billing" not in text for text in prompts)
    assert prompts[-1].count("<parameter=command>") == 4 and prompts[-1].count("[tool]r[end]") == 4


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_the_words_by_which_clients_know_that_a_prompt_is_too_long(
    player: Player, client: TestClient, path: str
) -> None:
    """Fallbacks of litellm and aider, and the compaction of Claude Code, depend on them."""
    for text in ("a" * 3000, "a" * 300_000):
        body = (
            {"input": text} if path == RESPONSES else {"messages": [{"role": "user", "content": text}], "max_tokens": 9}
        )
        answer = client.post(path, json=body)
        message = answer.json()["error"]["message"]
        expected = (
            "prompt is too long: "
            if path == MESSAGES
            else "This model's maximum context length is 2048 tokens. However"
        )
        assert answer.status_code == 400 and message.startswith(expected) and (path != MESSAGES or "> 2048" in message)


def test_a_call_that_was_cut_can_be_sent_back(player: Player, client: TestClient) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
    player.text, player.reason = call("f", command="ls").lstrip(), "length"
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "tools": tools, "tool_choice": "required"}
    message = post(client, CHAT, {**asked, "max_tokens": 50})["choices"][0]["message"]
    (cut,) = message["tool_calls"]
    with pytest.raises(ValueError, match="Expecting"):
        json.loads(cut["function"]["arguments"])
    result = {"role": "tool", "tool_call_id": cut["id"], "content": "error"}
    post(client, CHAT, {**asked, "messages": [*asked["messages"], message, result]})
    assert "<function=f>\n</function>" in prompt(player)


def test_what_other_clients_send(player: Player, client: TestClient) -> None:
    """Agents SDK, Anthropic's tool_runner, clients of OpenRouter and DeepSeek, instructor, monitors."""
    hello: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
    assert post(client, RESPONSES, {"input": "a" * 4000, "truncation": "auto"})["truncation"] == "auto"
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "g"}]}
    offered = [{"type": "function", "name": name, "parameters": SCHEMA} for name in ("f", "g")]
    post(client, RESPONSES, {"input": "a", "tools": offered, "tool_choice": allowed, "max_tool_calls": 3})
    assert prompt(player).startswith("[tools]g [user]") and "grammar" in player.requests[-1].sampling
    post(client, MESSAGES, {**hello, "max_tokens": 5, "tool_choice": {"type": "any"}})
    post(client, CHAT, {**hello, "tool_choice": "required"})
    post(client, RESPONSES, {"input": "a", "tools": [], "tool_choice": "required"})
    post(client, CHAT, {**hello, "thinking": {"type": "disabled"}, "reasoning": {"effort": "low"}})
    parts = [{"type": "thinking", "thinking": "hm"}, {"type": "refusal", "refusal": "I cannot."}]
    post(client, CHAT, {"messages": [*hello["messages"], {"role": "assistant", "content": parts}, *hello["messages"]]})
    assert "[assistant]I cannot.[end]" in prompt(player)
    schema = {"type": "object", "properties": {"s": {"type": "array", "items": {}, "uniqueItems": True}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    post(client, CHAT, {**hello, "response_format": form})
    form["json_schema"]["strict"] = True  # type: ignore[index]
    assert client.post(CHAT, json={**hello, "response_format": form}).status_code == 400
    for path in ("/health", "/live", "/ready", "/version", "/v1/models", "/v1/models/toy"):
        assert client.head(path).status_code == 200
    assert client.get("/v1/models/").json()["object"] == "list"
