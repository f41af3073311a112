"""What G requests side by side would give on one rank: plain, as exact chains, and as groups of particles.

A round of all is one batch, so it takes the steps of serial decoding with more rows: for each request 1 plainly, K + 1
as a chain, N (K + 1) as particles; in the draft's first forward twice as many as in the others. The rows of a request
read a context of its own. Particles grow by K + 1 tokens a round whatever the models are; what chains accept was
recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from swiftspec.lab import simulation
from swiftspec.lab.simulation import RecordedAcceptance, Rounds, SimulatedTimes

# rows of the target and of the draft, requests -> slow, fast
Forwards = Callable[[int, int, int], tuple[SimulatedTimes, SimulatedTimes]]


@dataclass(frozen=True, slots=True)
class PredictedBatch:
    """A way to decode G requests, and tokens a second of all of them: slow, middle and fast."""

    name: str
    groups: int
    low: float
    speed: float
    high: float


def predict_batches(
    groups: Sequence[int], particles: int, steps: int, acceptance: RecordedAcceptance, forwards: Forwards
) -> list[PredictedBatch]:
    """Every way with every number of requests. Raises UserError where no such chains were recorded."""
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
    """Of one of the requests."""
    return (simulation.serial(rounds, k, times) if k else simulation.plain(times)).speed


def format_batches(found: Sequence[PredictedBatch]) -> str:
    """A line for each number of requests, a column for each way."""
    names, counts = list(dict.fromkeys(each.name for each in found)), sorted({each.groups for each in found})
    cells = [["requests", *(f"{name}, tok/s" for name in names)]]
    for count in counts:
        mine = {each.name: each for each in found if each.groups == count}
        cells.append([str(count), *(f"{each.speed:.0f} ({each.low:.0f}..{each.high:.0f})" for each in mine.values())])
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in cells)
