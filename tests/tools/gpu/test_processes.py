"""Steps that fail, hang or leave something behind, and which of their results are kept."""

from __future__ import annotations

import json
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tools.gpu import processes
from tools.gpu.processes import run, run_all, time_for, without_paths
from tools.gpu.steps import ROOT, SECONDS, Step, build


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "SCRATCH", tmp_path / "scratch")


def python(name: str, code: str, limit: float = 30.0, result: Path | None = None) -> Step:
    return Step(name, (sys.executable, "-c", code), limit, result)


def test_a_failing_or_hanging_step_does_not_affect_others(tmp_path: Path) -> None:
    """A failure, a hang with a child process, one without tests, one without a program: the next step still runs."""
    done, file = tmp_path / "done.json", tmp_path / "step.json"
    hang = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    steps = [
        python("bad", "print('the reason'); raise SystemExit(3)"),
        python("slow", f"print('begun', flush=True); {hang}", limit=4.0),
        python("none", "raise SystemExit(5)"),
        Step("missing", ("no-such-program-here",), 5.0),
        python("decode x", f"open({str(done)!r}, 'w').write('{{\"pair\": \"x\"}}')", result=done),
    ]
    whole = run_all(steps, 40.0, file, {"gpu": "none"})
    states = {entry["name"]: entry["state"] for entry in whole["steps"]}
    assert list(states.values()) == ["failed", "out of time", "nothing to run", "failed", "ok"]
    assert "the reason" in whole["steps"][0]["tail"] and "begun" in whole["steps"][1]["tail"]
    assert "KeyboardInterrupt" in whole["steps"][1]["tail"], "what it was at, when its time was over"
    with tarfile.open(tmp_path / "step-logs.tar.gz") as packed:
        assert {"bad.log", "slow.log"} <= set(packed.getnames()), "all that was said can be taken away"
    assert whole["decodes"] == [{"pair": "x", "step": "decode x"}] and json.loads(file.read_text()) == whole


@pytest.mark.parametrize("before", ["pass", "raise SystemExit(1)"])
def test_if_early_starts_fail_the_remaining_steps_run_without_them(tmp_path: Path, before: str) -> None:
    """Only if early starts are the cause: if the smoke test fails without them, too, the cause is unknown."""
    report = "import os; print('early:', os.environ.get('SWIFTSPEC_EARLY_STARTS', 'as ever'))"
    steps = [python("smoke, nothing early", before), python("smoke", "raise SystemExit(1)"), python("after", report)]
    whole = run_all(steps, 40.0, tmp_path / "step.json", {})
    assert f"early: {'0' if before == 'pass' else 'as ever'}" in whole["steps"][-1]["tail"]


@pytest.mark.slow
def test_results_are_written_early_and_the_budget_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    looks = f"import json; assert [s['state'] for s in json.load(open({str(file)!r}))['steps']] == ['ok']"
    steps = [
        python("one", "pass"),
        python("two", looks),
        python("long", "import time; time.sleep(60)"),
        python("last", ""),
    ]
    whole = run_all(steps, 5.0, file, {})
    assert [entry["state"] for entry in whole["steps"]] == ["ok", "ok", "out of time", "not begun"]


def test_a_step_may_use_what_earlier_ones_have_saved() -> None:
    """But not what later required steps need; a build may use all, and an optional step its limit."""
    one, two, extra = Step("one", (), 30.0), Step("two", (), 20.0), Step("extra", (), 50.0, extra=True)
    later = [two, extra]
    assert [time_for(one, later, left) for left in (100.0, 50.0, 40.0, 10.0)] == [80.0, 30.0, 30.0, 10.0]
    assert time_for(replace(one, stretches=False), later, 100.0) == 30.0
    assert time_for(extra, [], 100.0) == 50.0
    assert time_for(build(), later, 400.0) == 400.0


def has_ended(pid: str) -> bool:
    """Whether a process has ended, even if its exit code was not read."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_a_remaining_child_process_does_not_block() -> None:
    """It holds the output of the step open after the step has ended, and is killed with it."""
    child = "import time; time.sleep(60)"
    code = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {child!r}]).pid)"
    outcome = run(python("parent", code), 20.0)
    assert outcome.state == "ok"
    until = time.monotonic() + 5
    while not has_ended(outcome.tail.strip()) and time.monotonic() < until:
        time.sleep(0.05)
    assert has_ended(outcome.tail.strip())


def test_results_of_a_failed_step_and_old_results_are_kept(tmp_path: Path) -> None:
    """A step that fails after it has written something; steps that write nothing useful keep the results of an earlier
    run."""
    new, empty, half, written, old = (tmp_path / f"{name}.json" for name in ("new", "empty", "half", "kept", "old"))
    old.write_text('{"before": 1}')

    def writes(name: str, file: Path, text: str, keep: Path | None = None) -> Step:
        code = f"import sys; open({str(file)!r}, 'w').write({text!r}); sys.exit(3)"
        return replace(python(name, code, result=file), keep=keep)

    steps = [
        writes("kernels", new, '{"results": [1]}', written),
        writes("constants", empty, '{"constants": {}}', old),
        writes("decode y", half, '{"pair"'),
    ]
    whole = run_all(steps, 60.0, tmp_path / "step.json", {})
    assert json.loads(written.read_text()) == {"results": [1]} and json.loads(old.read_text()) == {"before": 1}
    assert [step["state"] for step in whole["steps"]] == ["failed"] * 3 and whole["decodes"] == []


def test_a_step_receives_its_limit_and_environment() -> None:
    code = "import os, sys; print(sys.argv[1], os.environ['SWIFTSPEC_TEST_EPOCHS'], os.environ['SWIFTSPEC_CUDA'])"
    step = Step("say", (sys.executable, "-c", code, SECONDS), 99, environment={"SWIFTSPEC_TEST_EPOCHS": "6"})
    assert run(step, 30.0).tail == "18 6 1\n"


def test_a_step_with_only_skipped_tests_has_no_tests() -> None:
    assert run(python("tests", "print('5 skipped in 1.0s')"), 9.0).state == "nothing to run"
    assert run(python("tests", "print('1 passed, 5 skipped in 1.0s')"), 9.0).state == "ok"
    assert run(python("kernels", "print('0 failed, 9 cases skipped after the budget was spent')"), 9.0).state == "ok"


def test_published_results_name_no_path_of_this_machine() -> None:
    text = without_paths(f"{sys.executable} -m bench --json {ROOT}/build/a.json in {ROOT}")
    assert text == "python -m bench --json build/a.json in ."
