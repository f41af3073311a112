"""What the tests of serve/ share."""

from __future__ import annotations

from pathlib import Path

import pytest

from swiftspec.serve import session
from swiftspec.serve.text.template import Renderer


class Kept(Renderer):
    """One process for all sessions of this run, as each takes a second to start. test_template.py has its own."""

    def close(self) -> None:
        """Stays for the next one."""


KEPT = Kept(Path())


@pytest.fixture(autouse=True)
def one_renderer(monkeypatch: pytest.MonkeyPatch) -> None:
    def kept(model: Path) -> Renderer:
        KEPT._model = model
        return KEPT

    monkeypatch.setattr(session, "Renderer", kept)
