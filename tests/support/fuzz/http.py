"""Requests to the HTTP application, with an engine that generates arbitrary text; and chat templates."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
from fastapi.testclient import TestClient
from hypothesis import strategies as st

from swiftspec.serve.errors import MAX_MESSAGE_CHARS
from swiftspec.text.codec import TextCodec
from swiftspec.text.template import TemplateRenderer
from tests.support.fuzz import Target
from tests.support.fuzz.json_text import damaged, mutated, texts
from tests.support.http import READY, Player, application
from tests.support.tool_templates import TEMPLATES
from tests.support.toy_pair import byte_level_tokenizer, write_tokenizer

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, "required": ["a"]}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": "x"}'}}
TALK = [
    {"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "u"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "r"},
    {"role": "tool", "tool_call_id": "call_1", "content": "3"},
]  # fmt: skip
SAMPLED: dict[str, Any] = {
    "model": "toy", "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "seed": 1,
    "stop": ["x"], "stop_token_ids": [3], "logit_bias": {"5": 1.0}, "n": 2, "stream": True, "ignore_eos": False,
    "stream_options": {"include_usage": True},
}  # fmt: skip
CHAT = SAMPLED | {
    "messages": TALK, "tools": [TOOL], "tool_choice": "auto", "logprobs": True, "top_logprobs": 2,
    "chat_template_kwargs": {"a": 1}, "add_generation_prompt": True, "continue_final_message": False,
}  # fmt: skip
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
ANSWERED = {"model": "toy", "messages": [{"role": "user", "content": "u"}], "response_format": FORMAT}
TEXT = SAMPLED | {"prompt": ["a", "b"], "logprobs": 2, "echo": True, "best_of": 2, "truncate_prompt_tokens": 3}
GUIDED = {"prompt": [[5, 6]], "structured_outputs": {"choice": ["a", "b"]}, "prompt_logprobs": 1, "max_tokens": 2}
CLAUDE = {
    "model": "toy", "max_tokens": 5, "system": [{"type": "text", "text": "s"}], "stream": True, "messages": [
        {"role": "user", "content": "u"}, {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "t", "signature": ""},
            {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": "x"}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "3"}]},
            {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "d"}}]}],
    "tools": [{"name": "f", "input_schema": SCHEMA}], "tool_choice": {"type": "any"}, "stop_sequences": ["x"],
    "thinking": {"type": "enabled", "budget_tokens": 2048}, "output_config": {"effort": "low"},
}  # fmt: skip
ITEMS = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "u"}]},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
    {"type": "function_call", "call_id": "c", "name": "f", "namespace": "m", "arguments": '{"a": "x"}'},
    {"type": "function_call_output", "call_id": "c", "output": "3"}, {"type": "item_reference", "id": "msg_1"},
]  # fmt: skip
RESPONSE = {
    "model": "toy", "input": ITEMS[:4], "instructions": "i", "max_output_tokens": 5, "store": True, "stream": False,
    "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}, {"type": "web_search"}, {
        "type": "namespace", "name": "m", "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}]}],
    "tool_choice": {"type": "function", "name": "f"}, "text": {"format": {"type": "text"}}, "truncation": "auto",
    "reasoning": {"effort": "low"}, "include": ["message.output_text.logprobs"], "top_logprobs": 2,
}  # fmt: skip
TOKENS = {"prompt": "a", "add_special_tokens": True, "return_token_strs": True}
BODIES: dict[str, tuple[dict[str, Any], ...]] = {
    "/v1/chat/completions": (CHAT, ANSWERED), "/v1/chat/completions/render": (CHAT,),
    "/v1/completions": (TEXT, GUIDED), "/v1/completions/render": (TEXT,), "/v1/messages": (CLAUDE,),
    "/v1/messages/count_tokens": (CLAUDE,), "/v1/responses": (RESPONSE,), "/v1/responses/input_tokens": (RESPONSE,),
    "/tokenize": (TOKENS, {"messages": TALK, "tools": [TOOL]}), "/detokenize": ({"tokens": [5, 6]},),
}  # fmt: skip
# what a model may write: pieces of the syntaxes of tool calls, of reasoning and of JSON
PIECES = [
    "\n<tool_call>\n", '{"name": "f", "arguments": ', '{"a": "x"}', "}", "\n</tool_call>", "<tool_call>", "<think>",
    "</think>", '{"name": "g", "arguments": {}}', '"', "\\", "\\u12", "[" * 500, '{"a":' * 200, "9" * 5000, "1e999",
    "NaN", "\0", "\N{SNOWMAN}", "x", "<|end|>", "", '{"name": 5}', "null",
]  # fmt: skip
INFO = msgspec.structs.replace(READY, max_model_len=2000)
ODD_TEXT = st.sampled_from(["", "x", "../x", "\n", "\0", "%", "?a=b", "x" * 3000, "\ud800", "resp_1", "é"])


@functools.cache
def _served() -> tuple[Player, TestClient]:
    folder = write_tokenizer(Path(tempfile.mkdtemp()), byte_level_tokenizer(), TEMPLATES["hermes"])
    player = Player(TextCodec(folder, TemplateRenderer(Path("model"))))
    return player, TestClient(application(player))


def _check(answer: Any) -> str:
    """Asserts that a response is complete, or an error of one line. Returns "taken" or "refused"."""
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        error = answer.json()["error"]
        assert 0 < len(error["message"]) <= MAX_MESSAGE_CHARS and "\n" not in error["message"], error
        assert "Traceback" not in error["message"] and 'File "' not in error["message"], error
        return "refused"
    assert "internal_error" not in answer.text
    if answer.headers["content-type"].startswith("text/event-stream"):
        for line in answer.text.splitlines():
            assert not line.startswith("data: {") or isinstance(json.loads(line[6:]), dict)
    else:
        answer.json()
    return "taken"


def _post(client: TestClient, path: str, body: bytes) -> Any:
    return client.post(path, content=body, headers={"content-type": "application/json"})


def send(given: tuple[str, bytes, list[str], int, str], folder: Path) -> str:
    """One request; the model writes the given pieces of text."""
    path, body, output, size, reason = given
    player, client = _served()
    player.prepare(text="".join(output) or "x", size=size, reason=reason, info=INFO)
    return _check(_post(client, path, body))


def follow(given: tuple[dict[str, Any], Any, list[tuple[str, str, str]]], folder: Path) -> str:
    """Stores a response, continues it with a damaged request, and uses the endpoints of stored responses."""
    first, second, calls = given
    player, client = _served()
    player.prepare(info=INFO)
    made = _post(client, "/v1/responses", json.dumps(first).encode()).json()
    items = [each["id"] for each in made.get("output", ())] or ["x"]
    text = json.dumps(second).replace("@response", str(made.get("id"))).replace("@item", items[0])
    outcome = _check(_post(client, "/v1/responses", text.encode()))
    for method, name, query in calls:
        number = name.replace("@response", str(made.get("id")))
        suffix = "" if method in ("GET", "DELETE") else f"/{method}"
        verb = "GET" if method == "input_items" else method
        _check(client.request(verb, f"/v1/responses/{quote(number, errors='replace')}{suffix}{query}"))
    return outcome


REQUESTS = st.sampled_from(sorted(BODIES)).flatmap(
    lambda path: st.tuples(
        st.just(path), texts(*BODIES[path]), st.lists(st.sampled_from(PIECES), max_size=6), st.integers(1, 9),
        st.sampled_from(["stop", "length", "error"]),
    )
)  # fmt: skip
CONTINUED = {
    "input": [{"type": "item_reference", "id": "@item"}, ITEMS[0]], "previous_response_id": "@response",
    "store": True, "stream": True,
}  # fmt: skip
STORED_CALLS = st.tuples(
    st.sampled_from(["GET", "DELETE", "input_items"]), st.just("@response") | ODD_TEXT,
    st.sampled_from(["", "?stream=true", "?limit=0", "?limit=" + "9" * 5000, "?after=%00", "?starting_after=-5", "?x"]),
)  # fmt: skip
FOLLOWED = st.tuples(
    st.sampled_from([RESPONSE, {"input": "a"}]), mutated(CONTINUED), st.lists(STORED_CALLS, max_size=3)
)

TIMEOUT_S = 2.0
HOSTILE_TEMPLATES = [
    "{% for a in range(999999999) %}{% endfor %}", "{{ 'a' * 10**10 }}", "{{ 9 ** 9 ** 9 }}", "{{ messages.x.y }}",
    "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "{{ ''.__class__.__mro__ }}", "{% include 'x' %}",
    "{{ range(10**9) | list }}", "{% set ns = namespace(a='a' * 99) %}{% for i in range(99) %}{% set ns.a = ns.a * 2 %}"
    "{% endfor %}{{ ns.a }}", "{{ messages | tojson(indent=10**9) }}", "{{ '%1000000000d' % 1 }}", "{{ \"\\ud800\" }}",
    "{{ raise_exception('a\nb' * 9999) }}", "{{ strftime_now('%' * 9999) }}", "(" * 5000, "{{ " + "(" * 999, "{{", "{%",
    "{{ lipsum(n=10**9) }}", "{{ cycler.__init__.__globals__ }}", "{{ 'a' | center(10**10) }}", "{{ [[]] * 10**9 }}",
    "{{ messages | map(attribute='content') | join(',' * 10**9) }}", "{% for a in messages recursive %}"
    "{{ loop(messages) }}{% endfor %}", "{{ '{:>1000000000}'.format(1) }}",
    "{{ messages.append(messages) }}{{ messages }}",
]  # fmt: skip


@functools.cache
def _renderer() -> TemplateRenderer:
    return TemplateRenderer(Path("model"), TIMEOUT_S, 64 << 20)


def render(template: bytes, folder: Path) -> None:
    text = _renderer().render(template.decode("utf-8", "replace"), TALK, {"bos_token": "x"}, 100_000, [TOOL])
    assert len(text.encode("utf-8", "surrogatepass")) <= 100_000


TEMPLATE_TEXTS = st.sampled_from([*HOSTILE_TEMPLATES, *TEMPLATES.values()]).map(
    lambda text: text.encode("utf-8", "surrogatepass")
)
TARGETS = [
    Target("HTTP requests", REQUESTS, send, cost=2),
    Target("stored responses", FOLLOWED, follow, cost=4),
    Target("chat template", damaged(TEMPLATE_TEXTS), render, cost=8),
]
