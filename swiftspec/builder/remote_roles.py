"""The roles of a client whose draft, target, or both run on workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Unpack

from swiftspec.builder.drafters import DRAFTERS, DrafterInputs, drafter_key
from swiftspec.builder.hardware import resolve_device
from swiftspec.builder.load_options import LoadOptions, WorkerAddress
from swiftspec.builder.models import LocalRoles, Models
from swiftspec.builder.plan import Plan
from swiftspec.builder.roles import EngineLimits, Roles, TreeRoles, check_request, make_recorder, tree_engine
from swiftspec.builder.rules import Choices, resolve_config
from swiftspec.config import EngineConfig
from swiftspec.distributed.remote.client import DraftLink, RemoteDrafter
from swiftspec.distributed.remote.failover import RemoteDraft
from swiftspec.distributed.remote.reconnector import Reconnector
from swiftspec.distributed.remote.remote_verifier import RemoteVerifier
from swiftspec.distributed.remote.server_link import ServerLink, read_tokenizer
from swiftspec.distributed.remote.session_messages import ModelIdentity, ModelInfo, SessionStart
from swiftspec.distributed.transport.grpc.client import GrpcConnection
from swiftspec.distributed.transport.grpc.endpoint import DRAFT_SERVICE, TARGET_SERVICE
from swiftspec.distributed.transport.request_state import ModelLimits, RequestState
from swiftspec.distributed.transport.transport import Transport
from swiftspec.engine import TreeDecoding
from swiftspec.errors import UserError
from swiftspec.model.vocabulary import describe_masked
from swiftspec.runtime.drafter import NoDrafter
from swiftspec.runtime.graph_capture import capture_graphs
from swiftspec.runtime.replica_drafter import ReplicaDrafter
from swiftspec.sampling.grammar import GrammarCompiler

PING_TIMEOUT_S = 2.0  # seconds; timeout of a ping


class RemoteTarget:
    """Connection to a target worker. The constructor pings the worker and raises UserError if it does not answer.
    `info`: the worker's answer, which has the identity and the limits of its model."""

    def __init__(self, worker: WorkerAddress) -> None:
        self.worker = worker
        self.connection = GrpcConnection(worker.url, worker.flag, TARGET_SERVICE, worker.security)
        try:
            self.info = ping(self.connection, worker.timeout)
        except ConnectionError as error:
            raise UserError(f"{error}; start it with `swiftspec worker target`") from None

    def lost_reason(self) -> str | None:
        """Pings the worker. Returns why it does not serve this client, or None if it does."""
        try:
            same = ping(self.connection, self.worker.timeout).identity == self.info.identity
        except ConnectionError:  # without its details, which differ between attempts
            return f"{self.connection.peer} does not answer"
        except UserError as error:
            return str(error)
        return None if same else f"{self.connection.peer} has another model now: restart this server"

    def files(self) -> dict[str, bytes]:
        """Returns the worker's tokenizer files, by name. Raises UserError if the worker is lost or sends invalid
        files."""
        transport = self.connection.transport()
        try:
            return read_tokenizer(transport, 10 * self.worker.timeout)
        except (ConnectionError, TimeoutError) as error:
            raise UserError(str(error)) from None
        except ValueError as error:
            raise UserError(f"{self.connection.peer}: {error}") from None
        finally:
            transport.close()


def ping(connection: GrpcConnection, timeout: float) -> ModelInfo:
    """Returns the worker's model info. Raises ConnectionError if the worker does not answer within `timeout` seconds,
    and UserError if it has another protocol version or refuses the call."""
    try:
        return ModelInfo.from_json(connection.ping(timeout))
    except ValueError as error:
        raise UserError(f"{connection.peer}: {error}") from None


def build_remote_drafter(
    worker: WorkerAddress, note: Callable[[str], None], config: EngineConfig, bounds: ModelLimits
) -> RemoteDraft:
    """Returns a drafter whose model runs on a worker.

    If the worker does not answer, `note` receives a message, decoding starts without the draft, and the worker is
    pinged in the background until it answers. Raises UserError if the worker does not match the target. `bounds`: the
    target's limits.
    """
    connection = GrpcConnection(worker.url, worker.flag, DRAFT_SERVICE, worker.security)
    session = SessionStart(ModelIdentity("", ""), config)
    reported: list[str | None] = []  # what `note` has received about masked tokens, once

    def connect() -> Transport:
        info = ping(connection, PING_TIMEOUT_S)
        session.masked_tokens = _check(worker, bounds, info)
        session.identity = info.identity
        if worker.vocabulary is not None and not reported:
            reported.append(describe_masked(session.masked_tokens, worker.vocabulary.added, info.added_tokens))
            if reported[0] is not None:
                note(reported[0])
        return connection.transport()

    server = ServerLink(connection.transport(), RequestState(bounds, config.verify == "reject"), "draft", session)
    link = DraftLink(server, lost_reason=f"{connection.peer} has not been reached", answer_timeout_s=PING_TIMEOUT_S)
    reconnector = Reconnector(connect, on_demand=True)
    try:
        link.attach(connect())
    except ConnectionError as error:
        note(f"{error}; decoding without a draft until it answers")
        reconnector.on_lost()
    except UserError:
        reconnector.close()
        connection.close()
        raise

    def disconnect() -> None:
        reconnector.close()
        link.end_session()
        connection.close()

    drafter = DRAFTERS[drafter_key(config)].build(DrafterInputs(config, bounds, link=link))
    assert isinstance(drafter, RemoteDrafter | ReplicaDrafter)
    return RemoteDraft(drafter, link, reconnector, link.rpc_log, disconnect)


def _check(worker: WorkerAddress, bounds: ModelLimits, info: ModelInfo) -> tuple[int, ...]:
    """Returns the tokens that a draft worker must not propose. Raises UserError if it does not match the target: its
    tokenizer has other ordinary tokens, its LM head has too few rows, or its context is shorter."""
    if worker.vocabulary is not None and info.tokenizer != worker.vocabulary.ordinary:
        raise UserError(
            f"{worker.flag} {worker.url} does not match this target: the ordinary tokens of their tokenizers differ"
        )
    if info.vocab_size < bounds.vocab_size:
        raise UserError(
            f"{worker.flag} {worker.url} has {info.vocab_size} rows in its LM head, but the target has"
            f" {bounds.vocab_size} tokens: run the draft in this process with --draft-model"
        )
    if info.max_model_len < bounds.max_model_len:
        raise UserError(
            f"{worker.flag} {worker.url} has a context of {info.max_model_len} tokens: use --max-model-len"
            f" {info.max_model_len}"
        )
    if worker.vocabulary is None:
        return tuple(range(bounds.vocab_size, info.vocab_size))
    return worker.vocabulary.masked_tokens(info.vocabulary, info.vocab_size)


def build_remote_roles(
    target: RemoteTarget,
    draft: Path | None,
    config: EngineConfig | Choices,
    tokenizer: Path,
    **options: Unpack[LoadOptions],
) -> Roles:
    """Builds the roles of a client whose target runs on a worker.

    `draft`: a draft model to load in this process; None without a draft, or with a draft worker.
    `tokenizer`: folder with the target's tokenizer files.
    """
    device = "cpu" if draft is None else resolve_device(options.get("device", "auto")).type
    config = resolve_config(config, draft, device)
    info, worker = target.info, options.get("draft_worker")
    length = min(options.get("max_model_len") or info.max_model_len, info.max_model_len)
    bounds = ModelLimits(info.vocab_size, length, config.verify_batch)
    models, held, remote = None, LocalRoles(), None
    if draft is not None:
        options |= {"only": "draft", "max_model_len": length, "vocab_size": info.vocab_size}
        models = Models.of(Plan.create(draft, draft, config, None, options))
        held = _load_draft(models, config, options)
    elif worker is not None and config.mode != "ar":
        note = options.get("note") or (lambda line: None)
        remote = build_remote_drafter(replace(worker, vocabulary=info.vocabulary), note, config, bounds)
    verifier = RemoteVerifier(
        target.connection.transport(), SessionStart(info.identity, config), bounds, target.worker.timeout
    )
    drafter = held.drafter or (NoDrafter() if remote is None else remote.drafter)
    key = "none" if isinstance(drafter, NoDrafter) else drafter_key(config)
    if remote is not None and remote.rpc_log is not None:
        verifier.rpc_log = remote.rpc_log

    def disconnect() -> None:
        verifier.end_session()
        target.connection.close()

    eos = info.eos_token_ids
    check = partial(check_request, config, GrammarCompiler(tokenizer, eos, info.vocab_size))
    roles = tree_engine(
        TreeRoles(key, drafter, verifier, held, remote),
        config,
        EngineLimits(length, info.vocab_size, eos, check, config.verify_batch),
        make_recorder(options.get("trace")),
        metadata={
            "mode": config.mode,
            "verify_batch": config.verify_batch,
            "draft_leaves": config.leaves_per_expansion,
            "draft_steps": config.initial_draft_steps,
            "model": info.name,
        },
        models=models,
        rpc_log=verifier.rpc_log,
        disconnect=disconnect,
    )
    if remote is not None:
        decoding = roles.decoding
        assert isinstance(decoding, TreeDecoding)
        verifier.while_waiting = lambda: decoding.active_drafter.grow()  # applies received tree deltas
    return roles


def _load_draft(models: Models, config: EngineConfig, options: LoadOptions) -> LocalRoles:
    """Loads the draft of this process, and captures its CUDA graphs."""
    models.set_thread_counts(config, set_torch_threads=options.get("set_torch_threads", True))
    progress = options.get("progress")
    with models.device_errors_recorded(config):
        held = models.load_roles(config, None, progress, target=False, draft=True)
        capture_graphs(None, held.drafter, config, progress)
    return held
