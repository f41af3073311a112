"""What a rank does when it leaves its job, and which errors of that are raised."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from swiftspec.builder import ranks
from swiftspec.builder.ranks import Rank
from swiftspec.config import EngineConfig
from swiftspec.distributed.launch.config_check import RankRole
from swiftspec.distributed.launch.supervisor_link import Heartbeat, RankTable
from swiftspec.distributed.launch.world import World
from swiftspec.distributed.transport.request_state import ModelLimits


def left(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None, *, lost: bool, grouped: bool = True
) -> tuple[list[str], bool]:
    """What a rank has done of which closing the connections fails, and whether it has dropped roles and group."""
    done = list[str]()

    def close(*, shutdown: bool) -> None:
        done.append("connections")
        if error is not None:
            raise error

    monkeypatch.setattr(ranks, "pin_to_cores", lambda cores: done.append("cores"))
    connections: Any = SimpleNamespace(close=close)
    models: Any = SimpleNamespace(options=SimpleNamespace(device=torch.device("cpu")), release_graphs=lambda: None)
    group: Any = SimpleNamespace(close=lambda: done.append("closed"), abort=lambda: done.append("aborted"))
    rank = Rank(
        World(0, 2, 0, 2, "here", HashStore(), frozenset({0})),
        EngineConfig("ar", target_tp=2),
        models,
        RankRole("target", 0, 2),
        connections,
        ModelLimits(8, 8, 1),
        masked_tokens=(),
        heartbeat=Heartbeat(),
        rank_table=RankTable(lambda infos: None),
        group=group if grouped else None,
    )
    try:
        rank.leave(lost=lost)
    except OSError:
        done.append("raised")
    return done, grouped and rank.group is None


def test_every_step_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert left(monkeypatch, None, lost=False) == (["connections", "cores", "closed"], True)
    assert left(monkeypatch, None, lost=False, grouped=False) == (["connections", "cores"], False)
    gone = ConnectionError("gone")
    assert left(monkeypatch, gone, lost=True) == (["connections", "cores", "aborted"], False)
    assert left(monkeypatch, gone, lost=False)[0] == ["connections", "cores", "closed", "raised"]


def test_an_error_of_the_program_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AttributeError):
        left(monkeypatch, AttributeError("no such field"), lost=True)
