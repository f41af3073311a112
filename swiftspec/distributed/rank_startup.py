"""Starts one rank of a job. On a group's leader it returns that group's roles, on any other rank it runs its life."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch

from swiftspec.config import EngineConfig
from swiftspec.control.step_times import SteppedDrafter, measure_verification_time, steps_for
from swiftspec.distributed.collectives.join import RankGroup, join_group
from swiftspec.distributed.draft.client import DraftGroupClient
from swiftspec.distributed.draft.recovery import DraftGroupRecovery
from swiftspec.distributed.draft.server import DraftGroupServer, DraftTraceSender
from swiftspec.distributed.group.leader import (
    FollowerGroup,
    LeaderDrafter,
    LeaderPopulation,
    LeaderVerifier,
    run_follower,
    wait_for_shutdown,
)
from swiftspec.distributed.group.request_state import ModelLimits
from swiftspec.distributed.launch.config_check import RankConfig, RankRole, check_consistent, report_startup_error
from swiftspec.distributed.launch.supervision import Heartbeat, RankTable
from swiftspec.distributed.launch.world import World, pin_to_cores
from swiftspec.distributed.transport.channel import Channel
from swiftspec.distributed.transport.connections import Connections
from swiftspec.distributed.transport.opcodes import Opcode
from swiftspec.errors import DrafterLost, RankLost, UserError
from swiftspec.model.tensor_parallel import TensorParallelGroup
from swiftspec.observe.recorder import Recorder
from swiftspec.runtime.cancellation import CancelCheck
from swiftspec.runtime.drafter import NoDrafter
from swiftspec.runtime.fallback_drafter import FAILURES
from swiftspec.runtime.local_drafter import LocalDrafter
from swiftspec.runtime.verifier import LocalVerifier
from swiftspec.smc.population import LocalPopulation

Progress = Callable[[str, int, int], None]  # what is being done, step, steps


class RoleBuilder(Protocol):
    """Makes the roles of one rank; `builder.model_pair.ModelPair` does."""

    @property
    def device(self) -> torch.device: ...
    @property
    def share_device(self) -> bool: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def cancel_check(self) -> CancelCheck: ...
    def with_vocab(self, vocab_size: int, /) -> RoleBuilder:
        """The same with the vocabulary of the whole job. Raises UserError where a model has no such many tokens."""
        ...

    def rank_config(self, config: EngineConfig, *, target: bool, draft: bool) -> RankConfig:
        """What all ranks of a job must agree on, and what those of the group with these models must. Raises UserError
        where files cannot be read."""
        ...

    def kernel_sums(self, *, target: bool, draft: bool) -> int:
        """How wide the products are that kernels of a group with these models sum over peer memory; 0: they do not."""
        ...

    def verifier(
        self, config: EngineConfig, group: TensorParallelGroup | None, progress: Progress | None, /
    ) -> LocalVerifier: ...
    def drafter(
        self, config: EngineConfig, group: TensorParallelGroup | None, progress: Progress | None, /
    ) -> LocalDrafter: ...
    def population(
        self, config: EngineConfig, group: TensorParallelGroup | None, progress: Progress | None, /
    ) -> LocalPopulation: ...


Role = LocalVerifier | LocalDrafter | LocalPopulation


def executor_names(role: Role) -> set[str]:
    """The kinds of steps that it can use, by name."""
    return {kind.name for kind in role.executors}


def restrict_executors(role: Role, common: Container[str]) -> None:
    """Leaves it the kinds of steps that all ranks of its group can use."""
    agreed: list[Any] = [kind for kind in role.executors if kind.name in common]
    role.executors = agreed


class EngineRank:
    """Agrees with the other ranks on how they run, connects this one to them, loads its share of its group's models and
    waits until all have done so.

    Raises UserError on all ranks where they were not started alike; and on rank 0 when any rank cannot start, the
    others then are just sent home.
    """

    def __init__(self, world: World, config: EngineConfig, builder: RoleBuilder, progress: Progress | None) -> None:
        here = RankRole.of(world.rank, config)
        holds = {"target": here.group == "target", "draft": here.group == "draft" or config.mode in ("serial", "smc")}
        with report_startup_error(world):
            facts = builder.rank_config(config, **holds)
        whole = world
        self._world = world = world.next_job()
        keeping = world.supervisor
        self._heartbeat = Heartbeat() if keeping is None else keeping.heartbeat
        self.rank_table = RankTable((lambda members: None) if keeping is None else keeping.on_ranks_changed)
        self.rank_table.update(check_consistent(world, config, facts))
        self._connections = Connections.connect(world, config)
        vocab = self._connections.broadcast_value(builder.vocab_size)
        self._limits = ModelLimits(vocab, builder.max_model_len, config.verify_batch)
        self.verifier: LocalVerifier | None = None
        self.drafter: LocalDrafter | None = None
        self.population: LocalPopulation | None = None
        self._group: RankGroup | None = None
        self.recovery: DraftGroupRecovery | None = None  # of a draft that is lost, on rank 0
        error: str | None = None
        try:
            self._builder = builder = builder.with_vocab(vocab)
            self._builder.cancel_check.on_progress = self._heartbeat.mark_busy
            self._load(here, config, builder, holds, progress or self._loading)
        except UserError as problem:
            error = str(problem)
        except Exception as problem:  # no memory, no device, no group, a broken disk: rank 0 tells it
            error = f"rank {world.rank} cannot start: {str(problem) or type(problem).__name__}"
        kinds = {name for role in self._roles() for name in executor_names(role)}
        try:
            common = self._connections.wait_ready(error, kinds)
        except UserError:
            self.leave(restarting=keeping is not None and keeping.incarnation > 0)
            raise
        for role in self._roles():
            restrict_executors(role, common)
        self._heartbeat.mark_idle()
        for role in ("target", "draft"):
            self.rank_table.set_state(role, "up")
        if keeping is not None and self._connections.draft_leader is not None:
            self.recovery = DraftGroupRecovery(whole, config, facts, vocab, self.rank_table, self._connections)

    def _loading(self, what: str, step: int, steps: int) -> None:
        """Weights are being read."""
        self._heartbeat.mark_busy()

    def _load(
        self,
        here: RankRole,
        config: EngineConfig,
        builder: RoleBuilder,
        holds: dict[str, bool],
        progress: Progress | None,
    ) -> None:
        """This rank's share of its group's models, and the roles on them."""
        if here.group_size > 1:
            self._group = join_group(
                self._world, here.group, here.group_rank, here.group_size, device=builder.device,
                share_device=builder.share_device, width=builder.kernel_sums(**holds),
            )  # fmt: skip
        if config.effective_population is not None:
            self.population = builder.population(config, self._group, progress)
            return
        if here.group == "target":
            self.verifier = builder.verifier(config, self._group, progress)
        if holds["draft"]:
            self.drafter = builder.drafter(config, self._group, progress)

    def _roles(self) -> list[Role]:
        return [role for role in (self.verifier, self.drafter, self.population) if role is not None]

    def leader_roles(
        self, config: EngineConfig, log: Recorder | None = None
    ) -> tuple[LeaderVerifier, SteppedDrafter, EngineConfig]:
        """The roles of rank 0, and the config with d filled in. `log`: where the draft's records go."""
        assert self.verifier is not None
        team = self._follower_group()
        verifier = LeaderVerifier(self.verifier, team)
        if self._connections.draft_leader is not None:
            drafter = DraftGroupClient(
                self._connections.draft_leader,
                config.initial_draft_steps,
                self._limits,
                rejection_sampling=config.verify == "reject",
                recorder=log,
            )
            if config.draft_steps is None:
                config = replace(config, draft_steps=self._measure_draft_steps(config, verifier, drafter))
            return verifier, drafter, config
        if self.drafter is not None:
            return verifier, LeaderDrafter(self.drafter, team), config
        return verifier, NoDrafter(), config

    def leader_population(self) -> LeaderPopulation:
        """The role of rank 0 in mode smc."""
        assert self.population is not None
        return LeaderPopulation(self.population, self._follower_group())

    def _follower_group(self) -> FollowerGroup:
        """Whoever is led from here, also while a prompt is read."""
        team = FollowerGroup(self._connections.followers)
        self._builder.cancel_check.on_continue = partial(team.broadcast, Opcode.PREFILL_CONTINUE)
        return team

    def _measure_draft_steps(self, config: EngineConfig, verifier: LeaderVerifier, drafter: DraftGroupClient) -> int:
        """d by the two step times, measured at the same time as they will run: they share caches and memory. A draft
        that cannot even do that is asked again when a request comes."""
        room = self._builder.max_model_len - 1
        try:
            drafter.measure(room)
            target = measure_verification_time(verifier, config.verify_batch, room)
            steps = steps_for(target, drafter.times())
            drafter.draft_steps = steps
        except DrafterLost:
            return config.initial_draft_steps
        return steps

    def run(self, *, traced: bool) -> None:
        """The life of any rank but 0, until it is sent home. `traced`: for a trace with exact times. Raises
        RankLost when whoever should send it home is gone."""
        leader = self._connections.leader or self._connections.target_leader
        assert leader is not None
        comes_again = self._world.supervisor is not None
        try:
            if self._connections.target_leader is not None and self.drafter is not None:
                recording = DraftTraceSender(self._connections.target_leader, self.drafter, traced=traced)
                drafter = LeaderDrafter(self.drafter, self._follower_group())
                DraftGroupServer(
                    self._connections.target_leader, drafter, self._limits, recording, self._builder.cancel_check,
                    self._heartbeat,
                    stay_on_error=self._world.supervisor is None,
                ).run()  # fmt: skip
            else:  # a follower; or a leader that could not start, and is told to leave
                self._follow(leader)
            comes_again = False
        finally:
            self.leave(restarting=comes_again)

    def _follow(self, leader: Channel) -> None:
        """A follower of the draft whose model fails, and whom nobody starts again, stays until it is told to leave: the
        job goes on without it."""
        roles = self.verifier, self.drafter, self.population
        try:
            run_follower(leader, *roles, self._limits, self._builder.cancel_check, self._heartbeat)
        except FAILURES as error:
            if self._world.supervisor is not None:
                raise RankLost(f"the model failed: {str(error) or type(error).__name__}") from error
            if self.verifier is not None or self.population is not None:
                raise
            self.drafter = None
            wait_for_shutdown(leader)

    def leave(self, *, restarting: bool = False) -> None:
        """Sends home whoever is led from here, and leaves the group. `comes_again`: it does so without a word, as it is
        about to be started again, and so are they then."""
        if self.recovery is not None:
            self.recovery.close()
        self._connections.close(shutdown=not restarting)
        if self._world.rendezvous is not None and self._world.rank == 0 and not restarting:
            self._world.rendezvous.end_job()
        pin_to_cores(set(self._world.cores))
        if self._group is not None:
            self._group.close()
            self._group = None
