"""Chat templates: the text equals that of transformers, and an endless template is one error line."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from swiftspec.errors import UserError
from swiftspec.text import template_process
from swiftspec.text.codec import ChatMessage, TextCodec, may_have_template
from swiftspec.text.template import PromptTooLong, TemplateRenderer
from tests.support.toy_pair import BOT, END, TEMPLATE, byte_level_tokenizer, write_tokenizer
from tests.support.toy_pair import USER as USER_TOKEN

DEMO = Path(__file__).parents[2] / "swiftspec" / "demo"
USER = {"role": "user", "content": "a"}
CHATML = (
    "{%- if messages[0]['role'] == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}"
    "{%- else %}{{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}{%- endif %}\n"
    "{%- for message in messages %}{%- if message.role != 'system' %}\n"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>' }}{{ '\\n' }}\n"
    "{%- endif %}{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}\n"
)
ALTERNATING = (
    "{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}{% else %}"
    "{{ m['content'] + eos_token }}{% endif %}{% endfor %}"
)
DATED = (
    "{% set ns = namespace(found=false) %}{% for m in messages %}{% set ns.found = ns.found or 'def' in m.content %}"
    "{% endfor %}{{ strftime_now('%Y') }} {{ messages | tojson(indent=2) }} {{ ns.found }} {{ tools is none }}"
    "{{ pad_token is defined }}"
)
# what the template of gpt-oss uses: macros, the date, and variables that are not defined
HARMONY = (
    "{%- macro system() -%}{{ model_identity }}\nCurrent date: {{ strftime_now('%Y') }}\n"
    "{%- if reasoning_effort is not defined %}{%- set reasoning_effort = 'medium' %}{%- endif %}"
    "Reasoning: {{ reasoning_effort }}{%- if builtin_tools %}{{ builtin_tools | join }}{%- endif %}{%- endmacro %}"
    "{%- if not model_identity is defined %}{%- set model_identity = 'I' %}{%- endif %}"
    "<|start|>system<|message|>{{ system() }}<|end|>{%- set last = namespace(name=none) %}"
    "{%- for message in loop_messages | default(messages) %}{%- if message.role == 'assistant' %}"
    "{%- if 'thinking' in message %}{{ raise_exception('no') }}{%- elif loop.last and not add_generation_prompt %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|return|>' }}{%- else %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}{%- endif %}"
    "{%- else %}<|start|>{{ message.role }}<|message|>{{ message.content | tojson }}<|end|>{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}<|start|>assistant{%- endif %}"
)
CONVERSATIONS: list[list[ChatMessage]] = [
    [{"role": "user", "content": "def add(a, b):\n    "}],
    [
        {"role": "user", "content": " <b>für</b> 中 😀 <|end|>\n"},
        {"role": "assistant", "content": "{{ 1 + 1 }}"},
        {"role": "user", "content": ""},
    ],
]


@pytest.fixture(scope="module")
def renderer() -> Iterator[TemplateRenderer]:
    """One process for all tests without limits, since its start takes longer than the tests."""
    made = TemplateRenderer(Path("model"))
    yield made
    made.close()


@pytest.fixture
def codecs(tmp_path: Path, renderer: TemplateRenderer) -> Iterator[Any]:
    """Makes codecs with a template; their processes are ended."""
    made: list[TemplateRenderer] = []

    def make(template: Any, name: str = "model", **limits: Any) -> TextCodec:
        folder = write_tokenizer(tmp_path / name, byte_level_tokenizer(), template, bos_token=BOT)
        if not limits:
            return TextCodec(folder, renderer)
        made.append(TemplateRenderer(folder, **limits))
        return TextCodec(folder, made[-1])

    yield make
    for one in made:
        one.close()


def theirs(codec: TextCodec, conversation: Sequence[ChatMessage]) -> str:
    messages = [dict(message) for message in conversation]
    return str(codec.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def ours(codec: TextCodec, conversation: Sequence[ChatMessage]) -> str:
    return codec.token_text(codec.encode_chat(conversation))


@pytest.mark.parametrize("conversation", CONVERSATIONS, ids=["one", "three"])
def test_the_text_equals_that_of_transformers(codecs: Any, conversation: list[ChatMessage]) -> None:
    several = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": "{{ tools }}"}]
    for number, template in enumerate((TEMPLATE, CHATML, ALTERNATING, DATED, HARMONY, several)):
        codec = codecs(template, str(number))
        assert ours(codec, conversation) == theirs(codec, conversation) != ""
    demo = TextCodec(DEMO / "target")
    assert demo.encode_chat(conversation) == demo.tokenizer.encode(theirs(demo, conversation), add_special_tokens=False)
    demo.close()


def test_several_templates_without_a_default(codecs: Any) -> None:
    codec = codecs([{"name": "rag", "template": "a"}, {"name": "tool_use", "template": "b"}])
    with pytest.raises(UserError, match=r"failed \(This model has multiple chat templates with no default"):
        codec.encode_chat([USER])


LOOP = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
POWER = "{{ 2 ** (2 ** (40 * messages | length)) }}"  # without the length it would be computed while compiling


@pytest.mark.slow
@pytest.mark.parametrize("template", [LOOP, POWER], ids=["loop", "power"])
def test_an_endless_template(codecs: Any, template: str) -> None:
    """Repeatedly: the process was ended, and another one replaces it."""
    codec = codecs(
        "{% if messages[0].content == 'a' %}" + template + "{% endif %}fine", timeout_s=1.5, memory_bytes=2 << 30
    )
    for _ in range(2):
        with pytest.raises(UserError, match=r"model: the chat template (took longer than 1.5 s|needs more than)"):
            codec.encode_chat([USER])
    assert ours(codec, [{"role": "user", "content": "b"}]) == "fine"


@pytest.mark.slow
@pytest.mark.parametrize(
    "template",
    ["{{ 'a' * (10**10) }}", "{{ '%1000000000d' % 5 }}", "{{ ('a' * 10**8) | list | length }}"],
    ids=["repeated", "padded", "list"],
)
def test_a_template_that_allocates_all_memory(codecs: Any, template: str) -> None:
    codec = codecs(template, memory_bytes=256 << 20)
    with pytest.raises(UserError, match="model: the chat template needs more than 256 MiB of memory"):
        codec.encode_chat([USER])


def test_a_template_whose_text_exceeds_the_context(codecs: Any) -> None:
    codec = codecs("{{ 'a' * 100000 }}")
    with pytest.raises(PromptTooLong, match="with the chat template it has 100000 bytes, and at most 1000 fit"):
        codec.encode_chat([USER], context=100)
    assert len(codec.encode_chat([USER])) > 1000


@pytest.mark.slow
def test_a_process_that_exits(codecs: Any) -> None:
    """By itself, or killed."""
    codec = codecs(TEMPLATE, timeout_s=10.0)
    whole = ours(codec, [USER])
    renderer = codec._renderer
    os.kill(renderer._process.pid, signal.SIGKILL)
    with pytest.raises(UserError, match="the chat template terminated the process that renders it"):
        codec.encode_chat([USER])
    assert ours(codec, [USER]) == whole
    first = renderer._process
    codec.close()
    codec.close()
    assert first.returncode is not None, "it is no zombie"
    assert ours(codec, [USER]) == whole


@pytest.mark.slow
def test_without_waiting_clients_it_exits() -> None:
    """At the end of its input; in an endless template, at its CPU time limit."""
    request = {"template": LOOP, "messages": [USER], "variables": {}, "tools": None, "continue_final_message": False}
    request |= {"add_generation_prompt": True, "max_bytes": 9, "timeout_s": 0.1, "memory_bytes": 1 << 30}
    data = json.dumps(request).encode()
    for frame, code in ((b"", 0), (template_process.LENGTH.pack(len(data)) + data, -signal.SIGXCPU)):
        child = subprocess.Popen(
            [sys.executable, "-P", template_process.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(frame)
        child.stdin.close()
        assert child.wait(60) == code
        child.stdout.close()


def test_ctrl_c_while_a_template_is_rendered(codecs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    codec = codecs(LOOP, timeout_s=60.0)
    renderer = codec._renderer
    renderer.start()
    child = renderer._process

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("swiftspec.text.template._receive", interrupted)
    with pytest.raises(KeyboardInterrupt):
        codec.encode_chat([USER])
    assert child.returncode == -signal.SIGKILL


def test_an_error_of_a_template_is_one_short_line(codecs: Any) -> None:
    codec = codecs("{{ raise_exception('no\nway ' * 100000) }}")
    with pytest.raises(UserError, match=r"the chat template failed \(no way no way") as caught:
        codec.encode_chat([USER])
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_long_text_is_refused_before_it_is_tokenized(codecs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    codec = codecs(TEMPLATE)
    most = codec.max_text_bytes(10)
    assert most == 10 * codec.longest_token_bytes >= 10 * max(map(len, (USER_TOKEN, END)))
    assert len(codec.encode("é" * (most // 2), 10)) > 10, "it may still be too long"
    monkeypatch.setattr(codec, "tokenizer", None)
    with pytest.raises(PromptTooLong, match=f"the prompt of {most + 1} bytes does not fit the context of 10 with room"):
        codec.encode("a" * (most + 1), 10)
    with pytest.raises(PromptTooLong, match="does not fit any context"):
        codec.encode("a" * ((64 << 20) + 1))


def test_no_token_has_more_text_than_the_longest(codecs: Any) -> None:
    codec = codecs(TEMPLATE)
    codec.tokenizer.add_tokens([AddedToken("ever so long a token")])
    codec = TextCodec(codec.path)
    for text in ("def add(a, b):\n" * 9, "ÿ中😀" * 9, "<|user|>" * 50):
        assert len(text.encode()) <= len(codec.encode(text)) * codec.longest_token_bytes


def test_models_that_may_have_a_template(tmp_path: Path) -> None:
    assert may_have_template(DEMO / "target")
    assert not may_have_template(tmp_path)
    assert not may_have_template(write_tokenizer(tmp_path / "none", byte_level_tokenizer(), None))
    assert may_have_template(write_tokenizer(tmp_path / "one", byte_level_tokenizer()))
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "tokenizer_config.json")
    assert not may_have_template(tmp_path / "pipe")
    (tmp_path / "chat_template.jinja").write_text("a")
    assert may_have_template(tmp_path)


def test_a_template_can_append_to_lists(renderer: TemplateRenderer) -> None:
    """As Kimi K2's; what it changes is not kept for the next rendering."""
    source = "{% set _ = messages.append({'role': 'x'}) %}{{ messages | length }}"
    for _ in range(2):
        assert renderer.render(source, [{"role": "user", "content": ""}], {}, 1000) == "2"
