"""Workers in this process, on loopback, and clients that decode on them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from swiftspec.builder.load_options import LoadOptions, Side, WorkerAddress
from swiftspec.builder.remote_roles import RemoteTarget, build_remote_roles
from swiftspec.builder.worker_model import WorkerLimits, WorkerModel, make_worker
from swiftspec.config import EngineConfig
from swiftspec.distributed.launch.world import World
from swiftspec.distributed.remote.session_messages import ModelInfo, SessionStart, unpack_error, unpack_timed
from swiftspec.distributed.transport.codec import Frame, words_to_bytes, words_to_text
from swiftspec.distributed.transport.grpc.client import GrpcConnection
from swiftspec.distributed.transport.grpc.endpoint import SERVICES, Endpoint, RpcSecurity
from swiftspec.distributed.transport.grpc.server import RpcServer
from swiftspec.distributed.transport.opcodes import Opcode
from swiftspec.llm_engine import LLMEngine
from swiftspec.model.vocabulary import VocabularyIdentity
from swiftspec.token_engine import TokenEngine

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
    added_tokens: Mapping[int, str] = field(default_factory=dict[int, str])
    world: World | None = None
    options: LoadOptions = field(default_factory=LoadOptions)

    def load(self) -> WorkerModel:
        ranks = 1 if self.world is None else self.world.size
        limits = WorkerLimits(self.sessions, 600.0, replace(CONFIGS[self.side], target_tp=ranks, draft_tp=-1))
        return WorkerModel(self.side, self.model, limits, self.world, {**OPTIONS, **self.options})

    def start(self) -> StartedWorker:
        self.loaded = model = self.load()
        vocabulary = VocabularyIdentity(self.tokenizer.hex(), self.added_tokens, model.models.options.vocab_size)
        self.worker = make_worker(model, self.side, vocabulary, ())
        info, endpoint = self.worker.model_info.to_json(), Endpoint("127.0.0.1", self.port)
        service = SERVICES[self.side]
        self.server = RpcServer(service, self.worker.serve, info, endpoint, self.security, self.sessions)
        self.port = self.server.port
        return self

    def stop(self) -> None:
        self.server.stop()
        if self.loaded.rank is not None:
            self.loaded.rank.leave()

    def client_address(self, timeout: float = 20.0, security: RpcSecurity = OPEN) -> WorkerAddress:
        """The address as a client names it."""
        return WorkerAddress(f"127.0.0.1:{self.port}", f"--{self.side}-url", security, timeout)


class RawClient:
    """Exchanges messages with a worker, without the checks of the real client.

    `info`: the worker's model info. `session`: the session start that is sent first.
    """

    def __init__(self, worker: StartedWorker, shape: EngineConfig, session: str = "", security: RpcSecurity = OPEN):
        self._connection = GrpcConnection(f"127.0.0.1:{worker.port}", "--url", SERVICES[worker.side], security)
        self.info = ModelInfo.from_json(self._connection.ping(10))
        self.transport = self._connection.transport()
        self.session = SessionStart(self.info.identity, shape, session)

    def attach(self) -> str:
        """Opens or resumes the session and returns its id."""
        kind, words = self.ask(Opcode.SESSION_ATTACH, self.session.pack())
        assert kind == Opcode.SESSION_ATTACHED, words_to_text(words[4:])
        self.session.session = words_to_bytes(words).hex()
        return self.session.session

    def ask(self, kind: int, words: Sequence[int] = ()) -> Frame:
        """Sends a message and returns the answer, without its times."""
        self.transport.send(kind, words)
        return self.recv()

    def recv(self) -> Frame:
        kind, words = self.transport.recv(20)
        if kind == Opcode.TIMED_ANSWER:
            _, kind, words = unpack_timed(words)
        return kind, list(words)

    def refused(self, kind: int, words: Sequence[int] = ()) -> str:
        """Sends a message that the worker refuses, and returns the reason."""
        answer, words = self.ask(kind, words)
        assert answer == Opcode.ERROR, answer
        reason = unpack_error(words)[-1]
        assert reason and "\n" not in reason and len(reason) < 400
        return reason

    def close(self) -> None:
        self.transport.close()
        self._connection.close()


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
) -> Iterator[TokenEngine]:
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
        running = TokenEngine(build_remote_roles(RemoteTarget(target), local_draft, config, tokenizer, **options))
    else:
        running = LLMEngine(target, local_draft, config, **options)
    try:
        yield running
    finally:
        running.close()
