"""One rank of a job: starts it, and hands out what its place makes of it: a leader's roles, or a follower's life."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import torch

from swiftspec.assemble import Models, Progress, fingerprint
from swiftspec.control.measure import steps_for, verification_time
from swiftspec.distributed.bridge import DraftService, GroupDrafter
from swiftspec.distributed.channel import Channel
from swiftspec.distributed.followers import LeadingDrafter, LeadingPopulation, LeadingVerifier, Team, follow, park
from swiftspec.distributed.groups import peers
from swiftspec.distributed.groups.gloo import TensorParallel
from swiftspec.distributed.groups.peers import PeerParallel
from swiftspec.distributed.groups.shm import SharedParallel
from swiftspec.distributed.trace import TracedBridge, teller
from swiftspec.distributed.world import Links, Place, World, run_on
from swiftspec.errors import DrafterLost, UserError
from swiftspec.observe.trace import LaneDrafter, TraceLog
from swiftspec.params import EngineConfig
from swiftspec.runtime.drafter import FAILURES, NoDrafter, SteppedDrafter
from swiftspec.runtime.local_drafter import LocalDrafter
from swiftspec.runtime.verifier import LocalVerifier
from swiftspec.smc.population import SMC

COLLECTIVE_TIMEOUT = timedelta(seconds=30)  # a peer this late inside a forward hangs; one that dies is found at once


class Rank:
    """Connects this rank to the others, loads its share of its group's models and waits until all have done so.

    Raises UserError on rank 0 when any rank cannot start; the others then are just sent home.
    """

    def __init__(self, world: World, plan: EngineConfig, models: Models, progress: Progress | None) -> None:
        here = Place.of(world.rank, plan)
        self._world = world = world.next_job()
        self._links = Links.connect(world, plan)
        self._models = models = replace(models, vocab_size=self._links.share(models.vocab_size))
        self._verifier: LocalVerifier | None = None
        self._drafter: LocalDrafter | None = None
        self._smc: SMC | None = None
        self._group: TensorParallel | PeerParallel | SharedParallel | None = None
        error: str | None = None
        try:
            if here.size > 1:
                self._group = _join(world, here, plan, models)
            if plan.mode == "smc":
                self._smc = models.population(plan, self._group, progress)
            elif here.side == "target":
                self._verifier = models.verifier(plan, self._group, progress)
            if here.side == "draft" or plan.mode == "serial":
                self._drafter = models.drafter(plan, self._group, progress)
        except UserError as problem:
            error = str(problem)
        except Exception as problem:  # no memory, no device, no group, a broken disk: rank 0 tells it
            error = f"rank {world.rank} cannot start: {str(problem) or type(problem).__name__}"
        mine = [models.target] if here.side == "target" else []
        drafts = here.side == "draft" or plan.mode in ("serial", "smc")
        mine += [models.draft] if drafts and models.draft is not None else []
        try:
            self._links.report([models.facts(plan), *map(fingerprint, mine)], error)
        except UserError:
            self.leave()
            raise

    def lead(
        self, plan: EngineConfig, log: TraceLog | None = None
    ) -> tuple[LeadingVerifier, SteppedDrafter, EngineConfig]:
        """The roles of rank 0, the draft's lane to the log where there is one, and the plan with d filled in."""
        assert self._verifier is not None
        team = Team(self._links.followers)
        verifier = LeadingVerifier(self._verifier, team)
        if self._links.drafts is not None:
            bridge = self._links.drafts if log is None else TracedBridge(self._links.drafts, log)
            drafter = GroupDrafter(bridge, plan.steps)
            if plan.draft_steps is None:
                plan = replace(plan, draft_steps=self._measured(plan, verifier, drafter))
            return verifier, drafter, plan
        if self._drafter is not None:
            own = self._drafter if log is None else LaneDrafter(self._drafter, log.draft)
            return verifier, LeadingDrafter(own, team), plan
        return verifier, NoDrafter(), plan

    def lead_population(self) -> LeadingPopulation:
        """The role of rank 0 in mode smc."""
        assert self._smc is not None
        return LeadingPopulation(self._smc, Team(self._links.followers))

    def _measured(self, plan: EngineConfig, verifier: LeadingVerifier, drafter: GroupDrafter) -> int:
        """d by the two step times, measured at the same time as they will run: they share caches and memory. A draft
        that cannot even do that is asked again when a request comes."""
        room = self._models.max_model_len - 1
        try:
            drafter.measure(room)
            target = verification_time(verifier, plan.verify_batch, room)
            steps = steps_for(target, drafter.times())
            drafter.steps = steps
        except DrafterLost:
            return plan.steps
        return steps

    def follow(self) -> None:
        """The life of any rank but 0, until it is sent home. Raises RankLost when whoever should do that is gone."""
        leader = self._links.leader or self._links.target
        assert leader is not None
        try:
            if self._links.target is not None and self._drafter is not None:
                traced = self._models.trace is not None
                own = LaneDrafter(self._drafter, teller(self._links.target)) if traced else self._drafter
                DraftService(self._links.target, LeadingDrafter(own, Team(self._links.followers))).run()
            else:  # a follower; or a leader that could not start, and is told to leave
                self._follow(leader)
        finally:
            self.leave()

    def _follow(self, leader: Channel) -> None:
        """A follower of the draft whose model fails stays until it is told to leave: the job goes on without it."""
        try:
            follow(leader, self._verifier, self._drafter, self._smc)
        except FAILURES:
            if self._verifier is not None or self._smc is not None:
                raise
            self._drafter = None
            park(leader)

    def leave(self) -> None:
        """Sends home whoever is led from here, and leaves the group."""
        self._links.leave()
        run_on(set(self._world.cores))
        if self._group is not None:
            self._group.close()
            self._group = None


def _join(
    world: World, here: Place, plan: EngineConfig, models: Models
) -> TensorParallel | PeerParallel | SharedParallel:
    """The group of this rank, over the fastest wire there is."""
    store, name, timeout = world.store, here.side, COLLECTIVE_TIMEOUT
    if world.one_machine and models.device.type == "cpu":
        return SharedParallel.join(store, name, here.rank, here.size, spin=world.spin, timeout=timeout)
    device, share = models.device, models.share_device
    if device.type == "cuda" and not share:
        torch.cuda.set_device(device)  # what NCCL goes by
        drafts = here.side == "draft" or plan.mode in ("serial", "smc")
        width = models.kernel_sums(target=here.side == "target", draft=drafts) if world.one_machine else 0
        return peers.join(store, name, here.rank, here.size, device=device, timeout=timeout, width=width)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return TensorParallel.join(store, name, here.rank, here.size, device=device, timeout=timeout, share_device=share)
