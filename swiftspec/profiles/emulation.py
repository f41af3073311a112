"""Parser of `--emulate`: step times as durations, as names of models in the paper's Table 1, or from a JSON file."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from swiftspec import file_io
from swiftspec.errors import UserError, truncated_repr
from swiftspec.file_io import Fields
from swiftspec.observe.step_time_emulation import StepTimeEmulation, StepTimes

UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
TABLE_ROWS = 8  # rows per forward in Table 1
MIN_STEP_MS = 1e-9  # smallest step time that a file may contain
MAX_STEP_S = 60.0  # a larger step time is rejected: its unit is probably wrong


def paper_figures() -> dict[str, Any]:
    """Returns the measurements quoted from the SwiftSpec paper (Tables 1 and 6), from paper.json in this package."""
    return json.loads(Path(__file__).with_name("paper.json").read_text(encoding="utf-8"))


def parse_emulation(text: str) -> StepTimeEmulation:
    """Parses the value of `--emulate`. Raises UserError if it is invalid.

    `text` is one of:
    - a step time per model, such as `target=10.48ms,draft=3.25ms`; a model that is left out is not emulated
    - the same with the name of a model in the paper's Table 1 instead of a time, such as `target=llama3-70b`: the step
    time then depends on the TP size
    - the path of a .json file such as `{"target": {"4": {"1": 9.1, "8": 10.5}}, "draft": ...}`: milliseconds of a
    forward by TP size and by rows (tokens in the forward)
    """
    if text.endswith(".json"):
        return _from_file(Path(text))
    sides: dict[str, StepTimes] = {}
    for part in text.split(","):
        side, _, value = part.strip().partition("=")
        if side not in ("target", "draft") or side in sides or not value:
            raise UserError(f"--emulate {truncated_repr(text)}: expected target=10.48ms,draft=3.25ms or a .json file")
        sides[side] = _times(value)
    return StepTimeEmulation(sides.get("target"), sides.get("draft"))


def _times(value: str) -> StepTimes:
    table = {name: times for name, times in paper_figures()["step_ms"].items() if name != "note"}
    if value in table:
        return StepTimes(tuple((int(tp), TABLE_ROWS, ms * 1e-3) for tp, ms in table[value].items()))
    found = re.fullmatch(r"([0-9.]+(?:e-?\d+)?)(us|ms|s)", value)
    try:
        assert found is not None
        return StepTimes(((1, TABLE_ROWS, _checked(float(found[1]) * UNITS[found[2]])),))
    except (AssertionError, ValueError):
        known = ", ".join(table)
        raise UserError(
            f"--emulate: {truncated_repr(value)} is not a valid step time: expected a time such as 10.48ms (at most"
            f" {MAX_STEP_S:g} s) or one of {known}"
        ) from None


def _from_file(file: Path) -> StepTimeEmulation:
    name = f"--emulate {file}"
    fields = Fields(file_io.read_object(file, name, file_io.SMALL_FILE_BYTES))
    unknown = sorted(set(fields.data) - {"target", "draft"})
    try:
        if unknown or not fields.data:
            raise ValueError(
                f"the keys must be target and draft, not {truncated_repr(unknown[0]) if unknown else 'none'}"
            )
        return StepTimeEmulation(**{side: _from_table(fields.object(side)) for side in fields.data})
    except (ValueError, UserError) as error:
        raise UserError(
            f'{name} must contain milliseconds by TP size and rows, such as {{"target": {{"4": {{"8": 10.5}}}}}}'
            f" ({error})"
        ) from None


def _from_table(table: Fields) -> StepTimes:
    points: list[tuple[int, int, float]] = []
    for tp in table.data:
        times = table.object(tp)
        for rows in times.data:
            seconds = times.number(rows, ge=MIN_STEP_MS, le=1e3 * MAX_STEP_S) * 1e-3
            points.append((_count(tp), _count(rows), seconds))
    if not points:
        raise ValueError("a table has no step times")
    return StepTimes(tuple(points))


def _count(text: str) -> int:
    if re.fullmatch("[0-9]{1,6}", text) is None or int(text) < 1:
        raise ValueError(f"TP sizes and rows must be in 1..999999, not {truncated_repr(text)}")
    return int(text)


def _checked(seconds: float) -> float:
    if not (math.isfinite(seconds) and 0 < seconds <= MAX_STEP_S):
        raise ValueError(f"{seconds:g} s is not a valid step time")
    return seconds
