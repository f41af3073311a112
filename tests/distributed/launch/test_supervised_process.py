"""One supervised process: when it counts as hung, with a clock controlled by the test, and what it leaves behind."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from swiftspec.distributed.launch import supervised_process
from swiftspec.distributed.launch.supervised_process import (
    EXIT_HEARTBEAT_TIMEOUT_S,
    STARTUP_HEARTBEAT_TIMEOUT_S,
    WORK_UNIT_TIMEOUT_S,
    SupervisedProcess,
)
from swiftspec.distributed.launch.supervisor_link import EXIT_PEER_LOST
from tests.support.tiny_supervisor import FOREVER, program

ROOT = Path(__file__).parents[3]


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[SupervisedProcess]]:
    """Every process in the list is dead after the test."""
    monkeypatch.chdir(ROOT)
    created: list[SupervisedProcess] = []
    yield created
    for process in created:
        process.signal(signal.SIGKILL)
        if process.process is not None:
            process.process.wait()


def started(processes: list[SupervisedProcess], code: str, report_fd: int = 1) -> SupervisedProcess:
    process = SupervisedProcess(program(report_fd, "it", f"{code}; {FOREVER}"))
    processes.append(process)
    process.start(time.monotonic())
    return process


def receive_heartbeats(process: SupervisedProcess, now: float, count: int = 1) -> None:
    """Waits for `count` heartbeats and takes them as received at `now`."""
    for _ in range(count):
        assert process.control is not None and select.select([process.control], [], [], 20)[0]
        process.read_heartbeats(now)


def exit_code(process: SupervisedProcess) -> int | None:
    """Waits for the exit."""
    assert process.process is not None
    process.process.wait(20)
    return process.poll_exit()


@pytest.mark.slow
def test_a_process_stays_ready_whatever_heartbeat_arrives_last(processes: list[SupervisedProcess]) -> None:
    """Two threads of a process send heartbeats: one that was built before the process was ready may arrive last."""
    beats = "control.encode_heartbeat(True, None) + control.encode_heartbeat(False, None)"
    late = f"client._control.send({beats}); os.kill(os.getpid(), signal.SIGSTOP)"
    process = started(
        processes,
        f"import os, signal; from swiftspec.distributed.launch import control_socket as control; "
        f"client._send_heartbeats = False; {late}",
    )
    now = time.monotonic()
    while process.is_final_exit(1):
        receive_heartbeats(process, now)
    process.kill_if_hung(now + 3.1)
    assert process.kill_reason == "sent no heartbeat for 3 s"


@pytest.mark.slow
def test_a_process_without_heartbeats_is_killed(processes: list[SupervisedProcess]) -> None:
    process, now = started(processes, "client.set_ready()"), time.monotonic()
    receive_heartbeats(process, now, 2)
    process.kill_if_hung(now + 2.9)
    assert process.kill_reason == ""
    process.kill_if_hung(now + 3.1)
    assert process.kill_reason == "sent no heartbeat for 3 s"
    assert (exit_code(process), process.process, process.control) == (-9, None, None)


@pytest.mark.slow
def test_the_heartbeat_timeout_is_longer_once_the_process_is_to_exit(processes: list[SupervisedProcess]) -> None:
    process, now = started(processes, "client.set_ready()"), time.monotonic()
    receive_heartbeats(process, now, 2)
    process.expect_exit()
    process.kill_if_hung(now + EXIT_HEARTBEAT_TIMEOUT_S - 0.1)
    assert not process.kill_reason
    process.kill_if_hung(now + EXIT_HEARTBEAT_TIMEOUT_S + 0.1)
    assert process.kill_reason == f"sent no heartbeat for {EXIT_HEARTBEAT_TIMEOUT_S:g} s"


@pytest.mark.slow
def test_the_heartbeat_timeout_is_longer_during_startup(processes: list[SupervisedProcess]) -> None:
    process, now = started(processes, "client.heartbeat.mark_busy()"), time.monotonic()
    receive_heartbeats(process, now)
    process.kill_if_hung(now + STARTUP_HEARTBEAT_TIMEOUT_S - 0.1)
    receive_heartbeats(process, now + 2 * WORK_UNIT_TIMEOUT_S)
    process.kill_if_hung(now + 2 * WORK_UNIT_TIMEOUT_S)
    assert process.kill_reason == "", "operations during startup have their own limits"
    process.kill_if_hung(now + 2 * WORK_UNIT_TIMEOUT_S + STARTUP_HEARTBEAT_TIMEOUT_S + 0.1)
    assert process.kill_reason != ""


@pytest.mark.slow
def test_an_operation_that_takes_too_long(processes: list[SupervisedProcess]) -> None:
    before, process = time.monotonic(), started(processes, "client.heartbeat.mark_busy(); client.set_ready()")
    receive_heartbeats(process, before, 2)
    after = time.monotonic()  # the operation has begun by now
    receive_heartbeats(process, before + WORK_UNIT_TIMEOUT_S - 1)
    process.kill_if_hung(before + WORK_UNIT_TIMEOUT_S - 1)
    assert process.kill_reason == ""
    receive_heartbeats(process, after + WORK_UNIT_TIMEOUT_S + 1)
    process.kill_if_hung(after + WORK_UNIT_TIMEOUT_S + 1)
    assert process.kill_reason == "did not finish an operation within 300 s" and exit_code(process) == -9


@pytest.mark.slow
def test_an_idle_process_has_no_time_limit(processes: list[SupervisedProcess]) -> None:
    process, now = (
        started(processes, "client.heartbeat.mark_busy(); client.heartbeat.mark_idle(); client.set_ready()"),
        time.monotonic(),
    )
    receive_heartbeats(process, now, 2)
    receive_heartbeats(process, now + 10 * WORK_UNIT_TIMEOUT_S)
    process.kill_if_hung(now + 10 * WORK_UNIT_TIMEOUT_S)
    assert process.kill_reason == ""


@pytest.mark.slow
def test_a_supervisor_that_was_suspended_kills_no_process(processes: list[SupervisedProcess]) -> None:
    process, now = started(processes, "client.heartbeat.mark_busy(); client.set_ready()"), time.monotonic()
    receive_heartbeats(process, now, 2)
    process.reset_timers(now + 1000)
    process.kill_if_hung(now + 1002)
    assert process.kill_reason == ""
    receive_heartbeats(process, now + 1000 + WORK_UNIT_TIMEOUT_S - 1)
    process.kill_if_hung(now + 1000 + WORK_UNIT_TIMEOUT_S - 1)
    assert process.kill_reason == ""
    process.kill_if_hung(now + 1000 + WORK_UNIT_TIMEOUT_S + 5)
    assert process.kill_reason != ""


@pytest.mark.slow
def test_a_process_exits_when_its_supervisor_is_gone(processes: list[SupervisedProcess]) -> None:
    process = started(processes, "client.set_ready()")
    receive_heartbeats(process, 0.0)
    assert process.control is not None
    process.control.close()
    process.control = None
    assert exit_code(process) == EXIT_PEER_LOST


@pytest.mark.slow
def test_a_stopped_supervisor_does_not_block_a_process(processes: list[SupervisedProcess]) -> None:
    """Heartbeats that fill the socket are dropped."""
    read_fd, write_fd = os.pipe()
    started(processes, "[client.send_heartbeat() for _ in range(10000)]; report(done=1)", write_fd)
    os.close(write_fd)
    with os.fdopen(read_fd) as lines:
        assert "done" in [*json.loads(next(lines)), *json.loads(next(lines))]


@pytest.mark.slow
def test_shared_memory_of_a_dead_process_is_removed(processes: list[SupervisedProcess]) -> None:
    code = 'import os, pathlib; pathlib.Path(f"/dev/shm/swiftspec-{os.getpid()}-test").touch(); os._exit(3)'
    process = started(processes, code)
    assert process.process is not None
    other = Path(f"/dev/shm/swiftspec-{os.getpid()}-test")
    other.touch()
    try:
        left = Path(f"/dev/shm/swiftspec-{process.process.pid}-test")
        process.process.wait(20)
        assert left.exists()
        assert process.poll_exit() == 3 and process.poll_exit() is None
        assert not left.exists() and other.exists()
    finally:
        other.unlink()


@pytest.mark.parametrize(
    ("ready", "incarnation", "code", "final"),
    [
        (False, 0, 1, True), (False, 0, 2, True), (False, 0, -9, True), (False, 0, EXIT_PEER_LOST, False),
        (True, 0, 1, False), (True, 0, 0, True), (True, 0, 130, True), (True, 0, -15, False),
        (True, 0, EXIT_PEER_LOST, False),
        (False, 1, 1, False), (False, 1, 0, True), (False, 1, 143, True), (False, 1, 2, True),
    ],
)  # fmt: skip
def test_final_exits(ready: bool, incarnation: int, code: int, final: bool) -> None:
    process = SupervisedProcess(program(1, "it", ""))
    process.incarnation, process._ready_at = incarnation, 1.0 if ready else None
    assert process.is_final_exit(code) == final


@pytest.mark.slow
def test_a_process_that_waits_for_a_cpu_is_not_hung(
    processes: list[SupervisedProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine whose CPUs are taken, a process is silent without being blocked."""
    waited = 0.0
    monkeypatch.setattr(supervised_process, "cpu_wait_s", lambda process, thread: waited)
    process, now = started(processes, "client.set_ready()"), time.monotonic()
    receive_heartbeats(process, now, 2)
    waited = 30.0
    process.kill_if_hung(now + 32.9)
    assert process.kill_reason == ""
    process.kill_if_hung(now + 33.1)
    assert process.kill_reason == "sent no heartbeat for 3 s"


@pytest.mark.slow
def test_waiting_for_a_cpu_does_not_count_before_the_first_heartbeat(
    processes: list[SupervisedProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = 0.0
    monkeypatch.setattr(supervised_process, "cpu_wait_s", lambda process, thread: waited)
    process, now = started(processes, ""), time.monotonic()
    waited = 60.0
    process.kill_if_hung(now + STARTUP_HEARTBEAT_TIMEOUT_S + 59.9)
    assert process.kill_reason == ""
    process.kill_if_hung(now + STARTUP_HEARTBEAT_TIMEOUT_S + 60.1)
    assert process.kill_reason == f"sent no heartbeat for {STARTUP_HEARTBEAT_TIMEOUT_S:g} s"


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the kernel keeps no scheduling statistics")
def test_the_time_without_a_cpu_is_read_from_the_system() -> None:
    """It grows when two threads share a CPU."""
    code = f"import os; os.sched_setaffinity(0, [{min(os.sched_getaffinity(0))}]); any(iter(int, 1))"
    busy = [subprocess.Popen([sys.executable, "-S", "-c", code]) for _ in range(2)]
    try:
        while not all(supervised_process.cpu_wait_s(each.pid, each.pid) > 0.05 for each in busy):
            time.sleep(0.01)
    finally:
        for each in busy:
            each.kill()
            each.wait()
    assert supervised_process.cpu_wait_s(busy[0].pid, busy[0].pid) == 0.0
