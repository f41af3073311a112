"""The roles that rank 0, or a process alone, decodes on, and who observes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from swiftspec.assemble.limits import RequestLimits
from swiftspec.assemble.models import Models
from swiftspec.config import EngineConfig
from swiftspec.control.controller import Controller
from swiftspec.control.record import Measured
from swiftspec.control.step_times import SteppedDrafter
from swiftspec.decode import Observer, nobody
from swiftspec.distributed.bridge import GroupDrafter
from swiftspec.distributed.patient import Outage, PatientDrafter
from swiftspec.distributed.rank import Progress, Rank
from swiftspec.distributed.world import World
from swiftspec.engine import Decoding, TreeDecoding
from swiftspec.model.files import read_config
from swiftspec.observe.trace import DraftTrace, ParticleTrace, TraceLog, TreeTrace, both
from swiftspec.params import SamplingParams
from swiftspec.runtime.drafter import Drafter, NoDrafter
from swiftspec.runtime.fallback import FallbackDrafter
from swiftspec.runtime.local_drafter import LocalDrafter
from swiftspec.runtime.threaded import ThreadedVerifier, warm_up
from swiftspec.runtime.verifier import Verifier
from swiftspec.sampling.grammar import Grammars
from swiftspec.smc.decoding import ParticleDecoding
from swiftspec.smc.population import SMC, check_sampling


@dataclass(frozen=True, slots=True)
class Tree:
    """The roles that decode by a draft tree, before anything is put around the drafter."""

    drafter: SteppedDrafter
    verifier: Verifier


@dataclass(frozen=True, slots=True)
class Roles:
    """What rank 0 decodes on: a tree or a population. `config` has d filled in, where it was measured."""

    decoding: Decoding
    parts: Tree | SMC
    config: EngineConfig
    limits: RequestLimits
    rank: Rank | None
    log: TraceLog | None

    @property
    def outages(self) -> Sequence[Outage]:
        """The times in the request begun last in which the draft group was away."""
        drafter = self.decoding.drafter if isinstance(self.decoding, TreeDecoding) else None
        return drafter.outages if isinstance(drafter, PatientDrafter) else ()

    def close(self, *, comes_again: bool = False) -> None:
        """Sends the other ranks home, or see `Rank.leave`, and closes the trace."""
        if self.rank is not None:
            self.rank.leave(comes_again=comes_again)
        if self.log is not None:
            self.log.close()


def assemble(models: Models, config: EngineConfig, world: World | None, progress: Progress | None) -> Roles:
    """Loads the models and makes the roles of rank 0, or of a process alone."""
    log = None if models.trace is None else TraceLog(models.trace)
    rank = None if world is None else Rank(world, config, models, progress)
    if config.mode == "smc":
        parts, decoding = _population(models, config, rank, log, progress)
    else:
        parts, decoding, config = _tree(models, config, rank, log, progress)
    check = partial(_check, check_sampling if config.mode == "smc" else config.check_request, models.grammars)
    eos = read_config(models.target).eos_token_ids
    if log is not None:
        log.head(models.described(config))
    limits = RequestLimits(models.max_model_len, models.vocab_size, eos, check)
    return Roles(decoding, parts, config, limits, rank, log)


def _check(mode: Callable[[SamplingParams], None], grammars: Grammars, sampling: SamplingParams) -> None:
    """Raises UserError on parameters that the mode cannot serve, or a grammar that is none."""
    mode(sampling)
    if sampling.grammar is not None:
        grammars.rules(sampling.grammar)


def _population(
    models: Models, config: EngineConfig, rank: Rank | None, log: TraceLog | None, progress: Progress | None
) -> tuple[SMC, ParticleDecoding]:
    """The population, led by rank 0 where there are several."""
    population = models.population(config, None, progress) if rank is None else rank.population
    assert population is not None
    tell = nobody if log is None else ParticleTrace(population.target, population.draft, log)
    return population, ParticleDecoding(population if rank is None else rank.lead_population(), tell)


def _tree(
    models: Models, config: EngineConfig, rank: Rank | None, log: TraceLog | None, progress: Progress | None
) -> tuple[Tree, TreeDecoding, EngineConfig]:
    """Drafter and verifier, a controller between if the config leaves something to it, and who observes them."""
    if rank is not None:
        verifier, drafter, config = rank.lead(config, log)
        local, parts = rank.drafter, Tree(drafter, verifier)
    else:
        alone = models.verifier(config, None, progress)
        local = None if config.mode == "ar" else models.drafter(config, None, progress)
        if config.beside and local is not None:
            warm_up(local, alone)
        parts = Tree(local or NoDrafter(), ThreadedVerifier(alone) if config.mode == "async" else alone)
    controller = None
    if config.mode != "ar" and (config.self_switch or config.adapts):
        controller = Controller(parts.drafter, lambda: Measured(config))
    tell = nobody if log is None else _observers(log, parts.verifier, local, controller)
    report = (lambda: None) if controller is None else controller.report
    if rank is None or not isinstance(parts.drafter, GroupDrafter):
        return parts, decoding_on(controller or parts.drafter, parts.verifier, tell, report), config
    patient = PatientDrafter(controller or parts.drafter, parts.drafter, rank.comeback)
    return parts, TreeDecoding(patient, parts.verifier, tell, lambda: patient.lost, report), config


def decoding_on(
    drafter: Drafter, verifier: Verifier, tell: Observer = nobody, report: Callable[[], Any] = lambda: None
) -> TreeDecoding:
    """Decoding that goes on when the drafter is lost. `report`: what a controller among the drafters has decided."""
    fallback = FallbackDrafter(drafter)
    return TreeDecoding(fallback, verifier, tell, lambda: fallback.lost, report)


def _observers(
    log: TraceLog, verifier: Verifier, local: LocalDrafter | None, controller: Controller | None
) -> Observer:
    """Of both lanes on rank 0; a draft elsewhere sends the records of its own."""
    asked = (lambda: True) if controller is None else (lambda: controller.measured.speculating)
    target = TreeTrace(log, lambda: verifier.busy, asked)
    return target if local is None else both(DraftTrace(local, log.draft), target)
