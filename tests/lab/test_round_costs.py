"""A trace is parsed line by line; an error names the line number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import timeline
from swiftspec.errors import UserError
from swiftspec.lab import round_costs
from tests.support.fuzz.files import HEAD, PARTICLES, TIMELINE


def read(folder: Path, *lines: Any, end: str = "\n") -> round_costs.Trace:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    (folder / "t.jsonl").write_text(text + end)
    return round_costs.Trace.read(folder / "t.jsonl")


def test_valid_lines(tmp_path: Path) -> None:
    trace = read(tmp_path, HEAD, TIMELINE, TIMELINE | {"round": 2}, end='\n{"cut')
    assert trace.head == HEAD and trace.rounds == [TIMELINE, TIMELINE | {"round": 2}]
    assert len(round_costs.costs(trace)) == 1 and "2 rounds" in timeline.summary(trace)
    assert "mode smc" in timeline.summary(read(tmp_path, HEAD | {"mode": "smc"}, PARTICLES))
    assert timeline.to_chrome_trace(read(tmp_path, HEAD, {**PARTICLES, "population": [1.0, 1.0]}))["traceEvents"]


def test_tokens_per_round_count_all_verified_tokens(tmp_path: Path) -> None:
    rounds = [TIMELINE | {"tokens": [1, 2]}, TIMELINE | {"round": 2, "tokens": [3, 4, 5]}]
    end = {"request": 0, "end": {"tokens": 3}}
    assert "5 tokens (2.50 per round), 3 of them output" in timeline.summary(read(tmp_path, HEAD, *rounds, end))
    assert "2 rounds, 5 tokens (2.50 per round)\n" in timeline.summary(read(tmp_path, HEAD, *rounds))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "line 2, is not valid JSON"),
        ("", "line 2, is not valid JSON"),
        ("[" * 100_000 + "]" * 100_000, "line 2, cannot be parsed as JSON"),
        ("[]", "line 2, is damaged: it is not a JSON object"),
        ({}, "line 2, is damaged (request:"),
        (TIMELINE | {"wait": None}, "line 2, is damaged (wait:"),
        (TIMELINE | {"wait": [1]}, "line 2, is damaged (wait.1:"),
        (TIMELINE | {"target": {"verify": ["a", "b"]}}, "line 2, is damaged (target.verify.0:"),
        (TIMELINE | {"target": {"verify": [0, 1]}}, "forward, proposal and path"),
        (TIMELINE | {"tokens": 5}, "line 2, is damaged (tokens:"),
        (TIMELINE | {"round": "1"}, "line 2, is damaged (round:"),
        ("x" * (33 << 20), "line 2, is longer than 32 MiB"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, line: object, reason: str) -> None:
    with pytest.raises(UserError) as caught:
        read(tmp_path, HEAD, line, TIMELINE)
    assert reason in str(caught.value) and str(caught.value).isprintable() and len(str(caught.value)) < 600


def test_an_invalid_first_line(tmp_path: Path) -> None:
    for first in ("{", "[]", {}, {"swiftspec_trace": 99}):
        with pytest.raises(UserError, match=r"is not a trace of this version|line 1"):
            read(tmp_path, first, TIMELINE)
    with pytest.raises(UserError, match="line 1, is damaged"):
        read(tmp_path, {"swiftspec_trace": 1}, TIMELINE)


def test_a_trace_without_a_span(tmp_path: Path) -> None:
    bare = {"request": 0, "round": 0, "tokens": [], "target": {}}
    assert timeline.to_chrome_trace(read(tmp_path, HEAD, bare)) == {"traceEvents": []}
    timeline.summary(read(tmp_path, HEAD, TIMELINE, TIMELINE | {"round": 2, "target": {}}))
