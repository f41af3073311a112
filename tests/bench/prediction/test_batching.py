"""Concurrent requests computed by hand: rows, rounds and tokens of each kind of batching; and the command."""

from __future__ import annotations

import pytest

from bench.prediction import batching, latency_model
from bench.prediction.simulation import RecordedAcceptance, SimulatedTimes
from swiftspec.model.config_json import parse_config
from tests.bench.prediction.test_predictor import LLAMA_70B

CHAINS = RecordedAcceptance(
    [{"plan": {"mode": "serial", "verify_batch": 3, "draft_leaves": 1, "draft_steps": 2}, "rounds": [[2, 0], [0, 0]]}]
)


def test_rows_and_tokens_of_each_kind_of_batching() -> None:
    calls: list[tuple[int, int, int]] = []

    def forwards(rows: int, drafted: int, requests: int) -> tuple[SimulatedTimes, SimulatedTimes]:
        """A target row takes one second, a draft row a tenth, on the fast and the slow machine."""
        calls.append((rows, drafted, requests))
        times = SimulatedTimes(10.0 + rows, 1.0 + drafted / 10, verify=0.5)
        return times, times

    found = {(each.name, each.groups): each.speed for each in batching.predict_batches([1, 4], 2, 2, CHAINS, forwards)}
    assert found["ar", 4] == pytest.approx(4 / 14.5)
    # G (K + 1) rows verified; 2 G of the draft, then G; two tokens a round on average
    assert found["chains K 2", 4] == pytest.approx(4 * 2 / (22.5 + 1.8 + 1.4))
    # the same with N times the rows; K + 1 tokens a round
    assert found["smc N 2 K 2", 4] == pytest.approx(4 * 3 / (34.5 + 2.6 + 1.8))
    assert found["smc N 2 K 2", 1] == pytest.approx(3 / (16.5 + 1.4 + 1.2))
    assert (24, 16, 4) in calls and (24, 8, 4) in calls
    assert (
        batching.format_batches(batching.predict_batches([1, 4], 2, 2, CHAINS, forwards))
        .splitlines()[2]
        .startswith("4 ")
    )


def test_rows_are_nearly_free_until_compute_is_the_limit() -> None:
    config, lines = parse_config(LLAMA_70B), latency_model.constants(latency_model.GPUS["h200"])[1]
    times = [latency_model.forward(config, 1, rows, lines, False) for rows in (1, 64, 1024)]
    assert times[1] < 1.05 * times[0] and times[2] > 3 * times[0]
    four = latency_model.forward(config, 1, 4, lines, False, sequences=4)
    assert four > latency_model.forward(config, 1, 4, lines, False), "each request has a context of its own to read"
