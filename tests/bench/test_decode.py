"""bench/decode.py runs every system and prints the results that it writes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench import decode
from bench.baselines.llama_plain import has_llama_cpp
from bench.baselines.to_gguf import TYPES

needs_llama_cpp = pytest.mark.skipif(not has_llama_cpp(), reason="llama-cpp-python is not installed")


def run(monkeypatch: pytest.MonkeyPatch, out: Path) -> list[dict[str, object]]:
    argv = ["decode", "--limit", "1", "--repeats", "2", "--max-tokens", "8", "--threads", "1", "--json", str(out)]
    argv += ["--guidance-scale", "1.5"]
    monkeypatch.setattr(sys, "argv", argv)
    decode.main()
    return json.loads(out.read_text())["systems"]


@pytest.mark.slow
def test_a_run_without_llama_cpp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(decode, "has_llama_cpp", lambda: False)
    rows = run(monkeypatch, tmp_path / "out.json")
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "llama.cpp: not installed" and len(printed) == 2 + len(rows)
    ours = ["swiftspec ar", "swiftspec serial", "swiftspec ar, dense target", "swiftspec serial, dense target"]
    names = ["transformers", "transformers assisted", *(f"{name}{end}" for name in ours for end in ("", ", guided"))]
    assert [row["system"] for row in rows] == names
    assert all(line.startswith(name) for line, name in zip(printed[2:], names, strict=True))
    assert [row["ratio_to_unguided"] is not None for row in rows] == [name.endswith("guided") for name in names]
    assert all(row["same_text_as_transformers"] in (0, 1) for row in rows), "counted per prompt, not per request"


@needs_llama_cpp
def test_a_run_with_llama_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {row["system"]: row for row in run(monkeypatch, tmp_path / "out.json")}
    for kind in TYPES:
        row = rows[f"llama.cpp {kind}, 1 thread"]
        assert row["tokens_per_round"] == 1 and row["decode_tokens_per_second"] is not None
