"""Results of the runs, in a file that an interrupted evaluation continues."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.paper.systems import Shape
from swiftspec.errors import UserError

# values of `Cell.part`
TUNING, ABLATION, EQUAL_DEPTH, SPLITS, TREE = "tuning", "ablation", "equal depth", "splits", "tree"


@dataclass(frozen=True, slots=True)
class Cell:
    """What one run measures.

    `part`: of the evaluation. `sampling`: "greedy" or "defaults". `shape`: None for a server. `split`: target and draft
    ranks, such as `6+2`; of a server its address.
    """

    part: str
    system: str
    family: str
    sampling: str
    shape: Shape | None
    split: str
    repeat: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    """Totals of one run. `rounds`: 0 if unknown. `seconds`: decoding time. `busy`: seconds of it in forwards of the
    target."""

    cell: Cell
    tokens: int
    rounds: int
    seconds: float
    busy: float

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Result:
        """Creates an object from the result of `dataclasses.asdict`, also after a round trip through JSON."""
        cell: dict[str, Any] = data["cell"]
        cell["shape"] = cell["shape"] and Shape(**cell["shape"])
        data["cell"] = Cell(**cell)
        return Result(**data)


@dataclass
class Totals:
    """Sums over several runs."""

    tokens: int = 0
    rounds: int = 0
    seconds: float = 0.0
    busy: float = 0.0

    @staticmethod
    def of(results: Iterable[Result]) -> Totals | None:
        """Returns the sums, or None if there are no results."""
        total = Totals()
        for result in results:
            total.tokens += result.tokens
            total.rounds += result.rounds
            total.seconds += result.seconds
            total.busy += result.busy
        return total if total.seconds > 0 else None

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds

    @property
    def tokens_per_round(self) -> float | None:
        return self.tokens / self.rounds if self.rounds else None


@dataclass
class ResultFile:
    """JSONL file of results: a line with the settings, then one line per run.

    `steps`: measured milliseconds of a forward over 8 rows, by model and number of ranks.
    """

    file: Path
    settings: dict[str, Any]
    found: dict[Cell, Result] = field(default_factory=dict)
    steps: dict[tuple[str, int], float] = field(default_factory=dict)

    @staticmethod
    def open(file: Path, settings: dict[str, Any]) -> ResultFile:
        """Reads the file if it exists, and creates it otherwise. Raises UserError if its settings differ, because
        results under different settings are not comparable."""
        made = ResultFile(file, json.loads(json.dumps(settings)))
        if not file.is_file():
            file.parent.mkdir(parents=True, exist_ok=True)
            made._append(made.settings)
            return made
        first, *lines = file.read_text(encoding="utf-8").splitlines() or [""]
        try:
            earlier = json.loads(first)
            rows = [json.loads(line) for line in lines]
            made._load(rows)
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(f"{file} is not a file of results ({error}): delete it or use another --output") from None
        differing = sorted(name for name in made.settings if earlier.get(name) != made.settings[name])
        if differing:
            raise UserError(
                f"{file} has results with another value of {differing[0]}: delete it or use another --output"
            )
        return made

    def add(self, result: Result) -> None:
        self.found[result.cell] = result
        self._append(asdict(result))

    def add_step(self, model: str, tp: int, milliseconds: float) -> None:
        """Adds the measured time of a forward of `model`, "target" or "draft", on `tp` ranks."""
        self.steps[model, tp] = milliseconds
        self._append({"step": model, "tp": tp, "milliseconds": milliseconds})

    @property
    def servers(self) -> list[str]:
        """Names of the servers with results."""
        return list(dict.fromkeys(cell.system for cell in self.found if cell.shape is None))

    def select(self, part: str, **values: Any) -> Iterator[Result]:
        """Yields the results of one part whose cells have these values."""
        for cell, result in self.found.items():
            if cell.part == part and all(getattr(cell, name) == value for name, value in values.items()):
                yield result

    def total(self, part: str, **values: Any) -> Totals | None:
        """Returns the totals of `select`, or None if it yields nothing."""
        return Totals.of(self.select(part, **values))

    def _load(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            if "step" in row:
                self.steps[row["step"], row["tp"]] = row["milliseconds"]
            else:
                result = Result.from_dict(row)
                self.found[result.cell] = result

    def _append(self, row: dict[str, Any]) -> None:
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
