"""Chat templates of our own that write tool calls, one for each class of syntax that models use."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import jinja2

from swiftspec.errors import UserError

_HEAD = (
    "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content %}<think>"
    "{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% if m.tool_calls %}"
)
_TAIL = "{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
_EACH = "{% for c in m.tool_calls %}{% set f = c.function %}"


def _template(calls: str) -> str:
    return _HEAD + calls + _TAIL


def _named(before: str, one: str, after: str) -> str:
    """Calls with one text for each argument."""
    return _EACH + before + "{% for k, v in f.arguments.items() %}" + one + "{% endfor %}" + after + "{% endfor %}"


_TEXT = "{{ v if v is string else v | tojson }}"
TEMPLATES = {
    "hermes": _template(
        _EACH + '\n<tool_call>\n{"name": "{{ f.name }}", "arguments": '
        '{{ f.arguments | tojson }}}\n</tool_call>{% endfor %}'
    ),
    "json list": _template(
        "<TOOLS>[" + _EACH + '{{ ", " if not loop.first }}{"tool_name": "{{ f.name }}", "parameters": '
        '{{ f.arguments | tojson }}, "id": "{{ c.id }}"}{% endfor %}]</TOOLS>'
    ),
    "short ids": _template(
        "[TOOL_CALLS][" + _EACH + "{{ raise_exception('nine characters') if c.id | length != 9 }}"
        "{{ ', ' if not loop.first }}"
        '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}{% endfor %}]'
    ),
    "name as key": _template(
        "<|calls|>[" + _EACH + '{{ ", " if not loop.first }}{"{{ f.name }}": {{ f.arguments | tojson }}}'
        '{% endfor %}]<|/calls|>'
    ),
    "bare json": (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|{{ m.role }}|>{% if m.tool_calls %}"
        "{{ raise_exception('one call') if m.tool_calls | length > 1 }}{% set f = m.tool_calls[0].function %}"
        '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}{% else %}{{ m.content }}' + _TAIL
    ),
    "marked arguments": _template(_EACH + "[TOOL_CALLS]{{ f.name }}[CALL_ID]{{ c.id }}[ARGS]"
    "{{ f.arguments | tojson }}{% endfor %}"),
    "counted": _template(
        "<|calls_begin|>" + _EACH + "<|call_begin|>functions.{{ f.name }}:{{ loop.index0 }}<|args|>"
        "{{ f.arguments | tojson }}<|call_end|>{% endfor %}<|calls_end|>"
    ),
    "function tag": _template(_EACH + "<function={{ f.name }}>{{ f.arguments | tojson }}</function>{% endfor %}"),
    "tags with newlines": _template(
        _named(
            "\n<tool_call>\n<function={{ f.name }}>\n",
            "<parameter={{ k }}>\n"
            "{{ v | tojson if v is mapping or (v is sequence and v is not string) else v }}\n</parameter>\n",
            "</function>\n</tool_call>",
        )
    ),
    "key and value tags": _template(
        _named(
            "<tool_call>{{ f.name }}\n",
            "<arg_key>{{ k }}</arg_key>\n<arg_value>" + _TEXT + "</arg_value>\n",
            "</tool_call>",
        )
    ),
    "attributes": _template(
        "<calls>\n" + _named(
            '<invoke name="{{ f.name }}">\n',
            '<param name="{{ k }}" string="{{ "true" if v is string else "false" }}">' + _TEXT + "</param>\n",
            "</invoke>\n",
        ) + "</calls>"
    ),
    "python": _template(
        "<|call|>[" + _EACH + "{{ ', ' if not loop.first }}{{ f.name }}({% for k, v in f.arguments.items() %}"
        "{{ ', ' if not loop.first }}{{ k }}="
        "{{ \"'\" + v + \"'\" if v is string else (v | tojson if v is iterable else v) }}"
        "{% endfor %}){% endfor %}]<|/call|>"
    ),
    "other quotes": (
        "{% macro value(v) %}{% if v is string %}<|q|>{{ v }}<|q|>{% elif v is mapping %}{{ '{' }}"
        "{% for k, w in v.items() %}{{ ',' if not loop.first }}{{ k }}:{{ value(w) }}{% endfor %}{{ '}' }}"
        "{% elif v is iterable %}[{% for w in v %}{{ ',' if not loop.first }}{{ value(w) }}{% endfor %}]"
        "{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"
    )
    + _template(
        _EACH + "<|tool>call:{{ f.name }}{% for k, v in f.arguments.items() %}{{ '{' if loop.first else ',' }}"
        "{{ k }}:{{ value(v) }}{% endfor %}{{ '{' if not f.arguments }}{{ '}' }}<tool|>{% endfor %}"
    ),
    "left out": (  # as Granite 3: the template does not write the calls of messages
        "{% if tools %}use <|tool_call|> {{ tools | tojson }}{% endif %}{% for m in messages %}<|"
        "{{ m.role }}|>{{ m.content }}"
        "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    ),
}  # fmt: skip


@cache
def _compiled(template: str) -> jinja2.Template:
    environment = jinja2.Environment(autoescape=False)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)

    def raise_exception(text: str) -> None:
        raise UserError(text)

    return environment.from_string(template, {"raise_exception": raise_exception})


def rendering(template: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, begins: bool) -> str:
    """Renders a template of this file, which needs no other process. Raises UserError if it fails."""
    return _compiled(template).render(messages=messages, tools=tools, add_generation_prompt=begins)
