"""Command `swiftspec worker draft|target`: runs one model for clients in other processes or on other machines."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Literal

from swiftspec.capabilities import features_in
from swiftspec.cli.arguments import HELP_PAGES, parse_command
from swiftspec.cli.terminal import StartupProgress
from swiftspec.config import EngineConfig
from swiftspec.errors import RankLost, UserError
from swiftspec.extras import require_extra
from swiftspec.file_io import one_line
from swiftspec.model.checkpoint_files import read_config
from swiftspec.model.gguf.file import is_gguf
from swiftspec.settings.settings import Settings, UsageError, check_usage
from swiftspec.signals import DRAIN_TIMEOUT_S, GracefulStop, ignore_signals
from swiftspec.startup.built_in_models import built_in_models
from swiftspec.startup.model_resolution import check_before_download
from swiftspec.startup.session import MemoryCheck, WeightProgress, load_options
from swiftspec.startup.worker_endpoints import load_security
from swiftspec.text.codec import TOKENIZER_FILES, TextCodec, write_tokenizer_files
from swiftspec.text.hub import locate_model

if TYPE_CHECKING:
    from swiftspec.builder.worker_model import WorkerModel
    from swiftspec.distributed.launch.world import World
    from swiftspec.distributed.transport.grpc.endpoint import Endpoint, RpcSecurity
    from swiftspec.model.vocabulary import VocabularyIdentity

SESSION_IDLE_S = 600.0  # after this time the memory of an idle session is freed
DEFAULT_PORTS = {"target": 7070, "draft": 7071}  # ports of 127.0.0.1 that are used without --listen
PAIR_SETTINGS = (  # of target and draft together, or of requests
    "port", "draft_model", "draft_url", "target_url", "target_tp", "draft_tp", "chat_template", "system_prompt",
)  # fmt: skip
JoinFn = Callable[[], "World | None"]


def run_worker_command(argv: Sequence[str], join: JoinFn) -> int:
    """Parses the arguments and runs a worker until a signal ends it. Returns the exit code.

    `join`: joins the job that a launcher has started, or returns None for a single process.
    """
    side = argv[0] if argv else ""
    if side in ("-h", "--help"):
        parse_command(argv, page=HELP_PAGES["worker"])
    if side not in ("draft", "target"):
        raise UsageError("specify the model of the worker: `swiftspec worker draft` or `swiftspec worker target`")
    command = parse_command(argv[1:], page=HELP_PAGES["worker"])
    settings = command.settings
    given = [name for name in PAIR_SETTINGS if name in settings.model_fields_set]
    names = ", ".join(f"{{{name}}}" for name in given if getattr(settings, name) is not None)
    found = {
        "worker": True,
        "prompt flags": command.has_prompt_flags,
        "pair settings": bool(names),
        "synthetic acceptance": settings.synthetic_acceptance_length is not None,
    }
    check_usage(dict.fromkeys(features_in(found), "") | ({"pair settings": names} if names else {}))
    return run_worker(side, settings, join)


def run_worker(side: Literal["draft", "target"], settings: Settings, join: JoinFn) -> int:
    """Loads the model and serves clients until a signal. Returns the exit code.

    After the first signal, running requests have DRAIN_TIMEOUT_S to finish; a second signal ends the worker
    immediately. With several ranks, rank 0 serves and the others follow it. Raises RankLost if a rank is lost, and
    UserError if gRPC is not installed.
    """
    require_extra("network", "`swiftspec worker`")
    from swiftspec.distributed.transport.grpc.endpoint import Endpoint

    endpoint, security = (
        Endpoint.parse(settings.listen or f"127.0.0.1:{DEFAULT_PORTS[side]}", "--listen"),
        load_security(settings),
    )
    security.check_worker(endpoint)
    world = join()
    if world is not None and world.rank > 0:
        ignore_signals()  # rank 0 handles the signal, drains the requests and shuts this rank down
        _load(side, settings, world, StartupProgress(quiet=True))[0].follow()
        return 0
    phases = StartupProgress()
    try:
        model, codec = _load(side, settings, world, phases)
        try:
            _serve(model, codec.vocabulary.identity(), endpoint, security, settings, phases)
        finally:
            if model.rank is not None:
                model.rank.leave()
    finally:
        phases.close()
    return 0


def _serve(
    model: WorkerModel,
    vocabulary: VocabularyIdentity,
    endpoint: Endpoint,
    security: RpcSecurity,
    settings: Settings,
    phases: StartupProgress,
) -> None:
    """Serves clients until a signal. Raises UserError if the address is not available or the GPU fails, and RankLost
    if another rank is lost.

    `vocabulary`: that of the tokenizer.
    """
    from swiftspec.builder.worker_model import make_worker
    from swiftspec.distributed.transport.grpc.endpoint import SERVICES, Endpoint
    from swiftspec.distributed.transport.grpc.server import RpcServer

    failures: list[Exception] = []  # of the GPU, which this process cannot use any more
    stop_queue = SimpleQueue[int]()  # its `put` is reentrant, so that a signal handler may call it

    def fail(error: Exception) -> None:
        failures.append(error)
        stop_queue.put(0)

    with _tokenizer_files(model.path) as files:
        worker = make_worker(model, model.path.name, vocabulary, files, fail)
        info = worker.model_info.to_json()
        server = RpcServer(SERVICES[model.side], worker.serve, info, endpoint, security, settings.max_sessions)
        phases.ready()
        address = Endpoint(endpoint.host, server.port)
        print(f"swiftspec: {model.side} worker listening on {address}", file=sys.stderr, flush=True)
        group = model.group
        with GracefulStop(stop_queue.put):
            if group is None:
                server.run(stop_queue, worker.sweep)
            else:
                group.on_lost(lambda why: stop_queue.put(0))
                server.run(stop_queue, partial(worker.sweep, partial(group.check_followers, 0.0)))
                worker.run_if_idle(group.check_followers)  # SIGTERM may come from a launcher that has lost a rank
            broken = bool(failures) or (group is not None and group.broken is not None)
            server.stop(0.0 if broken else DRAIN_TIMEOUT_S)
        if failures:
            raise UserError(f"the GPU failed, restart this worker: {one_line(failures[0])}")
        if group is not None and group.broken is not None:
            raise RankLost(group.broken)


@contextmanager
def _tokenizer_files(model: Path) -> Iterator[tuple[Path, ...]]:
    """Returns a context manager with the files of the tokenizer, which clients receive; those of a GGUF file are
    temporary ones."""
    with TemporaryDirectory(prefix="swiftspec-") as temporary:
        folder = write_tokenizer_files(model, Path(temporary)) if is_gguf(model) else model
        yield tuple(folder / name for name in TOKENIZER_FILES if (folder / name).is_file())


def _locate(side: Literal["draft", "target"], settings: Settings, shape: EngineConfig, check: MemoryCheck) -> Path:
    """Returns the model, downloaded if needed. Raises UserError if it is missing, is a draft head, or cannot run on
    this rank's GPU."""
    built_in = built_in_models(settings.model)
    if built_in is not None:
        return built_in.draft if side == "draft" else built_in.target
    assert settings.model is not None
    check_before_download([(settings.model, settings.revision)], shape, check)
    model = locate_model(settings.model, settings.revision)
    if read_config(model).spec.draft_head is not None:
        raise UserError(
            f"{model} is a draft head, which reads the target's hidden states and runs in its process: use it as"
            " --draft-model of `swiftspec serve`"
        )
    return model


def _load(
    side: Literal["draft", "target"], settings: Settings, world: World | None, phases: StartupProgress
) -> tuple[WorkerModel, TextCodec]:
    """Loads the model, or this rank's shard of it, and its tokenizer. Raises UserError if there is not enough
    memory."""
    from swiftspec.distributed.launch.config_check import report_startup_error

    ranks = 1 if world is None else world.size
    with report_startup_error(world):
        tree = {name: getattr(settings, name) for name in ("verify_batch", "draft_leaves", "draft_steps")}
        adapts = side == "draft" and settings.draft_steps is None
        shape = EngineConfig("serial" if side == "draft" else "ar", adapt_steps=adapts, target_tp=ranks, **tree)
        path = _locate(side, settings, shape, MemoryCheck(settings, world, side))
        phases.begin("tokenizers")
        codec = TextCodec(path)
        phases.begin("libraries")
        options = load_options(settings)
        options |= {
            # a draft's depends on the client's target, so its sessions use all rows of the LM head
            "vocab_size": codec.size if side == "target" else None,
            "progress": WeightProgress(phases, f"{side} weights"),
            "note": phases.note,
        }
    phases.begin(f"{side} weights")
    from swiftspec.backends.cuda.devices import is_out_of_gpu_memory
    from swiftspec.builder.worker_model import WorkerLimits, WorkerModel

    room = WorkerLimits(settings.max_sessions, SESSION_IDLE_S, shape)
    try:
        return WorkerModel(side, path, room, world, options), codec
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_gpu_memory(error):
            raise
        raise UserError(
            "not enough memory for this model: use a smaller --max-model-len or --max-sessions, or --dtype bfloat16"
        ) from None
