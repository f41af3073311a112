"""How bench/smc.py evaluates its results: distances, table and figure."""

from __future__ import annotations

import math
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench import smc_groups
from bench.smc import Result, distance, plot, table

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


def test_the_figure_contains_every_point(tmp_path: Path) -> None:
    plot([PLAIN, WORSE, BETTER], tmp_path / "smc.svg", "title")
    points = [
        (float(circle.attrib["cx"]), float(circle.attrib["cy"]))
        for circle in ElementTree.parse(tmp_path / "smc.svg").iter("{http://www.w3.org/2000/svg}circle")
    ]
    (x1, y1), (x8, y8) = points
    assert x8 < x1 and y8 < y1, "slower lies left, likelier above"
    assert all(80 <= x <= 680 and 70 <= y <= 400 for x, y in points)


def test_the_figure_of_groups_contains_every_point(tmp_path: Path) -> None:
    smc_groups.plot([1, 2, 8], {"smc": [10, 15, 20], "match": [5, 10, 30]}, tmp_path / "groups.svg")
    points = [
        (float(circle.attrib["cx"]), float(circle.attrib["cy"]))
        for circle in ElementTree.parse(tmp_path / "groups.svg").iter("{http://www.w3.org/2000/svg}circle")
    ]
    assert [x for x, _ in points] == [80, 280, 680] * 2
    assert points[5][1] == 80 and points[0][1] > points[1][1] > points[2][1]
