"""The roles that rank 0, or a process alone, decodes on, and who observes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from swiftspec.builder.model_pair import Models
from swiftspec.builder.request_limits import RequestLimits
from swiftspec.config import EngineConfig
from swiftspec.control.controller import Controller
from swiftspec.control.round_stats import Measured
from swiftspec.control.step_times import SteppedDrafter
from swiftspec.decode import Observer, no_observer
from swiftspec.distributed.draft.client import GroupDrafter
from swiftspec.distributed.draft.failover import Away, Outage, PatientDrafter
from swiftspec.distributed.group.request_state import Bounds
from swiftspec.distributed.launch.world import World
from swiftspec.distributed.rank_startup import Progress, Rank
from swiftspec.engine import Decoding, TreeDecoding
from swiftspec.model.checkpoint_files import read_config
from swiftspec.observe.recorder import Recorder
from swiftspec.observe.rpc_latency import Hops, clocks
from swiftspec.observe.trace import DraftLane, ParticleTrace, Probabilities, Switch, TreeTrace
from swiftspec.observe.trace_file import TraceFile
from swiftspec.observe.trace_format import Record, head_of
from swiftspec.params import SamplingParams
from swiftspec.runtime.drafter import Drafter, NoDrafter
from swiftspec.runtime.fallback_drafter import FallbackDrafter
from swiftspec.runtime.local_drafter import LocalDrafter
from swiftspec.runtime.overlapped import ThreadedVerifier, warm_up
from swiftspec.runtime.rejection_verifier import FullVerifier
from swiftspec.runtime.verifier import Verifier
from swiftspec.sampling.grammar import Grammars
from swiftspec.smc.decoding import ParticleDecoding
from swiftspec.smc.limits import check_sampling
from swiftspec.smc.population import SMC


@dataclass(frozen=True, slots=True)
class Tree:
    """The roles that decode by a draft tree, before anything is put around the drafter."""

    drafter: SteppedDrafter
    verifier: Verifier


MakeDrafter = Callable[[EngineConfig, Bounds], tuple[Away, Callable[[], None]]]  # and what leaves the worker again


@dataclass(frozen=True, slots=True)
class Roles:
    """What rank 0 decodes on: a tree or a population. `config` has d filled in, where it was measured."""

    decoding: Decoding
    parts: Tree | SMC
    config: EngineConfig
    limits: RequestLimits
    rank: Rank | None
    recorder: Recorder
    head: Record  # the first line of what is on record
    leave: Callable[[], None] = lambda: None  # says goodbye to workers
    hops: Hops | None = None  # exchanges with them

    @property
    def outages(self) -> Sequence[Outage]:
        """The times in the request begun last in which the draft group was away."""
        drafter = self.decoding.asked if isinstance(self.decoding, TreeDecoding) else None
        return drafter.outages if isinstance(drafter, PatientDrafter) else ()

    def close(self, *, comes_again: bool = False) -> None:
        """Sends the other ranks home, or see `Rank.leave`, and closes the trace."""
        if self.rank is not None:
            self.rank.leave(comes_again=comes_again)
        self.leave()
        if self.recorder.file is not None:
            self.recorder.file.close()


def assemble(
    models: Models, config: EngineConfig, world: World | None, progress: Progress | None,
    worker: MakeDrafter | None = None,
) -> Roles:  # fmt: skip
    """Loads the models and makes the roles of rank 0, or of a process alone. `worker`: makes the drafter whose model a
    worker runs, where the config has that."""
    log = Recorder(None if models.trace is None else TraceFile(models.trace))
    rank = None if world is None else Rank(world, config, models, progress)
    check = partial(check_request, config, models.grammars)  # before d is measured: there is more room
    away, leave = None, lambda: None
    if worker is not None and config.draft_remote and config.mode != "ar":
        away, leave = worker(config, Bounds(models.vocab_size, models.max_model_len, config.verify_batch))
    if config.grouped is not None:
        parts, decoding = _population(models, config, rank, log, progress)
    else:
        parts, decoding, config = _tree(models, config, rank, away, log, progress)
    eos = read_config(models.target).eos_token_ids
    hops = None if away is None else away.hops
    head = head_of(models.described(config) | ({} if hops is None else clocks()))
    if log.file is not None:
        log.file.write([head])
    limits = RequestLimits(models.max_model_len, models.vocab_size, eos, check)
    return Roles(decoding, parts, config, limits, rank, log, head, leave, hops)


def check_request(config: EngineConfig, grammars: Grammars, sampling: SamplingParams) -> None:
    """Raises UserError on parameters that the mode cannot serve, or a grammar that is none."""
    if config.grouped is not None:
        check_sampling(sampling, chains=config.grouped.chains is not None)
    config.check_request(sampling)
    if sampling.grammar is not None:
        grammars.rules(sampling.grammar)


def _population(
    models: Models, config: EngineConfig, rank: Rank | None, log: Recorder, progress: Progress | None
) -> tuple[SMC, ParticleDecoding]:
    """The population, led by rank 0 where there are several."""
    population = models.population(config, None, progress) if rank is None else rank.population
    assert population is not None
    tell = Switch(lambda: log.wanted, ParticleTrace(population.target, population.draft, log))
    return population, ParticleDecoding(population if rank is None else rank.lead_population(), tell)


def _tree(
    models: Models, config: EngineConfig, rank: Rank | None, away: Away | None, log: Recorder, progress: Progress | None
) -> tuple[Tree, TreeDecoding, EngineConfig]:
    """Drafter and verifier, a controller between if the config leaves something to it, and who observes them."""
    if rank is not None:
        verifier, drafter, config = rank.lead(config, log)
        alone, local, parts = rank.verifier, rank.drafter, Tree(drafter, verifier)
        away = Away(drafter, drafter, rank.comeback) if isinstance(drafter, GroupDrafter) else None
    else:
        alone = models.verifier(config, None, progress)
        local = None if config.mode == "ar" or config.draft_remote else models.drafter(config, None, progress)
        threaded = config.mode == "async" and not config.draft_remote
        drafter = local or (NoDrafter() if away is None else away.drafter)
        parts = Tree(drafter, ThreadedVerifier(alone) if threaded else alone)
        if config.beside and local is not None:
            warm_up(local, alone)
    assert isinstance(alone, FullVerifier)
    hops = None if away is None else away.hops
    return parts, tree_decoding(parts, config, log, alone.probabilities, local, away, hops), config


def tree_decoding(
    parts: Tree, config: EngineConfig, log: Recorder, probabilities: Probabilities, local: LocalDrafter | None,
    away: Away | None, hops: Hops | None = None,
) -> TreeDecoding:  # fmt: skip
    """Decoding on a drafter of this process (`local`) or another (`away`), or on none. `probabilities`: the target's,
    as `TreeTrace` has it. `hops`: exchanges with workers."""
    controller = None
    if config.mode != "ar" and config.decides:
        controller = Controller(parts.drafter, lambda: Measured(config))
    tell = _observers(log, parts, probabilities, local, controller, hops)
    report = (lambda: None) if controller is None else controller.report
    if away is None:
        return decoding_on(controller or parts.drafter, parts.verifier, tell, report)
    patient = PatientDrafter(controller or away.drafter, away)
    return TreeDecoding(patient, parts.verifier, tell, lambda: patient.lost, report)


def decoding_on(
    drafter: Drafter, verifier: Verifier, tell: Observer = no_observer, report: Callable[[], Any] = lambda: None
) -> TreeDecoding:
    """Decoding that goes on when the drafter is lost. `report`: what a controller among the drafters has decided."""
    fallback = FallbackDrafter(drafter)
    return TreeDecoding(fallback, verifier, tell, lambda: fallback.lost, report)


def _observers(
    log: Recorder, parts: Tree, probabilities: Probabilities, local: LocalDrafter | None,
    controller: Controller | None, hops: Hops | None,
) -> Switch:  # fmt: skip
    """Of both lanes on rank 0, while somebody wants to know; a draft elsewhere sends the records of its own."""
    asked = (lambda: True) if controller is None else (lambda: controller.measured.speculating)
    told = parts.drafter.watch if isinstance(parts.drafter, GroupDrafter) else lambda on: None
    lane = None if local is None else DraftLane(local)
    taken = () if hops is None else (hops.take,)
    watcher = TreeTrace(log, lambda: parts.verifier.busy, asked, probabilities, lane, *taken)
    return Switch(lambda: log.wanted, watcher, told)
