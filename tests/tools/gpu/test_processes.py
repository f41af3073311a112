"""Steps that fail, hang or leave something behind."""

from __future__ import annotations

import sys
import tarfile
import time
from pathlib import Path

import pytest

from tools.gpu import processes
from tools.gpu.processes import pack_logs, run, without_paths
from tools.gpu.steps import ROOT, SECONDS, Step


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "SCRATCH", tmp_path / "scratch")


def python(name: str, code: str, limit: float = 30.0) -> Step:
    return Step(name, (sys.executable, "-c", code), limit)


@pytest.mark.slow
def test_a_step_that_fails_or_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    """A failure, a hang with a child process, one without tests, one without a program."""
    hang = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    steps = [
        python("bad", "print('the reason'); raise SystemExit(3)"),
        python("slow", f"print('begun', flush=True); {hang}", limit=4.0),
        python("none", "raise SystemExit(5)"),
        Step("missing", ("no-such-program-here",), 5.0),
    ]
    bad, slow, none, missing = (run(step, step.limit) for step in steps)
    assert [bad.state, slow.state, none.state, missing.state] == ["failed", "out of time", "nothing to run", "failed"]
    assert "the reason" in bad.tail and "begun" in slow.tail
    assert "KeyboardInterrupt" in slow.tail, "what it was at, when its time was over"
    pack_logs(tmp_path / "logs.tar.gz")
    with tarfile.open(tmp_path / "logs.tar.gz") as packed:
        assert {"bad.log", "slow.log"} <= {*packed.getnames()}, "all that was said can be taken away"


def has_ended(pid: str) -> bool:
    """Whether a process has ended, even if its exit code was not read."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_step_receives_its_limit_and_environment() -> None:
    code = "import os, sys; print(sys.argv[1], os.environ['SWIFTSPEC_TEST_EPOCHS'], os.environ['SWIFTSPEC_CUDA'])"
    step = Step("say", (sys.executable, "-c", code, SECONDS), 99, environment={"SWIFTSPEC_TEST_EPOCHS": "6"})
    assert run(step, 30.0).tail == "18 6 1\n"


@pytest.mark.slow
def test_a_step_with_only_skipped_tests_has_no_tests() -> None:
    assert run(python("tests", "print('5 skipped in 1.0s')"), 9.0).state == "nothing to run"
    assert run(python("tests", "print('1 passed, 5 skipped in 1.0s')"), 9.0).state == "ok"
    assert run(python("kernels", "print('0 failed, 9 cases skipped after the budget was spent')"), 9.0).state == "ok"


def test_published_results_name_no_path_of_this_machine() -> None:
    text = without_paths(f"{sys.executable} -m bench --json {ROOT}/build/a.json in {ROOT}")
    assert text == "python -m bench --json build/a.json in ."
