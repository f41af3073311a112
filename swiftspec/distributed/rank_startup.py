"""Startup of one rank: configuration check, connections, model loading, and its role as leader or follower."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch

from swiftspec.backends.cuda.devices import pci_address
from swiftspec.batching.scheduler import BatchScheduler
from swiftspec.config import EngineConfig
from swiftspec.control.step_times import SteppedDrafter, measure_verification_time, steps_for
from swiftspec.distributed.collectives.join import RankGroup, count_exchanges, end_startup, join_group
from swiftspec.distributed.collectives.leave import leave_group
from swiftspec.distributed.group.leader import (
    FollowerGroup,
    LeaderDrafter,
    LeaderScheduler,
    LeaderVerifier,
    run_follower,
    wait_for_shutdown,
)
from swiftspec.distributed.launch.config_check import RankConfig, RankRole, check_consistent, report_startup_error
from swiftspec.distributed.launch.supervision import Heartbeat, RankTable
from swiftspec.distributed.launch.world import World, cores_near_gpu, pin_to_cores
from swiftspec.distributed.remote.client import DraftLink, RemoteDrafter
from swiftspec.distributed.remote.draft_group import DraftGroupRecovery
from swiftspec.distributed.remote.reconnect import Reconnector
from swiftspec.distributed.remote.served_roles import DraftTraceSender
from swiftspec.distributed.remote.server import DraftGroupServer
from swiftspec.distributed.remote.server_link import ServerLink
from swiftspec.distributed.transport.connections import Connections
from swiftspec.distributed.transport.opcodes import Opcode
from swiftspec.distributed.transport.request_state import ModelLimits, RequestState
from swiftspec.distributed.transport.transport import Transport
from swiftspec.errors import DrafterLost, RankLost, UserError
from swiftspec.model.tensor_parallel import TensorParallelGroup
from swiftspec.observe.recorder import Recorder
from swiftspec.runtime.cancellation import CancelCheck
from swiftspec.runtime.drafter import NoDrafter
from swiftspec.runtime.fallback_drafter import FAILURES
from swiftspec.runtime.graph_capture import capture_graphs
from swiftspec.runtime.local_drafter import LocalDrafter
from swiftspec.runtime.verifier import LocalVerifier

Progress = Callable[[str, int, int], None]  # description, step, number of steps


class RoleOptions(Protocol):
    """Options of a rank's models. Implemented by `builder.model_pair.ModelPair`.

    Parameters `target` and `draft` of the methods: whether this rank loads the respective model.
    """

    @property
    def device(self) -> torch.device: ...
    @property
    def share_device(self) -> bool: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def masked_tokens(self) -> tuple[int, ...]: ...
    def rank_config(self, config: EngineConfig, *, target: bool, draft: bool) -> RankConfig:
        """Returns the configuration that must be the same on all ranks of the job, or on all ranks of one group.

        Raises UserError if model files cannot be read.
        """
        ...

    def peer_all_reduce_width(self, *, target: bool, draft: bool) -> int:
        """Returns the largest output size of a projection whose kernel all-reduces through peer memory; 0 if the models
        have no such kernel."""
        ...


class RoleBuilder(Protocol):
    """Builds the roles of one rank. Implemented by `builder.models.Models`."""

    @property
    def options(self) -> RoleOptions: ...
    @property
    def cancel_check(self) -> CancelCheck: ...
    def with_vocab(self, vocab_size: int, masked_tokens: tuple[int, ...], /) -> RoleBuilder:
        """Returns a copy with the vocabulary size of the job and the tokens that its draft never proposes. Raises
        UserError if a model's vocabulary is smaller."""
        ...

    def with_common_verdict(self, exchange: Callable[[str], Sequence[str]], /) -> RoleBuilder:
        """Returns a copy that uses the operators that work on the GPUs of all ranks of this rank's group. `exchange`:
        returns the texts that all ranks of the group pass to it."""
        ...

    def record_device_error(self, error: Exception, config: EngineConfig, /) -> None:
        """Records for the next start that the GPU of this process has failed. Does nothing for other errors."""
        ...

    def release_graphs(self) -> None:
        """Frees all CUDA graphs that the roles of this process have captured. All replays must have finished."""

    def verifier(
        self, config: EngineConfig, group: TensorParallelGroup | None, progress: Progress | None, /
    ) -> LocalVerifier: ...
    def drafter(
        self,
        config: EngineConfig,
        group: TensorParallelGroup | None,
        progress: Progress | None,
        verifier: LocalVerifier | None,
        /,
    ) -> LocalDrafter:
        """`verifier`: on the target of this rank; None: another rank has it."""
        ...

    def scheduler(
        self, config: EngineConfig, group: TensorParallelGroup | None, progress: Progress | None, /
    ) -> BatchScheduler: ...


Role = LocalVerifier | LocalDrafter | BatchScheduler


def _drafts_on_all_ranks(config: EngineConfig) -> bool:
    """Returns whether every rank runs both models."""
    return config.has_draft_model and config.mode != "async"


def executor_names(role: Role) -> set[str]:
    """Returns the names of the executors that `role` supports."""
    return {kind.name for kind in role.executors}


def restrict_executors(role: Role, common: Container[str]) -> None:
    """Removes all executors from `role` except those in `common`, the names that all ranks of its group support."""
    agreed: list[Any] = [kind for kind in role.executors if kind.name in common]
    role.executors = agreed


def agree_on_operators(builder: RoleBuilder, world: World, group: str, rank: int, size: int) -> RoleBuilder:
    """Returns the builder with the operators that all ranks of a group use: a trial may have a different result on each
    of their GPUs. `rank`: in the group. Must be called by all ranks of the group, before any of them joins it."""
    if size == 1 or builder.options.device.type != "cuda":
        return builder

    def exchange(text: str) -> Sequence[str]:
        keys = [f"{group} verdict {member}" for member in range(size)]
        world.store.set(keys[rank], text)
        return [world.store.get(key).decode() for key in keys]

    return builder.with_common_verdict(exchange)


class _PeerFailed(Exception):
    """Another rank of the group could not capture its graphs."""


class EngineRank:
    """One rank of an engine.

    The constructor checks that all ranks have the same configuration, connects this rank, joins its group and loads its
    shard of the group's models. It returns once this rank and the ranks that it leads have loaded; on rank 0 these are
    all ranks. Raises UserError on all ranks if configurations differ. If a rank cannot load, rank 0 raises UserError,
    and the other ranks receive SHUTDOWN.
    """

    def __init__(self, world: World, config: EngineConfig, builder: RoleBuilder, progress: Progress | None) -> None:
        here = RankRole.of(world.rank, config)
        holds = {"target": here.group == "target", "draft": here.group == "draft" or _drafts_on_all_ranks(config)}
        with report_startup_error(world):
            facts = builder.options.rank_config(config, **holds)
        whole = world
        self._world = world = world.next_engine()
        keeping = world.supervisor
        self._heartbeat = Heartbeat() if keeping is None else keeping.heartbeat
        self.rank_table = RankTable((lambda members: None) if keeping is None else keeping.on_ranks_changed)
        self.rank_table.update(check_consistent(world, config, facts))
        self._connections = Connections.connect(world, config)
        vocab, *masked = self._connections.broadcast_vocab(builder.options.vocab_size, builder.options.masked_tokens)
        self._limits = ModelLimits(vocab, builder.options.max_model_len, config.verify_batch)
        self.verifier: LocalVerifier | None = None
        self.drafter: LocalDrafter | None = None
        self.scheduler: BatchScheduler | None = None
        self._group: RankGroup | None = None
        self._team: FollowerGroup | None = None  # of rank 0 or of the draft's leader
        self.recovery: Reconnector | None = None  # set on rank 0 if a supervisor restarts a lost draft group
        error: str | None = None
        self._builder, self._config = builder, config
        try:
            builder = agree_on_operators(builder, world, here.group, here.group_rank, here.group_size)
            self._builder = builder = builder.with_vocab(vocab, tuple(masked))
            self._builder.cancel_check.on_progress = self._heartbeat.mark_busy
            self._load(here, config, builder, holds, progress or self._loading)
        except UserError as problem:
            error = str(problem)
        except Exception as problem:  # such as a lack of memory or a disk error: rank 0 reports it
            error = self._reason(problem)
        kinds = {name for role in self._roles() for name in executor_names(role)}
        error, common = self._connections.agree_in_group(error, kinds)
        if error is None:
            error = self._capture_graphs(common, config, progress or self._loading)
        try:
            self._connections.wait_ready(error)
        except UserError:
            self.leave(restarting=keeping is not None and keeping.incarnation > 0)
            raise
        self._heartbeat.mark_idle()
        for role in ("target", "draft"):
            self.rank_table.set_state(role, "up")
        if keeping is not None and self._connections.draft_leader is not None:
            recovery = DraftGroupRecovery(whole, config, facts, [vocab, *masked], self.rank_table, self._connections)
            self.recovery = recovery.reconnector

    def _capture_graphs(self, executors: Container[str], config: EngineConfig, progress: Progress) -> str | None:
        """Captures the graphs of the executors that all ranks of the group support. The ranks do so at the same time,
        since the captured forwards communicate, and wait for each other before each capture: no kernel waits for a rank
        that is still capturing, or has failed. Returns why a rank of the group failed, or None."""
        for role in self._roles():
            restrict_executors(role, executors)

        def barrier() -> None:
            problem, _ = self._connections.agree_in_group(None, set())
            if problem is not None:
                raise _PeerFailed(problem)

        error = lost = None
        done = set[str]()
        try:
            capture_graphs(self.verifier, self.drafter, config, progress, barrier)
            done = {"captured", f"{count_exchanges(self._group)} exchanges"}
        except _PeerFailed as failed:
            return str(failed)
        except RankLost as problem:  # the reason of the rank that has failed first is a better one
            lost = self._reason(problem)
        except Exception as problem:  # such as a lack of memory: rank 0 reports it
            error = self._reason(problem)
        error, common = self._connections.agree_in_group(error, done)
        if error is None and common == {"captured"}:
            return f"rank {self._world.rank} cannot start: the ranks of its group have captured different kernels"
        return error or lost

    def _reason(self, problem: Exception) -> str:
        """Returns in words why this rank cannot start, and records an error of its GPU."""
        self._record(problem)
        return f"rank {self._world.rank} cannot start: {str(problem) or type(problem).__name__}"

    def _record(self, error: Exception) -> None:
        self._builder.record_device_error(error, self._config)

    def _loading(self, what: str, step: int, steps: int) -> None:
        """Default progress callback: marks the rank as busy while it loads weights."""
        self._heartbeat.mark_busy()

    def _load(
        self,
        here: RankRole,
        config: EngineConfig,
        builder: RoleBuilder,
        holds: dict[str, bool],
        progress: Progress | None,
    ) -> None:
        """Joins this rank's group, loads its shard of the group's models and builds their roles."""
        pin_near_gpu(self._world, builder.options.device)
        if here.group_size > 1:
            self._group = join_group(
                self._world,
                here.group,
                here.group_rank,
                here.group_size,
                device=builder.options.device,
                share_device=builder.options.share_device,
                width=builder.options.peer_all_reduce_width(**holds),
            )
        if config.group_shape is not None:
            self.scheduler = builder.scheduler(config, self._group, progress)
            return
        if here.group == "target":
            self.verifier = builder.verifier(config, self._group, progress)
        if holds["draft"]:
            self.drafter = builder.drafter(config, self._group, progress, self.verifier)

    def _roles(self) -> list[Role]:
        return [role for role in (self.verifier, self.drafter, self.scheduler) if role is not None]

    def leader_roles(
        self, config: EngineConfig, log: Recorder | None = None
    ) -> tuple[LeaderVerifier, SteppedDrafter, EngineConfig]:
        """Returns rank 0's verifier, its drafter, and the config. With a draft group, d in the config is measured if it
        was None. `log`: receives the trace records of the draft group."""
        assert self.verifier is not None
        team = self._follower_group()
        verifier = LeaderVerifier(self.verifier, team)
        if self._connections.draft_leader is not None:
            state = RequestState(self._limits, rejection_sampling=config.verify == "reject")
            link = DraftLink(ServerLink(self._connections.draft_leader, state, "draft"), recorder=log)
            drafter = RemoteDrafter(link, config.initial_draft_steps)
            if config.draft_steps is None:
                config = replace(config, draft_steps=self._measure_draft_steps(config, verifier, drafter))
            return verifier, drafter, config
        if self.drafter is not None:
            return verifier, LeaderDrafter(self.drafter, team), config
        return verifier, NoDrafter(), config

    def leader_scheduler(self) -> LeaderScheduler:
        """Returns rank 0's scheduler, if requests are decoded in sequence groups (mode smc, or `max_num_seqs` > 1)."""
        assert self.scheduler is not None
        return LeaderScheduler(self.scheduler, self._follower_group())

    def _follower_group(self) -> FollowerGroup:
        """Returns the followers of this leader, and makes its cancellation check send them PREFILL_CONTINUE before each
        prefill chunk."""
        team = self._team = FollowerGroup(self._connections.followers, partial(end_startup, self._group))
        self._builder.cancel_check.on_continue = partial(team.broadcast, Opcode.PREFILL_CONTINUE)
        return team

    def _measure_draft_steps(self, config: EngineConfig, verifier: LeaderVerifier, drafter: RemoteDrafter) -> int:
        """Returns the d that follows from measured draft and target times, and sets it on the drafter. Returns the
        config's initial d if the draft group fails.

        Both times are measured concurrently, because draft and target share caches and memory bandwidth.
        """
        room = self._builder.options.max_model_len - 1
        try:
            drafter.measure(room)
            target = measure_verification_time(verifier, config.verify_batch, room)
            steps = steps_for(target, drafter.times())
            drafter.draft_steps = steps
        except DrafterLost:
            return config.initial_draft_steps
        return steps

    def run(self, *, traced: bool) -> None:
        """Runs the main loop of any rank except rank 0, until SHUTDOWN.

        `traced`: whether the draft's leader records its rounds with exact times from the start.
        Raises RankLost if the leader of this rank is gone without SHUTDOWN. The draft's leader is led by the target's
        leader.
        """
        leader = self._connections.leader or self._connections.target_leader
        assert leader is not None
        comes_again = self._world.supervisor is not None
        try:
            if self._connections.target_leader is not None and self.drafter is not None:
                recording = DraftTraceSender(self._connections.target_leader, self.drafter, traced=traced)
                drafter = LeaderDrafter(self.drafter, self._follower_group())
                DraftGroupServer(
                    self._connections.target_leader,
                    drafter,
                    self._limits,
                    recording,
                    self._builder.cancel_check,
                    self._heartbeat,
                    stay_on_error=self._world.supervisor is None,
                    on_error=self._record,
                ).run()
            else:  # a follower
                self._follow(leader)
        except BaseException:
            self.leave(restarting=comes_again, lost=True)
            raise
        self.leave()

    def _follow(self, leader: Transport) -> None:
        """Executes the leader's commands until SHUTDOWN.

        If the model of this rank fails: a supervised rank raises RankLost, so that it is restarted; a draft follower
        without a supervisor ignores all further commands until SHUTDOWN, since the job continues without the draft; any
        other rank raises the error.
        """
        roles = self.verifier, self.drafter, self.scheduler
        try:
            run_follower(leader, *roles, self._limits, self._builder.cancel_check, self._heartbeat)
        except FAILURES as error:
            self._record(error)
            if self._world.supervisor is not None:
                raise RankLost(f"the model failed: {str(error) or type(error).__name__}") from error
            if self.verifier is not None or self.scheduler is not None:
                raise
            self.drafter = None
            wait_for_shutdown(leader)

    def leave(self, *, restarting: bool = False, lost: bool = False) -> None:
        """Sends SHUTDOWN to the ranks that this rank leads, closes the connections, frees the captured graphs and
        leaves the group. The roles cannot be used afterwards.

        `restarting`: this rank and its followers are about to be restarted, so SHUTDOWN is not sent.
        `lost`: a rank is lost, or this one has failed. Never raises then, so that no other error replaces this one.

        If a rank is lost or the ranks of the group have diverged, the communicator is aborted, and the process has to
        exit next (`leave_group`).
        """
        lost = lost or restarting or (self._team is not None and self._team.broken is not None)
        world, steps = self._world, list[Callable[[], object]]()
        if self.recovery is not None:
            steps.append(self.recovery.close)
        steps.append(partial(self._connections.close, shutdown=not restarting))
        if world.rendezvous is not None and world.rank == 0 and not restarting:
            steps.append(world.rendezvous.end_job)
        if leave_job(world, steps, self._group, self._builder, lost=lost):
            self.verifier = self.drafter = self.scheduler = self._group = None


def leave_job(
    world: World, steps: Sequence[Callable[[], object]], group: RankGroup | None, builder: RoleBuilder, *, lost: bool
) -> bool:
    """Disconnects a rank by `steps`, releases its cores and leaves its group, each even if another one fails. Returns
    whether roles and group can be dropped: if a rank is lost, they keep their GPU memory, which kernels may still use.

    `lost`: see `EngineRank.leave`: errors of lost connections and of the store are then ignored.
    """
    with suppress(*(OSError, RuntimeError) if lost else ()), ExitStack() as rest:
        if group is not None:
            rest.callback(_leave_group, world, group, builder, lost=lost)
        rest.callback(pin_to_cores, set(world.cores))
        for step in reversed(steps):  # the stack calls the last one first
            rest.callback(step)
    return group is not None and not lost


def _leave_group(world: World, group: RankGroup, builder: RoleBuilder, *, lost: bool) -> None:
    """Leaves a group, and reports on the log if that fails unless a rank is lost."""
    problem = leave_group(group, builder.options.device, builder.release_graphs, lost=lost)
    if problem is not None and not lost:
        world.log(f"rank {world.rank} could not leave its group: {problem}")


def pin_near_gpu(world: World, device: torch.device) -> None:
    """Pins the calling thread, and the threads that it starts, to the cores of its GPU's NUMA node, which ranks with
    GPUs of the same node share. Without a GPU, the thread keeps the cores that `World` has reserved for this rank."""
    if device.type == "cuda":
        pin_to_cores(cores_near_gpu(pci_address(device), world.cores))
