"""bench/kernels.py runs every kind of case and writes the results that it prints."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench import kernels
from swiftspec.backends.cpu import cpu as host


@pytest.mark.skipif(host.level() == "none", reason="this CPU has no AVX2")
def test_quick_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["kernels", "--quick", "--only", "demo", "--json", str(tmp_path / "out.json")])
    kernels.main()
    written = json.loads((tmp_path / "out.json").read_text())
    printed = capsys.readouterr().out.splitlines()
    assert written["level"] == host.level() and len(printed) == 2 + len(written["results"])
    kinds = {result["name"].split()[0] for result in written["results"]}
    assert kinds == {"copy", "peak", "linear", "attention", "noise", "draw", "children"}
    assert all(r["microseconds"] > 0 and r["gigabytes"] > 0 for r in written["results"] if "demo" in r["name"])
