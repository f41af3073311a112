"""A keeper in a process of its own, and what becomes of the tiny processes that it keeps."""

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
from tests.support.server_process import hear
from tests.support.tiny_supervisor import FOR_EVER

ROOT = Path(__file__).parents[3]
UP = f"kept.ready(); tell(up=1); {FOR_EVER}"
ECHO = "from tests.support.tiny_supervisor import echo; kept.ready(); echo(kept, tell, {!r})"


class Kept:
    """A keeper. `programs`: what each one does, by its name."""

    def __init__(self, programs: dict[str, str | dict[str, Any]], **job: Any) -> None:
        values = {name: {"does": what} if isinstance(what, str) else what for name, what in programs.items()}
        heard, told = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.tiny_supervisor", str(told), json.dumps({"programs": values, **job})],
            cwd=ROOT, pass_fds=[told], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            start_new_session=True, preexec_fn=hear,
        )  # fmt: skip
        os.close(told)
        self._lines = os.fdopen(heard)
        self.told: list[dict[str, Any]] = []

    def until(self, **facts: Any) -> dict[str, Any]:
        """What a process tells next that these facts are in."""
        for line in self._lines:
            self.told.append(json.loads(line))
            if facts.items() <= self.told[-1].items():
                return self.told[-1]
        raise AssertionError(f"all have ended: {self.told}, {self.end()}")

    def end(self) -> tuple[int, str]:
        """Exit code and lines, once all that it kept have ended."""
        self.told += [json.loads(line) for line in self._lines]  # until nobody has the file any more
        assert self.process.stderr is not None
        return self.process.wait(20), self.process.stderr.read()

    def kill(self) -> None:
        self.process.kill()
        for told in self.told:
            with suppress(ProcessLookupError):
                os.kill(told["pid"], signal.SIGCONT)  # who is stopped cannot notice
        self.process.communicate()
        self._lines.close()


@pytest.fixture
def kept() -> Iterator[list[Kept]]:
    """Whatever is put in here is dead after the test."""
    made: list[Kept] = []
    yield made
    for one in made:
        one.kill()


def keep(kept: list[Kept], programs: dict[str, Any], **job: Any) -> Kept:
    kept.append(Kept(programs, **job))
    return kept[-1]


@pytest.mark.parametrize(
    ("does", "code"), [("raise SystemExit(3)", 3), ("kept.ready(); raise SystemExit(0)", 0), ("1 // 0", 1)]
)
def test_an_end_that_is_meant_is_the_keepers(kept: list[Kept], does: str, code: int) -> None:
    keeper = keep(kept, {"rank 0": does})
    assert keeper.end()[0] == code
    assert [told["life"] for told in keeper.told] == [0]


@pytest.mark.parametrize(
    ("dies", "line"),
    [
        ("kept.ready(); import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "was ended by SIGKILL"),
        ("kept.ready(); raise SystemExit(1)", "ended with code 1"),
        ("raise SystemExit(75)", "has lost another rank"),
    ],
)
def test_who_dies_lives_again(kept: list[Kept], dies: str, line: str) -> None:
    keeper = keep(kept, {"rank 0": f"exec({dies!r}) if life == 0 else exec('raise SystemExit(0)')"})
    code, lines = keeper.end()
    assert (code, [told["life"] for told in keeper.told]) == (0, [0, 1])
    assert lines.splitlines()[-1] == f"rank 0 {line}: it is started again"


def test_who_cannot_be_started_is_tried_again(kept: list[Kept]) -> None:
    """The machine may have no room for a process just now. At the very start that is the end."""
    does = "exec('kept.ready(); raise SystemExit(1)') if life == 0 else exec('raise SystemExit(0)')"
    keeper = keep(kept, {"rank 0": {"does": does, "nowhere": [1]}})
    code, lines = keeper.end()
    assert (code, [told["life"] for told in keeper.told]) == (0, [0, 2])
    why = "rank 0 could not be started (No such file or directory)"
    assert lines.splitlines()[-1] == f"{why}: it is started again"
    code, lines = keep(kept, {"rank 0": {"does": does, "nowhere": [0]}}).end()
    assert (code, lines.splitlines()) == (1, [why])


def test_who_is_killed_before_it_was_ready_ends_the_job(kept: list[Kept]) -> None:
    """As one that could not begin does: the others wait for it as it was."""
    keeper = keep(kept, {"rank 0": UP, "rank 1": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"})
    code, lines = keeper.end()
    assert (code, lines.splitlines()) == (137, ["rank 1 was ended by SIGKILL"])
    assert [told["life"] for told in keeper.told if told["name"] == "rank 1"] == [0]


def test_who_is_stopped_lives_again(kept: list[Kept]) -> None:
    keeper = keep(kept, {"rank 0": {"does": UP, "silence": 1.5}})
    first = keeper.until(up=1)
    os.kill(first["pid"], signal.SIGSTOP)
    assert keeper.until(up=1)["life"] == 1
    assert not Path(f"/proc/{first['pid']}").exists()
    keeper.process.terminate()
    assert "rank 0 gave no sign of life for 1.5 s: it is started again\n" in keeper.end()[1]


def test_a_keeper_that_was_stopped_itself_kills_nobody(kept: list[Kept]) -> None:
    keeper = keep(kept, {"rank 0": {"does": f"import signal; signal.signal(15, lambda *a: exit(0)); {UP}"}})
    child = keeper.until(up=1)["pid"]
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for process in (keeper.process.pid, child):  # as Ctrl-Z and fg do
            os.kill(process, number)
        until(lambda: stopped(child) == (number == signal.SIGSTOP))  # noqa: B023
    keeper.process.terminate()
    assert keeper.end() == (0, "")


def stopped(process: int) -> bool:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_too_often_is_the_end_of_rank_0_and_no_other(kept: list[Kept]) -> None:
    dies = "raise SystemExit(75)"
    job = {"rank 0": UP, "rank 1": {"does": dies, "vital": False}}
    keeper = keep(kept, job, DELAYS=[0.0], MOST=2)
    assert keeper.process.stderr is not None
    lines = [keeper.process.stderr.readline() for _ in range(3)]
    assert lines[-1] == "rank 1 has lost another rank, too often: it stays lost\n" and lines[0] == lines[1]
    keeper.process.terminate()
    assert keeper.end()[0] == 143
    assert keep(kept, {"rank 0": dies}, DELAYS=[0.0], MOST=2).end()[0] == 1
    assert keep(kept, {"rank 1": {"does": dies, "vital": False}}, DELAYS=[0.0], MOST=2).end()[0] == 0, (
        "a launcher goes on"
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_go_to_rank_0_one_to_one(kept: list[Kept], number: int) -> None:
    listens = "import signal; [signal.signal(n, lambda n, f: tell(signal=n)) for n in (1, 2, 15)]; " + UP
    keeper = keep(kept, {"rank 0": listens, "rank 1": UP}, TERM=0.1)
    first = keeper.until(up=1, name="rank 0")
    for _ in range(2):
        keeper.process.send_signal(number)
        keeper.until(signal=int(number), name="rank 0")
    os.kill(first["pid"], signal.SIGKILL)  # and after a signal nothing is started again
    assert keeper.end()[0] == 137
    assert {told["life"] for told in keeper.told} == {0}


def test_a_signal_while_nobody_is_there(kept: list[Kept]) -> None:
    keeper = keep(kept, {"rank 0": "raise SystemExit(75)"}, DELAYS=[100.0])
    assert keeper.process.stderr is not None
    keeper.process.stderr.readline()
    keeper.process.terminate()
    assert keeper.end()[0] == 143


def test_a_child_in_the_terminals_group_hears_ctrl_c_itself(kept: list[Kept]) -> None:
    counts = "import signal; signal.signal(2, lambda n, f: tell(signal=n)); "
    ends = "signal.signal(15, lambda n, f: exit(0)); "
    shared = {"does": counts + ends + UP, "session": False, "again": False, "silence": None}
    keeper = keep(kept, {"rank 0": shared}, shares_terminal=True)
    keeper.until(up=1)
    os.killpg(keeper.process.pid, signal.SIGINT)
    keeper.until(signal=2)
    keeper.process.terminate()
    assert keeper.end()[0] == 0
    assert len([told for told in keeper.told if "signal" in told]) == 1


def test_who_is_not_started_again(kept: list[Kept]) -> None:
    assert keep(kept, {"rank 0": {"does": "raise SystemExit(75)", "again": False}}).end()[0] == 1
    killed = {"does": "import os; os.kill(os.getpid(), 9)", "again": False}
    assert keep(kept, {"rank 0": killed}).end()[0] == 137


def test_the_others_leave_with_rank_0(kept: list[Kept]) -> None:
    """One that was sent home by itself, one by a signal, and one that hears none."""
    deaf = f"import signal; signal.signal(15, signal.SIG_IGN); {UP}"
    job = {"rank 0": "kept.ready(); raise SystemExit(0)", "rank 1": "raise SystemExit(0)", "rank 2": UP, "rank 3": deaf}
    keeper = keep(kept, job, HOME=0.2, TERM=0.2)
    assert keeper.end() == (0, "")


def test_a_rank_that_cannot_begin_ends_the_job(kept: list[Kept]) -> None:
    keeper = keep(kept, {"rank 0": UP, "rank 1": {"does": "raise SystemExit(4)", "vital": False}})
    assert keeper.end()[0] == 4


@pytest.mark.parametrize("victim", ["rank 0", "front"])
def test_whoever_is_new_has_a_new_wire(kept: list[Kept], victim: str) -> None:
    other = "front" if victim == "rank 0" else "rank 0"
    keeper = keep(kept, {"rank 0": ECHO.format("from rank 0"), "front": ECHO.format("from front")})

    def all_hear(*wanted: tuple[str, int, int]) -> None:
        """Until, of each name and life, so many have heard the other's word."""
        while True:
            heard = [(told["name"], told["life"]) for told in keeper.told if told.get("heard", "").startswith("from")]
            if all(heard.count((name, life)) >= count for name, life, count in wanted):
                return
            keeper.until()

    all_hear((victim, 0, 1), (other, 0, 1))
    os.kill(next(told["pid"] for told in keeper.told if told["name"] == victim), signal.SIGKILL)
    all_hear((victim, 1, 1), (other, 0, 2))
    keeper.process.terminate()
    assert keeper.end()[0] == 143


def test_a_killed_keeper_leaves_nobody(kept: list[Kept]) -> None:
    keeper = keep(kept, {"rank 0": UP, "rank 1": UP, "front": UP})
    for _ in range(3):
        keeper.until(up=1)
    keeper.process.kill()
    assert keeper.end()[0] == -9  # and nobody has the file open any more
