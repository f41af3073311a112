"""Signals: the exit code is that of the signal, even if native code or an `except` clause replaces the exception."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from swiftspec.errors import UserError
from swiftspec.serve.__main__ import run_guarded
from swiftspec.signals import GracefulStop, SignalHandlers
from tests.support.pty_terminal import Terminal
from tests.support.toy_pair import make_pair

ROOT = Path(__file__).parents[2]
CODES = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGHUP: 129}


@pytest.fixture(autouse=True)
def default_signals() -> object:
    """Restores the default signal handlers, since a process may start with ignored signals."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in CODES}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def converted(number: int) -> int:
    try:
        signal.raise_signal(number)
    except BaseException:
        raise RuntimeError("PyTorch makes this of an exception in its callback") from None
    return 0


def explained(number: int) -> int:
    try:
        return converted(number)
    except RuntimeError as error:
        raise UserError(f"model.safetensors is damaged: {error}") from None


def swallowed(number: int) -> int:
    try:
        return converted(number)
    except RuntimeError:
        return 0


def plain(number: int) -> int:
    signal.raise_signal(number)
    return 0


@pytest.mark.parametrize("number", CODES)
@pytest.mark.parametrize("call", [plain, converted, explained, swallowed], ids=lambda call: call.__name__)
def test_the_exit_code_is_that_of_the_signal(
    call: Callable[[int], int], number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_guarded(lambda first: call(number)) == CODES[signal.Signals(number)]
    assert capsys.readouterr() == ("", "")
    assert signal.getsignal(number) is signal.SIG_DFL, "as it was before"


def test_an_exit_without_a_signal_is_reported_as_usual(capsys: pytest.CaptureFixture[str]) -> None:
    def damaged(first: bool) -> int:
        raise UserError("it is damaged")

    assert run_guarded(damaged) == 1
    assert capsys.readouterr().err == "swiftspec: error: it is damaged\n"
    with pytest.raises(ZeroDivisionError):
        run_guarded(lambda first: 1 // 0)


def test_ignored_signals_stay_ignored() -> None:
    for number in CODES:
        signal.signal(number, signal.SIG_IGN)
        assert run_guarded(lambda first, number=number: plain(number)) == 0


def test_a_graceful_stop_interrupts_nothing_and_a_second_signal_does() -> None:
    numbers: list[int] = []

    def stopping(first: bool) -> int:
        with GracefulStop(numbers.append) as stop:
            assert not stop.requested and select.select([stop.wakeup_fd], [], [], 0)[0] == []
            signal.raise_signal(signal.SIGTERM)
            assert stop.requested and numbers == [signal.SIGTERM]
            assert os.read(stop.wakeup_fd, 8) == bytes([signal.SIGTERM])
            signal.raise_signal(signal.SIGINT)
        return 0

    assert run_guarded(stopping) == 130
    assert numbers == [signal.SIGTERM]
    assert [signal.getsignal(number) for number in CODES] == [signal.SIG_DFL] * 3


def test_handlers_are_restored_and_child_exits_reach_the_descriptor() -> None:
    previous_fd, numbers = signal.set_wakeup_fd(-1), list[int]()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with SignalHandlers(numbers.append, (signal.SIGHUP, signal.SIGCHLD), wakeup=True) as handlers:
        for number in (signal.SIGHUP, signal.SIGCHLD):
            signal.raise_signal(number)
        assert os.read(handlers.wakeup_fd, 8) == bytes([signal.SIGCHLD]) and numbers == [signal.SIGCHLD]
    assert signal.getsignal(signal.SIGHUP) is signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
    assert signal.set_wakeup_fd(previous_fd) == -1
    signal.signal(signal.SIGCHLD, before)


STUBBORN = """
import select, sys, time
from swiftspec.serve.__main__ import run_guarded
from swiftspec.signals import GracefulStop, SignalHandlers
def eats(first):
    print("runs", flush=True)
    while True:
        try:
            time.sleep(600)
        except BaseException:
            pass
def native(first):
    import ctypes
    print("runs", flush=True)
    ctypes.CDLL(None).poll(None, 0, -1)  # it is called again after a signal, as native code does
    ctypes.CDLL(None).pause()
    ctypes.CDLL(None).pause()
sys.exit(run_guarded({}, grace_s=0.2))
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", CODES)
@pytest.mark.parametrize("run", ["eats", "native"])
def test_a_process_that_does_not_exit_is_killed(run: str, number: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", STUBBORN.format(run)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "runs\n"
    process.send_signal(number)
    assert process.wait(60) == CODES[signal.Signals(number)]
    assert process.communicate() == ("", "")


RAW = "def raw(first):\n    import tty\n    tty.setraw(0)\n    eats(first)\n"


@pytest.mark.slow
def test_the_terminal_settings_are_restored() -> None:
    """Also if the process that changed them is killed."""
    child = STUBBORN.format("raw").replace("sys.exit", RAW + "sys.exit")
    script = (
        "import subprocess, sys, termios\nbefore = termios.tcgetattr(0)\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\nassert termios.tcgetattr(0) != before\nchild.terminate()\n"
        "print(child.wait(), termios.tcgetattr(0) == before)\n"
    )
    terminal = Terminal(["-c", script])
    terminal.until(r"143 True")
    assert terminal.leave() == 0


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The flags that name a pair."""
    target, draft = make_pair(tmp_path_factory.mktemp("pair"))
    return ["--model", str(target), "--draft-model", str(draft), "--threads", "1"]


PHASES = ("libraries", "tokenizers", "target weights", "draft weights", "ready")
FEW = {(phase, signal.SIGINT) for phase in PHASES} | {("libraries", signal.SIGHUP), ("ready", signal.SIGTERM)}


@pytest.mark.parametrize(
    ("phase", "number"),
    [
        pytest.param(phase, number, marks=pytest.mark.slow if (phase, number) in FEW else pytest.mark.long)
        for phase in PHASES
        for number in CODES
    ],
)
def test_a_signal_at_any_moment_of_the_start(pair: list[str], phase: str, number: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "swiftspec.serve", *pair, "--prompt", "a", "--ignore-eos", "--verify-batch", "1"],
        cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith(f"swiftspec: {phase}"):
            break
    process.send_signal(number)
    _, rest = process.communicate(timeout=60)
    too_late = process.returncode == 0 and "TTFT" in rest  # all output was written
    assert process.returncode == CODES[signal.Signals(number)] or too_late
    assert "error" not in rest and "Traceback" not in rest
