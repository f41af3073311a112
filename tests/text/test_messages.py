"""Messages in the form that chat templates take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from swiftspec.text.codec import TextCodec
from swiftspec.text.messages import accepted_system_messages, with_fitting_system_messages
from tests.support.tool_templates import rendering
from tests.support.toy_pair import byte_level_tokenizer, write_tokenizer

TURN = "<|{{ m.role }}|>{{ m.content }}<|end|>"
END = "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
PLAIN = "{% for m in messages %}" + TURN + END
REFUSED = "{{ raise_exception('no') }}{% endif %}"
FIRST = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}" + REFUSED + TURN + END
NO_SYSTEM = "{% for m in messages %}{% if m.role == 'system' %}" + REFUSED + TURN + END
ONLY_FIRST_IS_SHOWN = PLAIN.replace(
    "{{ m.content }}", "{% if loop.first or m.role != 'system' %}{{ m.content }}{% endif %}"
)
ROLES = ["system a", "system b", "user u", "system c", "assistant d", "system e", "user v", "tool f", "system g"]
LATER = ["user u\n\nc", "assistant d", "user e\n\nv", "tool f\n\ng"]  # joined to the messages before and after


@pytest.mark.parametrize(
    ("template", "accepted", "rendered"),
    [
        (PLAIN, "any", ROLES),
        (FIRST, "first", ["system a\n\nb", *LATER]),
        (ONLY_FIRST_IS_SHOWN, "first", ["system a\n\nb", *LATER]),
        (NO_SYSTEM, "none", [f"user a\n\nb\n\n{LATER[0].removeprefix('user ')}", *LATER[1:]]),
    ],
)
def test_system_messages_are_where_the_template_takes_them(
    tmp_path: Path, template: str, accepted: Any, rendered: list[str]
) -> None:
    """Also in a codec, which `LLM.chat`, the terminal and the server share."""
    assert accepted_system_messages(lambda messages: rendering(template, messages, None, True)) == accepted
    messages: list[dict[str, Any]] = [dict(zip(("role", "content"), each.split())) for each in ROLES]
    fitting = with_fitting_system_messages(messages, accepted)
    assert [f"{message['role']} {message['content']}" for message in fitting] == rendered
    one = [{"role": "system", "content": "a"}, {"role": "user", "content": "u"}]
    assert accepted == "none" or with_fitting_system_messages(one, accepted) == one
    codec = TextCodec(write_tokenizer(tmp_path, byte_level_tokenizer(), template))
    shown = rendering(template, [*map(dict, fitting)], None, True)
    assert codec.token_text(codec.encode_chat(messages)) == shown
    codec.close()
