"""Reduction of stamps to tables and traces; tests/simt runs the kernels that record them."""

from __future__ import annotations

import numpy as np
import pytest

from bench.gpu import stalls, stamps
from bench.gpu.stamps import PLACE, POINTS, START_NS, Launch

WORDS = 16
RATE = 1.755  # cycles per nanosecond


def launch(kernel: str, begin_ns: int, blocks_on: list[int], warps: int = 2) -> Launch:
    """A launch whose warps reach a point each 100 ns; block b starts b * 10 ns late on multiprocessor blocks_on[b],
    whose clock differs from that of others."""
    records = np.zeros((len(blocks_on) * warps, WORDS), np.int64)
    for index, record in enumerate(records):
        block = index // warps
        start = begin_ns + 10 * block
        clock = 1000 * blocks_on[block] + start * RATE
        record[:POINTS] = [round(clock + point * 100 * RATE) for point in range(POINTS)]
        record[START_NS], record[PLACE] = start, block << 32 | blocks_on[block]
    return Launch(kernel, records)


def test_phases_gaps_and_places_follow_from_the_stamps() -> None:
    """Whatever the offset of a multiprocessor's clock. The second launch starts before the first one ends, and its wait
    returns after it; some of its warps have no turn and reach no tile."""
    first, second = launch("linear 256 x 512", 10_000, [0, 1, 2, 0]), launch("attention", 11_000, [1, 1, 2, 3])
    second.records[0, 3:9] = 0
    found = stamps.reduce([first, second])
    assert found["cycles per ns"] == pytest.approx(RATE, rel=1e-3)
    linear, attention = found["kernels"]
    assert [phase["point"] for phase in linear["phases"]] == list(stamps.LINEAR[1:])
    assert all(phase["us"] == pytest.approx(0.1, rel=2e-2) for phase in linear["phases"])
    assert linear["us"] == pytest.approx(1.13, rel=1e-2) and linear["largest of mean"] == 2.0
    assert linear["blocks"] == 4 and attention["multiprocessors"] == 3
    assert attention["early us"] == pytest.approx(0.13, abs=5e-3)
    assert attention["gap us"] == pytest.approx(0.17, abs=5e-3), "from the last exit to the first wait that returned"
    reached = {phase["point"]: phase["warps"] for phase in attention["phases"]}
    assert reached["planned"] == 8 and reached["dependencies"] == 7
    barrier = next(phase for phase in attention["phases"] if phase["point"] == "cluster barrier")
    assert barrier["largest us"] == pytest.approx(0.7, rel=2e-2), "since the last point that the warp has reached"
    events = list(stamps.trace_events([first, second]))
    assert len(events) == 4 * 11 + 4 * 11 - 6 and all(event["dur"] >= 0 for event in events)
    assert any("gap" in line for line in stamps.describe(found))


def test_stalls_are_read_from_the_output_of_the_profiler() -> None:
    output = "\n".join([
        "==PROF== Connected", '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"',
        f'"0","void linear_kernel<1>(int)","{stalls.METRIC.format("no_instruction")}","inst","1,002.5"',
        '"0","void linear_kernel<1>(int)","another","inst","1"',
        '"1","void attention_kernel(int)","gpu__time_duration.sum","ns","14000"',
    ])  # fmt: skip
    assert stalls.parse(output) == [
        {"kernel": "void linear_kernel<1>", "no_instruction": 1002.5},
        {"kernel": "void attention_kernel", "ns": 14000.0},
    ]
    assert stalls.parse("ncu: error") == []
