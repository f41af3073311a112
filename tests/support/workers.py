"""Workers in this process, on loopback, and clients that decode on them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from swiftspec.builder.load_options import LoadOptions, Side, WorkerAddress
from swiftspec.builder.remote_roles import RemoteTarget, build_remote_roles
from swiftspec.builder.worker_model import WorkerLimits, WorkerModel, make_service
from swiftspec.config import EngineConfig
from swiftspec.distributed.launch.world import World
from swiftspec.distributed.rpc.endpoint import Endpoint, RpcSecurity
from swiftspec.distributed.rpc.server import RpcServer
from swiftspec.llm import LLM, LLMBase

TOKENIZER = bytes(32)  # the models of the tests have none
OPTIONS: LoadOptions = {"dtype": torch.float64}
CONFIGS = {
    "target": EngineConfig(mode="ar", verify_batch=16),
    "draft": EngineConfig(mode="serial", verify_batch=16, draft_leaves=8, adapt_steps=True),
}
OPEN = RpcSecurity()


@dataclass
class StartedWorker:
    """A worker that can be stopped and restarted at the same port."""

    side: Side
    model: Path
    sessions: int = 3
    security: RpcSecurity = OPEN
    port: int = 0
    tokenizer: bytes = TOKENIZER
    world: World | None = None
    options: LoadOptions = field(default_factory=LoadOptions)

    def load(self) -> WorkerModel:
        ranks = 1 if self.world is None else self.world.size
        limits = WorkerLimits(self.sessions, 600.0, replace(CONFIGS[self.side], target_tp=ranks, draft_tp=-1))
        return WorkerModel(self.side, self.model, limits, self.world, {**OPTIONS, **self.options})

    def start(self) -> StartedWorker:
        self.loaded = model = self.load()
        self.service = make_service(model, self.side, self.tokenizer, ())
        self.server = RpcServer(self.service, Endpoint("127.0.0.1", self.port), self.security, self.sessions)
        self.port = self.server.port
        return self

    def stop(self) -> None:
        self.server.stop()
        if self.loaded.rank is not None:
            self.loaded.rank.leave()

    def client_address(self, timeout: float = 20.0, security: RpcSecurity = OPEN) -> WorkerAddress:
        """The address as a client names it."""
        return WorkerAddress(f"127.0.0.1:{self.port}", f"--{self.side}-url", security, timeout)


@contextmanager
def started(side: Side, model: Path, **how: Any) -> Iterator[StartedWorker]:
    worker = StartedWorker(side, model, **how).start()
    try:
        yield worker
    finally:
        worker.stop()


@contextmanager
def client_on_workers(
    target: WorkerAddress | Path,
    draft: WorkerAddress | Path | None,
    tokenizer: Path = Path(),
    trace: Path | None = None,
    **plan: Any,
) -> Iterator[LLMBase]:
    """A client: each model is on a worker, or loaded here."""
    remote = {"target_remote": isinstance(target, WorkerAddress), "draft_remote": isinstance(draft, WorkerAddress)}
    config = EngineConfig(**{"mode": "async" if draft else "ar", **remote, **plan})
    options: LoadOptions = {
        **OPTIONS,
        "trace": trace,
        "draft_worker": draft if isinstance(draft, WorkerAddress) else None,
    }
    local_draft = draft if isinstance(draft, Path) else None
    if isinstance(target, WorkerAddress):
        running = LLMBase(build_remote_roles(RemoteTarget(target), local_draft, config, tokenizer, **options))
    else:
        running = LLM(target, local_draft, config, **options)
    try:
        yield running
    finally:
        running.close()
