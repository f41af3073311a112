"""Starts one rank of a job. On a group's leader it returns that group's roles, on any other rank it runs its life."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch

from swiftspec.config import EngineConfig
from swiftspec.control.step_times import SteppedDrafter, steps_for, verification_time
from swiftspec.distributed.collectives.join import AnyGroup, join_group
from swiftspec.distributed.draft.client import GroupDrafter
from swiftspec.distributed.draft.recovery import Comeback
from swiftspec.distributed.draft.server import DraftService, Recording
from swiftspec.distributed.group.leader import LeadingDrafter, LeadingPopulation, LeadingVerifier, Team, follow, park
from swiftspec.distributed.group.request_state import Bounds
from swiftspec.distributed.launch.config_check import Facts, Place, agree, telling
from swiftspec.distributed.launch.supervision import Members, Pulse
from swiftspec.distributed.launch.world import World, run_on
from swiftspec.distributed.transport.channel import Channel
from swiftspec.distributed.transport.connections import Links
from swiftspec.distributed.transport.opcodes import Call
from swiftspec.errors import DrafterLost, RankLost, UserError
from swiftspec.model.tensor_parallel import Group
from swiftspec.observe.recorder import Recorder
from swiftspec.runtime.cancellation import Pause
from swiftspec.runtime.drafter import NoDrafter
from swiftspec.runtime.fallback_drafter import FAILURES
from swiftspec.runtime.local_drafter import LocalDrafter
from swiftspec.runtime.verifier import LocalVerifier
from swiftspec.smc.population import SMC

Progress = Callable[[str, int, int], None]  # what is being done, step, steps


class Builder(Protocol):
    """Makes the roles of one rank; `assemble.models.Models` does."""

    @property
    def device(self) -> torch.device: ...
    @property
    def share_device(self) -> bool: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def pause(self) -> Pause: ...
    def with_vocab(self, vocab_size: int, /) -> Builder:
        """The same with the vocabulary of the whole job. Raises UserError where a model has no such many tokens."""
        ...

    def facts(self, config: EngineConfig, *, target: bool, draft: bool) -> Facts:
        """What all ranks of a job must agree on, and what those of the group with these models must. Raises UserError
        where files cannot be read."""
        ...

    def kernel_sums(self, *, target: bool, draft: bool) -> int:
        """How wide the products are that kernels of a group with these models sum over peer memory; 0: they do not."""
        ...

    def verifier(self, config: EngineConfig, group: Group | None, progress: Progress | None, /) -> LocalVerifier: ...
    def drafter(self, config: EngineConfig, group: Group | None, progress: Progress | None, /) -> LocalDrafter: ...
    def population(self, config: EngineConfig, group: Group | None, progress: Progress | None, /) -> SMC: ...


Role = LocalVerifier | LocalDrafter | SMC


def kinds_of(role: Role) -> set[str]:
    """The kinds of steps that it can use, by name."""
    return {kind.name for kind in role.steps_known}


def agree_on(role: Role, common: Container[str]) -> None:
    """Leaves it the kinds of steps that all ranks of its group can use."""
    agreed: list[Any] = [kind for kind in role.steps_known if kind.name in common]
    role.steps_known = agreed


class Rank:
    """Agrees with the other ranks on how they run, connects this one to them, loads its share of its group's models and
    waits until all have done so.

    Raises UserError on all ranks where they were not started alike; and on rank 0 when any rank cannot start, the
    others then are just sent home.
    """

    def __init__(self, world: World, config: EngineConfig, builder: Builder, progress: Progress | None) -> None:
        here = Place.of(world.rank, config)
        holds = {"target": here.side == "target", "draft": here.side == "draft" or config.mode in ("serial", "smc")}
        with telling(world):
            facts = builder.facts(config, **holds)
        whole = world
        self._world = world = world.next_job()
        keeping = world.keeping
        self._pulse = Pulse() if keeping is None else keeping.pulse
        self.members = Members((lambda members: None) if keeping is None else keeping.changed)
        self.members.take(agree(world, config, facts))
        self._links = Links.connect(world, config)
        vocab = self._links.share(builder.vocab_size)
        self._bounds = Bounds(vocab, builder.max_model_len, config.verify_batch)
        self.verifier: LocalVerifier | None = None
        self.drafter: LocalDrafter | None = None
        self.population: SMC | None = None
        self._group: AnyGroup | None = None
        self.comeback: Comeback | None = None  # of a draft that is lost, on rank 0
        error: str | None = None
        try:
            self._builder = builder = builder.with_vocab(vocab)
            self._builder.pause.pulse = self._pulse.work
            self._load(here, config, builder, holds, progress or self._loading)
        except UserError as problem:
            error = str(problem)
        except Exception as problem:  # no memory, no device, no group, a broken disk: rank 0 tells it
            error = f"rank {world.rank} cannot start: {str(problem) or type(problem).__name__}"
        kinds = {name for role in self._roles() for name in kinds_of(role)}
        try:
            common = self._links.report(error, kinds)
        except UserError:
            self.leave(comes_again=keeping is not None and keeping.life > 0)
            raise
        for role in self._roles():
            agree_on(role, common)
        self._pulse.rest()
        for role in ("target", "draft"):
            self.members.mark(role, "up")
        if keeping is not None and self._links.drafts is not None:
            self.comeback = Comeback(whole, config, facts, vocab, self.members, self._links)

    def _loading(self, what: str, step: int, steps: int) -> None:
        """Weights are being read."""
        self._pulse.work()

    def _load(
        self, here: Place, config: EngineConfig, builder: Builder, holds: dict[str, bool], progress: Progress | None
    ) -> None:
        """This rank's share of its group's models, and the roles on them."""
        if here.size > 1:
            self._group = join_group(
                self._world, here.side, here.rank, here.size, device=builder.device,
                share_device=builder.share_device, width=builder.kernel_sums(**holds),
            )  # fmt: skip
        if config.grouped is not None:
            self.population = builder.population(config, self._group, progress)
            return
        if here.side == "target":
            self.verifier = builder.verifier(config, self._group, progress)
        if holds["draft"]:
            self.drafter = builder.drafter(config, self._group, progress)

    def _roles(self) -> list[Role]:
        return [role for role in (self.verifier, self.drafter, self.population) if role is not None]

    def lead(
        self, config: EngineConfig, log: Recorder | None = None
    ) -> tuple[LeadingVerifier, SteppedDrafter, EngineConfig]:
        """The roles of rank 0, and the config with d filled in. `log`: where the draft's records go."""
        assert self.verifier is not None
        team = self._team()
        verifier = LeadingVerifier(self.verifier, team)
        if self._links.drafts is not None:
            drafter = GroupDrafter(
                self._links.drafts, config.steps, self._bounds, rejects=config.verify == "reject", records=log
            )
            if config.draft_steps is None:
                config = replace(config, draft_steps=self._measured(config, verifier, drafter))
            return verifier, drafter, config
        if self.drafter is not None:
            return verifier, LeadingDrafter(self.drafter, team), config
        return verifier, NoDrafter(), config

    def lead_population(self) -> LeadingPopulation:
        """The role of rank 0 in mode smc."""
        assert self.population is not None
        return LeadingPopulation(self.population, self._team())

    def _team(self) -> Team:
        """Whoever is led from here, also while a prompt is read."""
        team = Team(self._links.followers)
        self._builder.pause.tell = partial(team.tell, Call.GO_ON)
        return team

    def _measured(self, config: EngineConfig, verifier: LeadingVerifier, drafter: GroupDrafter) -> int:
        """d by the two step times, measured at the same time as they will run: they share caches and memory. A draft
        that cannot even do that is asked again when a request comes."""
        room = self._builder.max_model_len - 1
        try:
            drafter.measure(room)
            target = verification_time(verifier, config.verify_batch, room)
            steps = steps_for(target, drafter.times())
            drafter.draft_steps = steps
        except DrafterLost:
            return config.steps
        return steps

    def follow(self, *, traced: bool) -> None:
        """The life of any rank but 0, until it is sent home. `traced`: for a trace with exact times. Raises
        RankLost when whoever should send it home is gone."""
        leader = self._links.leader or self._links.target
        assert leader is not None
        comes_again = self._world.keeping is not None
        try:
            if self._links.target is not None and self.drafter is not None:
                recording = Recording(self._links.target, self.drafter, traced=traced)
                drafter = LeadingDrafter(self.drafter, self._team())
                DraftService(
                    self._links.target, drafter, self._bounds, recording, self._builder.pause, self._pulse,
                    stays=self._world.keeping is None,
                ).run()  # fmt: skip
            else:  # a follower; or a leader that could not start, and is told to leave
                self._follow(leader)
            comes_again = False
        finally:
            self.leave(comes_again=comes_again)

    def _follow(self, leader: Channel) -> None:
        """A follower of the draft whose model fails, and whom nobody starts again, stays until it is told to leave: the
        job goes on without it."""
        roles = self.verifier, self.drafter, self.population
        try:
            follow(leader, *roles, self._bounds, self._builder.pause, self._pulse)
        except FAILURES as error:
            if self._world.keeping is not None:
                raise RankLost(f"the model failed: {str(error) or type(error).__name__}") from error
            if self.verifier is not None or self.population is not None:
                raise
            self.drafter = None
            park(leader)

    def leave(self, *, comes_again: bool = False) -> None:
        """Sends home whoever is led from here, and leaves the group. `comes_again`: it does so without a word, as it is
        about to be started again, and so are they then."""
        if self.comeback is not None:
            self.comeback.close()
        self._links.leave(home=not comes_again)
        if self._world.meetings is not None and self._world.rank == 0 and not comes_again:
            self._world.meetings.end()
        run_on(set(self._world.cores))
        if self._group is not None:
            self._group.close()
            self._group = None
