"""Start and end of one rank, of a job or of a worker, and what the ranks of a job other than rank 0 run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from swiftspec.backends.cuda.devices import pci_address
from swiftspec.builder.models import LocalRoles, Models
from swiftspec.config import EngineConfig
from swiftspec.distributed.collectives.join import RankGroup, count_exchanges, end_startup, join_group
from swiftspec.distributed.collectives.leave import leave_group
from swiftspec.distributed.group.concurrent_requests import FollowerRequests, LeaderCallQueue
from swiftspec.distributed.group.follower_dispatch import FollowerDispatcher
from swiftspec.distributed.group.leader import FollowerGroup, LeaderDrafter, run_follower, wait_for_shutdown
from swiftspec.distributed.launch.config_check import RankConfig, RankRole, check_consistent, report_startup_error
from swiftspec.distributed.launch.supervisor_link import Heartbeat, RankTable
from swiftspec.distributed.launch.world import World, cores_near_gpu, pin_to_cores
from swiftspec.distributed.remote.failover import DraftGroupRecovery
from swiftspec.distributed.remote.reconnector import Reconnector
from swiftspec.distributed.remote.served_roles import DraftTraceSender
from swiftspec.distributed.remote.server import (
    ConcurrentDraftGroupServer,
    DraftGroupServer,
    suspend_until_received,
)
from swiftspec.distributed.transport.channels import ChannelSet
from swiftspec.distributed.transport.connections import Connections
from swiftspec.distributed.transport.opcodes import Opcode
from swiftspec.distributed.transport.request_state import ModelLimits
from swiftspec.distributed.transport.transport import Transport
from swiftspec.distributed.worker_group import WorkerGroup
from swiftspec.errors import RankLost, UserError
from swiftspec.model.checkpoint_files import Progress
from swiftspec.runtime.fallback_drafter import FAILURES
from swiftspec.runtime.graph_capture import capture_graphs, run_captures
from swiftspec.runtime.local_drafter import LocalDrafter

Load = Callable[["Rank"], LocalRoles]  # loads the models of a rank and returns the roles on them


class _PeerFailed(Exception):
    """Another rank of the group could not capture its graphs."""


@dataclass(slots=True)
class Rank:
    """A rank that is connected to the others. `start_engine_rank` and `start_worker_rank` return it once it has loaded.

    `role`: its place in its group.
    `limits`: those of requests, with the vocabulary of rank 0.
    `masked_tokens`: those that the draft of the job never proposes.
    `group`: the ranks with the other shards of its models; None if it is alone.
    `held`: the roles on its models.
    `executor_names`: those of the executors that all ranks of the group support.
    `team`: what this rank leads: the followers of a job, or those of a worker with its sessions.
    `recovery`: restarts a lost draft group; on rank 0 of a supervised job.
    """

    world: World
    config: EngineConfig
    models: Models
    role: RankRole
    connections: Connections
    limits: ModelLimits
    masked_tokens: tuple[int, ...]
    heartbeat: Heartbeat
    rank_table: RankTable
    group: RankGroup | None = None
    held: LocalRoles = field(default_factory=LocalRoles)
    executor_names: set[str] = field(default_factory=set)
    team: FollowerGroup | WorkerGroup | None = None
    recovery: Reconnector | None = None

    def load(self, width: Mapping[str, bool], load: Load) -> str | None:
        """Joins the group of this rank and loads its models, as all ranks of the group do. Returns why one of them
        failed, or None. `width`: see `Plan.peer_all_reduce_width`."""
        error = None
        try:
            self.models = agree_on_operators(self.models, self.world, self.role)
            self.models = self.models.with_vocab(self.limits.vocab_size, self.masked_tokens)
            self._join(width)
            self.held = load(self)
        except UserError as problem:
            error = str(problem)
        except Exception as problem:  # such as a lack of memory or a disk error: rank 0 reports it
            error = self._reason(problem)
        error, self.executor_names = self.connections.agree_in_group(error, self.held.executor_names)
        return error

    def _join(self, width: Mapping[str, bool]) -> None:
        options = self.models.options
        pin_near_gpu(self.world, options.device)
        if self.role.group_size > 1:
            self.group = join_group(
                self.world,
                self.role.group,
                self.role.group_rank,
                self.role.group_size,
                device=options.device,
                share_device=options.gpu.share_device,
                width=options.peer_all_reduce_width(**width),
            )

    def capture_graphs(self, progress: Progress) -> str | None:
        """Captures the graphs of the executors that all ranks of the group support. The ranks do so at the same time,
        since the captured forwards communicate, and wait for each other before each capture: no kernel waits for a rank
        that is still capturing, or has failed. Returns why a rank of the group failed, or None."""
        self.held.restrict_executors(self.executor_names)

        def barrier() -> None:
            problem, _ = self.connections.agree_in_group(None, set())
            if problem is not None:
                raise _PeerFailed(problem)

        error = lost = None
        done = set[str]()
        try:
            capture_graphs(self.held.verifier, self.held.drafter, self.config, progress, barrier)
            if self.held.scheduler is not None:
                run_captures(self.held.scheduler.captures(), progress, barrier)
            done = {"captured", f"{count_exchanges(self.group)} exchanges"}
        except _PeerFailed as failed:
            return str(failed)
        except RankLost as problem:  # the reason of the rank that has failed first is a better one
            lost = self._reason(problem)
        except Exception as problem:  # such as a lack of memory: rank 0 reports it
            error = self._reason(problem)
        error, common = self.connections.agree_in_group(error, done)
        if error is None and common == {"captured"}:
            return f"rank {self.world.rank} cannot start: the ranks of its group have captured different kernels"
        return error or lost

    def wait_ready(self, error: str | None) -> None:
        """Waits until all ranks have loaded. Leaves the job and raises UserError if one of them could not. `error`: why
        this rank, or a rank of its group, could not."""
        try:
            self.connections.wait_ready(error)
        except UserError:
            self.leave(restarting=self.world.incarnation > 0)
            raise

    def lead(self) -> FollowerGroup:
        """Returns the followers of this leader of a job, and makes its cancellation check send them PREFILL_CONTINUE
        before each prefill chunk."""
        team = FollowerGroup(self.connections.followers, partial(end_startup, self.group))
        self.models.cancel_check.on_continue = partial(team.broadcast, Opcode.PREFILL_CONTINUE)
        self.team = team
        return team

    def record(self, error: Exception) -> None:
        """Records an error of this rank's GPU for the next start."""
        self.models.record_device_error(error, self.config)

    def _reason(self, problem: Exception) -> str:
        """Returns in words why this rank cannot start, and records an error of its GPU."""
        self.record(problem)
        return f"rank {self.world.rank} cannot start: {str(problem) or type(problem).__name__}"

    def leave(self, *, restarting: bool = False, lost: bool = False) -> None:
        """Sends SHUTDOWN to the ranks that this rank leads, closes the connections, frees the captured graphs and
        leaves the group. The roles cannot be used afterwards.

        `restarting`: this rank and its followers are about to be restarted, so SHUTDOWN is not sent.
        `lost`: a rank is lost, or this one has failed. Never raises then, so that no other error replaces this one.

        If a rank is lost or the ranks of the group have diverged, the communicator is aborted, and the process has to
        exit next (`leave_group`). Roles and group then keep their GPU memory, which kernels may still use.
        """
        lost = lost or restarting or (self.team is not None and self.team.broken is not None)
        world, steps = self.world, list[Callable[[], object]]()
        if world.rendezvous is not None and world.rank == 0 and not restarting:
            steps.append(world.rendezvous.end_job)  # first, so that ranks know it when their connections close
        if self.recovery is not None:
            steps.append(self.recovery.close)
        steps.append(partial(self.connections.close, shutdown=not restarting))
        steps.append(partial(pin_to_cores, set(world.cores)))
        if self.group is not None:
            steps.append(partial(self._leave_group, self.group, lost=lost))
        # errors of lost connections and of the store are expected then; each step is done even if another one fails
        with suppress(*(OSError, RuntimeError) if lost else ()), ExitStack() as rest:
            for step in reversed(steps):  # the stack calls the last one first
                rest.callback(step)
        if self.group is not None and not lost:
            self.held, self.group = LocalRoles(), None

    def _leave_group(self, group: RankGroup, *, lost: bool) -> None:
        """Leaves the group, and reports on the log if that fails unless a rank is lost."""
        problem = leave_group(group, self.models.options.device, self.models.release_graphs, lost=lost)
        if problem is not None and not lost:
            self.world.log(f"rank {self.world.rank} could not leave its group: {problem}")


def start_engine_rank(world: World, config: EngineConfig, models: Models, progress: Progress | None) -> Rank:
    """Starts a rank of a job. Returns once this rank and the ranks that it leads have loaded; on rank 0 these are all
    ranks. Raises UserError on all ranks if configurations differ. If a rank cannot load, rank 0 raises UserError, and
    the other ranks receive SHUTDOWN."""
    role = RankRole.of(world.rank, config)
    shared = config.has_draft_model and config.mode != "async"  # every rank runs both models
    holds = {"target": role.group == "target", "draft": role.group == "draft" or shared}
    facts = _rank_config(world, config, models, holds)
    rank = _connect(world, config, models, facts)
    models.cancel_check.on_progress = rank.heartbeat.mark_busy
    shown = progress or (lambda what, step, steps: rank.heartbeat.mark_busy())
    error = rank.load(holds, lambda rank: rank.models.load_roles(config, rank.group, shown, **holds))
    rank.wait_ready(error or rank.capture_graphs(shown))
    rank.heartbeat.mark_idle()
    for group in ("target", "draft"):
        rank.rank_table.set_state(group, "up")
    if world.supervisor is not None and rank.connections.draft_leader is not None:
        vocab = [rank.limits.vocab_size, *rank.masked_tokens]
        recovery = DraftGroupRecovery(world, config, facts, vocab, rank.rank_table, rank.connections)
        rank.recovery = recovery.reconnector
    return rank


def start_worker_rank(
    world: World, config: EngineConfig, models: Models, settings: Mapping[str, Any], load: Load
) -> Rank:
    """Starts a rank of a worker, as `start_engine_rank` does. `settings`: further values that must be equal on all
    ranks. `load`: returns roles with the executors that sessions can use, which are dropped after the start."""
    holds = {"target": config.mode == "ar", "draft": config.mode != "ar"}
    facts = _rank_config(world, config, models, holds)
    rank = _connect(world, config, models, replace(facts, settings={**facts.settings, **settings}))
    rank.team = WorkerGroup(rank.connections.followers, lambda: end_startup(rank.group))
    rank.wait_ready(rank.load(holds, load))
    rank.held = LocalRoles()
    return rank


def _rank_config(world: World, config: EngineConfig, models: Models, holds: Mapping[str, bool]) -> RankConfig:
    with report_startup_error(world):
        return models.options.rank_config(config, **holds)


def _connect(world: World, config: EngineConfig, models: Models, facts: RankConfig) -> Rank:
    """Checks that the configurations of all ranks agree, and connects this one to the others."""
    supervisor, world = world.supervisor, world.next_engine()
    table = RankTable((lambda members: None) if supervisor is None else supervisor.on_ranks_changed)
    table.update(check_consistent(world, config, facts))
    connections = Connections.connect(world, config)
    vocab, *masked = connections.broadcast_vocab(models.options.vocab_size, models.options.vocabulary.masked_tokens)
    limits = ModelLimits(vocab, models.options.max_model_len, config.verify_batch)
    heartbeat = Heartbeat() if supervisor is None else supervisor.heartbeat
    role = RankRole.of(world.rank, config)
    return Rank(
        world,
        config,
        models,
        role,
        connections=connections,
        limits=limits,
        masked_tokens=tuple(masked),
        heartbeat=heartbeat,
        rank_table=table,
    )


def agree_on_operators(models: Models, world: World, role: RankRole) -> Models:
    """Returns the models with the operators that all ranks of a group use: a trial may have a different result on each
    of their GPUs. Must be called by all ranks of the group, before any of them joins it."""
    if role.group_size == 1 or models.options.device.type != "cuda":
        return models

    def exchange(text: str) -> Sequence[str]:
        keys = [f"{role.group} verdict {member}" for member in range(role.group_size)]
        world.store.set(keys[role.group_rank], text)
        return [world.store.get(key).decode() for key in keys]

    return models.with_common_verdict(exchange)


def run_until_shutdown(rank: Rank, *, traced: bool) -> None:
    """Runs the main loop of any rank of a job except rank 0, until SHUTDOWN.

    `traced`: whether the draft's leader records its rounds with exact times from the start.
    Raises RankLost if the leader of this rank is gone without SHUTDOWN. The draft's leader is led by the target's
    leader.
    """
    supervised, target = rank.world.supervisor is not None, rank.connections.target_leader
    leader = rank.connections.leader or target
    assert leader is not None

    def on_error(error: Exception) -> None:
        rank.record(error)
        if supervised and isinstance(error, RankLost):  # the group is broken: this rank is restarted
            raise error

    def serve(channel: Transport, drafter: LocalDrafter, team: FollowerGroup) -> DraftGroupServer:
        return DraftGroupServer(
            channel,
            LeaderDrafter(drafter, team),
            rank.limits,
            DraftTraceSender(channel, drafter, traced=traced),
            rank.models.cancel_check,
            rank.heartbeat,
            on_error=on_error,
        )

    try:
        if target is None or rank.held.drafter is None:
            _follow(rank, leader)
        elif not rank.held.others:
            serve(target, rank.held.drafter, rank.lead()).run()
        else:
            _serve_concurrent_requests(rank, target, serve)
    except BaseException:
        rank.leave(restarting=supervised, lost=True)
        raise
    rank.leave()


def _serve_concurrent_requests(
    rank: Rank, target: Transport, serve: Callable[[Transport, LocalDrafter, FollowerGroup], DraftGroupServer]
) -> None:
    """Serves several requests on the draft's leader until SHUTDOWN. `serve`: returns the server of one of them."""
    calls = LeaderCallQueue(rank.lead())
    for pool in rank.held.pools:
        pool.calls = calls
    drafters = [each.drafter for each in (rank.held, *rank.held.others) if each.drafter is not None]
    channels = ChannelSet(target, len(drafters), suspend_until_received)
    servers = [
        serve(channel, drafter, calls.group_of(index))
        for index, (channel, drafter) in enumerate(zip(channels.channels, drafters, strict=True))
    ]
    ConcurrentDraftGroupServer(channels, servers, calls, rank.models.cancel_check, rank.heartbeat).run()


def _follow(rank: Rank, leader: Transport) -> None:
    """Executes the leader's commands until SHUTDOWN.

    If the model of this rank fails: a supervised rank raises RankLost, so that it is restarted; a draft follower
    without a supervisor ignores all further commands until SHUTDOWN, since the job continues without the draft; any
    other rank raises the error.
    """
    held = rank.held
    first, *others = (
        FollowerDispatcher(each.verifier, each.drafter, each.scheduler, rank.limits) for each in (held, *held.others)
    )
    decode = FollowerRequests([first, *others], held.pools[0].calls).decode if others else first.decode
    try:
        run_follower(leader, decode, rank.models.cancel_check, rank.heartbeat)
    except FAILURES as error:
        rank.record(error)
        if rank.world.supervisor is not None:
            raise RankLost(f"the model failed: {str(error) or type(error).__name__}") from error
        if held.verifier is not None or held.scheduler is not None:
            raise
        held.drafter = None
        wait_for_shutdown(leader)


def pin_near_gpu(world: World, device: torch.device) -> None:
    """Pins the calling thread, and the threads that it starts, to the cores of its GPU's NUMA node, which ranks with
    GPUs of the same node share. Without a GPU, the thread keeps the cores that `World` has reserved for this rank."""
    if device.type == "cuda":
        pin_to_cores(cores_near_gpu(pci_address(device), world.cores))
