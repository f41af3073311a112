"""Drafting over a network: rounds computed by hand, parsing of links, and the command."""

from __future__ import annotations

import pytest

from bench.prediction import network
from bench.prediction.network import LinkCost
from bench.prediction.network_link import Link
from bench.prediction.predictor import main
from bench.prediction.simulation import SimulatedTimes

TIMES = SimulatedTimes(30, 3)  # milliseconds
DRAFT_APART, BOTH_APART = LinkCost(20, 0, both=False), LinkCost(20, 0, both=True)
HIT, MISS = (2, 0), (0, 1)


def test_serial_rounds_include_the_time_of_every_message() -> None:
    assert network.serial_over_link([HIT] * 3, 4, TIMES, DRAFT_APART).round == 30 + 40 + 12
    assert network.serial_over_link([HIT] * 3, 4, TIMES, BOTH_APART).round == 30 + 80 + 12


def test_a_replica_with_enough_nodes_hides_the_latency() -> None:
    found = network.async_over_link([HIT] * 50, 4, TIMES, BOTH_APART)
    assert found.round == pytest.approx(70) and found.waiting == 0
    near = network.async_over_link([HIT] * 50, 4, TIMES, LinkCost(5, 0, both=False))
    assert near.round == pytest.approx(30) and near.waiting == 0


def test_late_deltas_and_deltas_requested_by_a_result() -> None:
    late = network.async_over_link([HIT] * 400, 4, TIMES, DRAFT_APART)
    assert late.round == pytest.approx((20 + 12 + 20 + 30) / 2, rel=0.01), "growth goes into the round after the next"
    requested = network.async_over_link([MISS] * 50, 4, TIMES, BOTH_APART)
    assert requested.round == pytest.approx(70 + 20 + 3 + 20)
    slow = network.async_over_link([HIT] * 50, 4, TIMES, LinkCost(20, 5, both=True))
    assert slow.round == pytest.approx((20 + 12 + 20 + 4 * 5 + 70) / 2, rel=0.01), "nodes take their time on the wire"


def test_the_depth_that_hides_the_latency() -> None:
    assert network.max_hidden_depth(TIMES, BOTH_APART) == 10
    assert network.max_hidden_depth(TIMES, LinkCost(5, 0, both=False)) == 6
    assert network.max_hidden_depth(TIMES, DRAFT_APART) == 0


def test_valid_links() -> None:
    assert Link.parse("40ms") == Link(0.04)
    assert Link.parse("200us,1Gbit").one_way(0) == pytest.approx(1e-4)
    assert Link.parse("1s, 500kbit").one_way(62_500) == pytest.approx(1.5)


def test_the_command_reports_whether_it_pays(capsys: pytest.CaptureFixture[str]) -> None:
    pair = ["--emulate", "target=30ms,draft=3ms", "--ranks", "1"]
    assert main([*pair, "--link", "400us,1Gbit"]) == 0
    near = capsys.readouterr().out
    assert "draft remote: pays, async, draft remote at d" in near and "async, both remote" in near
    assert main([*pair, "--link", "100ms"]) == 0
    assert "draft remote: does not pay" in capsys.readouterr().out
    assert main([*pair, "--link", "soon"]) == 1
    assert capsys.readouterr().err.count("\n") == 1
