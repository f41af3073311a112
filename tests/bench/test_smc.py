"""How bench/smc.py evaluates its results: distances, table and figure."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from bench import smc_groups
from bench.figure import svg_axes
from bench.smc import Result, distance, draw, table

PLAIN = Result(0, 0, tokens=100, rounds=100, seconds=1.0, likelihood=[-1.0, -2.0, -1.5])
WORSE = Result(1, 4, tokens=200, rounds=40, seconds=1.0, likelihood=[-1.5, -2.5, -2.0])
BETTER = Result(8, 4, tokens=30, rounds=6, seconds=1.0, likelihood=[-0.9, -1.6, -1.6])


def test_a_distance_is_paired() -> None:
    assert distance(WORSE, PLAIN) == (pytest.approx(-0.5), pytest.approx(0))
    mean, error = distance(BETTER, PLAIN)
    assert mean == pytest.approx((0.1 + 0.4 - 0.1) / 3)
    assert error == pytest.approx(math.sqrt((0.1**2 + 0.4**2 + 0.1**2 - 3 * mean**2) / 2 / 3))


def test_the_table_has_a_row_for_each_n() -> None:
    rows = table([PLAIN, WORSE, BETTER]).splitlines()
    assert rows[0] == "| N | K = 4: speed, log p |" and len(rows) == 4
    assert rows[2] == "| 1 | 2.00x, -0.50 ± 0.00 |" and rows[3].startswith("| 8 | 0.30x, +0.13 ± ")


def points_of(line: Line2D) -> list[tuple[float, float]]:
    return [*zip(*(np.asarray(values, float).tolist() for values in line.get_data()))]


def test_the_figure_contains_every_point(tmp_path: Path) -> None:
    with svg_axes(tmp_path / "smc.svg") as drawn:
        draw(drawn, [PLAIN, WORSE, BETTER], "title")
    (fast, low), (slow, high) = points_of(drawn.lines[0])
    assert (fast, low) == (pytest.approx(2), pytest.approx(-0.5))
    assert (slow, high) == (pytest.approx(0.3), pytest.approx(distance(BETTER, PLAIN)[0]))
    assert [label.get_text() for label in drawn.texts] == ["1", "8"]
    text = (tmp_path / "smc.svg").read_text(encoding="utf-8")
    assert text.startswith("<?xml") and "title" in text and "1/2x" in text


def test_the_figure_of_groups_contains_every_point() -> None:
    drawn = Figure().add_subplot()
    smc_groups.draw(drawn, [1, 2, 8], {"smc": [10, 15, 20], "match": [5, 10, 30]})
    assert [*map(points_of, drawn.lines)] == [[(1, 10), (2, 15), (8, 20)], [(1, 5), (2, 10), (8, 30)]]
