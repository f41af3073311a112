"""The report of an evaluation: tables next to the paper's numbers, a CSV file and figures."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.paper import figures
from bench.paper.evaluation import (
    DEFAULTS_NAME,
    GREEDY_NAME,
    TREE_BATCH,
    TREE_LEAVES,
    TREE_STEPS,
    Evaluation,
    best_depth,
    depth_speeds,
)
from bench.paper.operators import CONTEXT, GPU_KERNELS, OTHERS, MeasuredOperators, table_3_rows, table_7_rows
from bench.paper.results import ABLATION, EQUAL_DEPTH, SPLITS, TREE, TUNING, Totals
from bench.paper.systems import (
    ALL,
    BASE,
    KERNELS,
    PAPER_SPLITS,
    PARALLEL_GPUS,
    PLAIN,
    SERIAL_GPUS,
    SPLIT,
    SYSTEMS,
    Shape,
    StepMilliseconds,
    System,
    paper_step_times,
    split_name,
    split_step_times,
)
from swiftspec.lab.sweep_runs import BATCHES
from swiftspec.profiles.emulation import paper_figures

DATASETS = {"alpaca": "ALP", "gsm8k": "GSM", "humaneval": "HE", "mtbench": "MT", "nq": "QA", "cnndm": "SUM"}  # Table 6
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

    def total(self, name: str, sampling: str = GREEDY_NAME, **values: Any) -> Totals | None:
        """Returns the totals of a system or of a server at its fastest address."""
        if name in self._results.servers:
            values["split"] = self.evaluation.best_address(name)
        return self._results.total(ABLATION, system=name, sampling=sampling, **values)

    def speed(self, name: str, **values: Any) -> float | None:
        """Returns the tokens per second of a system or of a server, greedily."""
        found = self.total(name, **values)
        return None if found is None else found.speed

    @property
    def baselines(self) -> dict[str, float]:
        """Tokens per second of the paper's base and of the servers, by name."""
        speeds = {name: self.speed(name) for name in (BASE.name, *self._results.servers)}
        return {name: speed for name, speed in speeds.items() if speed is not None}

    def ratios(self, name: str) -> dict[str, float]:
        """Returns the ratio of the speeds of `all` and of another system, by family, where both have results."""
        pairs = {f: (self.speed(ALL.name, family=f), self.speed(name, family=f)) for f in self._request.prompts}
        return {family: mine / other for family, (mine, other) in pairs.items() if mine and other}

    def text(self, name: str) -> str:
        """Returns the report in Markdown."""
        parts = [
            self._head(name),
            self._figure_8(),
            self._figure_7(),
            self._table_6(),
            self._figure_9(),
            self._figure_2(),
            self._table_1(),
            self._table_3(),
            self._table_7(),
        ]
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
        intro = (
            f"Models {shared['target']} and {shared['draft']} on {machine}; bs 8, w 8, {shared['max_tokens']} tokens"
            " per answer, one request at a time."
        )
        kinds = (
            "*measured*: on this machine; *emulated*: a real run whose forwards take the step times named in the table;"
            " *predicted*: computed, not run; *quoted*: from the SwiftSpec paper, on H800; *assumed*: quoted of a"
            " system that the paper's text does not name."
        )
        lines = [f"# The paper's evaluation: {name}", "", intro, "", kinds]
        return "\n".join([*lines, *(f"\n**{note}**" for note in self.evaluation.notes)])

    def _figure_8(self) -> str:
        """Returns the table of the ablation."""
        base = self.speed(BASE.name)
        if base is None:
            return ""
        head = [
            "system",
            "in the paper",
            "ranks, d",
            "target ms",
            "draft ms",
            "tok/s, greedy",
            "tokens per round",
            "tok/s, defaults",
            "tokens per round",
            "ratio to base",
            "paper's ratio",
        ]
        rows = [self._ablation_row(system, base) for system in SYSTEMS]
        quoted = (
            "The paper's text gives the ratio of asynchronous to serial mode for Qwen2-72B (275 to 200 tok/s, Table 6);"
            " the other bars of its Figure 8 have no numbers. That Table 6 is of the two systems without fused kernels"
            " is assumed."
        )
        return "\n\n".join([f"## Figure 8: ablation ({self._kind})", table(head, rows), self._order(), quoted])

    def _ablation_row(self, system: System, base: float) -> list[str]:
        table_6 = paper_figures()["table6"]
        ratio = table_6["parallel"]["tokens_per_second"] / table_6["serial"]["tokens_per_second"]
        quoted = {SPLIT: ratio, BASE: 1.0}.get(system)
        split = self.evaluation.best_split(system)
        about = f"{split_name(split)}, d {self.evaluation.best_depth(system, split)}"
        row = [
            system.name,
            system.paper_name,
            "-" if system is PLAIN else about,
            *self._steps(system, self.total(system.name)),
        ]
        for sampling in (GREEDY_NAME, DEFAULTS_NAME):
            found = self.total(system.name, sampling)
            for metric, value in _metrics(found):
                row.append(self._number("Figure 8", system.name, sampling, metric, value, self._kind))
        own = _ratio_of(self.speed(system.name), base)
        row.append(self._number("Figure 8", system.name, GREEDY_NAME, "ratio to base", own, self._kind))
        row.append(self._number("Figure 8", system.name, "Qwen2-72B", "ratio to base", quoted, QUOTED_KIND))
        return row

    def _steps(self, system: System, total: Totals | None) -> tuple[str, str]:
        """Returns the step times of a system as two cells: those that are emulated and their origin, or the measured
        one of the target in the runs of `total`."""
        if self._request.emulates:
            times = paper_step_times(system)
            draft = "-" if system is PLAIN else f"{times.draft:.2f} ({times.origin})"
            return f"{times.target:.2f} ({times.origin})", draft
        return "-" if total is None else f"{_forward_ms(total):.2f}", "-"

    def _gpu_ms(self, system: System, total: Totals) -> tuple[float, float | None]:
        """Returns the GPU time of a verification and of an expansion in milliseconds: emulated, or measured in the runs
        of `total`, which do not show that of an expansion."""
        if self._request.emulates:
            return paper_step_times(system).gpu_ms
        return self.evaluation.best_split(system)[0] * _forward_ms(total), None

    def _order(self) -> str:
        """Returns a sentence about the order of the systems, which the paper gives."""
        expected = [(ALL, SPLIT), (ALL, KERNELS), (SPLIT, BASE), (KERNELS, BASE)]
        wrong = [
            f"{low.name} is faster than {high.name}"
            for high, low in expected
            if (self.speed(high.name) or 0.0) <= (self.speed(low.name) or 0.0)
        ]
        return f"Order as in the paper: {'no, ' + ', '.join(wrong) if wrong else 'yes'}."

    def _figure_7(self) -> str:
        servers = [name for name in self._results.servers if self.speed(name) is not None]
        shown = [PLAIN.name, BASE.name, *servers, ALL.name]
        if any(self.speed(name) is None for name in shown):
            return ""
        best = max(self.baselines, key=self.baselines.__getitem__)
        compared = list(dict.fromkeys([PLAIN.name, BASE.name, best]))
        rows = []
        for family in [*self._request.prompts, None]:
            where = {} if family is None else {"family": family}
            speeds = {name: self.speed(name, **where) for name in shown}
            cells = [
                self._number("Figure 7", name, family or "all", "tok/s", speed, self._kind)
                for name, speed in speeds.items()
            ]
            ratios = [_ratio_of(speeds[ALL.name], speeds[name]) for name in compared]
            rows.append([family or "**all**", *cells, *("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios)])
        head = ["task", *shown, *(f"all to {name}" for name in compared)]
        notes = [
            f"Quoted: SwiftSpec is on average {BEST_BASELINE_RATIO} times as fast as the best baseline, and decodes"
            f" Llama 3 70B at {LLAMA_70B_SPEED} tok/s. Two of the paper's baselines draft with EAGLE-2 heads, which"
            " this project does not read."
        ]
        if servers:
            addresses = ", ".join(f"{name} at {self.evaluation.best_address(name)}" for name in servers)
            notes.append(f"Servers answer over HTTP, as streams; each is shown at its fastest address: {addresses}.")
        title = f"## Figure 7: tokens per second by task ({self._kind}, greedy)"
        return "\n\n".join([title, table(head, rows), *notes])

    def _table_6(self) -> str:
        """Returns Table 6: asynchronous and serial mode on the operators of the base, at equal d, bs and w."""
        sides = {"parallel": SPLIT, "serial": BASE}
        depths = {side: self._equal_depths(system) for side, system in sides.items()}
        if not all(depths.values()):
            return ""
        rows = [self._paper_row(side) for side in sides]
        for d in sorted(set(depths["parallel"]) & set(depths["serial"])):
            rows += [self._depth_row(side, system, d) for side, system in sides.items()]
        head = ["mode", "d", "tok/s", "target ms", "draft ms", "GPU ms: target", "draft", *DATASETS.values(), "mean"]
        return "\n\n".join(["## Table 6: tokens per round by dataset", table(head, rows), *self._losses(depths)])

    def _equal_depths(self, system: System) -> dict[int, Totals]:
        """Returns the totals of a system of Table 6 by d."""
        found = self._results.select(EQUAL_DEPTH, system=system.name)
        shapes = {result.cell.shape for result in found if result.cell.shape is not None}
        totals = {
            shape.draft_steps: self._results.total(EQUAL_DEPTH, system=system.name, shape=shape) for shape in shapes
        }
        return {d: total for d, total in sorted(totals.items()) if total is not None}

    def _paper_row(self, side: str) -> list[str]:
        row = paper_figures()["table6"][side]
        split = PARALLEL_GPUS if side == "parallel" else SERIAL_GPUS
        times = StepMilliseconds(row["target_ms"], row["draft_ms"], split, QUOTED_KIND)
        compression = [row["compression"][name] for name in DATASETS.values()]
        cells = [f"{side}, paper ({QUOTED_KIND})", "-", str(row["tokens_per_second"])]
        cells += [f"{value:.2f}" for value in (times.target, times.draft)]
        cells += [f"{value:.1f}" for value in times.gpu_ms]
        return cells + [f"{value:.2f}" for value in (*compression, fmean(compression))]

    def _depth_row(self, side: str, system: System, d: int) -> list[str]:
        """Returns the row of a mode at one d."""
        where: dict[str, Any] = {"system": system.name, "shape": Shape(draft_steps=d)}
        best = self.evaluation.best_depth(system, self.evaluation.best_split(system))
        about = f"{side}, d {d}"
        total = self._results.total(EQUAL_DEPTH, **where)
        assert total is not None
        row = [f"{side}, here ({self._kind})", f"{d} (its best)" if d == best else str(d)]
        row.append(self._number("Table 6", about, "all", "tok/s", total.speed, self._kind))
        row += self._steps(system, total)
        for what, value in zip(("target", "draft"), self._gpu_ms(system, total), strict=True):
            row.append(self._number("Table 6", about, what, "GPU ms per forward", value, self._kind))
        totals = {family: self._results.total(EQUAL_DEPTH, family=family, **where) for family in DATASETS}
        lengths = {family: each and each.tokens_per_round for family, each in totals.items()}
        known = [length for length in lengths.values() if length is not None]
        for family, length in {**lengths, "mean": fmean(known) if known else None}.items():
            row.append(self._number("Table 6", about, family, "tokens per round", length, self._kind))
        return row

    def _losses(self, depths: Mapping[str, Mapping[int, Totals]]) -> Iterator[str]:
        """Yields sentences about what asynchronous mode loses in tokens per round and saves in GPU time."""
        paper = {side: fmean(paper_figures()["table6"][side]["compression"].values()) for side in depths}
        losses = []
        for d in sorted(set(depths["parallel"]) & set(depths["serial"])):
            parallel, serial = (depths[side][d].tokens_per_round or 0.0 for side in ("parallel", "serial"))
            losses.append(f"{100 * (1 - parallel / serial):.0f} % at d = {d}")
        yield (
            f"At equal d, bs and w asynchronous rounds lose tokens here: {', '.join(losses)}; in the paper, whose two"
            f" modes have one configuration, {100 * (1 - paper['parallel'] / paper['serial']):.0f} %."
        )
        parallel, serial = (
            self._gpu_ms(system, next(iter(depths[side].values())))
            for side, system in (("parallel", SPLIT), ("serial", BASE))
        )
        saved = [
            f"{100 * (1 - mine / other):.0f} % less of it for {what}"
            for what, mine, other in zip(("a verification", "an expansion"), parallel, serial, strict=True)
            if mine is not None and other is not None
        ]
        yield (
            "GPU ms: time of a forward times the ranks that run it. The split takes"
            f" {' and '.join(saved)} ({self._kind})."
        )

    def _figure_9(self) -> str:
        """Returns the table of the splits: emulated ones of 8 GPUs, or those of this machine."""
        rows, part = [], SPLITS if self._request.emulates else TUNING
        splits = PAPER_SPLITS if self._request.emulates else self._request.splits
        for split in splits:
            d, speed = best_depth(self._results, part, ALL, split)
            if speed == 0.0:
                return ""
            others = depth_speeds(self._results, part, ALL, split)
            given = split_step_times(split) if self._request.emulates else None
            own = self._number("Figure 9", ALL.name, split_name(split), "tok/s", speed, self._kind)
            rows.append(
                [
                    split_name(split),
                    f"{given.target:.2f}, {given.draft:.2f}" if given else "-",
                    f"{given.target / given.draft:.1f}" if given else "-",
                    str(d),
                    own,
                    ", ".join(f"{other}: {each:.0f}" for other, each in others.items()),
                ]
            )
        note = (
            "Llama 3 70B and 3B at the step times of Table 1, which has no kernels of the paper. Quoted: 4+4 is the"
            " best split of this pair."
        )
        head = ["target + draft ranks", f"step times, ms ({QUOTED_KIND})", "ratio", "best d", "tok/s", "tok/s by d"]
        parts = [f"## Figure 9: splits of the ranks ({self._kind})", table(head, rows)]
        return "\n\n".join([*parts, note] if self._request.emulates else parts)

    def tree_series(self, *, by_batch: bool) -> list[tuple[int, float]]:
        """Returns the tokens per round of Figure 2 by bs, or by w."""
        shapes = {
            size: Shape(size, TREE_LEAVES, TREE_STEPS) if by_batch else Shape(TREE_BATCH, size, TREE_STEPS)
            for size in BATCHES
        }
        totals = {size: self._results.total(TREE, shape=shape) for size, shape in shapes.items()}
        lengths = {size: total and total.tokens_per_round for size, total in totals.items()}
        return [(size, length) for size, length in lengths.items() if length is not None]

    def _figure_2(self) -> str:
        series = {"bs": self.tree_series(by_batch=True), "w": self.tree_series(by_batch=False)}
        if len(series["w"]) < len(BATCHES):
            return ""
        titles = {"bs": f"bs varies, w {TREE_LEAVES}", "w": f"w varies, bs {TREE_BATCH}"}
        rows = []
        for symbol, points in series.items():
            cells = [
                self._number("Figure 2", KERNELS.name, f"{symbol} {size}", "tokens per round", value, MEASURED)
                for size, value in points
            ]
            rows.append([titles[symbol], *cells])
        note = "Quoted: little is gained by bs above 16, and by w above 8 (Llama 3 70B and 3B)."
        head = ["", *map(str, BATCHES)]
        title = f"## Figure 2: tokens per round by bs and w ({MEASURED}, serial, d {TREE_STEPS})"
        return f"{title}\n\n{table(head, rows)}\n\n{note}"

    def _table_1(self) -> str:
        paper = {name: row for name, row in paper_figures()["step_ms"].items() if name != "note"}
        sizes = sorted({1, 2, 4, 8, *(tp for _, tp in self._results.steps)})
        rows = []
        for name, row in paper.items():
            rows.append([name, QUOTED_KIND, *(f"{row[str(tp)]:.2f}" if str(tp) in row else "-" for tp in sizes)])
        for model in dict.fromkeys(model for model, _ in self._results.steps):
            cells = [
                self._number("Table 1", model, f"TP {tp}", "ms", self._results.steps.get((model, tp)), MEASURED)
                for tp in sizes
            ]
            rows.append([f"{model} of this pair", MEASURED, *cells])
        head = ["model", "", *(f"TP {tp}" for tp in sizes)]
        return f"## Table 1: milliseconds of a forward over 8 rows\n\n{table(head, rows)}"

    def _table_3(self) -> str:
        """Returns the operators of Llama 3 70B on 4 GPUs, with the shares of the peaks that they reach."""
        ours = MeasuredOperators.read(GPU_KERNELS)
        rows = list(table_3_rows(ours, lambda *cell: self._operator("Table 3", *cell)))
        shares = ["us", "% of compute", "% of memory"]
        head = ["operator", *(f"{name} ({QUOTED_KIND})" for name in shares), *(f"{name} (here)" for name in shares)]
        note = (
            "Peaks: 989 TFLOP/s and 3.35 TB/s, which the paper's shares of projections imply; all-reduces in % of"
            f" NVLink. This project ({MEASURED}): on {ours.gpu}, one rank's shard without all-reduce; attention"
            f" after {CONTEXT} tokens, O and down with their residual, QKV and SwiGLU with the norm."
            if ours
            else ""
        )
        title = "## Table 3: operators of Llama-3-70B on 4 GPUs"
        return f"{title}\n\n{table([*head, '% of copy (here)'], rows)}\n\n{note}".strip()

    def _table_7(self) -> str:
        """Returns the operators of Llama 3 in microseconds."""
        ours = MeasuredOperators.read(GPU_KERNELS)
        rows = list(table_7_rows(ours, lambda *cell: self._operator("Table 7", *cell)))
        head = ["operator, 8 rows", *(f"{name} ({QUOTED_KIND})" for name in OTHERS), f"this project ({MEASURED})"]
        note = (
            f"This project: on {ours.gpu}, from profiles/{GPU_KERNELS.name}; O and down with the kernel of their"
            " all-reduce, in a group of one."
            if ours
            else ""
        )
        return f"## Table 7: operators in microseconds\n\n{table(head, rows)}\n\n{note}".strip()

    def _operator(self, figure: str, system: str, op: str, unit: str, kind: str, value: float | None) -> str:
        return self._number(figure, system, op, unit, value, kind)


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


def pairs_report(reports: Mapping[str, Report]) -> str:
    """Returns a table of several pairs and their means: `all` relative to plain decoding, to the base, and to the
    baseline that is the fastest on the pair. A ratio is the mean over the task families."""
    rows, means = [], dict[str, list[float]]()
    for name, report in reports.items():
        baselines = report.baselines
        if not baselines or report.speed(ALL.name) is None:
            continue
        best = max(baselines, key=baselines.__getitem__)
        compared = {"plain": PLAIN.name, "base": BASE.name, "best": best}
        ratios = {what: fmean(found) for what, other in compared.items() if (found := [*report.ratios(other).values()])}
        for what, ratio in ratios.items():
            means.setdefault(what, []).append(ratio)
        speeds = [report.speed(other) for other in (PLAIN.name, best, ALL.name)]
        cells = [f"{speed:.1f}" if speed else "-" for speed in speeds]
        rows.append([name, *cells, *(_two_digits(ratios.get(what)) for what in compared), best])
    mean = [_two_digits(fmean(means[what]) if means.get(what) else None) for what in ("plain", "base", "best")]
    rows.append(["**mean**", "-", "-", "-", *mean, "-"])
    rows.append([f"paper, five pairs ({QUOTED_KIND})", "-", "-", "-", "-", "-", f"{BEST_BASELINE_RATIO:.2f}", "-"])
    head = [
        "pair",
        "plain, tok/s",
        "best baseline, tok/s",
        "all, tok/s",
        "all to plain",
        "all to base",
        "all to best baseline",
        "best baseline",
    ]
    return f"# Figure 7 over pairs\n\nGreedy; ratios are means over the task families.\n\n{table(head, rows)}\n"


def _metrics(total: Totals | None) -> list[tuple[str, float | None]]:
    return [("tok/s", total and total.speed), ("tokens per round", total and total.tokens_per_round)]


def _forward_ms(total: Totals) -> float:
    """Returns the milliseconds of a forward of the target."""
    return 1000 * total.busy / total.rounds


def _ratio_of(value: float | None, base: float | None) -> float | None:
    return None if value is None or base is None else value / base


def _two_digits(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
