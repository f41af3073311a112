"""Predicted throughput of concurrent requests on one rank: autoregressive decoding, chains (trees with one leaf), and
particles (SMC).

The requests are decoded as one batch, so a round has the phases of serial mode with more rows. Each request adds to a
target forward 1 row in autoregressive decoding, K + 1 rows as a chain and N (K + 1) rows as particles. To a draft
forward it adds one row per chain or particle, and two in the first forward of a round. Each row reads the context of
its own request. A particle gains K + 1 tokens per round; the tokens that a chain gains come from recorded acceptance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from bench.prediction import simulation
from bench.prediction.simulation import RecordedAcceptance, Rounds, SimulatedTimes

# (rows of a target forward, rows of a draft forward, requests) -> (slow, fast) step times
Forwards = Callable[[int, int, int], tuple[SimulatedTimes, SimulatedTimes]]


@dataclass(frozen=True, slots=True)
class PredictedBatch:
    """Predicted throughput of one decoding method for a number of concurrent requests.

    `groups`: number of requests.
    `low`, `speed`, `high`: tokens per second of all requests together, with slow, mean and fast step times.
    """

    name: str
    groups: int
    low: float
    speed: float
    high: float


def predict_batches(
    groups: Sequence[int], particles: int, steps: int, acceptance: RecordedAcceptance, forwards: Forwards
) -> list[PredictedBatch]:
    """Predicts autoregressive decoding, chains and particles for each number of requests in `groups`.

    `particles`: N.
    `steps`: K, the draft tokens per chain or particle and round.
    Raises UserError if no chains of K draft tokens were recorded.
    """
    ways: list[tuple[str, int, int, Rounds]] = [
        ("ar", 0, 0, [(0, 0)]),
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
    """Returns the tokens per second of one request. `k`: K, or 0 for autoregressive decoding."""
    return (simulation.serial(rounds, k, times) if k else simulation.plain(times)).speed


def format_batches(found: Sequence[PredictedBatch]) -> str:
    """Formats the predictions as a table with one row per number of requests and one column per decoding method."""
    names, counts = list(dict.fromkeys(each.name for each in found)), sorted({each.groups for each in found})
    cells = [["requests", *(f"{name}, tok/s" for name in names)]]
    for count in counts:
        mine = {each.name: each for each in found if each.groups == count}
        cells.append([str(count), *(f"{each.speed:.0f} ({each.low:.0f}..{each.high:.0f})" for each in mine.values())])
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in cells)
