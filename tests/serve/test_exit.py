"""How a process exits: by the interpreter's shutdown, or without it where that could wait forever."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from swiftspec.distributed.launch.supervisor_link import EXIT_PEER_LOST
from swiftspec.serve import __main__ as command
from swiftspec.serve import rank_process
from swiftspec.serve.__main__ import exit_process


class Ended(BaseException):
    """Raised instead of `os._exit`."""


@pytest.fixture(autouse=True)
def no_real_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(command, "ignore_signals", lambda: None)


def in_process_group(monkeypatch: pytest.MonkeyPatch, joined: bool, gpu: bool = False) -> None:
    distributed: Any = SimpleNamespace(is_available=lambda: True, is_initialized=lambda: joined)
    monkeypatch.setitem(sys.modules, "torch.distributed", distributed)
    cuda: Any = SimpleNamespace(is_initialized=lambda: gpu)
    monkeypatch.setitem(sys.modules, "torch.cuda", cuda)


@pytest.mark.parametrize(
    ("code", "joined", "gpu", "kind"),
    [
        (0, False, True, SystemExit), (0, True, False, Ended), (EXIT_PEER_LOST, False, True, Ended),
        (EXIT_PEER_LOST, False, False, SystemExit), (143, True, False, Ended),
    ],
)  # fmt: skip
def test_after_a_failure_on_a_gpu_or_in_a_group_the_shutdown_is_skipped(
    monkeypatch: pytest.MonkeyPatch, code: int, joined: bool, gpu: bool, kind: type[BaseException]
) -> None:
    """With the same exit code, and after the output was written."""
    in_process_group(monkeypatch, joined, gpu)
    written: list[str] = []
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, SimpleNamespace(flush=lambda name=name: written.append(name)))
    with pytest.raises(kind) as ended:
        exit_process(code)
    assert ended.value.args == (code,)
    assert written == ([] if kind is SystemExit else ["stdout", "stderr"])


def test_an_internal_error_of_a_rank_ends_its_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a traceback, and not by the interpreter's shutdown."""

    def fail(*args: Any, **more: Any) -> int:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    in_process_group(monkeypatch, True)
    monkeypatch.setattr(rank_process, "run_guarded", fail)
    monkeypatch.setattr(rank_process, "SupervisorClient", lambda *_: None)
    monkeypatch.setattr(rank_process.socket, "socket", lambda **_: None)
    monkeypatch.setattr(sys, "argv", ["rank_process", "3", "0", "--"])
    with pytest.raises(Ended, match="1"):
        rank_process.main()
    assert "illegal memory access" in capsys.readouterr().err
