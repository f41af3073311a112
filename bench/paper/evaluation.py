"""Runs the systems and records the results, until all are measured or the time is up."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from bench.common.completion_client import CompletionClient
from bench.paper.results import ABLATION, EQUAL_DEPTH, SPLITS, TREE, TUNING, Cell, Result, ResultFile
from bench.paper.systems import (
    ALL,
    BASE,
    KERNELS,
    PAPER_SPLITS,
    PLAIN,
    SPLIT,
    SYSTEMS,
    Shape,
    Split,
    System,
    engine_config,
    paper_step_times,
    split_name,
    split_step_times,
)
from swiftspec.errors import UserError
from swiftspec.lab import measurement
from swiftspec.lab.measurement import OutOfTime
from swiftspec.lab.sweep_runs import BATCHES, SERIAL_STEPS, depths
from swiftspec.lab.worker_pool import EngineBuild, Ops, RankPool
from swiftspec.params import SamplingParams

TREE_STEPS = 7  # expansions per round in Figure 2
TREE_BATCH, TREE_LEAVES = 32, 16  # in Figure 2, bs while w varies, and w while bs varies
STEP_ROWS, STEP_REPEATS = 8, 7  # of Table 1
WARM_UP_TOKENS = 8
GREEDY_NAME, DEFAULTS_NAME = "greedy", "defaults"  # of samplings
Prompts = Mapping[str, Sequence[Sequence[int]]]  # token ids by task family


@dataclass(frozen=True, slots=True)
class Request:
    """What to measure.

    `texts`: the prompts as text, for servers. `samplings`: sampling parameters by name, greedy first. `emulates`:
    whether forwards take the step times of the paper. `splits`: (target, draft) ranks of mode async. `tp`: ranks of
    both models in the other modes. `sizes`: numbers of ranks of a model in Table 1. `base_ops`: operators of the
    systems that are not fused. `budget_s`: seconds after which the runs end.
    """

    prompts: Prompts
    texts: Mapping[str, Sequence[str]]
    samplings: Mapping[str, SamplingParams]
    max_tokens: int
    repeats: int
    emulates: bool
    splits: Sequence[Split]
    tp: int
    sizes: Mapping[str, Sequence[int]]
    base_ops: Ops
    budget_s: float


@dataclass(frozen=True, slots=True)
class EngineRuns:
    """Runs that one engine makes.

    `shapes`: differ in d only. `samplings`: names. `ranks`: target and draft ranks that run it; None: `split`.
    `emulate`: step times in the format of `--emulate`; empty: none; None: those of the system in the paper, if the
    request emulates.
    """

    part: str
    system: System
    split: Split
    shapes: Sequence[Shape]
    samplings: Sequence[str] = (GREEDY_NAME,)
    ranks: Split | None = None
    emulate: str | None = None
    repeat: int = 0

    def cells(self, families: Sequence[str]) -> list[Cell]:
        """Returns what the runs measure, in their order."""
        return [
            Cell(self.part, self.system.name, family, sampling, shape, split_name(self.split), self.repeat)
            for shape in self.shapes
            for sampling in self.samplings
            for family in families
        ]


@dataclass
class Evaluation:
    """Runs the parts of the evaluation on the ranks of `pool`.

    `log`: receives a line per engine. `servers`: other servers; those with the same name are configurations of one
    system. `notes`: lines about results that are missing.
    """

    pool: RankPool
    request: Request
    results: ResultFile
    log: Callable[[str], None]
    servers: Sequence[CompletionClient] = ()
    notes: list[str] = field(default_factory=list)

    def run(self) -> None:
        """Measures what the file of results lacks."""
        self._deadline = time.monotonic() + self.request.budget_s
        parts = {
            "Table 1": self._time_steps,
            "the best configurations": self._tune,
            "Figures 7 and 8": self._ablation,
            "Table 6": self._equal_depths,
            "Figure 9": self._emulate_splits,
            "Figure 2": self._vary_tree,
        }
        for name, part in parts.items():
            try:
                part()
            except OutOfTime:
                self.notes.append(f"{name}: not all of it was measured, because the time was up; run the command again")

    def best_depth(self, system: System, split: Split) -> int:
        """Returns the d with the most tokens per second in the tuning runs."""
        return best_depth(self.results, TUNING, system, split)[0]

    def best_split(self, system: System) -> Split:
        """Returns the split of a system that was the fastest in the tuning runs."""
        return max(self._splits(system), key=lambda split: best_depth(self.results, TUNING, system, split)[1])

    def best_address(self, server: str) -> str:
        """Returns the address at which a server was the fastest in the tuning runs."""
        found = {cell.split for cell in self.results.found if cell.part == TUNING and cell.system == server}
        return max(sorted(found), key=lambda address: _speed(self.results, TUNING, system=server, split=address))

    def _splits(self, system: System) -> Sequence[Split]:
        return self.request.splits if system.asynchronous else [(self.request.tp, 0)]

    def _tuned_shapes(self, system: System, split: Split) -> list[Shape]:
        """Returns the tree shapes among which a system on a split has its best: in mode async also those whose d is
        next to the ratio of the step times (paper, section 5.5)."""
        steps = set(SERIAL_STEPS)
        if system.asynchronous:
            if self.request.emulates:
                times = paper_step_times(system)
                target, draft = times.target, times.draft
            else:
                target = self.results.steps.get(("target", split[0]))
                draft = self.results.steps.get(("draft", split[1] or split[0]))
            if target and draft:
                steps |= {*depths(target, draft)}
        return [Shape(draft_steps=d) for d in sorted(steps)]

    def _tune(self) -> None:
        """Decodes one prompt of each family with each d, as the paper tries several configurations of each system."""
        for system in SYSTEMS:
            for split in self._splits(system) if system is not PLAIN else ():
                self._run(EngineRuns(TUNING, system, split, self._tuned_shapes(system, split)), self._first_prompts())
        for server in self.servers:
            self._ask(TUNING, server, first=True)

    def _ablation(self) -> None:
        for repeat in range(self.request.repeats):
            for system in SYSTEMS:
                split = self.best_split(system)
                shape = Shape(draft_steps=self.best_depth(system, split))
                every = [*self.request.samplings]
                runs = EngineRuns(ABLATION, system, split, [shape], samplings=every, repeat=repeat)
                self._run(runs, self.request.prompts)
            for server in self.servers:
                if server.url == self.best_address(server.name):
                    self._ask(ABLATION, server, repeat=repeat)

    def _equal_depths(self) -> None:
        """Decodes with both systems of Table 6 at the best d of each, which differ."""
        splits = {system: self.best_split(system) for system in (BASE, SPLIT)}
        steps = sorted({self.best_depth(system, split) for system, split in splits.items()})
        for system, split in splits.items():
            shapes = [Shape(draft_steps=d) for d in steps]
            self._run(EngineRuns(EQUAL_DEPTH, system, split, shapes), self.request.prompts)

    def _emulate_splits(self) -> None:
        """Emulates Llama 3 70B and 3B on splits of 8 GPUs, on two ranks with the step times of those groups."""
        for split in PAPER_SPLITS if self.request.emulates else ():
            times = split_step_times(split)
            shapes = [Shape(draft_steps=d) for d in sorted({*SERIAL_STEPS, *depths(times.target, times.draft)})]
            runs = EngineRuns(SPLITS, ALL, split, shapes, ranks=(1, 1), emulate=times.emulation)
            self._run(runs, self._first_prompts())

    def _vary_tree(self) -> None:
        """Counts the tokens per round as bs and w vary. They do not depend on step times, so none are emulated."""
        shapes = [Shape(size, TREE_LEAVES, TREE_STEPS) for size in BATCHES]
        shapes += [Shape(TREE_BATCH, size, TREE_STEPS) for size in BATCHES]
        for shape in dict.fromkeys(shapes):
            self._run(EngineRuns(TREE, KERNELS, (self.request.tp, 0), [shape], emulate=""), self.request.prompts)

    def _time_steps(self) -> None:
        for model, sizes in self.request.sizes.items():
            for tp in sizes:
                if (model, tp) in self.results.steps:
                    continue
                self._check_time()
                try:
                    self._time_steps_of(model, tp)
                except UserError as error:
                    self.notes.append(f"Table 1: no step times of the {model} on {tp} ranks: {error}")

    def _time_steps_of(self, model: str, tp: int) -> None:
        with self.pool.engine(EngineBuild(engine_config(PLAIN, Shape(), tp, 0), alone=model)) as llm:
            verifier, room = measurement.tree_roles(llm).verifier, llm.max_model_len - 1
            took = statistics.median(measurement.step_times(verifier, STEP_ROWS, room, STEP_REPEATS))
            self.results.add_step(model, tp, 1000 * took)
            del llm, verifier

    def _first_prompts(self) -> Prompts:
        return {family: texts[:1] for family, texts in self.request.prompts.items()}

    def _run(self, runs: EngineRuns, prompts: Prompts) -> None:
        """Builds the engine of a system, and decodes the prompts whose results are missing."""
        missing = [cell for cell in runs.cells([*prompts]) if cell not in self.results.found]
        if not missing:
            return
        self._check_time()
        system, emulate = runs.system, runs.emulate
        if emulate is None:
            emulate = paper_step_times(system).emulation if self.request.emulates else ""
        ops: Ops = "auto" if system.fused else self.request.base_ops
        largest = max(runs.shapes, key=lambda shape: shape.draft_steps)
        plan = engine_config(system, largest, *(runs.ranks or runs.split))
        steps = ", ".join(str(shape.draft_steps) for shape in runs.shapes)
        self.log(
            f"{runs.part}: {system.name}, {split_name(runs.split)}, bs {largest.verify_batch}, w {largest.draft_leaves}"
            f", d {steps}"
        )
        with self.pool.engine(EngineBuild(plan, ops, emulate=emulate)) as llm:
            measurement.decode_all(llm, prompts[missing[0].family][:1], WARM_UP_TOKENS, self._deadline)
            for cell in missing:
                if system is not PLAIN and cell.shape is not None:
                    measurement.tree_roles(llm).drafter.draft_steps = cell.shape.draft_steps
                texts, sampling = prompts[cell.family], self.request.samplings[cell.sampling]
                run = measurement.decode_all(llm, texts, self.request.max_tokens, self._deadline, sampling)
                self.results.add(Result(cell, run.tokens, run.rounds, run.seconds, run.busy))
            del llm

    def _ask(self, part: str, server: CompletionClient, *, first: bool = False, repeat: int = 0) -> None:
        """Sends the prompts whose results are missing to a server, greedily. `first`: only the first one of each
        family."""
        fields = {"temperature": 0, "max_tokens": self.request.max_tokens, "ignore_eos": True}
        self.log(f"{part}: {server.name}, {server.url}")
        for family, texts in self.request.texts.items():
            cell = Cell(part, server.name, family, GREEDY_NAME, None, server.url, repeat)
            if cell in self.results.found:
                continue
            self._check_time()
            asked = texts[:1] if first else texts
            answers = [server.answer([{"role": "user", "content": text}], fields) for text in asked]
            reports = [answer.speculation for answer in answers]
            self.results.add(
                Result(
                    cell,
                    tokens=sum(answer.decode_tokens for answer in answers),
                    rounds=sum(report.rounds for report in reports if report) if all(reports) else 0,
                    seconds=sum(answer.decode_seconds for answer in answers),
                    busy=0.0,
                )
            )

    def _check_time(self) -> None:
        if time.monotonic() > self._deadline:
            raise OutOfTime


def best_depth(results: ResultFile, part: str, system: System, split: Split) -> tuple[int, float]:
    """Returns the d with which a system on this split has the most tokens per second in one part, and that speed:
    the default d and 0 if there are no results."""
    speeds = depth_speeds(results, part, system, split)
    best = max(speeds, key=speeds.__getitem__, default=Shape().draft_steps)
    return best, speeds.get(best, 0.0)


def depth_speeds(results: ResultFile, part: str, system: System, split: Split) -> dict[int, float]:
    """Returns the tokens per second of a system on a split in one part, by d."""
    cells = {"system": system.name, "split": split_name(split)}
    shapes = {result.cell.shape for result in results.select(part, **cells)}
    steps = sorted(shape.draft_steps for shape in shapes if shape is not None)
    return {d: _speed(results, part, shape=Shape(draft_steps=d), **cells) for d in steps}


def _speed(results: ResultFile, part: str, **values: object) -> float:
    total = results.total(part, **values)
    return 0.0 if total is None else total.speed
