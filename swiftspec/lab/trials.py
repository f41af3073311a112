"""What a sweep tries, in which order, and what it no longer tries: arithmetic only."""

from __future__ import annotations

import hashlib
import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from swiftspec.config import MAX_MEASURED_DRAFT_STEPS, MODES, EngineConfig
from swiftspec.control.step_times import DraftTimes, steps_for
from swiftspec.errors import UserError
from swiftspec.model.config import ModelConfig
from swiftspec.model.shard import Shard
from swiftspec.profiles import schema, store

ROWS = (1, 2, 4, 8, 16, 32)  # of the step times
SERIAL_STEPS = (1, 2, 3, 4, 6)  # the best d in turn follows from acceptance, not from a ratio of times
BATCHES = (2, 4, 8, 16, 32)  # bs and w, each with the other at the usual value (paper, Figure 2)
PARTICLES = {  # each with the others at the usual value
    "particles": (1, 2, 8, 16), "smc_draft_tokens": (1, 2, 8), "smc_groups": (2, 4, 8),
}  # fmt: skip
USUAL = EngineConfig()
ENGINE = tuple(
    name for name in store.PLAN_FIELDS if name != "draft_steps"
)  # what of a plan an engine keeps while d changes
LOSING = 0.85  # a run whose best repeat stays below this share of the leader's median is not repeated


@dataclass(frozen=True, slots=True)
class Trial:
    """One engine to build and one or more values of d to run on it; none: as the ratio of the step times has it."""

    mode: str
    target_tp: int
    draft_tp: int
    ops: str
    verify_batch: int = USUAL.verify_batch
    draft_leaves: int = USUAL.draft_leaves
    steps: tuple[int, ...] = ()
    particles: int = USUAL.population.particles  # these three in mode smc
    smc_draft_tokens: int = USUAL.population.smc_draft_tokens
    smc_groups: int = USUAL.population.smc_groups

    @staticmethod
    def of(plan: Mapping[str, Any], ops: str = "auto", steps: tuple[int, ...] = ()) -> Trial:
        """The engine of a profile's plan."""
        particles = {name: plan[name] for name in schema.PARTICLE_FIELDS if plan.get(name) is not None}
        return Trial(ops=ops, steps=steps, **{name: plan[name] for name in ENGINE}, **particles)

    def plan(self, draft_steps: int | None) -> EngineConfig:
        """The plan of the engine."""
        return schema.engine_config(self.row(draft_steps))

    def row(self, draft_steps: int | None) -> dict[str, Any]:
        """The plan as a profile holds it."""
        names = (*ENGINE, *(schema.PARTICLE_FIELDS if self.mode == "smc" else ()))
        engine = {name: getattr(self, name) for name in names}
        return {**engine, "draft_steps": draft_steps if self.mode in ("serial", "async") else None}


@dataclass(frozen=True, slots=True)
class SweepRequest:
    """What is to be measured."""

    modes: list[str]
    pairs: list[tuple[int, int]]  # splits of all ranks
    whole: bool  # all ranks can share both models
    prompts: list[list[int]]
    max_tokens: int
    repeats: int
    budget: float  # seconds

    def settings(self) -> dict[str, Any]:
        """What must be the same for a sweep to be resumed."""
        digest = hashlib.sha256(json.dumps(self.prompts).encode()).hexdigest()
        return {
            "prompts": len(self.prompts), "prompts_sha256": digest, "max_tokens": self.max_tokens,
            "repeats": self.repeats, "temperature": 0,
        }  # fmt: skip


def splits(text: str, ranks: int, target: ModelConfig, draft: ModelConfig) -> tuple[list[tuple[int, int]], list[str]]:
    """The splits of `ranks` ranks that are named (`all`, or `3+1,2+2`), and why others of `all` are left out. Raises
    UserError where a named one does not add up, or a model cannot be cut that way."""
    if text == "all":
        named = [(x, ranks - x) for x in range(ranks - 1, 0, -1)]
    else:
        named = []
        for part in text.split(","):
            found = re.fullmatch(r"\s*(\d+)\+(\d+)\s*", part)
            if found is None:
                raise UserError(f"--splits {text!r}: write all, or target+draft such as 3+1,2+2")
            x, y = int(found[1]), int(found[2])
            if x < 1 or y < 1 or x + y != ranks:
                raise UserError(f"--splits: {x}+{y} does not make {ranks} ranks with at least one on either side")
            named.append((x, y))
    kept, reasons = [], []
    for x, y in dict.fromkeys(named):
        reason = cannot_cut(target, x) or cannot_cut(draft, y)
        if reason is None:
            kept.append((x, y))
        elif text != "all":
            raise UserError(f"--splits: nobody can cut {x}+{y}: {reason}")
        else:
            reasons.append(f"{x}+{y}: {reason}")
    return kept, reasons


def cannot_cut(config: ModelConfig, size: int) -> str | None:
    """Why so many ranks cannot share a model."""
    try:
        Shard.of(config, 0, size)
    except UserError as error:
        return str(error)
    return None


def check_modes(text: str) -> list[str]:
    """The modes that are named. Raises UserError."""
    modes = text.split(",")
    for mode in modes:
        if mode not in MODES:
            raise UserError(f"--modes: {mode!r} is none of {', '.join(MODES)}")
    return modes


def contest(modes: Sequence[str], pairs: Sequence[tuple[int, int]], ranks: int, whole: bool) -> list[Trial]:
    """The splits and modes against each other, at the usual bs and w. `whole`: all ranks can share both models."""
    trials = []
    if "ar" in modes:
        trials += [Trial("ar", x, 0, "auto") for x in dict.fromkeys((ranks if whole else 1, 1))]
    if "serial" in modes:
        trials += [Trial("serial", x, x, "auto", steps=SERIAL_STEPS) for x in dict.fromkeys((ranks if whole else 1, 1))]
    if "async" in modes:
        trials += [Trial("async", x, y, "auto") for x, y in pairs]
    if "smc" in modes:
        trials.append(Trial("smc", 1, 1, "auto"))
    return trials


def variations(plan: Mapping[str, Any]) -> list[Trial]:
    """The winner's bs and w, one at a time (paper, Figure 2), with its d."""
    if plan["mode"] not in ("serial", "async"):
        return []
    start = Trial(plan["mode"], plan["target_tp"], plan["draft_tp"], "auto", steps=(plan["draft_steps"],))
    made = [replace(start, verify_batch=bs) for bs in BATCHES] + [replace(start, draft_leaves=w) for w in BATCHES]
    return [trial for trial in dict.fromkeys(made) if trial != start]


def populations(runs: Sequence[Mapping[str, Any]]) -> list[Trial]:
    """N, K and the number of groups of mode smc, one at a time, where it could be measured. Of several groups the speed
    is that of all together. Which is fastest says nothing of the text, which follows N and K."""
    if not any(run["plan"]["mode"] == "smc" and run["speeds"] for run in runs):
        return []
    start = Trial("smc", 1, 1, "auto")
    return [replace(start, **{name: value}) for name, values in PARTICLES.items() for value in values]


def ablation(runs: Sequence[Mapping[str, Any]]) -> list[Trial]:
    """The best of serial and async on all ranks, with the usual tree, once more with plain torch operators: base, only
    parallel tree, only kernels, both (paper, Figure 8; there the other axis is CUDA kernels)."""
    made = []
    most = max((store.ranks_of(run["plan"]) for run in runs), default=1)
    for mode in ("serial", "async"):
        mine = [r for r in runs if r["plan"]["mode"] == mode and r["speeds"] and r["ops"] == "auto"
                and store.ranks_of(r["plan"]) == most and not r["variation"]]  # fmt: skip
        if mine:
            plan = max(mine, key=lambda run: statistics.median(run["speeds"]))["plan"]
            made.append(Trial.of(plan, "reference", (plan["draft_steps"],)))
    return made


def depths(target: float, draft: float) -> tuple[int, ...]:
    """d: floor and ceiling of the ratio of a verification to an expansion (paper, section 3.1)."""
    low = steps_for(target, DraftTimes(0.0, draft))
    high = min(max(math.ceil(target / draft), 1), MAX_MEASURED_DRAFT_STEPS)
    return tuple(sorted({low, high}))


def losers(runs: Sequence[Mapping[str, Any]]) -> list[int]:
    """Which runs are so far behind the leader on as many ranks that repeating them is a waste. The best of every mode
    stays, so that there is something to compare with."""
    best: dict[tuple[int, str], float] = {}
    for run in runs:
        if run["speeds"] and not run["variation"]:
            place = _place(run)
            best[place] = max(best.get(place, 0.0), statistics.median(run["speeds"]))
    behind = []
    for index, run in enumerate(runs):
        if run["speeds"] and not run["variation"] and statistics.median(run["speeds"]) < best[_place(run)]:
            leader = max(speed for (count, _), speed in best.items() if count == _place(run)[0])
            if max(run["speeds"]) < LOSING * leader:
                behind.append(index)
    return behind


def _place(run: Mapping[str, Any]) -> tuple[int, str]:
    return store.ranks_of(run["plan"]), run["plan"]["mode"]
