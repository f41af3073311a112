"""GPU timing for the benchmarks: a CUDA graph of many calls replayed between two events. On a CPU, which only stands in
for a GPU in tests of the benchmarks, the calls are timed one after the other."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch

CALLS, REPLAYS = 200, 20
STAND_IN_RUNS = 2  # on a CPU
COPY_BYTES = {"cuda": 4 << 30, "cpu": 16 << 20}  # of the copy that measures the bandwidth
ENOUGH = 0.1  # seconds of replays after which the timing stops, but not before 5 replays

Call = Callable[[], Any]
Timer = Callable[[list[Call]], float]  # microseconds per call


class GpuLost(Exception):
    """Raised when the process can no longer measure correctly."""


def graph_timer(calls: list[Call]) -> float:
    """Returns the microseconds per call: the median replay of a graph of at least CALLS calls, divided by their number.
    Stops early after ENOUGH seconds of replays.

    Raises GpuLost if the capture fails.
    """
    return _replay_time(calls, lambda times: len(times) < 5 or sum(times) < 1000 * ENOUGH)


def fixed_graph_timer(calls: list[Call]) -> float:
    """As `graph_timer`, with the same number of calls and replays on every rank, for calls that exchange data."""
    return _replay_time(calls, lambda times: True)


def _replay_time(calls: list[Call], goes_on: Callable[[list[float]], bool]) -> float:
    """Returns the microseconds per call of at most REPLAYS replays. `goes_on`: whether another replay follows the ones
    that took these milliseconds."""
    many = list(itertools.islice(itertools.cycle(calls), max(CALLS, len(calls))))
    for call in calls[:3]:
        call()
    return 1000 * median(_replays(captured(many), goes_on)) / len(many)


def captured(calls: Sequence[Call]) -> Callable[[], None]:
    """Captures the calls in a CUDA graph and returns its replay. The caller has run each kind of call before, because
    kernels are loaded at their first launch. Raises GpuLost if the capture fails."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for call in calls:
                call()
    except Exception as error:
        raise GpuLost(str(error)) from error  # a failed capture leaves stream and allocator in capture mode
    return graph.replay


def _replays(replay: Callable[[], None], goes_on: Callable[[list[float]], bool]) -> list[float]:
    """Returns the milliseconds of at most REPLAYS replays after one that is not counted."""
    replay()
    times: list[float] = []
    while len(times) < REPLAYS and goes_on(times):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return times


def sequence_timer(calls: Sequence[Call]) -> float:
    """Returns the microseconds of all calls together: the median replay of a graph that contains each of them once.

    Raises GpuLost if the capture fails.
    """
    for call in calls:
        call()
    return 1000 * median(_replays(captured(calls), lambda times: len(times) < 5 or sum(times) < 1000 * ENOUGH))


def eager_sequence_timer(calls: Sequence[Call]) -> float:
    """As `sequence_timer`, on the clock of the host, without a graph."""
    times = list[float]()
    for _ in range(STAND_IN_RUNS + 1):
        began = time.perf_counter()
        for call in calls:
            call()
        times.append(time.perf_counter() - began)
    return 1e6 * median(times[1:])


def eager_timer(calls: list[Call]) -> float:
    """As `graph_timer`, on the clock of the host, without a graph."""
    return eager_sequence_timer(calls) / len(calls)


def copy_speed(device: str) -> float:
    """Returns the GB/s read and written by a device copy of COPY_BYTES in total, which are much larger than a GPU's
    caches."""
    size = COPY_BYTES[device.partition(":")[0]]
    source = torch.ones(size // 2, dtype=torch.uint8, device=device)
    target = source.clone()  # pages of a CPU are mapped before the timing
    if device == "cpu":
        return size / (1e3 * eager_timer([partial(target.copy_, source)]))
    times = []
    for _ in range(6):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return size / (1e6 * median(times[1:]))


def alive() -> bool:
    """Returns whether this process can still use the GPU. A device error persists until the process ends."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True
