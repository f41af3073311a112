"""Requests in the shapes that agents send, answered by a model whose template takes one system message at the start
and writes each argument of a call between tags, as Qwen3.5's does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from fastapi.testclient import TestClient
from msgspec import structs

from swiftspec.text.codec import TextCodec
from swiftspec.text.template import TemplateRenderer
from tests.serve.test_app import CHAT, MESSAGES, RESPONSES
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
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": result}
        for item, result in zip(output[2:], ("a", [{"type": "input_image", "image_url": "data:image/png;base64,AA"}]))
    ]
    output[0]["encrypted_content"] = None
    player.text = "Done.</think>ok"
    post(client, RESPONSES, {**body, "input": [*body["input"], *output, *results]})
    text = f"Sure.{call('shell', command='ls -l')}{call('mcp__docs__find', command='3')}"
    image = "[input_image omitted: this model reads text only]"
    history = f"{start}[assistant]<think>\nI list.\n</think>\n\n{text}[end][tool]a[end][tool]{image}[end]"
    assert prompt(player) == f"{history}[assistant]<think>\n"
    elsewhere: list[dict[str, Any]] = [  # calls of a model of OpenAI, whose session is resumed here
        {"type": "reasoning", "summary": [], "encrypted_content": "gAAA"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "q"}},
        {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "patched"},
        {"type": "local_shell_call", "call_id": "c2", "action": {"command": ["ls"]}, "status": "completed"},
        {"type": "local_shell_call_output", "id": "c2", "output": "b"},
    ]
    post(client, RESPONSES, {**body, "input": [*body["input"], *elsewhere]})
    calls = call("apply_patch", input="*** Begin"), call("local_shell", command='["ls"]')
    assert prompt(player).startswith(
        f"{start}[assistant]{calls[0]}[end][tool]patched[end][assistant]{calls[1]}[end][tool]b[end]"
    )


def test_ai_sdk(player: Player, client: TestClient) -> None:
    """Its default provider refers to stored reasoning and messages, and repeats calls."""
    hello = {"role": "user", "content": [{"type": "input_text", "text": "hi"}]}
    tool = {"type": "function", "name": "f", "description": "d", "parameters": SCHEMA}
    asked = {"model": "toy", "tools": [tool, {"type": "web_search"}], "tool_choice": "auto"}
    player.text = f"hm</think>Hello.{call('f', command='ls')}"
    first = post(client, RESPONSES, {**asked, "input": [hello], "include": ["web_search_call.action.sources"]})
    start = prompt(player)
    references = [{"type": "item_reference", "id": first["output"][0]["id"]}, {"id": first["output"][1]["id"]}]
    repeated = {name: first["output"][2][name] for name in ("type", "call_id", "name", "arguments")}
    result = {"type": "function_call_output", "call_id": repeated["call_id"], "output": "{}"}
    later = {**asked, "input": [hello, *references, repeated, result]}
    events(client, RESPONSES, later)
    assert (
        prompt(player)
        == f"{start}hm\n</think>\n\nHello.{call('f', command='ls')}[end][tool]{{}}[end][assistant]<think>\n"
    )
    message = {"role": "assistant", "content": [{"type": "output_text", "text": "Hello."}], "id": references[1]["id"]}
    unstored = {"store": False, "parallel_tool_calls": False, "input": [hello, message, repeated, result]}
    assert post(client, RESPONSES, {**asked, **unstored})["store"] is False
    client.delete(f"{RESPONSES}/{first['id']}")
    missing = client.post(RESPONSES, json=later)
    assert missing.status_code == 400 and "not found" in missing.json()["error"]["message"]


def test_openai_agents_sdk(player: Player, client: TestClient) -> None:
    """The result of a call follows by the id of the response; a handoff is a call, whose history goes to an agent
    without tools."""
    handoff = {"name": "transfer_to_b", "parameters": {"type": "object", "properties": {}}, "strict": True}
    body = {
        "model": "toy", "include": [], "instructions": "A", "parallel_tool_calls": True, "temperature": 0.5,
        "truncation": "auto", "tools": [
            {**handoff, "type": "function", "description": "d"},
            {"type": "web_search", "filters": None, "user_location": None, "search_context_size": "medium"},
        ],
    }  # fmt: skip
    player.text = f"t</think>{call('transfer_to_b')}"
    first = post(client, RESPONSES, {**body, "input": [{"content": "x", "role": "user"}]})
    start = prompt(player)
    result = {"call_id": first["output"][1]["call_id"], "output": "B", "type": "function_call_output"}
    post(client, RESPONSES, {**body, "input": [result], "previous_response_id": first["id"]})
    followed = prompt(player)
    assert followed == f"{start}t\n</think>\n\n{call('transfer_to_b')}[end][tool]B[end][assistant]<think>\n"
    plain = {"model": "toy", "include": [], "instructions": "A"}
    post(client, RESPONSES, {**plain, "input": [{"content": "x", "role": "user"}, *first["output"], result]})
    assert prompt(player) == followed.removeprefix("[tools]transfer_to_b ")


AGENTS_OF_CHAT_COMPLETIONS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {  # fields, those of sent answers
    "aider": ({"temperature": 0}, ("content",)),
    "Continue": ({"max_tokens": 500, "stream_options": {"include_usage": True}}, ("content", "tool_calls")),
    "opencode": (
        {"max_tokens": 500, "tool_choice": "auto", "stream_options": {"include_usage": True}},
        ("content", "reasoning_content", "tool_calls"),
    ),
}


@pytest.mark.parametrize("name", AGENTS_OF_CHAT_COMPLETIONS)
def test_agents_of_chat_completions(player: Player, client: TestClient, name: str) -> None:
    """Two parallel calls in a stream, whose answer the client puts together and sends back with the results."""
    more, fields = AGENTS_OF_CHAT_COMPLETIONS[name]
    has_tools = "tool_calls" in fields
    messages: list[dict[str, Any]] = [{"role": "system", "content": "S"}, {"role": "user", "content": "u"}]
    tools = [{"type": "function", "function": {"name": each, "parameters": SCHEMA}} for each in ("sh", "read")]
    body = {"model": "toy", **more, **({"tools": tools} if has_tools else {})}
    calls = f"{call('sh', command='ls')}{call('read', command='a')}" if has_tools else ""
    player.text = f"hm</think>I call.{calls}"
    chunks = events(client, CHAT, {**body, "messages": messages})
    assert ("usage" in chunks[-1] and not chunks[-1]["choices"]) == ("stream_options" in more)
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    assert choices[-1]["finish_reason"] == ("tool_calls" if has_tools else "stop")
    deltas = [choice["delta"] for choice in choices]
    answer: dict[str, Any] = {"role": deltas[0]["role"]}
    for field in fields:
        parts = [delta[field] for delta in deltas if delta.get(field)]
        answer[field] = "".join(parts) if field != "tool_calls" else [each for part in parts for each in part]
    results = [
        {"role": "tool", "tool_call_id": each["id"], "content": "r"} for each in answer.get("tool_calls", ())
    ] or [{"role": "user", "content": "r"}]
    start = prompt(player).removesuffix("<think>\n")
    events(client, CHAT, {**body, "messages": [*messages, answer, *results]})
    thought = "<think>\nhm\n</think>\n\n" if "reasoning_content" in fields else ""
    role = "tool" if has_tools else "user"
    assert (
        prompt(player) == f"{start}{thought}I call.{calls}[end]{f'[{role}]r[end]' * len(results)}[assistant]<think>\n"
    )


def test_claude_code(player: Player, client: TestClient) -> None:
    """Five turns with a system block that changes, reminders between turns, and a tool of Anthropic's server."""
    tools = [{"name": "Bash", "input_schema": SCHEMA}, {"type": "web_search_20250305", "name": "web_search"}]
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}
    messages: list[dict[str, Any]] = []
    prompts: list[str] = []
    body: dict[str, Any] = {}
    for turn in range(5):
        content: list[dict[str, Any]] = [{"type": "text", "text": f"q{turn}"}]
        if turn:
            result: dict[str, Any] = {"type": "tool_result", "tool_use_id": messages[-1]["content"][-1]["id"]}
            parts = [image] if turn == 2 else [{"type": "text", "text": "r"}]
            content.insert(0, {**result, "content": parts, "is_error": turn == 3})
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
        got = events(client, f"{MESSAGES}?beta=true", body)
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
    assert prompts[0].startswith("[tools]Bash [system]You code.[end][user]q0\n\nnow[end]")
    begin = "[assistant]<think>\n"
    assert all(later.startswith(text.removesuffix(begin)) for text, later in pairwise(prompts))  # for the prefix cache
    assert prompts[-1].count("<parameter=command>") == 4 and prompts[-1].count("[tool]r[end]") == 3
    assert "[tool][image omitted: this model reads text only][end]" in prompts[-1]
    counted = {name: body[name] for name in ("model", "messages", "tools", "system", "thinking")}
    assert post(client, f"{MESSAGES}/count_tokens?beta=true", counted)["input_tokens"] >= len(prompts[-1])
    body["messages"] = [{"role": "user", "content": [image]}]
    refused = client.post(MESSAGES, json=body)
    assert refused.status_code == 400 and "'image' are not supported; use text" in refused.json()["error"]["message"]


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
    for arguments in (cut["function"]["arguments"], "", "[1]", "null", {}, None):
        cut["function"]["arguments"] = arguments
        post(client, CHAT, {**asked, "messages": [*asked["messages"], message, result]})
        assert "<function=f>\n</function>" in prompt(player)


def test_what_other_clients_send(player: Player, client: TestClient) -> None:
    """Agents SDK, Anthropic's tool_runner, clients of OpenRouter and DeepSeek, instructor, monitors."""
    hello: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
    assert post(client, RESPONSES, {"input": "a" * 4000, "truncation": "auto"})["truncation"] == "auto"
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "g"}]}
    offered = [{"type": "function", "name": name, "parameters": SCHEMA} for name in ("f", "g")]
    post(client, RESPONSES, {"input": "a", "tools": offered, "tool_choice": allowed, "max_tool_calls": 3})
    assert prompt(player).startswith("[tools]g [user]") and player.grammar
    post(client, MESSAGES, {**hello, "max_tokens": 5, "tool_choice": {"type": "any"}})
    post(client, CHAT, {**hello, "tool_choice": "required"})
    post(client, RESPONSES, {"input": "a", "tools": [], "tool_choice": "required"})
    post(client, CHAT, {**hello, "thinking": {"type": "disabled"}, "reasoning": {"effort": "low"}})
    text = {"temperature": "0.7", "max_tokens": "5", "stream": "false", "top_k": 4.0, "logit_bias": {"3": "1"}}
    post(client, CHAT, {**hello, **text})
    sampling = player.requests[-1].sampling
    assert (sampling.temperature, sampling.max_tokens, sampling.top_k) == (0.7, 5, 4)
    custom = {"type": "custom", "custom": {"name": "patch", "format": {"type": "text"}}}
    called = {"id": "c", "type": "custom", "custom": {"name": "patch", "input": "+ a"}}
    used = [{"role": "assistant", "tool_calls": [called]}, {"role": "tool", "tool_call_id": "c", "content": "r"}]
    function = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
    post(client, CHAT, {"messages": [*hello["messages"], *used], "tools": [custom, function]})
    assert prompt(player).startswith(f"[tools]f [user]hi[end][assistant]{call('patch', input='+ a')}[end][tool]r[end]")
    parts = [{"type": "thinking", "thinking": "hm"}, {"type": "refusal", "refusal": "I cannot."}]
    post(client, CHAT, {"messages": [*hello["messages"], {"role": "assistant", "content": parts}, *hello["messages"]]})
    assert "[assistant]I cannot.[end]" in prompt(player)
    schema = {"type": "object", "properties": {"s": {"type": "array", "items": {}, "uniqueItems": True}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    post(client, CHAT, {**hello, "response_format": form})
    decimal = {"anyOf": [{"type": "number"}, {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}]}
    schema["properties"] |= {"pattern": {"type": "string"}, "price": decimal}  # type: ignore[operator]
    post(client, CHAT, {**hello, "response_format": form})
    form["json_schema"]["strict"] = True  # type: ignore[index]
    assert client.post(CHAT, json={**hello, "response_format": form}).status_code == 400
    searched = [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
        {"type": "text", "text": "b"},
    ]
    turns = [*hello["messages"], {"role": "assistant", "content": searched}, *hello["messages"]]
    post(client, MESSAGES, {"max_tokens": 5, "messages": turns})
    assert "[assistant]b[end]" in prompt(player)
    for path in ("/health", "/live", "/ready", "/version", "/v1/models", "/v1/models/toy"):
        assert client.head(path).status_code == 200
    assert client.get("/v1/models/").json()["object"] == "list"
