"""A model that writes harmony behind the server: each endpoint separates channels, with and without stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from swiftspec.text.template import TemplateRenderer
from tests.serve.api.test_generation import ask, prompt
from tests.serve.api.test_output_order import (
    LIMIT,
    SIZES,
    STREAMED,
    answer,
    stream,
)
from tests.serve.test_app import CHAT, HELLO, MESSAGES, RESPONSES, refused
from tests.support.harmony import harmony_codec
from tests.support.http import READY, Player, application, serving

TEXT = (
    "<|channel|>analysis<|message|>hm, <|end|><|start|>assistant<|channel|>commentary<|message|>I ask.<|end|>"
    '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
)
PARTS = [("reasoning", "hm, "), ("text", "I ask."), ("call", "f")]
PATHS = (CHAT, RESPONSES, MESSAGES)
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "f"}}]
FORM = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}


@pytest.fixture(scope="module")
def harmony_player(tmp_path_factory: pytest.TempPathFactory, renderer: TemplateRenderer) -> Player:
    codec = harmony_codec(tmp_path_factory.mktemp("harmony"), renderer)
    ends = [codec.vocab[name] for name in ("<|return|>", "<|endoftext|>", "<|call|>")]
    info = msgspec.structs.replace(READY, eos_token_ids=ends, max_model_len=1024)
    return Player(codec, info=info)


@pytest.fixture(scope="module")
def harmony_url(harmony_player: Player) -> Iterator[str]:
    with serving(application(harmony_player)) as address:
        yield address


@pytest.fixture
def writer(harmony_player: Player) -> Player:
    harmony_player.prepare(info=harmony_player.info)
    return harmony_player


@pytest.fixture
def client(writer: Player, harmony_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=harmony_url, timeout=300) as made:
        yield made


@pytest.mark.sampled(1)
@pytest.mark.parametrize("path", PATHS)
def test_channels_in_each_endpoint(writer: Player, client: httpx.Client, path: str) -> None:
    answers = []
    for size in SIZES:
        writer.prepare(info=writer.info, text=TEXT, size=size)
        answers.append(answer(client, path, 400))
        assert STREAMED[path](stream(client, path, **{LIMIT[path]: 400})) == PARTS, size
    assert answers[1:] == answers[:1] * (len(SIZES) - 1)
    shown = str({name: value for name, value in answers[0].items() if name != "choices"})
    if path == CHAT:
        (choice,) = answers[0]["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
        assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("hm, ", "I ask.")
    assert "<|" not in shown and "functions." not in shown


@pytest.mark.sampled(1)
@pytest.mark.parametrize("path", PATHS)
def test_an_answer_that_is_cut_anywhere(writer: Player, client: httpx.Client, path: str) -> None:
    """A call that is cut is a call in chat completions, as OpenAI returns it, and otherwise text."""
    call = len(writer.tokens(TEXT[: TEXT.index("{")]))
    for limit in range(1, len(writer.tokens(TEXT)), 3):
        writer.prepare(info=writer.info, text=TEXT, size=7)
        answer(client, path, limit)
        parts = STREAMED[path](stream(client, path, **{LIMIT[path]: limit}))
        for (kind, text), (expected, whole) in zip(parts, PARTS):
            assert kind == expected
            assert whole.startswith(text) or (path != CHAT and limit > call and text.startswith(whole))
        assert path != CHAT or len(parts) == 3 or limit < call


def test_the_tokens_of_reasoning(writer: Player) -> None:
    analysis = "<|channel|>analysis<|message|>hm<|end|>"
    writer.text = f"{analysis}<|start|>assistant<|channel|>final<|message|>fine<|return|>"
    whole = ask(writer, CHAT, **HELLO, max_tokens=200)
    assert whole["choices"][0]["message"]["content"] == "fine"
    details = whole["usage"]["completion_tokens_details"]
    assert details["reasoning_tokens"] == len(writer.tokens(analysis))


def test_without_reasoning(writer: Player) -> None:
    writer.text = TEXT
    message = ask(writer, CHAT, **HELLO, max_tokens=400, include_reasoning=False, tools=TOOLS)["choices"][0]["message"]
    assert "reasoning" not in message and message["content"] == "I ask."


def test_constraints_apply_after_the_analysis(writer: Player) -> None:
    ask(writer, CHAT, **HELLO, response_format=FORM)
    assert "@answer" in writer.grammar and "call_0" not in writer.grammar
    ask(writer, CHAT, **HELLO, guided_regex="a+", tools=TOOLS)
    assert "@answer" in writer.grammar and "call_0" not in writer.grammar
    ask(writer, CHAT, **HELLO, response_format=FORM, tools=TOOLS)
    assert "@answer" in writer.grammar and "call_0" in writer.grammar
    ask(writer, CHAT, **HELLO, response_format=FORM, tools=TOOLS, tool_choice="required")
    assert "@answer" not in writer.grammar and " to=functions.f" in writer.grammar
    continued = [*HELLO["messages"], {"role": "assistant", "content": "a"}]
    ask(writer, CHAT, messages=continued, continue_final_message=True, guided_regex="a+")
    assert "@answer" not in writer.grammar


def test_constraints_that_are_refused(writer: Player, client: httpx.Client) -> None:
    forced = {"tools": TOOLS, "tool_choice": "required"}
    refused(client, CHAT, {**HELLO, **forced, "guided_regex": "a"}, "tool_choice")
    continued = [*HELLO["messages"], {"role": "assistant", "content": "a"}]
    body = {"messages": continued, "continue_final_message": True, **forced}
    assert "cannot continue the last message" in refused(client, CHAT, body, "tool_choice")


def test_a_continued_message(writer: Player) -> None:
    messages = [*HELLO["messages"], {"role": "assistant", "content": "so"}]
    writer.text = " far<|return|>"
    for path, body in ((CHAT, {"continue_final_message": True}), (MESSAGES, {"max_tokens": 50})):
        assert "'content': ' far'" in str(ask(writer, path, messages=messages, **body)) or path == MESSAGES
        assert prompt(writer).endswith("<|start|>assistant<|channel|>final<|message|>so")


def test_the_input_of_the_template(writer: Player) -> None:
    calls = [{"id": name, "function": {"name": name, "arguments": "{}"}} for name in "fg"]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning": "c", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "f", "content": "1"},
        {"role": "tool", "tool_call_id": "g", "content": "2"},
    ]
    variables = {"model_identity": "You", "builtin_tools": ["python"]}
    ask(writer, CHAT, messages=messages, tools=TOOLS, reasoning_effort="high", chat_template_kwargs=variables)
    assert prompt(writer) == (
        "<|start|>system<|message|>You Reasoning: highpython<|end|><|start|>developer<|message|>// \ntype f;<|end|>"
        "<|start|>user<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>c\nb<|end|>"
        "<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}<|call|>"
        '<|start|>functions.f to=assistant<|channel|>commentary<|message|>"1"<|end|>'
        "<|start|>assistant to=functions.g<|channel|>commentary json<|message|>{}<|call|>"
        '<|start|>functions.g to=assistant<|channel|>commentary<|message|>"2"<|end|><|start|>assistant'
    )
    ask(writer, MESSAGES, **HELLO, max_tokens=9, output_config={"effort": "low"})
    assert "Reasoning: low" in prompt(writer)
    ask(writer, RESPONSES, input="a", reasoning={"effort": "low"})
    assert "Reasoning: low" in prompt(writer)


def test_text_of_markers_in_an_answer_is_text(writer: Player, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only special tokens are markers."""
    tokens = writer.tokens("<|channel|>final<|message|>the token ")
    tokens += [token for part in ("<|e", "nd|>", " ends") for token in writer.tokens(part)]
    monkeypatch.setattr(Player, "tokens", lambda self, text=None: tokens)
    message = ask(writer, CHAT, **HELLO, max_tokens=200)["choices"][0]["message"]
    assert message["content"] == "the token <|end|> ends"
