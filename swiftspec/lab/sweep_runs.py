"""Trials of a sweep: which there are, in which order, and which are dropped. Nothing is measured here."""

from __future__ import annotations

import hashlib
import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from swiftspec.config import MAX_MEASURED_DRAFT_STEPS, MODES, EngineConfig
from swiftspec.control.step_times import GREEDY, DraftTimes, steps_for
from swiftspec.errors import UserError
from swiftspec.lab.worker_pool import Ops
from swiftspec.model.config import ModelConfig
from swiftspec.model.shard import Shard
from swiftspec.params import FILTERS, PENALTIES, SamplingParams
from swiftspec.profiles import schema, store

ROWS = (1, 2, 4, 8, 16, 32)  # rows per forward of the measured step times
# d in serial mode and on one GPU, where the best d depends on acceptance, not on a ratio of times
SERIAL_STEPS = (1, 2, 3, 4, 6)
BATCHES = (2, 4, 8, 16, 32)  # values of bs and of w, each with the other one at its default (paper, Figure 2)
PARTICLES = {  # values of N, K and sequence groups, each with the others at their defaults
    "particles": (1, 2, 8, 16),
    "smc_draft_tokens": (1, 2, 8),
    "smc_groups": (2, 4, 8),
}
USUAL = EngineConfig()
TREE_MODES = ("serial", "async")
# of SamplingParams, as field `samplings` of a profile has them
SAMPLING_FIELDS = ("temperature", *FILTERS, *PENALTIES)
ENGINE = tuple(
    name for name in store.PLAN_FIELDS if name != "draft_steps"
)  # fields of a plan that are fixed when an engine is built, unlike d
DROP_SPEED_RATIO = 0.85  # a run is not repeated if its best repeat is below this share of the fastest run's median


@dataclass(frozen=True, slots=True)
class Trial:
    """An engine to build, and the values of d to measure with it.

    `steps`: values of d. If it is empty, mode async derives them from measured step times (`depths`).
    """

    mode: str
    target_tp: int
    draft_tp: int
    ops: Ops
    verify_batch: int = USUAL.verify_batch
    draft_leaves: int = USUAL.leaves_per_expansion
    steps: tuple[int, ...] = ()
    calibration: float | None = None  # None: the default
    particles: int = USUAL.population.particles  # only used in mode smc, like the next two fields
    smc_draft_tokens: int = USUAL.population.smc_draft_tokens
    smc_groups: int = USUAL.population.smc_groups

    @staticmethod
    def of(plan: Mapping[str, Any], ops: Ops = "auto", steps: tuple[int, ...] = ()) -> Trial:
        """Returns the trial whose engine has `plan`, the plan of a run in a profile."""
        particles = {name: plan[name] for name in schema.PARTICLE_FIELDS if plan.get(name) is not None}
        tree = {name: plan[name] for name in ENGINE}
        return Trial(ops=ops, steps=steps, calibration=plan.get("calibration"), **tree, **particles)

    def plan(self, draft_steps: int | None) -> EngineConfig:
        """Returns the engine configuration at d = `draft_steps`."""
        return schema.engine_config(self.row(draft_steps))

    def row(self, draft_steps: int | None) -> dict[str, Any]:
        """Returns the plan at d = `draft_steps` as a profile stores it. d is None in modes without a draft tree."""
        names = (*ENGINE, *(schema.PARTICLE_FIELDS if self.mode == "smc" else ()))
        engine = {name: getattr(self, name) for name in names}
        calibration = {} if self.calibration is None else {"calibration": self.calibration}
        return {**engine, **calibration, "draft_steps": draft_steps if self.mode in ("serial", "async") else None}


@dataclass(frozen=True, slots=True)
class SweepRequest:
    """Specification of a sweep."""

    modes: list[str]
    pairs: list[tuple[int, int]]  # (target ranks, draft ranks) of mode async; (1, 0): both models on one GPU
    shards_on_all_ranks: bool  # whether both models can be sharded over all ranks
    prompts: list[list[int]]  # token ids
    max_tokens: int  # per request
    repeats: int
    budget: float  # seconds
    samplings: tuple[SamplingParams, ...] = (GREEDY,)  # each prompt is decoded with each; the first one is greedy
    draft_leaves: int = USUAL.leaves_per_expansion  # w; the default of a CPU
    base_ops: Ops = "reference"  # operators of the ablation's base

    def settings(self) -> dict[str, Any]:
        """Returns field `settings` of the profile. A sweep can only be resumed with equal settings."""
        digest = hashlib.sha256(json.dumps(self.prompts).encode()).hexdigest()
        samplings = [
            {name: value for name, value in asdict(each).items() if name in SAMPLING_FIELDS} for each in self.samplings
        ]
        return {
            "prompts": len(self.prompts),
            "prompts_sha256": digest,
            "max_tokens": self.max_tokens,
            "repeats": self.repeats,
            "samplings": samplings,
            "draft_leaves": self.draft_leaves,
        }


def splits(text: str, ranks: int, target: ModelConfig, draft: ModelConfig) -> tuple[list[tuple[int, int]], list[str]]:
    """Parses --splits. Returns the splits as (target ranks, draft ranks), and the reasons why splits are left out.

    `text`: splits such as `3+1,2+2`; or `all`, which leaves out the splits that cannot shard a model.
    Raises UserError if the text has another form, or if a split that it names does not add up to `ranks` or cannot
    shard a model.
    """
    if text == "all":
        named = [(x, ranks - x) for x in range(ranks - 1, 0, -1)]
    else:
        named = []
        for part in text.split(","):
            found = re.fullmatch(r"\s*(\d+)\+(\d+)\s*", part)
            if found is None:
                raise UserError(f"--splits {text!r}: expected all, or target+draft such as 3+1,2+2")
            x, y = int(found[1]), int(found[2])
            if x < 1 or y < 1 or x + y != ranks:
                raise UserError(f"--splits: {x}+{y} must add up to {ranks} ranks, with at least 1 on each side")
            named.append((x, y))
    kept, reasons = [], []
    for x, y in dict.fromkeys(named):
        reason = shard_error(target, x) or shard_error(draft, y)
        if reason is None:
            kept.append((x, y))
        elif text != "all":
            raise UserError(f"--splits: {x}+{y} is not possible: {reason}")
        else:
            reasons.append(f"{x}+{y}: {reason}")
    return kept, reasons


def shard_error(config: ModelConfig, size: int) -> str | None:
    """Returns the reason why a model cannot be sharded over `size` ranks, or None if it can."""
    try:
        Shard.of(config, 0, size)
    except UserError as error:
        return str(error)
    return None


def check_modes(text: str) -> list[str]:
    """Parses a comma-separated list of modes. Raises UserError on an unknown mode."""
    modes = text.split(",")
    for mode in modes:
        if mode not in MODES:
            raise UserError(f"--modes: {mode!r} is not one of {', '.join(MODES)}")
    return modes


def initial_trials(request: SweepRequest, ranks: int) -> list[Trial]:
    """Returns the first trials of a sweep over `ranks` ranks: every mode and split with the default bs and w.

    Modes ar and serial run on one rank, and also on all ranks if both models can be sharded over them. With both models
    on one GPU d is tried as in serial mode, since their step times depend on each other.
    """
    trials: list[Trial] = []
    modes, w = request.modes, request.draft_leaves
    sizes = dict.fromkeys((ranks if request.shards_on_all_ranks else 1, 1))
    if "ar" in modes:
        trials += [Trial("ar", x, 0, "auto", draft_leaves=w) for x in sizes]
    if "serial" in modes:
        trials += [Trial("serial", x, x, "auto", draft_leaves=w, steps=SERIAL_STEPS) for x in sizes]
    if "async" in modes:
        steps = {pair: SERIAL_STEPS if pair[1] == 0 else () for pair in request.pairs}
        trials += [Trial("async", x, y, "auto", draft_leaves=w, steps=steps[x, y]) for x, y in request.pairs]
    if "smc" in modes:
        trials.append(Trial("smc", 1, 1, "auto"))
    return trials


def variations(plan: Mapping[str, Any]) -> list[Trial]:
    """Returns trials of the fastest plan with the default bs and w, `plan`, with other values of bs or w: one is varied
    while the other has its default (paper, Figure 2). Returns none if the plan has no draft tree."""
    if plan["mode"] not in TREE_MODES:
        return []
    start = Trial.of(plan, steps=(plan["draft_steps"],))
    made = [replace(start, verify_batch=bs) for bs in BATCHES] + [replace(start, draft_leaves=w) for w in BATCHES]
    return [trial for trial in dict.fromkeys(made) if trial != start]


def leaf_trials(plan: Mapping[str, Any]) -> list[Trial]:
    """Returns trials of the fastest plan, `plan`, with other values of w, which `variations` has tried at the default
    bs only. Returns none if the plan has no draft tree."""
    if plan["mode"] not in TREE_MODES:
        return []
    start = Trial.of(plan, steps=(plan["draft_steps"],))
    return [replace(start, draft_leaves=w) for w in BATCHES if w != start.draft_leaves]


def calibration_trial(plan: Mapping[str, Any], calibration: float) -> Trial:
    """Returns the trial of the fastest plan, `plan`, with another calibration. The plan must have a draft tree."""
    return replace(Trial.of(plan, steps=(plan["draft_steps"],)), calibration=calibration)


def populations(runs: Sequence[Mapping[str, Any]]) -> list[Trial]:
    """Returns trials of mode smc that vary N, K and the number of sequence groups, one at a time.

    Returns none if `runs` has no measurement of mode smc. The speed of several groups is that of all together. Speed
    alone does not select a setting, since the quality of the text depends on N and K.
    """
    if not any(run["plan"]["mode"] == "smc" and run["speeds"] for run in runs):
        return []
    start = Trial("smc", 1, 1, "auto")
    return [replace(start, **{name: value}) for name, values in PARTICLES.items() for value in values]


def ablation(runs: Sequence[Mapping[str, Any]], base_ops: Ops = "reference") -> list[Trial]:
    """Returns trials that repeat the fastest serial and the fastest asynchronous run with the operators `base_ops`.

    Considers only runs on the largest number of ranks with the default bs and w. Together with the original runs the
    trials are an ablation of asynchronous mode and of the operators (paper, Figure 8). On a GPU the base are the
    operators of torch's libraries in captured graphs (`unfused`), since the reference operators expand int4 weights and
    capture nothing.
    """
    made = []
    most = max((store.ranks_of(run["plan"]) for run in runs), default=1)
    for mode in ("serial", "async"):
        mine = [
            r
            for r in runs
            if r["plan"]["mode"] == mode
            and r["speeds"]
            and r["ops"] == "auto"
            and store.ranks_of(r["plan"]) == most
            and not r["variation"]
        ]
        if mine:
            plan = max(mine, key=lambda run: statistics.median(run["speeds"]))["plan"]
            made.append(Trial.of(plan, base_ops, (plan["draft_steps"],)))
    return made


def depths(target: float, draft: float) -> tuple[int, ...]:
    """Returns floor and ceiling of `target / draft` as values of d, within 1..MAX_MEASURED_DRAFT_STEPS (paper, section
    3.1).

    `target`: seconds of a verification.
    `draft`: seconds of an expansion.
    """
    low = steps_for(target, DraftTimes(0.0, draft))
    high = min(max(math.ceil(target / draft), 1), MAX_MEASURED_DRAFT_STEPS)
    return tuple(sorted({low, high}))


def dominated_runs(runs: Sequence[Mapping[str, Any]]) -> list[int]:
    """Returns the indices of the runs that are too slow to be repeated.

    A run is too slow if its best repeat is below LOSING times the median of the fastest run on as many ranks. The
    fastest run of each mode and number of ranks is never too slow, so that modes can be compared.
    """
    best: dict[tuple[int, str], float] = {}
    for run in runs:
        if run["speeds"] and not run["variation"]:
            place = _place(run)
            best[place] = max(best.get(place, 0.0), statistics.median(run["speeds"]))
    behind = []
    for index, run in enumerate(runs):
        if run["speeds"] and not run["variation"] and statistics.median(run["speeds"]) < best[_place(run)]:
            leader = max(speed for (count, _), speed in best.items() if count == _place(run)[0])
            if max(run["speeds"]) < DROP_SPEED_RATIO * leader:
                behind.append(index)
    return behind


def _place(run: Mapping[str, Any]) -> tuple[int, str]:
    return store.ranks_of(run["plan"]), run["plan"]["mode"]
