"""A tokenizer and a chat template of the harmony format, with the input conventions of the template of gpt-oss."""

from __future__ import annotations

from pathlib import Path

from swiftspec.text.codec import TextCodec
from swiftspec.text.harmony import MARKER_TOKENS
from swiftspec.text.template import TemplateRenderer
from tests.support.toy_pair import byte_level_tokenizer, write_tokenizer

EOS = "<|return|>"
SPECIAL = ("<|endoftext|>", *MARKER_TOKENS)
HARMONY_TEMPLATE = (
    "{%- if reasoning_effort is not defined %}{%- set reasoning_effort = 'medium' %}{%- endif %}"
    "<|start|>system<|message|>{{ model_identity | default('I') }} Reasoning: {{ reasoning_effort }}"
    "{{ builtin_tools | default([]) | join(',') }}<|end|>"
    "{%- if tools %}<|start|>developer<|message|>{% for t in tools %}{{ '// ' + t.function.description + '\n' }}"
    "type {{ t.function.name }};{% endfor %}<|end|>{% endif %}{%- set ns = namespace(called=none) %}"
    "{%- for m in messages %}{%- if m.role == 'assistant' and m.tool_calls %}{%- set call = m.tool_calls[0].function %}"
    "{%- if m.content and m.thinking %}{{ raise_exception('content and thinking') }}{%- endif %}"
    "{%- if m.content or m.thinking %}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + (m.content or m.thinking) + '<|end|>' }}{%- endif %}"
    "{{ '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}"
    "{{ call.arguments | tojson }}<|call|>{%- set ns.called = call.name %}"
    "{%- elif m.role == 'assistant' %}{%- if loop.last and not add_generation_prompt and m.thinking %}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{%- endif %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    "{%- elif m.role == 'tool' %}{%- if ns.called is none %}{{ raise_exception('no call') }}{%- endif %}"
    "{{ '<|start|>functions.' + ns.called + ' to=assistant<|channel|>commentary<|message|>' }}"
    "{{ m.content | tojson }}<|end|>"
    "{%- else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}<|start|>assistant{%- endif %}"
)


def harmony_folder(folder: Path) -> Path:
    """Writes the tokenizer's files of a model that writes harmony."""
    return write_tokenizer(folder, byte_level_tokenizer(SPECIAL), HARMONY_TEMPLATE, eos_token=EOS)


def harmony_codec(folder: Path, renderer: TemplateRenderer) -> TextCodec:
    """The codec of a model that writes harmony."""
    return TextCodec(harmony_folder(folder), renderer)


def marked(text: str) -> str:
    """Returns a text with the characters of the markers instead of their names."""
    for name, character in MARKER_TOKENS.items():
        text = text.replace(name, character)
    return text
