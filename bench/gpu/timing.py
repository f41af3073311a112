"""GPU timing for the benchmarks: a CUDA graph of many calls replayed between two events."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

CALLS, REPLAYS = 200, 20
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
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for call in many:
                call()
    except Exception as error:
        raise GpuLost(str(error)) from error  # a failed capture leaves stream and allocator in capture mode
    graph.replay()
    times: list[float] = []
    while len(times) < REPLAYS and goes_on(times):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return 1000 * median(times) / len(many)


def copy_speed(device: str, size: int = 4 << 30) -> float:
    """Returns the GB/s read and written by a device copy of `size` bytes in total, which must be much larger than the
    caches."""
    source = torch.ones(size // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
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
