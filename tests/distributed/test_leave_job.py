"""What a rank does when it leaves its job, and which errors of that are raised."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from swiftspec.distributed import rank_startup
from swiftspec.distributed.launch.world import World
from swiftspec.distributed.rank_startup import leave_job

CPU = torch.device("cpu")


class Group:
    """Stands in for a group of ranks."""

    def __init__(self, done: list[str]) -> None:
        self.close, self.abort = lambda: done.append("closed"), lambda: done.append("aborted")


class Builder:
    device = CPU

    def release_graphs(self) -> None:
        """No graphs on a CPU."""


def left(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None, *, lost: bool, grouped: bool = True
) -> tuple[list[str], bool]:
    """What a rank has done whose first step fails, and whether its roles can be dropped."""
    done = list[str]()

    def fails() -> None:
        done.append("first")
        if error is not None:
            raise error

    monkeypatch.setattr(rank_startup, "pin_to_cores", lambda cores: done.append("cores"))
    group, builder = Group(done) if grouped else None, Builder()
    world, parts = World(0, 2, 0, 2, "here", HashStore(), frozenset({0})), (group, builder)
    steps: Any = [fails, lambda: done.append("second")]
    types: Any = parts
    try:
        return done, leave_job(world, steps, *types, lost=lost)
    except OSError:
        return [*done, "raised"], False


def test_every_step_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert left(monkeypatch, None, lost=False) == (["first", "second", "cores", "closed"], True)
    assert left(monkeypatch, None, lost=False, grouped=False) == (["first", "second", "cores"], False)
    gone = ConnectionError("gone")
    assert left(monkeypatch, gone, lost=True) == (["first", "second", "cores", "aborted"], False)
    assert left(monkeypatch, gone, lost=False)[0] == ["first", "second", "cores", "closed", "raised"]


def test_an_error_of_the_program_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AttributeError):
        left(monkeypatch, AttributeError("no such field"), lost=True)
