"""swiftspec/_C.pyi matches the installed extension."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import stubs

pytestmark = pytest.mark.slow  # each test starts processes


def test_the_types_of_the_extension_are_current() -> None:
    assert stubs.is_current(), "run python -m tools.stubs"


@pytest.mark.slow
def test_a_change_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, extension = stubs.STUB_FILE.read_text(), stubs.run_stubgen()
    monkeypatch.setattr(stubs, "run_stubgen", lambda: extension)  # once for both tests
    changed = tmp_path / "_C.pyi"
    monkeypatch.setattr(stubs, "STUB_FILE", changed)
    for old, new in (("def threads() -> int", "def threads() -> str"), ("def threads()", "def thread_count()")):
        assert old in text
        changed.write_text(text.replace(old, new))
        assert not stubs.is_current()
