"""The queue of GPU steps on an injected clock: budget, resumption, and which results are kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.gpu import queue
from tools.gpu.processes import Outcome
from tools.gpu.queue import END_S, LEAST_SHARE, Queue, ResumeError, resumed, write
from tools.gpu.steps import NOTHING_EARLY, TRIAL, Step
from tools.gpu.telemetry import Sample, summary


@dataclass
class Machine:
    """Runs steps that take `seconds` by name on a clock of its own; `on_run` is called with each."""

    seconds: dict[str, float]
    now: float = 0.0
    ran: list[tuple[Step, float]] = field(default_factory=list)
    on_run: Callable[[Step], None] = lambda step: None

    def run(self, step: Step, limit: float) -> Outcome:
        self.ran.append((step, limit))
        self.on_run(step)
        took = self.seconds[step.name]
        self.now += min(took, limit)
        return Outcome(step.name, "ok" if took <= limit else "out of time", min(took, limit), "")


@pytest.fixture(autouse=True)
def scratch(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "SCRATCH", tmp_path_factory.mktemp("scratch"))
    monkeypatch.setattr(queue, "pack_logs", lambda file: None)


def queued(machine: Machine, file: Path, budget: float) -> Queue:
    return Queue(file, budget, run=machine.run, clock=lambda: machine.now)


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 90)), max_size=12), st.integers(10, 300))
def test_the_budget_is_kept_and_no_step_is_skipped_without_need(
    tmp_path_factory: pytest.TempPathFactory, times: list[tuple[int, int]], budget: int
) -> None:
    """For any limits and durations. A step that has run got at most its limit, and at least a share of it."""
    steps = [Step(str(index), (), limit) for index, (limit, _) in enumerate(times)]
    machine = Machine({str(index): took for index, (_, took) in enumerate(times)})
    whole = queued(machine, tmp_path_factory.getbasetemp() / "q.json", budget).run_all(steps, {"steps": []})
    assert [entry["name"] for entry in whole["steps"]] == [step.name for step in steps]
    assert machine.now <= budget - END_S or not machine.ran
    now = 0.0
    for step, entry in zip(steps, whole["steps"], strict=True):
        left = budget - now - END_S
        assert (entry["state"] == "no time left") == (left < LEAST_SHARE * step.limit)
        now += entry["seconds"]
    assert all(LEAST_SHARE * step.limit <= limit <= step.limit for step, limit in machine.ran)


def test_results_are_written_after_each_step_and_resumed(tmp_path: Path) -> None:
    """The second step ends the queue; resumed, it runs again, and the first one does not."""
    file, result, kept = tmp_path / "q.json", tmp_path / "r.json", tmp_path / "kept.json"
    steps = [Step("one", (), 10, result, kept), Step("two", (), 10), Step("three", (), 10, needs=tmp_path / "none")]

    def crash(step: Step) -> None:
        if step.name == "two":
            raise KeyboardInterrupt
        result.write_text('{"results": [1]}')

    machine = Machine({"one": 1, "two": 1, "three": 1}, on_run=crash)
    with pytest.raises(KeyboardInterrupt):
        queued(machine, file, 100).run_all(steps, {"machine": {"gpu": "x"}, "steps": []})
    assert json.loads(kept.read_text()) == {"results": [1]}
    machine.on_run = lambda step: None
    machine.ran.clear()
    for lost in (result, kept):  # as on another machine
        lost.unlink()
    whole = queued(machine, file, 100).run_all(steps, resumed(file, {"gpu": "x"}))
    assert [entry["state"] for entry in whole["steps"]] == ["ok", "ok", "nothing to run"]
    assert whole["steps"][0]["result"] == {"results": [1]} and whole == json.loads(file.read_text())
    assert [step.name for step, _ in machine.ran] == ["two"]
    assert json.loads(result.read_text()) == json.loads(kept.read_text()) == {"results": [1]}
    for broken in ("", "{}"):
        file.write_text(broken)
        with pytest.raises(ResumeError, match="holds no results of a queue"):
            resumed(file, {"gpu": "x"})


def test_steps_share_a_file_of_results(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    kept.write_text('{"results": ["of an earlier run"]}')
    steps = [Step(name, (), 10, tmp_path / name, kept) for name in ("one", "two", "three")]
    written: dict[str, dict[str, object]] = {
        "one": {"on": 1, "results": [1], "points": [5]}, "two": {"on": 2, "results": [2, 3]}, "three": {"results": []},
    }  # fmt: skip

    def write_result(step: Step) -> None:
        assert step.result is not None
        write(step.result, written[step.name])

    machine = Machine(dict.fromkeys(written, 1.0), on_run=write_result)
    queued(machine, tmp_path / "q.json", 100).run_all(steps, {"steps": []})
    assert json.loads(kept.read_text()) == {"on": 2, "results": [1, 2, 3], "points": [5]}


@pytest.mark.parametrize(
    ("found", "seconds", "why"),
    [
        ({"fallbacks": {"attention": ""}, "unusable": ["attention"]}, 1, "kernels of attention hung or ended"),
        ({"fallbacks": {"attention": ""}, "unusable": []}, 1, None),
        (None, 1, None),
        (None, 99, "the trial did not end"),
    ],
    ids=["hung", "wrong", "failed", "out of time"],
)
def test_kernels_that_hang_are_not_timed(tmp_path: Path, found: object, seconds: float, why: str | None) -> None:
    result = tmp_path / "trial.json"

    def write_result(step: Step) -> None:
        result.write_text(json.dumps(found))

    machine = Machine({TRIAL: seconds, "after": 1}, on_run=write_result)
    whole = queued(machine, tmp_path / "q.json", 100).run_all(
        [Step(TRIAL, (), 10, result), Step("after", (), 10)], {"steps": []}
    )
    tested = queued(Machine({TRIAL: seconds, "after": 1}, on_run=machine.on_run), tmp_path / "t.json", 100)
    tested.times_kernels = False
    steps = tested.run_all([Step(TRIAL, (), 10, result), Step("after", (), 10)], {"steps": []})["steps"]
    assert steps[1]["state"] == "ok"
    last = whole["steps"][1]
    assert (last["state"], len(machine.ran)) == (("ok", 2) if why is None else ("unsafe", 1))
    assert why is None or last["tail"].startswith(why)


@pytest.mark.parametrize("fallbacks", [{}, {"early_starts": "a reason"}])
def test_after_a_trial_in_which_early_starts_fail_all_steps_run_without_them(
    tmp_path: Path, fallbacks: dict[str, str]
) -> None:
    result = tmp_path / "trial.json"
    machine = Machine({TRIAL: 1, "after": 1}, on_run=lambda step: write(result, {"fallbacks": fallbacks}))
    queued(machine, tmp_path / "q.json", 100).run_all(
        [Step(TRIAL, (), 10, result), Step("after", (), 10)], {"steps": []}
    )
    assert machine.ran[1][0].environment == (NOTHING_EARLY if fallbacks else {})


def test_clocks_are_those_of_busy_samples() -> None:
    samples = [Sample(0.0, 345, 70.0, 0x1), *(Sample(0.1 * i, mhz, 600.0, 0x4) for i, mhz in enumerate((1980, 1700)))]
    idle = [Sample(0.0, 345, 80.0, 0x1)] * 9
    assert summary(idle) == {} and summary([*idle, Sample(1.0, 1980, 150.0, 0x0)])["lowest MHz"] == 1980
    found = summary(samples)
    assert (found["lowest MHz"], found["highest MHz"], found["busy"]) == (1700, 1980, 2)
    assert found["limited by"] == {"power cap": 1.0} and summary([]) == {}
