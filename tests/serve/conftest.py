"""Fixtures of the HTTP tests: a scripted engine behind a server, and a client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from swiftspec.text.codec import TextCodec
from swiftspec.text.template import TemplateRenderer
from tests.support.http import Player, application, serving
from tests.support.toy_pair import TEMPLATE, byte_level_tokenizer, write_tokenizer

HERMES = (
    "{% for t in tools or [] %}{{ t.function.name }} <tool_call>{% endfor %}"
    "{% if effort is defined %}{{ effort }}{% endif %}"
    "{% for m in messages %}{{ '<|' + ('user' if m.role == 'user' else 'bot') + '|>' + (m.content or '') }}"
    "{% for c in m.tool_calls or [] %}{{ '\n<tool_call>' }}\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}"
    "{{ '<|end|>' }}{% endfor %}{% if add_generation_prompt %}<|bot|>{% endif %}{# <think> #}"
)


@pytest.fixture(scope="session")
def renderer() -> Iterator[TemplateRenderer]:
    """One process for all tests of these."""
    made = TemplateRenderer(Path("model"))
    yield made
    made.close()


@pytest.fixture(scope="session")
def plain_player(tmp_path_factory: pytest.TempPathFactory, renderer: TemplateRenderer) -> Player:
    """A model whose template supports neither tools nor reasoning."""
    folder = write_tokenizer(tmp_path_factory.mktemp("plain"), byte_level_tokenizer(), TEMPLATE)
    return Player(TextCodec(folder, renderer))


@pytest.fixture(scope="session")
def hermes_player(tmp_path_factory: pytest.TempPathFactory, renderer: TemplateRenderer) -> Player:
    """A model whose template supports tools and reasoning."""
    folder = write_tokenizer(tmp_path_factory.mktemp("hermes"), byte_level_tokenizer(), HERMES)
    return Player(TextCodec(folder, renderer))


@pytest.fixture(scope="session")
def plain_url(plain_player: Player) -> Iterator[str]:
    with serving(application(plain_player)) as address:
        yield address


@pytest.fixture(scope="session")
def hermes_url(hermes_player: Player) -> Iterator[str]:
    with serving(application(hermes_player)) as address:
        yield address


@pytest.fixture
def player(plain_player: Player) -> Player:
    plain_player.prepare()
    return plain_player


@pytest.fixture
def thinker(hermes_player: Player) -> Player:
    hermes_player.prepare()
    return hermes_player


@pytest.fixture
def client(player: Player, plain_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=plain_url, timeout=300, verify=False) as made:
        yield made


@pytest.fixture
def thinking_client(thinker: Player, hermes_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=hermes_url, timeout=300, verify=False) as made:
        yield made
