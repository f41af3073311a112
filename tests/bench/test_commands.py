"""Every command of bench/ and tools/ can be imported and prints its help."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def commands() -> list[str]:
    """The modules of bench/ and tools/ that parse a command line."""
    files = sorted(file for folder in ("bench", "tools") for file in (ROOT / folder).rglob("*.py"))
    found = [file for file in files if "Parser(" in (text := file.read_text()) and "def main(" in text]
    return [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in found]


@pytest.mark.parametrize("name", commands())
def test_help(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(import_module(name).main())
    assert ended.value.code in (0, None)
    assert capsys.readouterr().out.startswith("usage:")
