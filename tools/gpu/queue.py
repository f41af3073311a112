"""Runs the steps of tools/gpu_queue.py within a budget, and records each before the next one begins."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tools.gpu import processes
from tools.gpu.processes import OUT_OF_TIME, Outcome, pack_logs, read, without_paths
from tools.gpu.steps import NOTHING_EARLY, SCRATCH, TRIAL, Step
from tools.gpu.telemetry import Sensor, Telemetry, summary

END_S = 5.0  # for killing a step
LEAST_SHARE = 0.5  # of its limit that a step must have; steps write what they have measured as they go
NO_TIME, NOTHING, UNSAFE = "no time left", "nothing to run", "unsafe"
Json = dict[str, Any]
RunStep = Callable[[Step, float], Outcome]


class ResumeError(Exception):
    """The results to resume cannot be used; the message is one line."""


@dataclass(slots=True)
class Queue:
    """A run of steps. After each, `file` has all results so far. `clock`, in seconds, and `run` are those of this
    machine unless a test replaces them. `times_kernels`: the steps would hang if kernels do, so none follows a trial
    that says so; tests have limits of their own. `kept`: what the steps have written so far, by `Step.keep`."""

    file: Path
    budget: float
    sensor: Sensor | None = None
    run: RunStep = processes.run
    clock: Callable[[], float] = time.monotonic
    times_kernels: bool = True
    kept: dict[Path, Json] = field(default_factory=dict)

    def run_all(self, steps: Sequence[Step], whole: Json) -> Json:
        """Runs the steps that `whole` does not have with state ok, and returns it with them. `whole` has "machine" and
        "steps"."""
        began = self.clock()
        done = {entry["name"]: entry for entry in whole["steps"] if entry["state"] == "ok"}
        whole["steps"] = []
        for step in steps:
            left = self.budget - (self.clock() - began) - END_S
            if step.name in done:
                entry = done[step.name]
                self._restore(step, entry)
            elif self.times_kernels and (why := _unsafe(whole)) is not None:
                entry = _entry(step, Outcome(step.name, UNSAFE, 0.0, why))
            elif step.needs is not None and not step.needs.exists():
                entry = _entry(step, Outcome(step.name, NOTHING, 0.0, f"{step.needs.name} is missing"))
            elif left < LEAST_SHARE * step.limit:
                entry = _entry(step, Outcome(step.name, NO_TIME, 0.0, f"{left:.0f} s left"))
            else:
                entry = self._one(step, min(step.limit, left), whole)
            whole["steps"].append(entry)
            print(f"== {step.name}: {entry['state']}, {entry['seconds']:.0f} s", flush=True)
            write(self.file, whole)
            pack_logs(self.file.with_name(f"{self.file.stem.removesuffix('-queue')}-logs.tar.gz"))
        return whole

    def _one(self, step: Step, limit: float, whole: Json) -> Json:
        print(f"== {step.name}: {shlex.join(step.command)}", flush=True)
        if step.result is not None:
            step.result.unlink(missing_ok=True)
        environment = {**_around(whole), **step.environment}
        SCRATCH.mkdir(parents=True, exist_ok=True)
        with Telemetry(self.sensor, SCRATCH / "telemetry.jsonl") as telemetry:
            outcome = self.run(replace(step, environment=environment), limit)
        print(outcome.tail, flush=True)
        found = read(step.result)
        self._keep(step, found)
        return _entry(step, outcome) | {"gpu": summary(telemetry.samples), "result": found}

    def _restore(self, step: Step, entry: Json) -> None:
        """Writes the result of a step that an earlier run has done, which other steps may read."""
        found = entry.get("result")
        if found is not None and step.result is not None:
            SCRATCH.mkdir(parents=True, exist_ok=True)
            write(step.result, found)
            self._keep(step, found)

    def _keep(self, step: Step, found: Json | None) -> None:
        """Writes results or constants to `step.keep`. Lists continue those of other steps that keep theirs there."""
        if found is None or step.keep is None or not (found.get("results") or found.get("constants")):
            return
        whole = self.kept.setdefault(step.keep, {})
        for name, value in found.items():
            whole[name] = [*whole.get(name, []), *value] if isinstance(value, list) else value
        write(step.keep, whole)


def _entry(step: Step, outcome: Outcome) -> Json:
    published = {"tail": without_paths(outcome.tail), "command": without_paths(shlex.join(step.command))}
    return asdict(outcome) | published | {"limit": step.limit}


def _trial(whole: Json) -> Json:
    """Returns what is known of the trial."""
    return next((entry for entry in whole["steps"] if entry["name"] == TRIAL), {})


def _around(whole: Json) -> dict[str, str]:
    """Returns the environment of all steps after a trial in which early starts fail."""
    found = _trial(whole).get("result") or {}
    return NOTHING_EARLY if "early_starts" in found.get("fallbacks", {}) else {}


def _unsafe(whole: Json) -> str | None:
    """Returns why no step after the trial may time kernels: each would hang until its limit, and the time is better
    spent on a repair."""
    trial = _trial(whole)
    if trial.get("state") == OUT_OF_TIME:
        return "the trial did not end"
    unusable = (trial.get("result") or {}).get("unusable")
    return f"kernels of {', '.join(unusable)} hung or ended their process in the trial" if unusable else None


def write(file: Path, whole: Json) -> None:
    """Writes JSON atomically: a reader always finds a complete file."""
    part = file.with_suffix(".part")
    part.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    part.replace(file)


def resumed(file: Path, machine: Json) -> Json:
    """Returns the results of an earlier run, for `run_all`. Raises ResumeError if they are not from this GPU."""
    whole = read(file)
    if whole is None or "steps" not in whole:
        raise ResumeError(f"{file} holds no results of a queue")
    if whole["machine"]["gpu"] != machine["gpu"]:
        raise ResumeError(f"{file} is from {whole['machine']['gpu']}, this machine has {machine['gpu']}")
    return whole


def results_of(whole: Json) -> dict[str, Json]:
    """Returns by step the documents that the steps wrote, with the telemetry of each under "gpu"."""
    return {
        entry["name"]: entry["result"] | {"gpu": entry.get("gpu") or {}}
        for entry in whole["steps"]
        if entry.get("result")
    }
