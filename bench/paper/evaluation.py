"""Runs the systems and records the results, until all are measured or the time is up."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from bench.paper.results import ABLATION, SPLITS, TREE, TUNING, Cell, Result, ResultFile
from bench.paper.systems import (
    ALL,
    KERNELS,
    PAPER_SPLITS,
    PLAIN,
    SYSTEMS,
    Shape,
    Split,
    System,
    engine_config,
    paper_step_times,
    split_name,
    split_step_times,
)
from swiftspec.lab import measurement
from swiftspec.lab.measurement import OutOfTime
from swiftspec.lab.trials import BATCHES
from swiftspec.lab.worker_pool import EngineBuild, Ops, RankPool
from swiftspec.params import SamplingParams

DEPTHS = (1, 2, 3, 4)  # values of d among which each system has its best
TREE_STEPS = 7  # expansions per round in Figure 2
TREE_BATCH, TREE_LEAVES = 32, 16  # in Figure 2, bs while w varies, and w while bs varies
STEP_ROWS, STEP_REPEATS = 8, 7  # of Table 1
WARM_UP_TOKENS = 8
GREEDY_NAME, DEFAULTS_NAME = "greedy", "defaults"  # of samplings
Prompts = Mapping[str, Sequence[Sequence[int]]]  # token ids by task family


@dataclass(frozen=True, slots=True)
class Request:
    """What to measure.

    `samplings`: sampling parameters by name, greedy first. `emulates`: whether forwards take the step times of the
    paper. `splits`: (target, draft) ranks of mode async. `tp`: ranks of both models in the other modes. `base_ops`:
    operators of the systems that are not fused. `budget_s`: seconds after which the runs end.
    """

    prompts: Prompts
    samplings: Mapping[str, SamplingParams]
    max_tokens: int
    repeats: int
    emulates: bool
    splits: Sequence[Split]
    tp: int
    base_ops: Ops
    budget_s: float


@dataclass
class Evaluation:
    """Runs the parts of the evaluation on the ranks of `pool`. `log`: receives a line per engine. `notes`: lines about
    results that are missing."""

    pool: RankPool
    request: Request
    results: ResultFile
    log: Callable[[str], None]
    notes: list[str] = field(default_factory=list)

    def run(self) -> None:
        """Measures what the file of results lacks."""
        self._deadline = time.monotonic() + self.request.budget_s
        parts = {
            "the best d": self._tune, "Figures 7 and 8, Table 6": self._ablation, "Figure 9": self._emulate_splits,
            "Figure 2": self._vary_tree, "Table 1": self._time_steps,
        }  # fmt: skip
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
        if not system.asynchronous:
            return self.request.tp, 0
        return max(self.request.splits, key=lambda split: best_depth(self.results, TUNING, system, split)[1])

    def _tune(self) -> None:
        """Decodes one prompt of each family with each d, as the paper tries several configurations of each system."""
        for d in DEPTHS:
            for system in SYSTEMS:
                splits = self.request.splits if system.asynchronous else [(self.request.tp, 0)]
                for split in splits if system is not PLAIN else ():
                    self._run(TUNING, system, Shape(draft_steps=d), split, self._first_prompts())

    def _ablation(self) -> None:
        for repeat in range(self.request.repeats):
            for system in SYSTEMS:
                split = self.best_split(system)
                shape = Shape(draft_steps=self.best_depth(system, split))
                every = self.request.samplings
                self._run(ABLATION, system, shape, split, self.request.prompts, every, repeat=repeat)

    def _emulate_splits(self) -> None:
        """Emulates Llama 3 70B and 3B on splits of 8 GPUs, on two ranks with the step times of those groups."""
        for x, y in PAPER_SPLITS if self.request.emulates else ():
            emulation = split_step_times(x, y)
            for d in DEPTHS:
                shape = Shape(draft_steps=d)
                self._run(SPLITS, ALL, shape, (x, y), self._first_prompts(), ranks=(1, 1), emulate=emulation)

    def _vary_tree(self) -> None:
        """Counts the tokens per round as bs and w vary. They do not depend on step times, so none are emulated."""
        shapes = [Shape(size, TREE_LEAVES, TREE_STEPS) for size in BATCHES]
        shapes += [Shape(TREE_BATCH, size, TREE_STEPS) for size in BATCHES]
        for shape in dict.fromkeys(shapes):
            self._run(TREE, KERNELS, shape, (self.request.tp, 0), self.request.prompts, emulate="")

    def _time_steps(self) -> None:
        for model in ("target", "draft"):
            if model in self.results.steps:
                continue
            self._check_time()
            plan = engine_config(PLAIN, Shape(), self.request.tp, 0)
            with self.pool.engine(EngineBuild(plan, alone=model)) as llm:
                verifier, room = measurement.tree_roles(llm).verifier, llm.max_model_len - 1
                took = statistics.median(measurement.step_times(verifier, STEP_ROWS, room, STEP_REPEATS))
                self.results.add_step(model, 1000 * took)
                del llm, verifier

    def _first_prompts(self) -> Prompts:
        return {family: texts[:1] for family, texts in self.request.prompts.items()}

    def _run(
        self, part: str, system: System, shape: Shape, split: Split, prompts: Prompts,
        samplings: Iterable[str] = (GREEDY_NAME,), *, ranks: Split | None = None, emulate: str | None = None,
        repeat: int = 0,
    ) -> None:  # fmt: skip
        """Builds the engine of a system, and decodes the prompts whose results are missing.

        `ranks`: target and draft ranks that run it; None: `split`. `emulate`: step times in the format of `--emulate`;
        empty: none; None: those of the system in the paper, if the request emulates.
        """
        cells = [
            Cell(part, system.name, family, sampling, shape, split_name(split), repeat)
            for sampling in samplings
            for family in prompts
        ]
        missing = [cell for cell in cells if cell not in self.results.found]
        if not missing:
            return
        self._check_time()
        if emulate is None:
            emulate = paper_step_times(system).emulation if self.request.emulates else ""
        ops: Ops = "auto" if system.fused else self.request.base_ops
        plan = engine_config(system, shape, *(ranks or split))
        self.log(f"{part}: {system.name}, {split_name(split)}, bs {shape.verify_batch}, w {shape.draft_leaves},"
                 f" d {shape.draft_steps}")  # fmt: skip
        with self.pool.engine(EngineBuild(plan, ops, emulate=emulate)) as llm:
            measurement.decode_all(llm, prompts[missing[0].family][:1], WARM_UP_TOKENS, self._deadline)
            for cell in missing:
                texts, sampling = prompts[cell.family], self.request.samplings[cell.sampling]
                run = measurement.decode_all(llm, texts, self.request.max_tokens, self._deadline, sampling)
                self.results.add(Result(cell, run.tokens, run.rounds, run.seconds, run.busy))
            del llm

    def _check_time(self) -> None:
        if time.monotonic() > self._deadline:
            raise OutOfTime


def best_depth(results: ResultFile, part: str, system: System, split: Split) -> tuple[int, float]:
    """Returns the d with which a system on this split has the most tokens per second in one part, and that speed:
    the default d and 0 if there are no results."""
    speeds = {
        d: total.speed
        for d in DEPTHS
        if (total := results.total(part, system=system.name, split=split_name(split), shape=Shape(draft_steps=d)))
    }
    best = max(speeds, key=speeds.__getitem__, default=Shape().draft_steps)
    return best, speeds.get(best, 0.0)
