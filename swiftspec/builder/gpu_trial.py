"""GPU trial at start: decides which CUDA operators and mechanisms a process uses on its GPU.

A process of its own (backends/cuda/trial.py) runs every kind of operator on the shapes of the models to load. What
fails falls back, one rung after the other: first no early starts, then no CUDA graphs, then torch's operators for the
families of operators that fail. Sums through peer memory are checked where ranks join a group; here they fall back only
after an error at run time. The last check times tilings of the projections and shapes of the attention kernel, whose
choice the verdict keeps.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from signal import Signals
from threading import Thread
from typing import IO, Any, Protocol

from swiftspec.backends.cuda.trial import TUNING, TrialRequest
from swiftspec.backends.cuda.trial_checks import TrialCheck, TrialPlan, trial_checks
from swiftspec.backends.cuda.tuner import TUNE_S, Tuning
from swiftspec.backends.families import FAMILIES, Family

UNFINISHED_S = 1.0  # a check that has run this long when the trial's time is over counts as hung, too
HUNG, DIED = "it hung", "it ended its process"  # reasons of checks that have cost their process the GPU
STOP_S = 1.0  # wait for a killed process; one that is blocked in the driver is abandoned
SWITCHES = ("early_starts", "graphs", "peers")
COMMAND = (sys.executable, "-m", "swiftspec.backends.cuda.trial")
DESCRIPTIONS = {  # by name of a fallback
    "early_starts": "kernels do not start early",
    "graphs": "no CUDA graphs",
    "peers": "sums by NCCL",
    **{family: f"{family} by torch's operators" for family in FAMILIES},
}


@dataclass(frozen=True, slots=True)
class TrialLimits:
    """Limits of a trial, in seconds.

    `trial_s`: of all processes together; the import of torch takes most of it. `check_s`: of one check, with the load
    of its kernels; a longer one is repeated. `repeated_check_s`: of the repetition, which counts as hung if it takes
    longer, since the trials of many ranks on a cold disk are slow; the trial may take so much longer. `tune_s`: of
    timing in the check TUNING, in addition to `check_s`.
    """

    trial_s: float = 25.0
    check_s: float = 5.0
    repeated_check_s: float = 20.0
    tune_s: float = TUNE_S


LIMITS = TrialLimits()


@dataclass(frozen=True, slots=True)
class GpuVerdict:
    """What a process does not use on its GPU, and why.

    `fallbacks`: reasons by name. "early_starts": every kernel waits for the end of its predecessor. "graphs": CUDA
    graphs are not captured. "peers": NCCL sums over a group. A family of operators: torch's own are used for it.
    `tuning`: what is faster than the defaults.
    """

    fallbacks: Mapping[str, str] = field(default_factory=dict)
    tuning: Tuning = field(default_factory=Tuning)

    @property
    def early_starts(self) -> bool:
        return "early_starts" not in self.fallbacks

    @property
    def graphs(self) -> bool:
        return "graphs" not in self.fallbacks

    @property
    def peers(self) -> bool:
        return "peers" not in self.fallbacks

    @property
    def on_library(self) -> frozenset[Family]:
        """The families of operators for which torch's own are used."""
        return frozenset(family for family in FAMILIES if family in self.fallbacks)

    def without(self, names: Collection[str], why: str) -> GpuVerdict:
        """Returns a copy in which `names` fall back for the reason `why`, unless they do already."""
        return replace(self, fallbacks={**dict.fromkeys(names, why), **self.fallbacks})

    def union(self, ranks: Sequence[GpuVerdict]) -> GpuVerdict:
        """Returns the verdict with the fallbacks of all ranks of a group, and with the tuning of the first rank that
        has one for a shape: the same on all ranks, since other tilings and kernels have other last bits."""
        fallbacks: dict[str, str] = {}
        tuning = Tuning()
        for verdict in (self, *ranks):
            fallbacks = {**verdict.fallbacks, **fallbacks}
        for verdict in ranks:
            tuning = verdict.tuning.under(tuning)
        return GpuVerdict(fallbacks, tuning)

    def lower(self, why: str, *, grouped: bool) -> GpuVerdict:
        """Returns the next rung, after an error at run time that names no operator: the defaults of what is tuned,
        then nothing early, then no graphs, then sums by NCCL (`grouped`: the rank is one of a group), then torch's
        operators for everything."""
        if self.tuning:
            return replace(self, tuning=Tuning())
        for name in SWITCHES:
            if name not in self.fallbacks and (name != "peers" or grouped):
                return self.without([name], why)
        return self.without(tuple(FAMILIES), why)

    def note(self) -> str | None:
        """Returns in one line what falls back and why; None if nothing does."""
        if not self.fallbacks:
            return None
        by_reason: dict[str, list[str]] = {}
        for name in DESCRIPTIONS:
            if name in self.fallbacks:
                by_reason.setdefault(self.fallbacks[name], []).append(DESCRIPTIONS[name])
        if {*FAMILIES} <= self.fallbacks.keys():
            return f"GPU: torch's operators replace the CUDA operators ({'; '.join(by_reason)})"
        parts = [f"{', '.join(names)} ({why})" for why, names in by_reason.items()]
        return f"GPU: {'; '.join(parts)}; all else runs on the CUDA operators"

    def to_json(self) -> dict[str, Any]:
        return {"fallbacks": dict(self.fallbacks), "tuning": self.tuning.to_json()}

    @staticmethod
    def from_json(values: object) -> GpuVerdict:
        """Returns the verdict that `to_json` has converted. Raises ValueError if `values` is not one."""
        found = values.get("fallbacks") if isinstance(values, dict) else None
        if not isinstance(found, dict) or not all(
            name in DESCRIPTIONS and isinstance(why, str) for name, why in found.items()
        ):
            raise ValueError("not a verdict")
        return GpuVerdict(found, Tuning.from_json(values.get("tuning") if isinstance(values, dict) else None))


class TrialProcess(Protocol):
    """A process that runs checks."""

    def next_line(self, timeout_s: float, /) -> str | None:
        """Returns its next line, or None once it has ended. Raises TimeoutError."""
        ...

    def stop(self) -> str:
        """Ends the process if it runs. Returns how it ended."""
        ...


class CheckProcess:
    """A `TrialProcess` that runs `command`. `stderr`: as of subprocess.Popen."""

    def __init__(
        self, request: TrialRequest, command: Sequence[str] = COMMAND, stderr: int | None = subprocess.DEVNULL
    ) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            encoding="utf-8",
            errors="replace",
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(OSError), self._process.stdin as pipe:  # it may have ended already
            pipe.write(f"{json.dumps(request.to_json())}\n")
        self._lines = queue.SimpleQueue[str | None]()
        self._ended = False  # its output; it is about to exit
        Thread(target=self._read, args=(self._process.stdout,), daemon=True, name="GPU trial").start()

    def _read(self, pipe: IO[str]) -> None:
        with pipe, suppress(OSError, ValueError):
            for line in pipe:
                self._lines.put(line)
        self._lines.put(None)

    def next_line(self, timeout_s: float) -> str | None:
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError from None
        self._ended = self._ended or line is None
        return line

    def stop(self) -> str:
        try:
            code = self._process.wait(STOP_S if self._ended else 0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            try:
                code = self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                return "blocked in the driver"
        return f"exit code {code}" if code >= 0 else Signals(-code).name


StartTrial = Callable[[TrialRequest], TrialProcess]
RunChecks = Callable[[GpuVerdict, Sequence[str]], Mapping[str, str | None]]  # reasons, or None, by name of the check


class TrialRunner:
    """Runs checks in processes, each of which continues behind the check that has ended the one before.

    `start`: starts a process. `clock`: returns the time in seconds.
    `problem`: why no check of a process has begun; None if one did in each process. `tuning`: what TUNING has found.
    """

    def __init__(
        self,
        plan: TrialPlan,
        device: str,
        start: StartTrial,
        clock: Callable[[], float] = time.monotonic,
        limits: TrialLimits = LIMITS,
    ) -> None:
        self._plan, self._device, self._start, self._clock, self._limits = plan, device, start, clock, limits
        self._until = clock() + limits.trial_s
        self._slow: dict[str, str] = {}  # checks that took too long at first, and how they ended
        self.problem: str | None = None
        self.tuning = Tuning()

    def run(self, verdict: GpuVerdict, names: Sequence[str]) -> Mapping[str, str | None]:
        """Runs the checks `names` with the fallbacks of `verdict`. Returns for each why it failed, or None; without
        those for which there was no time."""
        results: dict[str, str | None] = {}
        while self._clock() < self._until and len(results) < len(names):
            left = [name for name in names if name not in results]
            on_library, tune_s = sorted(verdict.on_library), self._limits.tune_s
            request = TrialRequest(self._plan, self._device, verdict.early_starts, on_library, left, tune_s)
            before = len(results)
            culprit, how = self._run_process(request, results)
            if culprit is not None and how.startswith(HUNG) and culprit not in self._slow:
                self._until += 0 if self._slow else self._limits.repeated_check_s
                self._slow[culprit] = how
            elif culprit is not None:
                results[culprit] = how
            elif len(results) == before:
                self.problem = how
                break
        unrepeated = {name: how for name, how in self._slow.items() if name in names}
        return unrepeated | results

    def _run_process(self, request: TrialRequest, results: dict[str, str | None]) -> tuple[str | None, str]:
        """Runs one process and adds its results. Returns the check that has ended it, or None, and how it ended."""
        current, problem, began, late = None, "", self._clock(), False
        try:
            process = self._start(request)
        except OSError as error:
            return None, f"its process was not started ({error.strerror or error})"
        try:
            while (line := process.next_line(self._time_left(current, began))) is not None:
                match _decoded(line):
                    case {"begins": str(name)} if name in request.names:
                        current, began = name, self._clock()
                    case {"check": str(name), "reason": (str() | None) as reason, **more} if name == current:
                        results[name], current = reason, None
                        self._keep_tuning(more)
                    case {"problem": str(problem)}:
                        pass
                    case _:  # something else that the process has printed
                        pass
        except TimeoutError:
            late = True
        finally:
            lasted, how = self._clock() - began, process.stop()
        if late:
            if current is None:
                return None, f"no check began within {lasted:.0f} s"
            return (current if lasted >= UNFINISHED_S else None), f"{HUNG} for {lasted:.0f} s"
        if current is None:
            return None, problem or f"its process ended ({how})"
        return current, f"{DIED} ({how})"

    def _keep_tuning(self, more: Mapping[str, object]) -> None:
        with suppress(ValueError):  # other checks have none
            self.tuning = Tuning.from_json(more.get("tuning"))

    def _time_left(self, current: str | None, began: float) -> float:
        """Returns the seconds that the next line may take. Raises TimeoutError if there are none."""
        limit = self._limits.repeated_check_s if current in self._slow else self._limits.check_s
        limit += self._limits.tune_s if current == TUNING else 0
        until = self._until if current is None else min(self._until, began + limit)
        left = until - self._clock()
        if left <= 0:
            raise TimeoutError
        return left


def _decoded(line: str) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def search_rungs(checks: Sequence[TrialCheck], run: RunChecks) -> tuple[GpuVerdict, bool]:
    """Returns the first verdict with which all checks pass, and whether there was time for all of them. The first run
    ends with TUNING, which changes no fallback.

    A check that fails without early starts, too, is not their fault: then its family, or the graphs, fall back, and
    early starts stay unless another check needs that. A check that has failed once and for which there is no more time
    counts as failed. Raises ValueError if two checks have the same name.
    """
    by_name = {check.name: check for check in checks}
    if len(by_name) < len(checks):
        raise ValueError("two checks of a trial have the same name")
    verdict = GpuVerdict()
    first = run(verdict, [*by_name, TUNING])
    complete = first.keys() >= {*by_name, TUNING}
    failed = {name: why for name, why in first.items() if why is not None and name in by_name}
    if not failed:
        return verdict, complete
    strict = verdict.without(["early_starts"], _first(failed))
    again = run(strict, list(failed))
    still = {name: again.get(name) or why for name, why in failed.items() if again.get(name, why) is not None}
    if len(still) < len(failed) or again.keys() != failed.keys():
        fixed = {name: why for name, why in failed.items() if name not in still} or failed
        verdict = verdict.without(["early_starts"], _first(fixed))
    while still:
        verdict, pending = _next_rung(verdict, {by_name[name]: why for name, why in still.items()}, checks)
        found = run(verdict, pending) if pending else {}
        complete = complete and found.keys() >= {*pending}
        still = {name: why for name in pending if (why := found.get(name, still.get(name))) is not None}
    return verdict, complete


def _first(failed: Mapping[str, str]) -> str:
    return next(f"{name}: {why}" for name, why in failed.items())


def _next_rung(
    verdict: GpuVerdict, failed: Mapping[TrialCheck, str], checks: Sequence[TrialCheck]
) -> tuple[GpuVerdict, list[str]]:
    """Returns the verdict after the checks `failed`, and the names of the checks to run with it."""
    for check, why in failed.items():
        if check.family is not None:
            verdict = verdict.without([check.family], f"{check.name}: {why}")
    repeated = {check.name: why for check, why in failed.items() if check.switch == "early_starts"}
    if all(check.family is None for check in failed):
        if not repeated:
            whole = {check.name: why for check, why in failed.items()}
            return verdict.without(["graphs"], _first(whole)), []
        if verdict.early_starts:
            verdict = verdict.without(["early_starts"], _first(repeated))
        elif not {"projections", "attention"} <= verdict.on_library:  # no kernel alone is wrong, but several in a row
            verdict = verdict.without(["projections", "attention"], _first(repeated))
        else:
            return verdict.without(tuple(FAMILIES), _first(repeated)), []
    pending = [check.name for check in checks if check.switch is not None]
    return verdict, pending


def run_trial(
    plan: TrialPlan,
    device: str,
    start: StartTrial = CheckProcess,
    clock: Callable[[], float] = time.monotonic,
    limits: TrialLimits = LIMITS,
) -> tuple[GpuVerdict, str | None]:
    """Runs a trial. Returns its verdict, and if it was not completed, why."""
    runner = TrialRunner(plan, device, start, clock, limits)
    verdict, complete = search_rungs(trial_checks(plan), runner.run)
    verdict = replace(verdict, tuning=runner.tuning)
    if complete:
        return verdict, None
    return verdict, runner.problem or f"it was not complete after {limits.trial_s:g} s"
