"""The roles of a client whose draft, target, or both run on workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Unpack

from swiftspec.builder.load_options import LoadOptions, WorkerAddress
from swiftspec.builder.model_pair import ModelPair, draft_tree_slots
from swiftspec.builder.roles import EngineLimits, Roles, TreeRoles, check_request, make_tree_decoding
from swiftspec.config import EngineConfig
from swiftspec.distributed.draft.failover import RemoteDraft
from swiftspec.distributed.group.request_state import ModelLimits
from swiftspec.distributed.rpc import swiftspec_pb2 as pb
from swiftspec.distributed.rpc.connection import WorkerConnection
from swiftspec.distributed.rpc.draft_stream import DraftStream
from swiftspec.distributed.rpc.drafter import GrpcDrafter, GrpcTreeDeltaLink
from swiftspec.distributed.rpc.protobuf_codec import ModelIdentity, streams_tree_deltas
from swiftspec.distributed.rpc.reconnect import PING_TIMEOUT_S, WorkerReconnector
from swiftspec.distributed.rpc.service import DRAFT_SERVICE, TARGET_SERVICE
from swiftspec.distributed.rpc.status import WorkerLost
from swiftspec.distributed.rpc.verifier import GrpcVerifier
from swiftspec.errors import UserError
from swiftspec.observe.recorder import Recorder
from swiftspec.observe.rpc_latency import clock_reading
from swiftspec.observe.trace_file import TraceFile
from swiftspec.observe.trace_format import trace_header
from swiftspec.runtime.drafter import NoDrafter
from swiftspec.runtime.replica_drafter import ReplicaDrafter
from swiftspec.sampling.grammar import GrammarCompiler
from swiftspec.tree.replica import TreeReplica
from swiftspec.tree.tree import DraftTree

Disconnect = Callable[[], None]


class RemoteTarget:
    """Connection to a target worker. The constructor pings the worker and raises UserError if it does not answer.
    `about`: the worker's answer, which has the identity and the limits of its model."""

    def __init__(self, worker: WorkerAddress) -> None:
        self.worker = worker
        self.link = WorkerConnection(worker.url, worker.flag, TARGET_SERVICE, pb.VerifyAnswer, worker.security)
        try:
            self.about = self.link.ping(worker.timeout)
        except WorkerLost as error:
            raise UserError(f"{error}; start it with `swiftspec worker target`") from None

    def files(self) -> dict[str, bytes]:
        """Returns the worker's tokenizer files, by name. Raises UserError if the worker is lost."""
        try:
            return dict(self.link.read_tokenizer(10 * self.worker.timeout))
        except WorkerLost as error:
            raise UserError(str(error)) from None


def build_remote_drafter(
    worker: WorkerAddress, note: Callable[[str], None], config: EngineConfig, bounds: ModelLimits
) -> tuple[RemoteDraft, Disconnect]:
    """Returns a drafter whose model runs on a worker, and a function that disconnects from the worker.

    If the worker does not answer, `note` receives a message, decoding starts without the draft, and the worker is
    pinged in the background until it answers. Raises UserError if the worker does not match the target. `bounds`: the
    target's limits.
    """
    link = WorkerConnection(worker.url, worker.flag, DRAFT_SERVICE, pb.DraftAnswer, worker.security)
    redial = WorkerReconnector(link, partial(_check, worker, bounds))
    stream = DraftStream(link, config, bounds, PING_TIMEOUT_S)
    try:
        stream.attach(redial.probe())
    except WorkerLost as error:
        note(f"{error}; decoding without a draft until it answers")
        redial.on_lost()
    except UserError:
        redial.close()
        link.close()
        raise

    def leave() -> None:
        redial.close()
        stream.end_session()
        link.close()

    if not streams_tree_deltas(config):
        return RemoteDraft(GrpcDrafter(stream), stream, redial, stream.rpc_log), leave
    slots = draft_tree_slots(config)
    replica = TreeReplica(DraftTree(1 + slots * config.children_per_leaf, slots), bounds.vocab_size)
    return RemoteDraft(
        ReplicaDrafter(GrpcTreeDeltaLink(stream), replica, config), stream, redial, stream.rpc_log
    ), leave


def _check(worker: WorkerAddress, bounds: ModelLimits, about: pb.PingAnswer) -> None:
    """Raises UserError if a draft worker does not match the target: its tokenizer differs or its context is shorter."""
    if worker.tokenizer is not None and about.tokenizer != worker.tokenizer:
        raise UserError(f"{worker.flag} {worker.url} does not match this target: their tokenizers differ")
    if about.max_model_len < bounds.max_model_len:
        raise UserError(
            f"{worker.flag} {worker.url} has a context of {about.max_model_len} tokens: use --max-model-len"
            f" {about.max_model_len}"
        )


def build_remote_roles(
    target: RemoteTarget, draft: Path | None, config: EngineConfig, tokenizer: Path, **options: Unpack[LoadOptions]
) -> Roles:
    """Builds the roles of a client whose target runs on a worker.

    `draft`: a draft model to load in this process; None without a draft, or with a draft worker.
    `tokenizer`: folder with the target's tokenizer files.
    """
    about, note = target.about, options.get("note") or (lambda line: None)
    length = min(options.get("max_model_len") or about.max_model_len, about.max_model_len)
    models = None
    if draft is not None:
        options |= {"only": "draft", "max_model_len": length, "vocab_size": about.vocab_size}
        models = ModelPair.create(draft, draft, config, None, options)
    bounds = ModelLimits(about.vocab_size, length, config.verify_batch)
    identity, worker = ModelIdentity(about.model, about.tokenizer), options.get("draft_worker")
    away, leave_draft, local = None, lambda: None, None
    if models is not None:
        local = models.drafter(config, None, options.get("progress"))
    elif worker is not None and config.mode != "ar":
        away, leave_draft = build_remote_drafter(replace(worker, tokenizer=about.tokenizer), note, config, bounds)
    drafter = local or (NoDrafter() if away is None else away.drafter)
    verifier = GrpcVerifier(target.link, identity, config, bounds, target.worker.timeout)

    def leave() -> None:
        leave_draft()
        verifier.end_session()
        target.link.close()

    trace = options.get("trace")
    recorder = Recorder(None if trace is None else TraceFile(trace))
    shape = {
        "verify_batch": config.verify_batch,
        "draft_leaves": config.draft_leaves,
        "draft_steps": config.initial_draft_steps,
    }
    rpc_log = verifier.rpc_log if away is None or away.rpc_log is None else away.rpc_log
    verifier.rpc_log = rpc_log
    head = trace_header({"mode": config.mode, **shape, "model": about.name} | clock_reading())
    if recorder.file is not None:
        recorder.file.write([head])
    parts = TreeRoles(drafter, verifier)
    decoding = make_tree_decoding(parts, config, recorder, lambda tokens, parents: None, local, away, rpc_log)
    if away is not None:
        verifier.while_waiting = lambda: decoding.active_drafter.grow()  # applies received tree deltas
    eos = tuple(about.eos_token_ids)
    check = partial(check_request, config, GrammarCompiler(tokenizer, eos, about.vocab_size))
    limits = EngineLimits(length, about.vocab_size, eos, check)
    return Roles(decoding, parts, config, limits, None, recorder, head, leave, rpc_log)
