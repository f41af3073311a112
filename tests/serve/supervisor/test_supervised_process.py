"""One kept process: when it counts as hanging, by a clock that the test turns, and what it leaves."""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from swiftspec.distributed.launch.supervision import LOST
from swiftspec.serve.supervisor.supervised_process import PIECE, STARTING, Child
from tests.support.tiny_supervisor import FOR_EVER, program

ROOT = Path(__file__).parents[3]


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Child]]:
    """Whatever is put in here is dead after the test."""
    monkeypatch.chdir(ROOT)
    made: list[Child] = []
    yield made
    for child in made:
        child.signal(signal.SIGKILL)
        if child.process is not None:
            child.process.wait()


def started(children: list[Child], does: str, report: int = 1) -> Child:
    child = Child(program(report, "it", f"{does}; {FOR_EVER}"))
    children.append(child)
    child.start(time.monotonic())
    return child


def beats(child: Child, now: float, count: int = 1) -> None:
    """Waits for heartbeats, which come at that time."""
    for _ in range(count):
        assert child.control is not None and select.select([child.control], [], [], 20)[0]
        child.hear(now)


def code(child: Child) -> int | None:
    """Of its end, waited for."""
    assert child.process is not None
    child.process.wait(20)
    return child.ended()


def test_who_was_ready_once_is_so_whatever_beat_comes_last(children: list[Child]) -> None:
    """Two threads of a process send: the one that has not seen yet that it is ready may do so behind the other."""
    late = "kept._end.send(control.beat(True, None) + control.beat(False, None)); os.kill(os.getpid(), signal.SIGSTOP)"
    child = started(
        children,
        f"import os, signal; from swiftspec.serve.supervisor import control_protocol as control; "
        f"kept._beats = False; {late}",
    )
    now = time.monotonic()
    while child.for_good(1):
        beats(child, now)
    child.watch(now + 3.1)
    assert child.why == "gave no sign of life for 3 s"


def test_who_is_silent_is_killed(children: list[Child]) -> None:
    child, now = started(children, "kept.ready()"), time.monotonic()
    beats(child, now, 2)
    child.watch(now + 2.9)
    assert child.why == ""
    child.watch(now + 3.1)
    assert child.why == "gave no sign of life for 3 s"
    assert (code(child), child.process, child.control) == (-9, None, None)


def test_a_start_may_be_silent_for_longer(children: list[Child]) -> None:
    child, now = started(children, "kept.pulse.work()"), time.monotonic()
    beats(child, now)
    child.watch(now + STARTING - 0.1)
    beats(child, now + 2 * PIECE)
    child.watch(now + 2 * PIECE)
    assert child.why == "", "what it does at the start has limits of its own"
    child.watch(now + 2 * PIECE + STARTING + 0.1)
    assert child.why != ""


def test_a_piece_of_work_that_takes_too_long(children: list[Child]) -> None:
    child, now = started(children, "kept.pulse.work(); kept.ready()"), time.monotonic()
    beats(child, now, 2)
    beats(child, now + PIECE - 1)
    child.watch(now + PIECE - 1)
    assert child.why == ""
    beats(child, now + PIECE + 1)
    child.watch(now + PIECE + 1)
    assert child.why == "has worked on one thing for 300 s" and code(child) == -9


def test_a_wait_may_take_for_ever(children: list[Child]) -> None:
    child, now = started(children, "kept.pulse.work(); kept.pulse.rest(); kept.ready()"), time.monotonic()
    beats(child, now, 2)
    beats(child, now + 10 * PIECE)
    child.watch(now + 10 * PIECE)
    assert child.why == ""


def test_a_keeper_that_slept_accuses_nobody(children: list[Child]) -> None:
    child, now = started(children, "kept.pulse.work(); kept.ready()"), time.monotonic()
    beats(child, now, 2)
    child.excuse(now + 1000)
    child.watch(now + 1002)
    assert child.why == ""
    beats(child, now + 1000 + PIECE - 1)
    child.watch(now + 1000 + PIECE - 1)
    assert child.why == ""
    child.watch(now + 1000 + PIECE + 5)
    assert child.why != ""


def test_without_a_keeper_nobody_stays(children: list[Child]) -> None:
    child = started(children, "kept.ready()")
    beats(child, 0.0)
    assert child.control is not None
    child.control.close()
    child.control = None
    assert code(child) == LOST


def test_a_stopped_keeper_holds_nobody_up(children: list[Child]) -> None:
    """Nobody reads so many heartbeats."""
    heard, told = os.pipe()
    started(children, "[kept.beat() for _ in range(10000)]; tell(done=1)", told)
    os.close(told)
    with os.fdopen(heard) as lines:
        assert "done" in [*json.loads(next(lines)), *json.loads(next(lines))]


def test_what_a_dead_process_left_is_taken_away(children: list[Child]) -> None:
    made = 'import os, pathlib; pathlib.Path(f"/dev/shm/swiftspec-{os.getpid()}-test").touch(); os._exit(3)'
    child = started(children, made)
    assert child.process is not None
    other = Path(f"/dev/shm/swiftspec-{os.getpid()}-test")
    other.touch()
    try:
        left = Path(f"/dev/shm/swiftspec-{child.process.pid}-test")
        child.process.wait(20)
        assert left.exists()
        assert child.ended() == 3 and child.ended() is None
        assert not left.exists() and other.exists()
    finally:
        other.unlink()


@pytest.mark.parametrize(
    ("ready", "life", "code", "for_good"),
    [
        (False, 0, 1, True), (False, 0, 2, True), (False, 0, -9, True), (False, 0, LOST, False),
        (True, 0, 1, False), (True, 0, 0, True), (True, 0, 130, True), (True, 0, -15, False), (True, 0, LOST, False),
        (False, 1, 1, False), (False, 1, 0, True), (False, 1, 143, True), (False, 1, 2, True),
    ],
)  # fmt: skip
def test_which_end_is_meant(ready: bool, life: int, code: int, for_good: bool) -> None:
    child = Child(program(1, "it", ""))
    child.life, child._ready_at = life, 1.0 if ready else None
    assert child.for_good(code) == for_good
