"""Fixtures of the tests of serve/."""

from __future__ import annotations

from pathlib import Path

import pytest

from swiftspec.startup import session
from swiftspec.text.template import TemplateRenderer


class SharedRenderer(TemplateRenderer):
    """One process for all sessions of this test run, since each takes a second to start. test_template.py starts
    separate ones."""

    def close(self) -> None:
        """Does nothing: the next session uses the process too."""


SHARED_RENDERER = SharedRenderer(Path())


@pytest.fixture(autouse=True)
def one_renderer(monkeypatch: pytest.MonkeyPatch) -> None:
    def shared_renderer(model: Path, chat_template: Path | None = None, *, start: bool = False) -> TemplateRenderer:
        SHARED_RENDERER.model = chat_template or model
        return SHARED_RENDERER

    monkeypatch.setattr(session, "template_renderer", shared_renderer)
