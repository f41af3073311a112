"""A client with a remote target and a draft of its own, which may run on a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.data.heldout import DEMO
from swiftspec.builder import remote_roles, roles
from swiftspec.builder.load_options import WorkerAddress
from swiftspec.builder.models import Models
from swiftspec.builder.remote_roles import RemoteTarget, build_remote_roles
from swiftspec.config import EngineConfig
from swiftspec.distributed.remote.session_messages import ModelInfo
from swiftspec.distributed.transport.grpc.endpoint import RpcSecurity
from swiftspec.errors import UserError
from swiftspec.runtime.local_drafter import LocalDrafter
from swiftspec.token_engine import TokenEngine


def no_transport() -> Any:
    return SimpleNamespace(peer="worker", close=lambda: None)


def remote_target() -> Any:
    info = ModelInfo("target", "tokenizer", "target", 384, 256, (0,), "float32")
    connection = SimpleNamespace(transport=no_transport, close=lambda: None)
    return SimpleNamespace(info=info, connection=connection, worker=SimpleNamespace(timeout=1.0))


def test_a_local_draft_captures_at_startup_and_records_errors_of_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    captured, recorded = list[Any](), list[Exception]()
    monkeypatch.setattr(remote_roles, "capture_graphs", lambda *roles: captured.append(roles))
    monkeypatch.setattr(roles, "num_captures", lambda verifier, drafter: 7 if drafter is not None else 0)
    monkeypatch.setattr(Models, "record_device_error", lambda self, error, plan: recorded.append(error))
    config = EngineConfig("serial", target_remote=True, draft_steps=2)
    running = TokenEngine(build_remote_roles(remote_target(), DEMO / "draft", config, Path(), dtype=torch.float32))
    [(verifier, drafter, plan, _)] = captured
    assert verifier is None and isinstance(drafter, LocalDrafter) and plan.draft_steps == 2
    assert running.roles.decoding.captured_graphs() == 7

    def fails() -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
        yield

    with pytest.raises(RuntimeError, match="illegal memory access") as raised:
        next(running._rounds(fails(), lambda: False))
    assert recorded == [raised.value]


def test_why_a_target_worker_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    info = remote_target().info
    answers: list[ModelInfo | Exception] = [info, info, ConnectionError("refused"), UserError("wrong token")]
    answers.append(replace(info, model="other"))

    def ping(*_: Any) -> ModelInfo:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(remote_roles, "ping", ping)
    target = RemoteTarget(WorkerAddress("127.0.0.1:1", "--target-url", RpcSecurity(), 1.0))
    assert [target.lost_reason() for _ in range(4)] == [
        None,
        "--target-url 127.0.0.1:1 does not answer",
        "wrong token",
        "--target-url 127.0.0.1:1 has another model now: restart this server",
    ]
    target.connection.close()
