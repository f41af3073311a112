"""A worker: one loaded model, and a session on it for each client."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from swiftspec.backends.cuda.devices import is_device_error
from swiftspec.builder.drafters import build_drafter
from swiftspec.builder.load_options import LoadOptions, Side
from swiftspec.builder.models import LoadedModel, LocalRoles, Models, build_verifier
from swiftspec.builder.plan import Plan
from swiftspec.builder.ranks import Rank, start_worker_rank
from swiftspec.config import EngineConfig
from swiftspec.distributed.collectives.join import RankGroup
from swiftspec.distributed.group.command_stream import CommandStream
from swiftspec.distributed.group.follower_dispatch import FollowerDispatcher
from swiftspec.distributed.group.leader import LeaderDrafter, LeaderVerifier, dispatch_loop
from swiftspec.distributed.launch.config_check import report_startup_error
from swiftspec.distributed.launch.world import World
from swiftspec.distributed.remote.served_roles import (
    ServedDrafter,
    ServedRole,
    ServedTreeDrafter,
    ServedVerifier,
    streams_tree_deltas,
)
from swiftspec.distributed.remote.session_messages import ModelInfo
from swiftspec.distributed.remote.sessions import WorkerSessions
from swiftspec.distributed.remote.worker import Worker
from swiftspec.distributed.transport.opcodes import Opcode
from swiftspec.distributed.transport.request_state import ModelLimits
from swiftspec.distributed.worker_group import FollowerSessionRegistry, SessionFollowerGroup, WorkerGroup
from swiftspec.errors import UserError
from swiftspec.model.fingerprint import fingerprint
from swiftspec.model.vocabulary import VocabularyIdentity
from swiftspec.runtime.cancellation import CancelCheck
from swiftspec.runtime.lookahead_drafter import LookaheadDrafter


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Limits of a worker.

    `sessions`: maximum number of sessions.
    `idle_timeout_s`: seconds without a call after which a session is ended.
    `shape`: configuration with the largest bs, w and d of a session.
    """

    sessions: int
    idle_timeout_s: float
    shape: EngineConfig

    def check(self, shape: EngineConfig, side: Side) -> None:
        """Raises UserError if bs, or on a draft worker w or d, exceeds the limits. `shape`: the configuration of a
        session."""
        flags = {"verify_batch": "verify_batch"}  # by the name of the value in the configuration
        if side == "draft":
            flags |= {"leaves_per_expansion": "draft_leaves", "max_draft_steps": "draft_steps"}
        for name, flag in flags.items():
            requested, limit = getattr(shape, name), getattr(self.shape, name)
            if requested > limit:
                raise UserError(
                    f"{flag} {requested} exceeds this worker's limit of {limit}: start the worker with"
                    f" --{flag.replace('_', '-')} {requested}"
                )


class WorkerModel:
    """The model of a worker, or this rank's shard of it, and the roles on it.

    `rank`: this rank of the worker's group; None if the worker is a single process. Raises UserError if the model
    cannot be loaded, its caches do not fit into memory, or the ranks were started with different settings.
    """

    def __init__(
        self, side: Side, model: Path, limits: WorkerLimits, world: World | None, options: LoadOptions
    ) -> None:
        options = {**options, "only": side, "sessions": limits.sessions}
        self.side: Side = side
        with report_startup_error(world):
            plan = Plan.create(model, model if side == "draft" else None, limits.shape, world, options)
        self.limits, self.path = replace(limits, shape=plan.engine), model
        limits, models = self.limits, Models.of(plan)
        models.set_thread_counts(limits.shape, set_torch_threads=options.get("set_torch_threads", True))
        self.rank: Rank | None = None
        self._progress = options.get("progress")
        self._masked: dict[tuple[int, ...], LoadedModel] = {}  # by masked tokens, those of the last session
        with models.device_errors_recorded(limits.shape):
            if world is None:
                self._load(models, None)
            else:
                settings = {"worker": side, "max_sessions": limits.sessions}
                self.rank = start_worker_rank(world, limits.shape, models, settings, self._load_share)

    @property
    def group(self) -> WorkerGroup | None:
        """The followers of rank 0, with their sessions; None if the worker is a single process."""
        group = None if self.rank is None else self.rank.team
        assert group is None or isinstance(group, WorkerGroup)
        return group

    def _load(self, models: Models, group: RankGroup | None) -> None:
        shapes = [replace(self.limits.shape, proposal=proposal) for proposal in ("coupled", "sample")]
        largest = max(shapes, key=lambda shape: models.options.tree_slots(self.side, shape))
        self.models, self.loaded = models, models.load_side(self.side, largest, group, self._progress)

    def _load_share(self, rank: Rank) -> LocalRoles:
        """Loads this rank's shard. Returns roles on it with a minimal KV cache, whose executors are those that sessions
        can use."""
        self._load(rank.models, rank.group)
        small = replace(self.loaded, context=1, prefix_cache_tokens=0)
        return self._roles(small, self.limits.shape, CancelCheck())

    def bounds(self, shape: EngineConfig) -> ModelLimits:
        """Returns the limits of a session. Raises UserError if its configuration `shape` exceeds the limits of the
        worker."""
        self.limits.check(shape, self.side)
        return ModelLimits(self.models.options.vocab_size, self.models.options.max_model_len, shape.verify_batch)

    def _with_masked(self, masked: tuple[int, ...]) -> LoadedModel:
        """Returns the model with `masked` tokens, on the same weights. Raises UserError if a token has no row in the LM
        head."""
        if not {*masked} < {*range(self.models.options.vocab_size)}:
            raise UserError(f"masked tokens must be in 0..{self.models.options.vocab_size - 1}, and not all of them")
        if masked not in self._masked:
            self._masked = {masked: replace(self.loaded, model=self.loaded.model.with_masked_tokens(masked))}
        return self._masked[masked]

    def roles(self, shape: EngineConfig, masked: tuple[int, ...], cancel_check: CancelCheck) -> LocalRoles:
        """Returns the role of a session, with its own KV cache. `masked`: tokens that a drafter never proposes."""
        loaded = self.loaded if self.side == "target" else self._with_masked(masked)
        held = self._roles(loaded, shape, cancel_check)
        if self.rank is not None:
            held.restrict_executors(self.rank.executor_names)
        return held

    def _roles(self, loaded: LoadedModel, shape: EngineConfig, cancel_check: CancelCheck) -> LocalRoles:
        runner = loaded.runner(self.models.options.tree_slots(self.side, shape), cancel_check)
        if self.side == "target":
            return LocalRoles(build_verifier(*runner, shape))
        return LocalRoles(drafter=build_drafter(*runner, shape))

    def follow(self) -> None:
        """Runs this rank, which is not rank 0, until rank 0 shuts it down. Raises RankLost if rank 0 exits without
        doing so."""
        rank = self.rank
        assert rank is not None and rank.connections.leader is not None
        leader = rank.connections.leader
        commands = CommandStream(leader)

        def open_session(shape: EngineConfig, masked: tuple[int, ...]) -> FollowerDispatcher:
            pause = CancelCheck()
            pause.cancelled = commands.prefill_aborted
            held = self.roles(shape, masked, pause)
            return FollowerDispatcher(held.verifier, held.drafter, None, self.bounds(shape))

        with self.models.device_errors_recorded(self.limits.shape):
            try:
                dispatch_loop(leader, commands, FollowerSessionRegistry(open_session).decode, rank.heartbeat)
            except BaseException:
                rank.leave(lost=True)
                raise
            rank.leave()


def make_worker(
    model: WorkerModel,
    name: str,
    vocabulary: VocabularyIdentity,
    files: tuple[Path, ...],
    on_device_error: Callable[[Exception], object] = lambda error: None,
) -> Worker:
    """Returns the worker that rank 0 runs.

    `name`: name of the model.
    `vocabulary`: that of its tokenizer.
    `files`: the tokenizer files that a client needs.
    """
    models, limits = model.models, model.limits
    info = ModelInfo(
        fingerprint(model.path),
        vocabulary.ordinary,
        name=name,
        vocab_size=models.options.vocab_size,
        max_model_len=models.options.max_model_len,
        eos_token_ids=models.options.vocabulary.eos_token_ids,
        dtype=str(model.loaded.model.dtype).removeprefix("torch."),
        added_tokens=vocabulary.added,
    )
    group = model.group or WorkerGroup(())
    followers: dict[ServedRole, SessionFollowerGroup] = {}  # of each session

    def open_session(shape: EngineConfig, masked: tuple[int, ...]) -> ServedRole:
        bounds, cancel_check, session_followers = model.bounds(shape), CancelCheck(), group.new_session(shape, masked)
        cancel_check.on_continue = partial(session_followers.broadcast, Opcode.PREFILL_CONTINUE)
        held = model.roles(shape, masked, cancel_check)
        if held.verifier is not None:
            verifier = LeaderVerifier(held.verifier, session_followers)
            role: ServedRole = ServedVerifier(verifier, bounds, cancel_check, shape)
        else:
            assert held.drafter is not None
            leading = LeaderDrafter(held.drafter, session_followers)
            if streams_tree_deltas(shape):
                assert isinstance(held.drafter, LookaheadDrafter)
                role = ServedTreeDrafter(held.drafter, leading, bounds, cancel_check, shape)
            else:
                role = ServedDrafter(leading, bounds, cancel_check, shape)
        followers[role] = session_followers
        return role

    def close_session(role: ServedRole) -> None:
        group.end_session(followers.pop(role))

    sessions = WorkerSessions(open_session, limits.sessions, limits.idle_timeout_s, on_end=close_session)

    def on_error(error: Exception) -> None:
        models.record_device_error(error, limits.shape)
        if any(each is not None and is_device_error(each) for each in (error, error.__cause__)):
            on_device_error(error)

    return Worker(model.side, info, sessions, files, models.options.device, on_error)
