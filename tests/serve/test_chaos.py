"""Servers under injected faults (`python -m tests.support.chaos` runs longer), and tests of the driver itself."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from tests.support.chaos import Chaos, Plan, grown
from tests.support.server_process import ServerProcess
from tests.support.server_processes import SHARED_MEMORY, ServerProcesses, inject_fault, until


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("seconds", "ranks", "target_tp", "seed"),
    [
        pytest.param(15.0, 2, 1, 1, marks=pytest.mark.slow),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in [(40.0, 1, 1, 4), (40.0, 2, 1, 1), (40.0, 3, 1, 2), (40.0, 3, 2, 3)]
        ),
    ],
)
def test_a_server_under_faults(seconds: float, ranks: int, target_tp: int, seed: int) -> None:
    report = Chaos(Plan(seconds, ranks, target_tp, seed, apart=6.0)).run()
    print(json.dumps(report))
    assert report["problems"] == []
    assert report["requests"]["text"] and sum(report["faults"].values())


class Sleeping:
    """A process that sleeps, instead of a server."""

    def __init__(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(100)"])
        self.url = "http://127.0.0.1:9"

    def processes(self) -> list[int]:
        return [self.process.pid]


@pytest.fixture
def sleeping() -> Iterator[Sleeping]:
    made = Sleeping()
    yield made
    made.process.kill()
    made.process.wait()


def state(process: int) -> str:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.slow
def test_processes_are_stopped_slowed_and_killed(sleeping: Sleeping) -> None:
    process = sleeping.process.pid
    assert inject_fault("stop", process)
    until(lambda: state(process) == "T", 10)
    assert not inject_fault("slow", process) and state(process) == "T"
    sleeping.process.send_signal(signal.SIGCONT)
    until(lambda: state(process) != "T", 10)
    assert inject_fault("slow", process)
    until(lambda: state(process) != "T", 10)
    assert inject_fault("kill", process)
    assert sleeping.process.wait(10) == -signal.SIGKILL
    assert not inject_fault("kill", process) and not inject_fault("kill", 0)


@pytest.mark.slow
def test_leftovers_are_detected(sleeping: Sleeping) -> None:
    process = sleeping.process.pid
    job = ServerProcesses(cast(ServerProcess, sleeping), 1)
    assert list(job.snapshot()) == [process] and job.front_end() == 0
    assert job.health() == {} and not job.is_up()
    assert job.leftovers(0.0) == [f"process {process}"]
    shared = SHARED_MEMORY / f"swiftspec-{process}-0"
    shared.touch()
    try:
        inject_fault("kill", process)  # a zombie whose exit status was not read
        until(lambda: state(process) == "Z", 10)
        assert job.leftovers(0.0) == [str(shared)]
    finally:
        shared.unlink()
    assert job.leftovers(0.0) == []


@pytest.mark.parametrize(
    ("after", "messages"),
    [((1 << 20, 9), []), ((30 << 20, 3), ["29 MiB and 0 files"]), ((1 << 20, 30), ["0 MiB and 27 files"])],
)
def test_growing_resource_usage_is_detected(after: Any, messages: list[str]) -> None:
    before = {"supervisor 0": (1 << 20, 3), "front end": (1 << 20, 3)}
    lines = grown(before, {"supervisor 0": after, "front end": (40 << 20, 5)})
    assert len(lines) == len(messages) and all(part in line for part, line in zip(messages, lines))
