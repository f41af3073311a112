"""A supervisor in a separate process, and the small processes that it supervises."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.http import until
from tests.support.server_process import RESTORE_SIGNALS
from tests.support.tiny_supervisor import FOREVER

pytestmark = pytest.mark.slow  # each test starts processes

ROOT = Path(__file__).parents[3]
UP = f"client.set_ready(); report(up=1); {FOREVER}"
ECHO = "from tests.support.tiny_supervisor import echo; client.set_ready(); echo(client, report, {!r})"


class SupervisorProcess:
    """A supervisor. `programs`: the code of each process by name."""

    def __init__(self, programs: dict[str, str | dict[str, Any]], **job: Any) -> None:
        values = {name: {"code": code} if isinstance(code, str) else code for name, code in programs.items()}
        read_fd, write_fd = os.pipe()
        argv = [str(write_fd), json.dumps({"programs": values, **job})]
        self.process = subprocess.Popen(
            [*RESTORE_SIGNALS, sys.executable, "-m", "tests.support.tiny_supervisor", *argv],
            cwd=ROOT,
            pass_fds=[write_fd],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        os.close(write_fd)
        self._lines = os.fdopen(read_fd)
        self.reports: list[dict[str, Any]] = []

    def until(self, **facts: Any) -> dict[str, Any]:
        """Waits for the next report that contains these facts."""
        for line in self._lines:
            self.reports.append(json.loads(line))
            if facts.items() <= self.reports[-1].items():
                return self.reports[-1]
        raise AssertionError(f"all processes have ended: {self.reports}, {self.end()}")

    def end(self) -> tuple[int, str]:
        """Exit code and log lines, once all its processes have ended."""
        self.reports += [json.loads(line) for line in self._lines]  # until no process has the file open
        assert self.process.stderr is not None
        return self.process.wait(20), self.process.stderr.read()

    def kill(self) -> None:
        self.process.kill()
        for report in self.reports:
            with suppress(ProcessLookupError):
                os.kill(report["pid"], signal.SIGCONT)  # a stopped process cannot notice that the supervisor is gone
        self.process.communicate()
        self._lines.close()


@pytest.fixture
def started() -> Iterator[list[SupervisorProcess]]:
    """Every supervisor in the list is dead after the test."""
    created: list[SupervisorProcess] = []
    yield created
    for one in created:
        one.kill()


def start(started: list[SupervisorProcess], programs: dict[str, Any], **job: Any) -> SupervisorProcess:
    started.append(SupervisorProcess(programs, **job))
    return started[-1]


@pytest.mark.parametrize(
    ("program", "code"), [("raise SystemExit(3)", 3), ("client.set_ready(); raise SystemExit(0)", 0), ("1 // 0", 1)]
)
def test_an_intended_exit_ends_the_supervisor(started: list[SupervisorProcess], program: str, code: int) -> None:
    supervisor = start(started, {"rank 0": program})
    assert supervisor.end()[0] == code
    assert [report["incarnation"] for report in supervisor.reports] == [0]


@pytest.mark.parametrize(
    ("crash", "line"),
    [
        ("client.set_ready(); import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL"),
        ("client.set_ready(); raise SystemExit(1)", "exited with code 1"),
        ("raise SystemExit(75)", "lost another rank"),
    ],
)
def test_a_process_that_dies_is_restarted(started: list[SupervisorProcess], crash: str, line: str) -> None:
    supervisor = start(started, {"rank 0": f"exec({crash!r}) if incarnation == 0 else exec('raise SystemExit(0)')"})
    code, lines = supervisor.end()
    assert (code, [report["incarnation"] for report in supervisor.reports]) == (0, [0, 1])
    assert lines.splitlines()[-1] == f"rank 0 {line}; restarting"


def test_a_failed_start_is_retried(started: list[SupervisorProcess]) -> None:
    """The machine may be unable to create a process for a moment. A failure of the first start ends the job."""
    program = "exec('client.set_ready(); raise SystemExit(1)') if incarnation == 0 else exec('raise SystemExit(0)')"
    supervisor = start(started, {"rank 0": {"code": program, "fail_to_start": [1]}})
    code, lines = supervisor.end()
    assert (code, [report["incarnation"] for report in supervisor.reports]) == (0, [0, 2])
    why = "rank 0 could not be started (No such file or directory)"
    assert lines.splitlines()[-1] == f"{why}; restarting"
    code, lines = start(started, {"rank 0": {"code": program, "fail_to_start": [0]}}).end()
    assert (code, lines.splitlines()) == (1, [why])


def test_a_process_killed_before_it_is_ready_ends_the_job(started: list[SupervisorProcess]) -> None:
    """Like a failed first start: the other ranks wait for this incarnation."""
    supervisor = start(started, {"rank 0": UP, "rank 1": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"})
    code, lines = supervisor.end()
    assert (code, lines.splitlines()) == (137, ["rank 1 was killed by SIGKILL"])
    assert [report["incarnation"] for report in supervisor.reports if report["name"] == "rank 1"] == [0]


def test_a_stopped_process_is_restarted(started: list[SupervisorProcess]) -> None:
    supervisor = start(started, {"rank 0": {"code": UP, "heartbeat_timeout_s": 1.5}})
    first = supervisor.until(up=1)
    os.kill(first["pid"], signal.SIGSTOP)
    assert supervisor.until(up=1)["incarnation"] == 1
    assert not Path(f"/proc/{first['pid']}").exists()
    supervisor.process.terminate()
    assert "rank 0 sent no heartbeat for 1.5 s; restarting\n" in supervisor.end()[1]


def test_a_supervisor_that_was_stopped_kills_no_process(started: list[SupervisorProcess]) -> None:
    supervisor = start(started, {"rank 0": {"code": f"import signal; signal.signal(15, lambda *a: exit(0)); {UP}"}})
    child = supervisor.until(up=1)["pid"]
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for process in (supervisor.process.pid, child):  # as Ctrl-Z and fg do
            os.kill(process, number)
        until(lambda: stopped(child) == (number == signal.SIGSTOP))  # noqa: B023
    supervisor.process.terminate()
    assert supervisor.end() == (0, "")


def stopped(process: int) -> bool:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_the_restart_limit_ends_the_job_only_for_rank_0(started: list[SupervisorProcess]) -> None:
    crash = "raise SystemExit(75)"
    job = {"rank 0": UP, "rank 1": {"code": crash, "critical": False}}
    supervisor = start(started, job, RESTART_DELAYS_S=[0.0], MAX_RESTARTS=2)
    assert supervisor.process.stderr is not None
    lines = [supervisor.process.stderr.readline() for _ in range(3)]
    assert lines[-1] == "rank 1 lost another rank; not restarting: too many restarts\n" and lines[0] == lines[1]
    supervisor.process.terminate()
    assert supervisor.end()[0] == 143
    assert start(started, {"rank 0": crash}, RESTART_DELAYS_S=[0.0], MAX_RESTARTS=2).end()[0] == 1
    assert (
        start(started, {"rank 1": {"code": crash, "critical": False}}, RESTART_DELAYS_S=[0.0], MAX_RESTARTS=2).end()[0]
        == 0
    ), "the launcher continues"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_go_to_rank_0_one_to_one(started: list[SupervisorProcess], number: int) -> None:
    listens = "import signal; [signal.signal(n, lambda n, f: report(signal=n)) for n in (1, 2, 15)]; " + UP
    supervisor = start(started, {"rank 0": listens, "rank 1": UP}, SIGTERM_GRACE_S=0.1)
    first = supervisor.until(up=1, name="rank 0")
    for _ in range(2):
        supervisor.process.send_signal(number)
        supervisor.until(signal=int(number), name="rank 0")
    os.kill(first["pid"], signal.SIGKILL)  # after a signal nothing is restarted
    assert supervisor.end()[0] == 137
    assert {report["incarnation"] for report in supervisor.reports} == {0}


def test_a_signal_while_no_process_runs(started: list[SupervisorProcess]) -> None:
    supervisor = start(started, {"rank 0": "raise SystemExit(75)"}, RESTART_DELAYS_S=[100.0])
    assert supervisor.process.stderr is not None
    supervisor.process.stderr.readline()
    supervisor.process.terminate()
    assert supervisor.end()[0] == 143


def test_a_process_in_the_terminals_group_receives_ctrl_c_itself(started: list[SupervisorProcess]) -> None:
    counts = "import signal; signal.signal(2, lambda n, f: report(signal=n)); "
    ends = "signal.signal(15, lambda n, f: exit(0)); "
    shared = {"code": counts + ends + UP, "new_session": False, "restart": False, "heartbeat_timeout_s": None}
    supervisor = start(started, {"rank 0": shared}, shares_terminal=True)
    supervisor.until(up=1)
    os.killpg(supervisor.process.pid, signal.SIGINT)
    supervisor.until(signal=2)
    supervisor.process.terminate()
    assert supervisor.end()[0] == 0
    assert len([report for report in supervisor.reports if "signal" in report]) == 1


def test_a_process_without_restart(started: list[SupervisorProcess]) -> None:
    assert start(started, {"rank 0": {"code": "raise SystemExit(75)", "restart": False}}).end()[0] == 1
    killed = {"code": "import os; os.kill(os.getpid(), 9)", "restart": False}
    assert start(started, {"rank 0": killed}).end()[0] == 137


def test_the_other_processes_end_with_rank_0(started: list[SupervisorProcess]) -> None:
    """One leaves by itself, one on SIGTERM, and one ignores SIGTERM."""
    deaf = f"import signal; signal.signal(15, signal.SIG_IGN); {UP}"
    job = {
        "rank 0": "client.set_ready(); raise SystemExit(0)",
        "rank 1": "raise SystemExit(0)",
        "rank 2": UP,
        "rank 3": deaf,
    }
    supervisor = start(started, job, SHUTDOWN_GRACE_S=0.2, SIGTERM_GRACE_S=0.2)
    assert supervisor.end() == (0, "")


def test_a_rank_that_cannot_start_ends_the_job(started: list[SupervisorProcess]) -> None:
    supervisor = start(started, {"rank 0": UP, "rank 1": {"code": "raise SystemExit(4)", "critical": False}})
    assert supervisor.end()[0] == 4


@pytest.mark.parametrize("victim", ["rank 0", "frontend"])
def test_a_new_process_gets_a_new_link(started: list[SupervisorProcess], victim: str) -> None:
    other = "frontend" if victim == "rank 0" else "rank 0"
    supervisor = start(started, {"rank 0": ECHO.format("from rank 0"), "frontend": ECHO.format("from frontend")})

    def wait_until_received(*wanted: tuple[str, int, int]) -> None:
        """Waits until each (name, incarnation) has received the given number of messages."""
        while True:
            received = [
                (report["name"], report["incarnation"])
                for report in supervisor.reports
                if report.get("received", "").startswith("from")
            ]
            if all(received.count((name, incarnation)) >= count for name, incarnation, count in wanted):
                return
            supervisor.until()

    wait_until_received((victim, 0, 1), (other, 0, 1))
    os.kill(next(report["pid"] for report in supervisor.reports if report["name"] == victim), signal.SIGKILL)
    wait_until_received((victim, 1, 1), (other, 0, 2))
    supervisor.process.terminate()
    assert supervisor.end()[0] == 143


def test_a_killed_supervisor_leaves_no_process(started: list[SupervisorProcess]) -> None:
    supervisor = start(started, {"rank 0": UP, "rank 1": UP, "frontend": UP})
    for _ in range(3):
        supervisor.until(up=1)
    supervisor.process.kill()
    assert supervisor.end()[0] == -9  # and no process has the file open
