"""Tables and verdicts of bench/large.py."""

from __future__ import annotations

import os
import platform
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.workload import Measured

FIRST, SECOND = "first start", "second start"
OURS, PEER = "swiftspec", "llama.cpp"


@dataclass(frozen=True, slots=True)
class Row:
    """One system and its measurements.

    `kind` is its role in the comparisons: ar, head int8, tree or start; plain or draft for llama.cpp.
    """

    system: str
    name: str
    kind: str
    measured: Measured

    @property
    def title(self) -> str:
        return f"{self.system} {self.name}"

    def record(self) -> dict[str, Any]:
        """Returns the row for the JSON document."""
        found = asdict(self.measured)
        figures = {f"rate_{what}": value for what, value in zip(("min", "median", "max"), self.rates(), strict=True)}
        return {"system": self.system, "name": self.name, "kind": self.kind, **figures, **found}

    def rates(self) -> tuple[float | None, float | None, float | None]:
        """Returns minimum, median and maximum of the requests' tokens per second, or three times None without
        requests."""
        rates = self.measured.rates
        return (min(rates), statistics.median(rates), max(rates)) if rates else (None, None, None)

    @property
    def per_round(self) -> float | None:
        """Tokens per target forward after the prefill, or None if the rounds are not known."""
        return self.measured.decoded / self.measured.rounds if self.measured.rounds else None

    @property
    def sampled_per_round(self) -> float | None:
        """The same of the requests at COMMON_SAMPLING."""
        return self.measured.sampled_decoded / self.measured.sampled_rounds if self.measured.sampled_rounds else None


@dataclass(frozen=True, slots=True)
class Verdict:
    """A requirement on a measured figure.

    `aim`: lower bound, or upper bound if `most` is set. `found`: the figure, or None if it was not measured in this
    run.
    """

    what: str
    aim: float
    found: float | None
    most: bool = False

    @property
    def holds(self) -> bool | None:
        if self.found is None:
            return None
        return self.found <= self.aim if self.most else self.found >= self.aim

    def line(self) -> str:
        word = {True: "holds", False: "missed", None: "not measured"}[self.holds]
        found = "-" if self.found is None else f"{self.found:.2f}"
        return f"{word:12}  {found:>6}  {'at most' if self.most else 'at least':8} {self.aim:>5g}  {self.what}"


def table(rows: list[Row]) -> str:
    """Formats the rows as aligned text."""
    head = ["system", "start s", "load s", "peak GB", "prompt tok/s", "tok/s", "least", "best", "tok/round", "accepted",
            "sampled", "tok/round"]  # fmt: skip
    lines = [head]
    for row in rows:
        m, (least, median, best) = row.measured, row.rates()
        prompt = max(m.prompts, default=None)
        share = m.accepted / m.drafted if m.drafted and row.kind == "draft" else None  # not informative for a tree
        cells = [
            _shown(m.start), _shown(m.load), _shown(m.peak / 1e9 or None), _shown(prompt), _shown(median),
            _shown(least), _shown(best), _shown(row.per_round), _shown(share),
            _shown(statistics.median(m.sampled_rates) if m.sampled_rates else None), _shown(row.sampled_per_round),
        ]  # fmt: skip
        lines.append([row.title, *cells])
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(line, widths)))
        for line in lines
    )


def verdicts(rows: list[Row], weights: int) -> list[Verdict]:
    """Returns the requirements on a large pair on a laptop, with the figures found. `weights`: bytes of both models."""
    ours, peers = ([row for row in rows if row.system == system] for system in (OURS, PEER))
    plain = [row for row in peers if row.kind == "plain"]
    best, best_plain = (max((max(r.measured.rates, default=0.0) for r in of), default=0.0) for of in (peers, plain))
    medians = [m for row in ours if (m := row.rates()[1]) is not None]
    int8 = [min(row.measured.rates) for row in ours if row.kind == "head int8" and row.measured.rates]
    prompts, theirs = ([p for row in of for p in row.measured.prompts] for of in (_of(ours, "ar", "head int8"), plain))
    both, spoken = ([p for row in of for p in row.measured.prompts] for of in (_of(ours, "tree"), _of(peers, "draft")))
    found = [
        Verdict("best mode's median / llama.cpp's best request, plain or with its draft", 2.0, _ratio(medians, best)),
        Verdict("every plain request with --head int8 / llama.cpp's best plain one", 1.15, _ratio(int8, best_plain)),
        Verdict("prompt, target alone / llama.cpp's best", 2.0, _ratio(prompts, max(theirs, default=0.0))),
        Verdict("prompt, both models / llama.cpp's best with its draft", 2.0, _ratio(both, max(spoken, default=0.0))),
    ]
    for name, aim in ((FIRST, 12.0), (SECOND, 3.0)):
        start = next((row.measured for row in ours if row.name == name), None)
        found.append(Verdict(f"{name}, seconds of loading", aim, start and start.load, most=True))
        found.append(Verdict(f"{name}, seconds with Python's imports", aim, start and start.start, most=True))
        peak = start.peak / 1e9 if start is not None and start.peak else None
        most = round(1.2 * weights / 1e9 + 0.5, 2)
        found.append(Verdict(f"{name}, peak GB of memory (1.2 times the weights plus 0.5)", most, peak, most=True))
    return found


def builds(rows: list[Row]) -> list[str]:
    """Returns the builds of llama.cpp in the rows: each version once, and whether it was built with AMX."""
    return list(dict.fromkeys(row.measured.notes["version"] for row in rows if "version" in row.measured.notes))


def agreement(rows: list[Row]) -> list[str]:
    """Returns one line per llama.cpp system: for each text, how many leading tokens equal those of SwiftSpec without a
    draft."""
    reference = next((row.measured.texts for row in rows if row.system == OURS and row.kind == "ar"), None)
    lines: list[str] = []
    for row in rows if reference else []:
        if row.system == PEER and row.measured.texts:
            pairs = zip(reference or [], row.measured.texts, strict=False)
            lines.append(f"{row.title}: {', '.join(str(_together(*pair)) for pair in pairs)}")
    return lines


def machine() -> dict[str, Any]:
    """Returns a description of the machine and of the software versions."""
    import torch

    from swiftspec import __version__
    from swiftspec.backends.cpu import cpu

    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": name, "instructions": cpu.level(), "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(memory / 1e9, 1), "torch": torch.__version__, "swiftspec": __version__,
    }  # fmt: skip


def _of(rows: list[Row], *kinds: str) -> list[Row]:
    return [row for row in rows if row.kind in kinds]


def _ratio(values: list[float], other: float) -> float | None:
    return max(values) / other if values and other else None


def _together(ours: list[int], theirs: list[int]) -> int:
    """Returns the number of equal tokens before the first difference."""
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"
