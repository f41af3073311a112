"""Sweep: measures a model pair with every mode, split and d (paper, sections 3.1 and 5.5: the profile phase)."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from swiftspec import file_io
from swiftspec.config import EngineConfig
from swiftspec.control.step_times import CONTEXT_TOKENS, VERIFICATIONS_PER_PREFILL
from swiftspec.errors import UserError
from swiftspec.lab import calibration, measurement, round_costs, sweep_runs
from swiftspec.lab.round_costs import Trace
from swiftspec.lab.sweep_runs import SweepRequest, Trial
from swiftspec.lab.worker_pool import EngineBuild, RankPool
from swiftspec.llm_engine import LLMEngine
from swiftspec.params import SamplingParams
from swiftspec.profiles import store

Json = dict[str, Any]
STEP_REPEATS = 9
TIMELINE_ROUNDS = 6  # rounds of the best asynchronous run whose timeline is stored
WARM_UP_TOKENS = 16
# tokens of the requests that measure step times (control/step_times.py)
MEASURED_CONTEXT = CONTEXT_TOKENS + VERIFICATIONS_PER_PREFILL * max(*sweep_runs.BATCHES, *sweep_runs.ROWS) + 2


class SweepDisplay(Protocol):
    """Protocol of the progress display of a sweep."""

    def begin(self, what: str, done: int, total: int, left: float) -> None:
        """Shows that the measurement `what` begins.

        `done`, `total`: number of finished measurements, and of all.
        `left`: expected seconds until the end of the sweep.
        """
        ...

    def best(self, what: str, speed: float) -> None:
        """Shows the fastest run so far, `what`. `speed`: tokens per second."""
        ...

    def note(self, text: str) -> None:
        """Shows a message to the user."""
        ...

    def close(self) -> None: ...


class Sweep:
    """Sweep on rank 0, which adds its measurements to `profile`.

    After each measurement the unfinished profile is saved next to `file`, with the ending .partial.json, so that
    `load_resumed` can load it. `run` writes `file` itself at the end.
    """

    def __init__(self, pool: RankPool, request: SweepRequest, profile: Json, file: Path, show: SweepDisplay) -> None:
        self.profile, self.file = profile, file
        self._pool, self._request, self._show = pool, request, show
        longest = max(map(len, request.prompts)) + max(request.max_tokens, WARM_UP_TOKENS)
        pool.context = max(longest, MEASURED_CONTEXT)
        self._began = time.monotonic()
        self._longest = 0.0  # seconds of the longest measurement
        self._done = 0

    @staticmethod
    def empty(key: Json, environment: Json, request: SweepRequest) -> Json:
        """Returns a profile without measurements."""
        return {
            "swiftspec_profile": store.VERSION,
            "key": key,
            "environment": environment,
            "settings": request.settings(),
            "steps": [],
            "runs": [],
            "rounds": [],
            "lanes": [],
            "around": {},
            "orchestration": None,
            "stopped": None,
        }

    def run(self) -> None:
        """Measures until everything is measured or the budget is spent, then writes the profile.

        Raises UserError if no run could be measured.
        """
        contest = sweep_runs.initial_trials(self._request, self._pool.ranks)
        try:
            for repeat in range(self._request.repeats):
                for trial in contest:
                    self._run_initial(trial, repeat)
                self._drop()
            self._lanes()
            self._rounds()
            self._step_times()
            self._run_variations(self._variations)
            self._run_variations(lambda: self._of_winner(sweep_runs.leaf_trials))
            self._run_variations(lambda: self._of_winner(self._calibrated))
            self._run_variations(lambda: sweep_runs.ablation(self.profile["runs"], self._request.base_ops))
            self._run_variations(lambda: sweep_runs.populations(self.profile["runs"]))
        except measurement.OutOfTime:
            self.profile["stopped"] = f"the budget of {self._request.budget:g} s is spent; raise it with --budget"
            self._show.note(self.profile["stopped"])
        if not any(run["speeds"] for run in self.profile["runs"]):
            raise UserError(f"nothing could be measured: {self.profile['stopped'] or self._first_reason()}")
        self.profile["runs"] = [run for run in self.profile["runs"] if run["speeds"] or run["dropped"]]
        file_io.write_text(self.file, json.dumps(self.profile, indent=1) + "\n")
        self._partial.unlink(missing_ok=True)

    def close(self) -> None:
        """Closes the progress display."""
        self._show.close()

    @property
    def _partial(self) -> Path:
        return self.file.with_name(self.file.name.removesuffix(".json") + store.PARTIAL_SUFFIX)

    def _first_reason(self) -> str:
        return next((run["dropped"] for run in self.profile["runs"] if run["dropped"]), "no mode is left")

    # ---- engines, one at a time

    def _run_initial(self, trial: Trial, repeat: int) -> None:
        """Measures a trial in repeat number `repeat` (from 0), at each d that is not dropped and lacks this repeat."""
        plan = trial.row(None)
        runs = [r for r in self.profile["runs"] if r["ops"] == trial.ops and not r["variation"]]
        mine = [r for r in runs if plan_matches(r["plan"], plan)]
        steps = trial.steps or (None,)
        if mine:
            steps = [r["plan"]["draft_steps"] for r in mine if not r["dropped"] and len(r["speeds"]) <= repeat]
        elif repeat > 0:
            return
        if steps:
            self._decode(trial, tuple(steps), variation=False)

    def _run_variations(self, pick: Callable[[], Iterable[Trial]]) -> None:
        """Measures, once each, the trials that `pick` derives from the earlier measurements."""
        for trial in pick():
            steps = trial.steps or (None,)
            plan = trial.row(steps[0])
            mine = (run for run in self.profile["runs"] if run["plan"] == plan and run["ops"] == trial.ops)
            if not any(run["speeds"] or run["dropped"] for run in mine):
                self._decode(trial, steps, variation=True)

    def _variations(self) -> list[Trial]:
        first = {**self.profile, "runs": [run for run in self.profile["runs"] if not run["variation"]]}
        winner = store.best_run(first)
        return [] if winner is None else sweep_runs.variations(winner["plan"])

    def _of_winner(self, make: Callable[[Json], list[Trial]]) -> list[Trial]:
        """Returns the trials that `make` derives from the plan of the fastest run so far."""
        winner = store.best_run(self.profile)
        return [] if winner is None else make(winner["plan"])

    def _calibrated(self, plan: Json) -> list[Trial]:
        """Returns the trial of the fastest plan, `plan`, with the calibration that fits its rounds. Returns none if the
        plan has no draft tree, or if the rounds are too few."""
        if plan["mode"] not in sweep_runs.TREE_MODES:
            return []
        self._step(f"calibration of {store.plan_title(plan)}")
        recorded = self._traced(sweep_runs.calibration_trial(plan, calibration.RECORDED_CALIBRATION), plan)
        fitted = calibration.fit_calibration(recorded.rounds)
        return [] if fitted is None else [sweep_runs.calibration_trial(plan, fitted)]

    def _decode(self, trial: Trial, steps: tuple[int | None, ...], variation: bool) -> None:
        """Builds the engine of a trial, decodes the prompts at each d and adds the speeds to the profile.

        `steps`: the values of d. (None,) stands for values derived from step times in mode async, and for no d in modes
        without a draft tree.
        `variation`: whether the trial depends on earlier measurements.
        """
        self._step(store.plan_title(trial.row(steps[0] if len(steps) == 1 else None)))
        known = [d for d in steps if d is not None]
        order = EngineBuild(trial.plan(max(known) if known else None), trial.ops)
        try:
            with self._pool.engine(order) as llm:
                times = None
                if trial.mode == "async" and trial.draft_tp > 0:
                    times = measurement.phase_times(llm)
                    steps = sweep_runs.depths(*times) if not known else steps
                self._decode_prompts(llm, self._request.prompts[:1], WARM_UP_TOKENS)
                for d in steps:
                    self._entry(trial, d, variation)  # so that a resumed sweep finds the d that are missing
                for d in steps:
                    if d is not None:
                        measurement.tree_roles(llm).drafter.draft_steps = d
                    found = self._decode_prompts(llm)
                    self._add(trial, d, found, times, variation)
                    self._save()
        except UserError as error:
            for d in steps:
                self._entry(trial, d, variation)["dropped"] = str(error)
            self._show.note(f"{store.plan_title(trial.row(None))} skipped: {error}")
        self._save()

    def _decode_prompts(
        self, llm: LLMEngine, prompts: Sequence[Sequence[int]] | None = None, max_tokens: int | None = None
    ) -> tuple[measurement.Run, measurement.Run | None]:
        """Decodes the prompts with all samplings. `prompts`, `max_tokens`: None: those of the request."""
        request = self._request
        return measurement.decode_samplings(
            llm, prompts or request.prompts, max_tokens or request.max_tokens, self._deadline(), request.samplings
        )

    def _entry(self, trial: Trial, d: int | None, variation: bool) -> Json:
        plan = trial.row(d)
        for run in self.profile["runs"]:
            if run["plan"] == plan and run["ops"] == trial.ops:
                return run
        run = {
            "plan": plan,
            "ops": trial.ops,
            "variation": variation,
            "speeds": [],
            "sampled_speeds": [],
            "tokens_per_round": None,
            "rounds": 0,
            "target_busy": None,
            "steps": None,
            "dropped": None,
        }
        self.profile["runs"].append(run)
        return run

    def _add(
        self,
        trial: Trial,
        d: int | None,
        found: tuple[measurement.Run, measurement.Run | None],
        times: tuple[float, float] | None,
        variation: bool,
    ) -> None:
        entry, (run, sampled) = self._entry(trial, d, variation), found
        entry["speeds"].append(run.speed)
        if sampled is not None:
            entry["sampled_speeds"].append(sampled.speed)
        entry["tokens_per_round"], entry["rounds"] = run.tokens_per_round, run.rounds
        entry["target_busy"], entry["steps"] = run.busy / run.seconds, times
        leader = store.best_run(self.profile)
        if leader is not None:
            self._show.best(store.plan_title(leader["plan"]), store.median_speed(leader))

    def _drop(self) -> None:
        """Marks the runs that are too slow as dropped, so that they are not repeated."""
        for index in sweep_runs.dominated_runs(self.profile["runs"]):
            run = self.profile["runs"][index]
            if not run["dropped"] and not run["variation"]:
                run["dropped"] = "much slower than the fastest run"

    def _step_times(self) -> None:
        """Measures the step times of each model on groups of every size (paper, Table 1)."""
        for side in ("target", "draft"):
            for tp in range(1, self._pool.ranks + 1):
                if any(step["side"] == side and step["tp"] == tp for step in self.profile["steps"]):
                    continue
                self._step(f"step times of the {side} on {tp} rank{'s' if tp > 1 else ''}")
                try:
                    self._step_times_of(side, tp)
                except UserError as error:
                    self._show.note(f"no step times of the {side} on {tp} ranks: {error}")
                self._save()

    def _step_times_of(self, side: str, tp: int) -> None:
        """Measures the step times of a model on `tp` ranks."""
        plan = EngineConfig("ar", verify_batch=max(sweep_runs.ROWS), target_tp=tp)
        with self._pool.engine(EngineBuild(plan, alone=side)) as llm:
            verifier, room = measurement.tree_roles(llm).verifier, llm.max_model_len - 1
            for rows in sweep_runs.ROWS:
                seconds = list(measurement.step_times(verifier, rows, room, STEP_REPEATS))
                self.profile["steps"].append({"side": side, "tp": tp, "rows": rows, "seconds": seconds})

    def _rounds(self) -> None:
        """Records the rounds of every mode and tree shape that was measured, as input of the predictor.

        One rank per model and no emulated step times are enough, since rounds of a fixed d do not depend on them.
        """
        runs = [run for run in self.profile["runs"] if run["speeds"] and not run["variation"]]
        plans = [run["plan"] for run in runs if run["plan"]["draft_steps"]]
        for plan in plans:
            shape = {name: plan[name] for name in ("mode", *store.TREE_FIELDS)}
            if not any(plan_matches(known["plan"], shape) for known in self.profile["rounds"]):
                self._step(f"rounds of {store.plan_title(plan)}")
                trial = replace(Trial.of(plan), target_tp=1, draft_tp=min(plan["draft_tp"], 1))
                trace = self._traced(trial, plan)
                self.profile["rounds"].append({"plan": shape, "rounds": measurement.rounds_of(trace)})
                self._save()

    def _lanes(self) -> None:
        """Records the timelines of a few rounds of the fastest asynchronous run, and the times around its forwards."""
        winner = store.best_run(self.profile, {"mode": "async"})
        if winner is not None and not self.profile["lanes"]:
            self._step("timelines")
            trace = self._traced(Trial.of(winner["plan"]), winner["plan"], paced=True)
            last = [line for line in trace.rounds if line["request"] == trace.rounds[-1]["request"]]
            self.profile["lanes"] = [
                measurement.round_timeline(line) for line in last[len(last) // 2 :][:TIMELINE_ROUNDS]
            ]
            self.profile["around"] = measurement.overhead_times(trace)
            self.profile["orchestration"] = self._host_overhead(trace, winner["plan"])

    def _host_overhead(self, trace: Trace, plan: Json) -> Json | None:
        """Returns the host overhead per round of a run with emulated step times: its median in seconds, and the share
        of that in the median round. Returns None unless the step times of both models are emulated."""
        emulate = self._pool.pair.options.get("emulate")
        if emulate is None or emulate.target is None or emulate.draft is None:
            return None
        target = emulate.target.at(plan["target_tp"], plan["verify_batch"])
        draft = emulate.draft.at(max(plan["draft_tp"], 1), plan["draft_leaves"])
        costs = round_costs.costs(trace)
        cost = statistics.median(round_costs.host_overhead(costs, target, draft))
        return {"seconds": cost, "share": cost / statistics.median(r.length for r in costs)}

    def _traced(self, trial: Trial, plan: Json, paced: bool = False) -> Trace:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "rounds.jsonl"
            order = EngineBuild(trial.plan(plan["draft_steps"]), paced=paced, trace=str(file))
            with self._pool.engine(order) as llm:
                self._decode_prompts(llm)
            return Trace.read(file)

    # ---- the budget

    def _step(self, what: str) -> None:
        """Counts and shows the next measurement, `what`. Raises OutOfTime if the rest of the budget is shorter than the
        longest measurement so far."""
        now = time.monotonic()
        spent = now - self._began
        if self._done > 0:
            self._longest = max(self._longest, now - self._last)
        if self._done > 0 and spent + self._longest > self._request.budget:
            raise measurement.OutOfTime
        left = max(self._request.budget - spent, 0.0)
        total = max(self._total(), self._done + 1)
        if self._done > 0:
            left = min(left, spent / self._done * (total - self._done))
        self._last = now
        self._show.begin(what, self._done, total, left)
        self._done += 1

    def _total(self) -> int:
        """Estimates the number of measurements, since the variations and dropped runs are not known in advance."""
        contest = sweep_runs.initial_trials(self._request, self._pool.ranks)
        alone = 2 * self._pool.ranks + len(sweep_runs.BATCHES) * 4 + len(sweep_runs.BATCHES) + 2
        return len(contest) * self._request.repeats + alone + self._populations()

    def _populations(self) -> int:
        return sum(map(len, sweep_runs.PARTICLES.values())) if "smc" in self._request.modes else 0

    def _deadline(self) -> float:
        return self._began + self._request.budget

    def _save(self) -> None:
        file_io.write_text(self._partial, json.dumps(self.profile) + "\n")


def plan_matches(plan: Json, wanted: Json) -> bool:
    """Returns whether `plan` has all values of `wanted`. A value None matches any value."""
    return all(value is None or plan[name] == value for name, value in wanted.items())


def load_resumed(file: Path, fresh: Json) -> Json:
    """Returns the unfinished profile that an interrupted sweep has saved next to `file`.

    `fresh`: profile of the new sweep.
    Raises UserError if there is no unfinished profile, or if its key or settings differ from those of `fresh`.
    """
    partial = file.with_name(file.name.removesuffix(".json") + store.PARTIAL_SUFFIX)
    if not partial.exists():
        raise UserError(f"nothing to resume: {partial} does not exist")
    found = store.load(partial)
    for name in ("key", "settings"):
        if found[name] != fresh[name]:
            raise UserError(f"cannot resume {partial}: its {name} differ from those of this sweep")
    return found


def describe_sampling(sampling: SamplingParams) -> str:
    """Describes sampling parameters in a few words: `greedy`, or those that differ from their defaults."""
    if sampling.greedy:
        return "greedy"
    default = SamplingParams()
    names = (name for name in sweep_runs.SAMPLING_FIELDS if getattr(sampling, name) != getattr(default, name))
    changed = ", ".join(f"{name} {getattr(sampling, name):g}" for name in names)
    return f"sampled with {changed or 'temperature 1'}"


def describe_trials(request: SweepRequest, ranks: int) -> Sequence[str]:
    """Returns lines that describe the measurements of a sweep, for --dry-run. `ranks`: number of ranks of the job."""
    contest = sweep_runs.initial_trials(request, ranks)
    lines = []
    for trial in contest:
        measured = trial.mode == "async" and not trial.steps
        d = "d measured" if measured else f"d in {', '.join(map(str, trial.steps))}" if trial.steps else ""
        lines.append(f"{store.plan_title(trial.row(None))} {d}".rstrip())
    rows = f"{sweep_runs.ROWS[0]}..{sweep_runs.ROWS[-1]}"
    lines.append(f"step times of both models on 1..{ranks} ranks, {rows} rows")
    lines.append("the winner with other bs or w, and with the calibration that fits its rounds")
    lines.append(f"the best serial and async runs with {request.base_ops} operators")
    lines.append(f"{len(request.prompts)} prompts, each {' and '.join(map(describe_sampling, request.samplings))}")
    several = [f"{name} in {', '.join(map(str, values))}" for name, values in sweep_runs.PARTICLES.items()]
    return [*lines, *(["smc with one changed at a time: " + "; ".join(several)] if "smc" in request.modes else [])]
