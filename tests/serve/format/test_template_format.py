"""What is derived from a chat template besides tool calls, and templates from which nothing is."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftspec.errors import UserError
from swiftspec.serve.format.template_format import (
    TemplateFormat,
    derive_template_format,
)
from tests.support.cases import examples
from tests.support.tool_templates import TEMPLATES, rendering

TURN = "<|{{ m.role }}|>{% if m.reasoning_content %}REASONED{% endif %}{{ m.content }}<|end|>"
END = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
PLAIN = "{% for m in messages %}" + TURN + "{% endfor %}" + END


def derived(template: str, vocabulary: tuple[str, ...] = ()) -> TemplateFormat:
    return derive_template_format(lambda *probe: rendering(template, *probe), template, dict.fromkeys(vocabulary, 1))


@pytest.mark.parametrize(
    ("reasoned", "end", "markers"),
    [
        ("<think>\n{{ m.reasoning_content }}\n</think>\n\n", END, ("<think>", "</think>")),
        ("[THINK]{{ m.reasoning_content }}[/THINK]", END, ("[THINK]", "[/THINK]")),
        ("<|channel>thought\n{{ m.reasoning_content }}<channel|>", END, ("<|channel>thought", "<channel|>")),
        ("<|open|>think<|sep|>{{ m.reasoning_content }}<|close|>think<|sep|>", END.replace("assistant|>", "assistant|>"
         "<|open|>think<|sep|>"), ("<|open|>think<|sep|>", "<|close|>think")),
        ("{{ m.reasoning_content }}\n[BEGIN FINAL RESPONSE]\n", END.replace("assistant|>", "assistant|>My steps:\n"),
         ("My steps:", "[BEGIN FINAL RESPONSE]")),
        ("", END, None),
    ],
)  # fmt: skip
def test_the_markers_of_reasoning(reasoned: str, end: str, markers: tuple[str, str] | None) -> None:
    template = PLAIN.replace("REASONED", reasoned).replace(END, end).replace("<|end|>", "<|close|><|end|>")
    assert derived(template).reasoning == markers
    assert derived(PLAIN.replace("REASONED", ""), ("<think>",)).reasoning == ("<think>", "</think>")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (PLAIN, "the chat template has no tools"),
        ("{{ tools }}" + PLAIN, "does not render tool calls"),
        (PLAIN + "{% if tools %}{{ raise_exception('no tools') }}{% endif %}", "fails with tools (no tools)"),
        (TEMPLATES["function tag"].replace("<function=", ">>>").replace("<|assistant|>", "<|assistant|>>>>"),
         "no marker precedes the name"),
        (TEMPLATES["tags with newlines"].replace("<parameter={{ k }}>\n", "").replace("\n</parameter>", " "),
         "the arguments of tool calls are not found"),
        (TEMPLATES["hermes"].replace("f.arguments | tojson", "f.arguments | length"), "not found in its rendering"),
    ],
)  # fmt: skip
def test_templates_whose_calls_are_not_understood(template: str, reason: str) -> None:
    found = derived(template)
    assert found.tool_calls is None and reason in found.reason


FRAGMENTS = [
    "{{ tools }}", "{% for m in messages %}", "{% endfor %}", "{{ messages[-1].content }}", "{{ messages[0].content }}",
    "{{ messages | map(attribute='tool_calls') | list }}", "{{ messages | tojson }}", "{{ raise_exception('x') }}",
    "zqtool", "zqother", "{{ '{' }}", '{"name": "zqtool", "arguments": {}}', "zquser", "zqcontent", "zqa", "zqva",
    "{{ messages[1].tool_calls[0].function.name }}", "{{ messages[1].tool_calls[0].function.arguments }}", "[", "]",
    "{{ messages[1].tool_calls[0].function.arguments | tojson }}", "zqreasoning", "{{ messages[1].reasoning_content }}",
]  # fmt: skip


@settings(max_examples=examples(60))
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=12))
def test_any_template_gives_a_format(fragments: list[str]) -> None:
    """Whatever a template renders, nothing is raised, and a syntax that is returned has been read back."""
    text = "".join(fragments)

    def render(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, begins: bool) -> str:
        try:
            return rendering(text, messages, tools, begins)
        except Exception as error:  # of jinja2
            raise UserError(str(error)) from None

    found = derive_template_format(render, text, {})
    assert (found.tool_calls is None) == bool(found.reason)
