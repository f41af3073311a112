"""The report of an evaluation: tables next to the paper's numbers, a CSV file and figures."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.gpu.targets import QUOTED
from bench.paper import figures
from bench.paper.evaluation import DEFAULTS_NAME, GREEDY_NAME, TREE_BATCH, TREE_LEAVES, Evaluation, best_depth
from bench.paper.results import ABLATION, SPLITS, TREE, TUNING, Totals
from bench.paper.systems import (
    ALL,
    BASE,
    KERNELS,
    PAPER_SPLITS,
    PLAIN,
    SPLIT,
    SYSTEMS,
    Shape,
    System,
    paper_step_times,
    split_name,
    split_step_times,
)
from swiftspec.lab.trials import BATCHES
from swiftspec.profiles.emulation import paper_figures

DATASETS = {"alpaca": "ALP", "gsm8k": "GSM", "humaneval": "HE", "mtbench": "MT", "nq": "QA", "cnndm": "SUM"}  # Table 6
GPU_KERNELS = Path(__file__).resolve().parents[2] / "profiles" / "h100-kernels.json"
MEASURED, EMULATED, PREDICTED, QUOTED_KIND = "measured", "emulated", "predicted", "quoted"
BEST_BASELINE_RATIO = 1.75  # of SwiftSpec to the best baseline, mean of five pairs and six datasets (abstract)
LLAMA_70B_SPEED = 348  # tokens per second, mean (abstract)


@dataclass(frozen=True, slots=True)
class Number:
    """A number of the report. `kind`: measured, emulated, predicted or quoted."""

    figure: str
    system: str
    about: str
    metric: str
    value: float
    kind: str


@dataclass
class Report:
    """Formats the results of an evaluation. `numbers`: every number of the tables."""

    evaluation: Evaluation

    def __post_init__(self) -> None:
        self.numbers: list[Number] = []
        self._results, self._request = self.evaluation.results, self.evaluation.request
        self._kind = EMULATED if self._request.emulates else MEASURED

    def total(self, system: System, sampling: str = GREEDY_NAME, **values: Any) -> Totals | None:
        return self._results.total(ABLATION, system=system.name, sampling=sampling, **values)

    def speed(self, system: System, sampling: str = GREEDY_NAME, **values: Any) -> float | None:
        found = self.total(system, sampling, **values)
        return None if found is None else found.speed

    def text(self, name: str) -> str:
        """Returns the report in Markdown."""
        parts = [self._head(name), self._figure_8(), self._figure_7(), self._table_6(), self._figure_9(),
                 self._figure_2(), self._table_1(), self._tables_3_and_7()]  # fmt: skip
        return "\n\n".join(part for part in parts if part) + "\n"

    def _number(self, figure: str, system: str, about: str, metric: str, value: float | None, kind: str) -> str:
        """Records a number and returns it as text."""
        if value is None:
            return "-"
        self.numbers.append(Number(figure, system, about, metric, value, kind))
        return f"{value:.2f}" if abs(value) < 20 else f"{value:.1f}"

    def _head(self, name: str) -> str:
        shared = self._results.settings
        machine = f"{shared['machine']['count']} x {shared['machine']['name']}"
        lines = [
            f"# The paper's evaluation: {name}", "",
            f"Models {shared['target']} and {shared['draft']} on {machine}; bs 8, w 8, {shared['max_tokens']} tokens"
            " per answer, one request at a time.", "",
            "*measured*: on this machine; *emulated*: a real run whose forwards take the step times named in the table;"
            " *predicted*: computed, not run; *quoted*: from the SwiftSpec paper, on H800.",
        ]  # fmt: skip
        return "\n".join([*lines, *(f"\n**{note}**" for note in self.evaluation.notes)])

    def _figure_8(self) -> str:
        """Returns the table of the ablation."""
        base = self.speed(BASE)
        if base is None:
            return ""
        row6 = paper_figures()["table6"]
        paper = {SPLIT: row6["parallel"]["tokens_per_second"] / row6["serial"]["tokens_per_second"], BASE: 1.0}
        rows = []
        for system in SYSTEMS:
            greedy, sampled = self.total(system), self.total(system, DEFAULTS_NAME)
            split = self.evaluation.best_split(system)
            about = f"{split_name(split)}, d {self.evaluation.best_depth(system, split)}"
            rows.append([
                system.name, system.paper_name, "-" if system is PLAIN else about, *self._steps(system),
                *(self._number("Figure 8", system.name, sampling, metric, value, self._kind)
                  for sampling, found in ((GREEDY_NAME, greedy), (DEFAULTS_NAME, sampled))
                  for metric, value in _metrics(found)),
                self._number("Figure 8", system.name, GREEDY_NAME, "ratio to base", _ratio(greedy, base), self._kind),
                self._number("Figure 8", system.name, "Qwen2-72B", "ratio to base", paper.get(system), QUOTED_KIND),
            ])  # fmt: skip
        head = ["system", "in the paper", "ranks, d", "target ms", "draft ms", "tok/s, greedy", "tokens per round",
                "tok/s, defaults", "tokens per round", "ratio to base", "paper's ratio"]  # fmt: skip
        return "\n\n".join([
            f"## Figure 8: ablation ({self._kind})", table(head, rows), self._order(),
            "The paper's text gives the ratio of asynchronous to serial mode for Qwen2-72B (275 to 200 tok/s, Table 6);"
            " the other bars of its Figure 8 have no numbers.",
        ])  # fmt: skip

    def _steps(self, system: System) -> tuple[str, str]:
        """Returns the step times of a system: those that are emulated and their origin, or the measured one of the
        target."""
        if self._request.emulates:
            times = paper_step_times(system)
            shown = f"{times.target:.2f} ({times.origin})"
            return shown, "-" if system is PLAIN else f"{times.draft:.2f} ({times.origin})"
        found = self.total(system)
        return ("-" if found is None else f"{1000 * found.busy / found.rounds:.2f}"), "-"

    def _order(self) -> str:
        """Returns a sentence about the order of the systems, which the paper gives."""
        expected = [(ALL, SPLIT), (ALL, KERNELS), (SPLIT, BASE), (KERNELS, BASE)]
        wrong = [
            f"{low.name} is faster than {high.name}"
            for high, low in expected
            if (self.speed(high) or 0.0) <= (self.speed(low) or 0.0)
        ]
        return f"Order as in the paper: {'no, ' + ', '.join(wrong) if wrong else 'yes'}."

    def _figure_7(self) -> str:
        shown = PLAIN, BASE, ALL
        if any(self.speed(system) is None for system in shown):
            return ""
        rows = []
        for family in [*self._request.prompts, None]:
            where = {} if family is None else {"family": family}
            speeds = [self.speed(system, **where) for system in shown]
            cells = [
                self._number("Figure 7", system.name, family or "all", "tok/s", speed, self._kind)
                for system, speed in zip(shown, speeds, strict=True)
            ]
            ratios = [_ratio_of(speeds[2], speed) for speed in speeds[:2]]
            rows.append([family or "**all**", *cells, *("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios)])
        head = ["task", *(system.name for system in shown), "all to plain", "all to base"]
        quoted = (
            f"Quoted: SwiftSpec is on average {BEST_BASELINE_RATIO} times as fast as the best baseline, and decodes"
            f" Llama 3 70B at {LLAMA_70B_SPEED} tok/s."
        )
        return "\n\n".join(
            [f"## Figure 7: tokens per second by task ({self._kind}, greedy)", table(head, rows), quoted]
        )

    def _table_6(self) -> str:
        """Returns Table 6: asynchronous and serial mode on the operators of the base."""
        if self.speed(BASE) is None:
            return ""
        rows = []
        for side, system in (("parallel", SPLIT), ("serial", BASE)):
            paper = paper_figures()["table6"][side]
            quoted = [paper["tokens_per_second"], paper["target_ms"], paper["draft_ms"]]
            quoted += [paper["compression"][name] for name in DATASETS.values()]
            rows.append([f"{side}, paper ({QUOTED_KIND})", *map(str, quoted)])
            totals = {family: self.total(system, family=family) for family in DATASETS}
            lengths = [
                self._number("Table 6", side, family, "tokens per round", total and total.tokens_per_round, self._kind)
                for family, total in totals.items()
            ]
            own = self._number("Table 6", side, "all", "tok/s", self.speed(system), self._kind)
            rows.append([f"{side}, here ({self._kind})", own, *self._steps(system), *lengths])
        head = ["mode", "tok/s", "target ms", "draft ms", *DATASETS.values()]
        return f"## Table 6: tokens per round by dataset\n\n{table(head, rows)}"

    def _figure_9(self) -> str:
        """Returns the table of the splits: emulated ones of 8 GPUs, or those of this machine."""
        rows, part = [], SPLITS if self._request.emulates else TUNING
        splits = PAPER_SPLITS if self._request.emulates else self._request.splits
        for split in splits:
            d, speed = best_depth(self._results, part, ALL, split)
            if speed == 0.0:
                return ""
            given = split_step_times(*split).replace(",", ", ") if self._request.emulates else "-"
            own = self._number("Figure 9", ALL.name, split_name(split), "tok/s", speed, self._kind)
            rows.append([split_name(split), given, str(d), own])
        note = (
            "Llama 3 70B and 3B at the step times of Table 1, which has no kernels of the paper. Quoted: 4+4 is the"
            " best split of this pair." if self._request.emulates else ""
        )  # fmt: skip
        head = ["target + draft ranks", "step times (quoted)", "d", "tok/s"]
        return "\n\n".join(["## Figure 9: splits of the ranks (" + self._kind + ")", table(head, rows), note]).strip()

    def tree_series(self, *, by_batch: bool) -> list[tuple[int, float]]:
        """Returns the tokens per round of Figure 2 by bs, or by w."""
        shapes = {size: Shape(size, TREE_LEAVES, 7) if by_batch else Shape(TREE_BATCH, size, 7) for size in BATCHES}
        totals = {size: self._results.total(TREE, shape=shape) for size, shape in shapes.items()}
        return [(size, total.tokens_per_round) for size, total in totals.items() if total is not None]

    def _figure_2(self) -> str:
        by_batch, by_leaves = self.tree_series(by_batch=True), self.tree_series(by_batch=False)
        if len(by_leaves) < len(BATCHES):
            return ""
        rows = [
            [f"bs varies, w {TREE_LEAVES}", *(self._number("Figure 2", KERNELS.name, f"bs {size}", "tokens per round",
                                                           value, MEASURED) for size, value in by_batch)],
            [f"w varies, bs {TREE_BATCH}", *(self._number("Figure 2", KERNELS.name, f"w {size}", "tokens per round",
                                                          value, MEASURED) for size, value in by_leaves)],
        ]  # fmt: skip
        note = "Quoted: little is gained by bs above 16, and by w above 8 (Llama 3 70B and 3B)."
        head = ["", *map(str, BATCHES)]
        return f"## Figure 2: tokens per round by bs and w ({MEASURED}, serial, d 7)\n\n{table(head, rows)}\n\n{note}"

    def _table_1(self) -> str:
        paper = {name: row for name, row in paper_figures()["step_ms"].items() if name != "note"}
        rows = [
            [name, QUOTED_KIND, *(f"{row[size]:.2f}" for size in ("1", "2", "4", "8"))] for name, row in paper.items()
        ]
        for model, took in self._results.steps.items():
            own = self._number("Table 1", model, f"{self._request.tp} ranks", "ms", took, MEASURED)
            rows.append([f"{model} of this pair", MEASURED, *(own if size == self._request.tp else "-"
                                                               for size in (1, 2, 4, 8))])  # fmt: skip
        head = ["model", "", "TP 1", "TP 2", "TP 4", "TP 8"]
        return f"## Table 1: milliseconds of a forward over 8 rows\n\n{table(head, rows)}"

    def _tables_3_and_7(self) -> str:
        """Returns the operators of Llama 3 in microseconds, with those that `bench.gpu.kernels` has measured."""
        own, machine = measured_kernels(GPU_KERNELS)
        systems = "SwiftSpec", "vLLM", "TensorRT-LLM", "FlashInfer", "FlashAttention", "Table 3"
        rows = []
        for (model, tp, operator), quoted in QUOTED.items():
            took = own.get((model, tp, operator))
            label = f"{model}, TP {tp}, {operator}"
            for system, value in quoted.items():
                self._number("Tables 3 and 7", system, label, "us", value, QUOTED_KIND)
            cell = self._number("Tables 3 and 7", "this project", label, "us", took, MEASURED)
            rows.append([label, *(f"{quoted[name]:.1f}" if name in quoted else "-" for name in systems), cell])
        head = ["operator, 8 rows", *(f"{name} ({QUOTED_KIND})" for name in systems), f"this project ({MEASURED})"]
        note = (
            f"This project: on {machine}, from profiles/{GPU_KERNELS.name}; O and down without their all-reduce."
            if own
            else ""
        )
        return f"## Tables 3 and 7: operators in microseconds\n\n{table(head, rows)}\n\n{note}".strip()


def measured_kernels(file: Path) -> tuple[dict[tuple[str, int, str], float], str]:
    """Returns the microseconds of the project's operators over 8 rows by model, TP size and operator, from a file of
    `bench.gpu.kernels`, and the name of the GPU. Without a file there are none."""
    if not file.is_file():
        return {}, ""
    data = json.loads(file.read_text(encoding="utf-8"))
    rows = (row for row in data["results"] if row["competitor"] == "swiftspec" and row["rows"] == 8)
    return {(row["model"], row["tp"], row["op"]): row["microseconds"] for row in rows}, data["machine"]["gpu"]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write_report(evaluation: Evaluation, folder: Path, name: str) -> Iterator[Path]:
    """Writes the report, the numbers and the figures of an evaluation. Yields the files."""
    report = Report(evaluation)
    text, numbers = folder / "report.md", folder / "numbers.csv"
    text.write_text(report.text(name), encoding="utf-8")
    yield text
    with numbers.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["figure", "system", "about", "metric", "value", "kind"])
        writer.writerows([n.figure, n.system, n.about, n.metric, f"{n.value:.6g}", n.kind] for n in report.numbers)
    yield numbers
    yield from figures.draw(report.numbers, folder)


def _metrics(total: Totals | None) -> list[tuple[str, float | None]]:
    return [("tok/s", total and total.speed), ("tokens per round", total and total.tokens_per_round)]


def _ratio(total: Totals | None, base: float) -> float | None:
    return None if total is None else total.speed / base


def _ratio_of(value: float | None, base: float | None) -> float | None:
    return None if value is None or base is None else value / base
