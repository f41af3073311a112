"""`swiftspec worker draft|target`: one model, for whoever decodes on it from elsewhere."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

from swiftspec.config import EngineConfig
from swiftspec.errors import RankLost, UserError
from swiftspec.serve.cli.arguments import parse
from swiftspec.serve.model_resolution import embedded_model
from swiftspec.serve.session import Weights, load_options
from swiftspec.serve.settings.settings import Settings, UsageError
from swiftspec.serve.terminal import Phases
from swiftspec.serve.text.codec import TOKENIZER_FILES, TextCodec, locate
from swiftspec.serve.worker_endpoints import security_of

if TYPE_CHECKING:
    from swiftspec.builder.worker_model import WorkerModel
    from swiftspec.distributed.launch.world import World
    from swiftspec.distributed.rpc.endpoint import Endpoint, Security

PORTS = {"target": 7070, "draft": 7071}  # on the loopback, where --listen names no other
Join = Callable[[], "World | None"]
ASKS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(argv: Sequence[str], join: Join) -> int:
    """Runs a worker until a signal ends it. Returns the exit code. `join`: the ranks that a launcher has started."""
    side = argv[0] if argv else ""
    if side not in ("draft", "target"):
        raise UsageError("which model does the worker run? `swiftspec worker draft` or `swiftspec worker target`")
    command = parse(argv[1:])
    if command.prompt is not None or command.prompt_file is not None or command.json:
        raise UsageError("a worker's clients bring their prompts: leave out --prompt, --prompt-file and --json")
    settings = command.settings
    for name in ("port", "draft_model", "draft_url", "target_url", "target_tp", "draft_tp"):
        if name in settings.model_fields_set and getattr(settings, name) is not None:
            raise UsageError(
                f"--{name.replace('_', '-')} is not for a worker, which runs the one --model: leave it out"
            )
    return run(side, settings, join)


def run(side: Literal["draft", "target"], settings: Settings, join: Join) -> int:
    """Loads the model, listens, and leaves once a signal has come and the requests under way are over; they may take
    --drain-timeout for that. A second signal ends it at once. Where a launcher has started several ranks, rank 0 does
    so, and the others follow it. Raises RankLost where one of them is gone."""
    from swiftspec.distributed.rpc.endpoint import Endpoint

    endpoint, security = Endpoint.of(settings.listen or f"127.0.0.1:{PORTS[side]}", "--listen"), security_of(settings)
    security.check_worker(endpoint)
    world = join()
    if world is not None and world.rank > 0:
        for number in ASKS:  # rank 0 hears it, ends what runs, and says when to leave
            signal.signal(number, signal.SIG_IGN)
        _load(side, settings, world, Phases(quiet=True))[0].follow()
        return 0
    phases = Phases()
    try:
        model, codec = _load(side, settings, world, phases)
        try:
            _serve(model, codec.digest, endpoint, security, settings, phases)
        finally:
            if model.rank is not None:
                model.rank.leave()
    finally:
        phases.close()
    return 0


def _serve(
    model: WorkerModel, tokenizer: bytes, endpoint: Endpoint, security: Security, settings: Settings, phases: Phases
) -> None:
    """Listens until a signal has come. Raises UserError where nothing can listen there, and RankLost."""
    from swiftspec.builder.worker_model import service_of
    from swiftspec.distributed.rpc.endpoint import Endpoint
    from swiftspec.distributed.rpc.server import Server

    own = tuple(model.path / name for name in TOKENIZER_FILES if (model.path / name).is_file())
    service = service_of(model, model.path.name, tokenizer, own)
    server = Server(service, endpoint, security, settings.max_sessions)
    phases.ready()
    listens = Endpoint(endpoint.host, server.port)
    print(f"swiftspec: {model.side} worker listening on {listens}", file=sys.stderr, flush=True)
    crew = None if model.rank is None else model.rank.crew
    with Asked() as asked:
        if crew is None:
            server.run(asked.signals)
        else:
            crew.when_lost(lambda why: asked.signals.put(0))
            server.run(asked.signals, partial(crew.look, 0.0))
            service.between(crew.look)  # a launcher that has lost one of us asks the others to leave
        server.stop(settings.drain_timeout if crew is None or crew.broken is None else 0.0)
    if crew is not None and crew.broken is not None:
        raise RankLost(crew.broken)


class Asked:
    """The first signal asks for a graceful end and is put into `signals`, which a handler may do at any moment; a
    second one ends the command as it ends any other."""

    def __init__(self) -> None:
        self.signals: SimpleQueue[int] = SimpleQueue()
        self._before: dict[int, Any] = {}
        self._asked = False

    def __enter__(self) -> Asked:
        for number in ASKS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            self.__exit__()
            os.kill(os.getpid(), number)
        self._asked = True
        self.signals.put(number)


def _load(
    side: Literal["draft", "target"], settings: Settings, world: World | None, phases: Phases
) -> tuple[WorkerModel, TextCodec]:
    """The model, or this rank's share of it, and what turns its ids into tokens."""
    from swiftspec.distributed.launch.config_check import telling

    ranks = 1 if world is None else world.size
    with telling(world):
        path = locate(settings.model or embedded_model(side), settings.revision)
        phases.begin("tokenizers")
        codec = TextCodec(path)
        phases.begin("libraries")
        options, _, _ = load_options(settings, path, world)
        options |= {"vocab_size": codec.size, "progress": Weights(phases, f"{side} weights"), "note": phases.note}
        tree = {name: getattr(settings, name) for name in ("verify_batch", "draft_leaves", "draft_steps")}
        adapts = side == "draft" and settings.draft_steps is None
        shape = EngineConfig("serial" if side == "draft" else "ar", adapt_steps=adapts, target_tp=ranks, **tree)
    phases.begin(f"{side} weights")
    from swiftspec.builder.worker_model import Room, WorkerModel

    room = Room(settings.max_sessions, settings.session_idle, shape)
    try:
        return WorkerModel(side, path, room, world, options), codec
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        raise UserError(
            "not enough memory for this model: take a smaller --max-model-len, fewer --max-sessions, or --dtype"
        ) from None
