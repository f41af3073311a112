"""Predicted throughput of G concurrent requests on one rank: plain decoding, exact chains and groups of particles.

A round of all requests is one batch: the phases of serial decoding with more rows. Per request the target's batch has 1
row in plain decoding, K + 1 rows for a chain and N (K + 1) rows for particles; the first draft forward has twice as
many rows as the others. The rows of a request read that request's own context. Particles always gain K + 1 tokens per
round; the tokens that chains gain come from recorded acceptance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from swiftspec.lab import simulation
from swiftspec.lab.simulation import RecordedAcceptance, Rounds, SimulatedTimes

# (rows of the target, rows of the draft, requests) -> (slow, fast)
Forwards = Callable[[int, int, int], tuple[SimulatedTimes, SimulatedTimes]]


@dataclass(frozen=True, slots=True)
class PredictedBatch:
    """One way to decode G requests and the tokens per second of all of them together: slow, middle and fast."""

    name: str
    groups: int
    low: float
    speed: float
    high: float


def predict_batches(
    groups: Sequence[int], particles: int, steps: int, acceptance: RecordedAcceptance, forwards: Forwards
) -> list[PredictedBatch]:
    """Predicts every way of decoding for every number of requests.

    Raises UserError if no chains of that length were recorded.
    """
    ways: list[tuple[str, int, int, Rounds]] = [
        ("plain", 0, 0, [(0, 0)]),
        (f"chains K {steps}", 1, steps, acceptance.chains(steps)),
        (f"smc N {particles} K {steps}", particles, steps, [(steps, 0)]),
    ]
    return [_batch(name, count, n, k, rounds, forwards) for name, n, k, rounds in ways for count in groups]


def _batch(name: str, count: int, n: int, k: int, rounds: Rounds, forwards: Forwards) -> PredictedBatch:
    rows = max(n, 1) * count
    first, others = (forwards(rows * (k + 1), drafted, count) for drafted in (2 * rows, rows))
    slow, fast = (
        replace(one, draft=(one.draft + (k - 1) * other.draft) / max(k, 1))
        for one, other in zip(first, others, strict=True)
    )
    speeds = [count * _speed(rounds, k, times) for times in (slow, simulation.between(slow, fast), fast)]
    return PredictedBatch(name, count, *speeds)


def _speed(rounds: Rounds, k: int, times: SimulatedTimes) -> float:
    """Returns the tokens per second of one request."""
    return (simulation.serial(rounds, k, times) if k else simulation.plain(times)).speed


def format_batches(found: Sequence[PredictedBatch]) -> str:
    """Formats the predictions as a table with one row per number of requests and one column per way of decoding."""
    names, counts = list(dict.fromkeys(each.name for each in found)), sorted({each.groups for each in found})
    cells = [["requests", *(f"{name}, tok/s" for name in names)]]
    for count in counts:
        mine = {each.name: each for each in found if each.groups == count}
        cells.append([str(count), *(f"{each.speed:.0f} ({each.low:.0f}..{each.high:.0f})" for each in mine.values())])
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in cells)
