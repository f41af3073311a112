"""Builds the roles that rank 0, a single process or a client of workers decodes with, and their observers.

`builder.ranks` starts the ranks, `builder.models` loads what a process holds, `builder.remote_roles` connects to
workers, and `builder.drafters` says how a drafter is built and surrounded. `tree_engine` puts the parts together,
wherever they run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path

from swiftspec.batching.tree_batch import TreeBatchDecoding
from swiftspec.builder.drafters import DRAFTERS, DrafterInputs, WrapperInputs, build_suffix_drafter, drafter_key
from swiftspec.builder.models import LocalRoles, Models
from swiftspec.builder.ranks import Rank, start_engine_rank
from swiftspec.cache.prefix_cache import TokenText
from swiftspec.config import EngineConfig
from swiftspec.control.controller import Controller
from swiftspec.control.shared_stats import SharedStats
from swiftspec.control.step_times import SteppedDrafter, measure_verification_time, steps_for
from swiftspec.distributed.group.concurrent_requests import LeaderCallQueue
from swiftspec.distributed.group.leader import LeaderDrafter, LeaderScheduler, LeaderVerifier
from swiftspec.distributed.launch.world import World
from swiftspec.distributed.remote.client import DraftLink, RemoteDrafter
from swiftspec.distributed.remote.failover import FailoverDrafter, RemoteDraft
from swiftspec.distributed.remote.reconnector import ReconnectedLink, SharedReconnector
from swiftspec.distributed.remote.server_link import ServerLink
from swiftspec.distributed.transport.channels import ChannelSet
from swiftspec.distributed.transport.request_state import ModelLimits, RequestState
from swiftspec.distributed.transport.transport import Transport
from swiftspec.engine import Decoding, TreeDecoding
from swiftspec.errors import DrafterLost, UserError
from swiftspec.model.checkpoint_files import Progress
from swiftspec.observe.recorder import Recorder
from swiftspec.observe.rpc_latency import RpcLog, clock_reading
from swiftspec.observe.trace import DraftTimeline, ObserverToggle, ParticleTrace, TreeTrace
from swiftspec.observe.trace_file import TraceFile
from swiftspec.observe.trace_format import Record, trace_header
from swiftspec.params import MAX_LOGPROB_VALUES, MAX_LOGPROBS, SamplingParams
from swiftspec.runtime.coroutines import CallQueue
from swiftspec.runtime.graph_capture import capture_graphs, num_captures, run_captures
from swiftspec.runtime.local_drafter import LocalDrafter
from swiftspec.runtime.overlapped import OverlappedDrafter, ThreadedVerifier, warm_up
from swiftspec.runtime.prefix_caching import PrefixCachingRunner
from swiftspec.runtime.row_budget import RowBudget
from swiftspec.runtime.runner import Runner
from swiftspec.runtime.sequence_runner import SequencePool, SequenceRunner
from swiftspec.runtime.suffix_drafter import SharedLookup
from swiftspec.runtime.verifier import Verifier
from swiftspec.sampling.grammar import GrammarCompiler
from swiftspec.smc.decoding import PopulationDecoding
from swiftspec.smc.scheduler import BatchScheduler


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits that a request on a pair of models must respect. `check_sampling`: raises UserError for parameters that
    the mode does not support. `max_round_tokens`: largest number of output tokens of a round."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    check_sampling: Callable[[SamplingParams], None]
    max_round_tokens: int = 1

    def check(self, prompt: Sequence[int], sampling: SamplingParams) -> None:
        """Raises UserError if a request cannot be served. Called before anything is computed for the request."""
        length, vocab = self.max_model_len, self.vocab_size
        if not prompt:
            raise UserError("the prompt is empty: pass at least one token")
        negative = ("the negative prompt", sampling.negative_prompt_ids)
        for name, ids in (("the prompt", prompt), negative):
            if len(ids) >= length:
                raise UserError(
                    f"{name} of {len(ids)} tokens does not fit the context of {length} with room for an answer: shorten"
                    " it or raise max_model_len"
                )
        others = ("stop_token_ids", sampling.stop_token_ids), *sampling.rule_token_ids()
        for name, ids in (("the prompt", prompt), negative, *others):
            if not all(0 <= token < vocab for token in ids):
                raise UserError(f"{name} contains a token outside 0..{vocab - 1}")
        self._check_rules(sampling)
        round_tokens = min(self.max_round_tokens, length if sampling.max_tokens is None else sampling.max_tokens)
        for name, tokens in (("prompt_logprobs", len(prompt)), ("logprobs", round_tokens)):
            if getattr(sampling, name) == -1 and tokens * vocab > MAX_LOGPROB_VALUES:
                raise UserError(
                    f"{name} -1 returns {vocab} values per token, and a message contains up to {tokens} tokens, more"
                    f" than the limit of {MAX_LOGPROB_VALUES} values: use 0..{MAX_LOGPROBS}"
                )
        self.check_sampling(sampling)

    def _check_rules(self, sampling: SamplingParams) -> None:
        """Raises UserError if the token rules exclude every token at the beginning of the output."""
        excluded = sampling.bad_tokens
        if sampling.min_tokens > 0:
            excluded |= {*self.eos_token_ids, *sampling.stop_token_ids}
        allowed = sampling.allowed_token_ids
        remaining = self.vocab_size - len(excluded) if allowed is None else len({*allowed} - excluded)
        if remaining <= 0:
            raise UserError("allowed_token_ids, bad_words_ids and min_tokens exclude every token")


@dataclass(frozen=True, slots=True)
class TreeRoles:
    """Drafter and verifier of a draft tree.

    `drafter_key`: key of the drafter in DRAFTERS.
    `drafter`: without the wrappers of that entry.
    `held`: the roles on the models of this process.
    `remote`: the drafter, if it is in another process.
    """

    drafter_key: str
    drafter: SteppedDrafter
    verifier: Verifier
    held: LocalRoles = field(default_factory=LocalRoles)
    remote: RemoteDraft | None = None

    @property
    def target(self) -> Runner | None:
        """The runner of the target, if that runs in this process."""
        return None if self.held.verifier is None else self.held.verifier.runner


ConnectDraft = Callable[[EngineConfig, ModelLimits], RemoteDraft]  # connects to a drafter on a worker


@dataclass(frozen=True, slots=True)
class Roles:
    """The roles that rank 0 or a single process decodes with. `config`: the engine configuration, in which a measured d
    is filled in."""

    decoding: Decoding
    inner_roles: TreeRoles | BatchScheduler
    config: EngineConfig
    limits: EngineLimits
    rank: Rank | None
    recorder: Recorder
    trace_header: Record  # the first line of traces
    disconnect_workers: Callable[[], None] = lambda: None  # disconnects from workers
    rpc_log: RpcLog | None = None  # RPCs with workers; None without workers
    models: Models | None = None  # the models of this process; None without any

    def reusable_texts(self) -> list[TokenText]:
        """Returns the texts whose prefixes a request without guidance does not need to prefill: none if the target runs
        in another process. A draft head can reduce what is reused of them."""
        parts = self.inner_roles
        if isinstance(parts, BatchScheduler):
            return parts.reusable_texts()
        return [] if parts.target is None else parts.target.reusable_texts()

    @property
    def cache_tokens(self) -> int:
        """Tokens whose keys and values the target can hold: those of running requests and of the prefix cache. 0 if
        the target runs in another process."""
        target = self.inner_roles.target
        if target is None:
            return 0
        holder = target.pool if isinstance(target, SequenceRunner) else target
        budget = holder.prefix_cache.budget if isinstance(holder, PrefixCachingRunner | SequencePool) else 0
        return self.limits.max_model_len * self.config.num_sequences + budget

    def close(self, *, will_restart: bool = False) -> None:
        """Shuts the other ranks down, disconnects from workers and closes the trace. `will_restart`: only disconnects
        from the other ranks, because this rank is about to be restarted."""
        if self.rank is not None:
            self.rank.leave(restarting=will_restart)
        self.disconnect_workers()
        if self.recorder.file is not None:
            self.recorder.file.close()


def build_roles(
    models: Models,
    config: EngineConfig,
    world: World | None,
    progress: Progress | None,
    connect_draft: ConnectDraft | None = None,
) -> Roles:
    """Loads the models and builds the roles of rank 0, or of a single process. `world`: the ranks of the job; None for
    a single process. `connect_draft`: connects to the worker of a remote draft."""
    options = models.options
    recorder = make_recorder(options.loading.trace)
    check = partial(check_request, config, options.grammars)  # before d is measured, when the config allows a larger d
    vocabulary = options.vocabulary
    limits = EngineLimits(options.max_model_len, vocabulary.size, vocabulary.eos_token_ids, check, config.max_nodes)
    rank = None if world is None else start_engine_rank(world, config, models, progress)
    if config.mode == "smc":
        scheduler, decoding = _population(models, config, rank, recorder, progress)
        head = trace_begin(recorder, options.trace_metadata(config))
        return Roles(
            decoding,
            scheduler,
            config=config,
            limits=limits,
            rank=rank,
            recorder=recorder,
            trace_header=head,
            models=models,
        )
    if config.max_num_seqs > 1:
        first, trees, config = _trees(models, config, rank, recorder, progress)
        head = trace_begin(recorder, options.trace_metadata(config))
        return Roles(
            trees, first, config=config, limits=limits, rank=rank, recorder=recorder, trace_header=head, models=models
        )
    if rank is not None:
        parts, config = _lead(rank, models, config, recorder)
    else:
        remote = None
        if connect_draft is not None and config.draft_remote and config.mode != "ar":
            remote = connect_draft(config, _model_limits(models, config))
        parts = _alone(models, config, remote, progress)
    return tree_engine(
        parts, config, limits, recorder, metadata=options.trace_metadata(config), models=models, rank=rank
    )


def _model_limits(models: Models, config: EngineConfig) -> ModelLimits:
    return ModelLimits(models.options.vocab_size, models.options.max_model_len, config.verify_batch)


def _population(
    models: Models, config: EngineConfig, rank: Rank | None, recorder: Recorder, progress: Progress | None
) -> tuple[BatchScheduler, PopulationDecoding]:
    """Returns the scheduler of sequence groups on rank 0 and the decoding on it, which forwards every call to the
    followers if there are several ranks."""
    held = models.load_roles(config, None, progress, target=True, draft=True) if rank is None else rank.held
    scheduler = held.scheduler
    assert scheduler is not None
    if rank is None:
        run_captures(scheduler.captures(), progress)
    on_event = ObserverToggle(lambda: recorder.enabled, ParticleTrace(scheduler.target, scheduler.draft, recorder))
    leading = scheduler if rank is None else LeaderScheduler(scheduler, rank.lead())
    return scheduler, PopulationDecoding(leading, on_event, lambda: scheduler.captured_graphs)


def _trees(
    models: Models, config: EngineConfig, rank: Rank | None, recorder: Recorder, progress: Progress | None
) -> tuple[TreeRoles, TreeBatchDecoding, EngineConfig]:
    """Returns the roles of the first of several concurrent requests, the decoding with roles for each of them, and the
    config. If there are several ranks, the roles forward their calls to the followers; with a draft group, d in the
    config is measured if it was None."""
    key = drafter_key(config, models.draft_head)
    entry = DRAFTERS[key]
    if rank is None:
        held = models.load_roles(config, None, progress, target=True, draft=entry.needs == "model")
        calls, leading = held.pools[0].calls, None
        capture_graphs(held.verifier, held.drafter, config, progress)  # all requests share the graphs
    else:
        held = rank.held
        calls = leading = LeaderCallQueue(rank.lead())
        for pool in held.pools:
            pool.calls = calls
    assert held.verifier is not None
    each_held = [held, *held.others]
    recorders = [recorder, *(Recorder(beside=recorder) for _ in held.others)]
    drafts: list[RemoteDraft | None] = [None] * len(each_held)
    if rank is not None and rank.connections.draft_leader is not None and leading is not None:
        verifier = LeaderVerifier(held.verifier, leading.group_of(0))
        drafts, config = _draft_channels(rank, models, config, calls, verifier, recorders)
    times = models.target_times(config, held.verifier) if entry.needs == "nothing" else None

    budget = RowBudget(calls)
    lookup = SharedLookup(budget)

    def make_roles(index: int, local: LocalRoles, draft: RemoteDraft | None) -> TreeRoles:
        assert local.verifier is not None
        verifier, drafter = local.verifier, local.drafter or (None if draft is None else draft.drafter)
        if drafter is None:
            inputs = DrafterInputs(
                config, _model_limits(models, config), verifier=verifier, target_times=times, lookup=lookup
            )
            drafter = entry.build(inputs)
        if leading is None:
            return TreeRoles(key, drafter, verifier, local)
        team = leading.group_of(index)
        led = LeaderDrafter(drafter, team) if isinstance(drafter, LocalDrafter) else drafter
        return TreeRoles(key, led, LeaderVerifier(verifier, team), local, draft)

    roles = list(map(make_roles, count(), each_held, drafts))
    pair_times = None
    if rank is None and held.drafter is not None:
        pair_times = models.row_times(config, held.verifier, held.drafter)
        times = None if pair_times is None else pair_times.target
    if times is not None:
        budget.row_seconds = times.at
    budgets = models.draft_budgets(config) if rank is None else None
    stats = SharedStats(config, pair_times, budgets, lambda: calls.num_requests)
    decodings = list[TreeDecoding]()
    for parts, own in zip(roles, recorders, strict=True):
        given = _wrapper_inputs(parts, config, models, rank is None, stats, lookup)
        decodings.append(_tree_decoding(parts, config, own, given, None))
    captured = partial(num_captures, held.verifier, held.drafter)
    return roles[0], TreeBatchDecoding(decodings, held.pools, calls, captured), config


def _draft_channels(
    rank: Rank,
    models: Models,
    config: EngineConfig,
    calls: CallQueue,
    verifier: Verifier,
    recorders: Sequence[Recorder],
) -> tuple[list[RemoteDraft | None], EngineConfig]:
    """Returns the draft group as each of several concurrent requests sees it, and the config with d. `verifier`: of the
    first of them. `recorders`: of each of them."""
    assert rank.connections.draft_leader is not None
    channels = ChannelSet(rank.connections.draft_leader, len(recorders), calls.wait)
    parts: Sequence[ReconnectedLink | None] = [None] * len(recorders)
    if rank.recovery is not None:
        parts = SharedReconnector(rank.recovery, channels).parts
    links = [_draft_link(rank, config, *each, calls) for each in zip(channels.channels, recorders, strict=True)]
    drafters = list[RemoteDrafter]()
    for link in links:
        drafters.append(RemoteDrafter(link, config.initial_draft_steps))
        if config.draft_steps is None:
            room = models.options.max_model_len - 1
            config = replace(config, draft_steps=_measure_draft_steps(config, verifier, drafters[0], room))
    return list(map(RemoteDraft, drafters, links, parts)), config


def _draft_link(
    rank: Rank, config: EngineConfig, transport: Transport, recorder: Recorder, calls: CallQueue | None = None
) -> DraftLink:
    """Returns the link to the draft group. `calls`: of the concurrent requests, if there are several."""
    state = RequestState(rank.limits, rejection_sampling=config.verify == "reject")
    in_company = (lambda: False) if calls is None else (lambda: calls.company)
    return DraftLink(ServerLink(transport, state, "draft"), recorder=recorder, in_company=in_company)


def _alone(models: Models, config: EngineConfig, remote: RemoteDraft | None, progress: Progress | None) -> TreeRoles:
    """Returns the roles of a process that has the target alone, and the draft unless that is `remote`."""
    unconnected = config.draft_remote and remote is None
    key = "none" if unconnected else drafter_key(config, models.draft_head)
    entry = DRAFTERS[key]
    held = models.load_roles(config, None, progress, target=True, draft=entry.needs == "model")
    target, draft = held.verifier, held.drafter
    assert target is not None
    capture_graphs(target, draft, config, progress)
    if remote is not None:
        return TreeRoles(key, remote.drafter, target, held, remote)
    if draft is None:
        times = models.target_times(config, target)
        given = DrafterInputs(config, _model_limits(models, config), target_times=times)
        return TreeRoles(key, entry.build(given), target, held)
    if config.overlap_on_one_gpu:
        overlapped = OverlappedDrafter(draft)
        warm_up(overlapped, target)
        return TreeRoles(key, overlapped, ThreadedVerifier(target), held)
    return TreeRoles(key, draft, target, held)


def _lead(rank: Rank, models: Models, config: EngineConfig, recorder: Recorder) -> tuple[TreeRoles, EngineConfig]:
    """Returns the roles of rank 0, which leads the ranks of the target, and the config. With a draft group, d in the
    config is measured if it was None. `recorder`: receives the trace records of the draft group."""
    key = drafter_key(config, models.draft_head)
    entry, held, team = DRAFTERS[key], rank.held, rank.lead()
    assert held.verifier is not None
    verifier = LeaderVerifier(held.verifier, team)
    if held.drafter is not None:
        return TreeRoles(key, LeaderDrafter(held.drafter, team), verifier, held), config
    if rank.connections.draft_leader is None:
        return TreeRoles(key, entry.build(DrafterInputs(config, rank.limits)), verifier, held), config
    link = _draft_link(rank, config, rank.connections.draft_leader, recorder)
    drafter = entry.build(DrafterInputs(config, link=link))
    assert isinstance(drafter, RemoteDrafter)
    if config.draft_steps is None:
        room = models.options.max_model_len - 1
        config = replace(config, draft_steps=_measure_draft_steps(config, verifier, drafter, room))
    return TreeRoles(key, drafter, verifier, held, RemoteDraft(drafter, link, rank.recovery)), config


def _measure_draft_steps(config: EngineConfig, verifier: Verifier, drafter: RemoteDrafter, room: int) -> int:
    """Returns the d that follows from measured draft and target times, and sets it on the drafter. Returns the config's
    initial d if the draft group fails. `room`: most tokens of the context.

    Both times are measured concurrently, because draft and target share caches and memory bandwidth.
    """
    try:
        drafter.measure(room)
        target = measure_verification_time(verifier, config.verify_batch, room)
        steps = steps_for(target, drafter.times())
        drafter.draft_steps = steps
    except DrafterLost:
        return config.initial_draft_steps
    return steps


def tree_engine(
    parts: TreeRoles,
    config: EngineConfig,
    limits: EngineLimits,
    recorder: Recorder,
    *,
    metadata: Record,
    models: Models | None,
    rank: Rank | None = None,
    rpc_log: RpcLog | None = None,
    disconnect: Callable[[], None] = lambda: None,
) -> Roles:
    """Returns the roles of a process that decodes with a draft tree: surrounds the drafter with the wrappers of its
    kind, and adds observers.

    `metadata`: description of the run, for the first line of a trace.
    `models`: the models of this process; None without any.
    `rpc_log`: log of the RPCs with the worker of the target; None: that of the draft's worker, if there is one.
    `disconnect`: disconnects from the worker of the target.
    """
    remote = parts.remote
    given = _wrapper_inputs(parts, config, models, rank is None)
    rpc_log = rpc_log if remote is None or remote.rpc_log is None else remote.rpc_log
    decoding = _tree_decoding(parts, config, recorder, given, rpc_log)

    def leave() -> None:
        if remote is not None:
            remote.disconnect()
        disconnect()

    head = trace_begin(recorder, metadata if rpc_log is None else metadata | clock_reading())
    return Roles(
        decoding,
        parts,
        config=config,
        limits=limits,
        rank=rank,
        recorder=recorder,
        trace_header=head,
        disconnect_workers=leave,
        rpc_log=rpc_log,
        models=models,
    )


def _tree_decoding(
    parts: TreeRoles, config: EngineConfig, recorder: Recorder, given: WrapperInputs, rpc_log: RpcLog | None
) -> TreeDecoding:
    """Returns the decoding with a draft tree. `given`: what the wrappers of the drafter are built from."""
    held, drafter, controller = parts.held, parts.drafter, None
    for wrap in DRAFTERS[parts.drafter_key].wrappers:
        drafter = wrap(drafter, given)
        controller = drafter if isinstance(drafter, Controller) else controller
    if held.drafter is not None and controller is not None and given.stats.row_times is not None:
        held.drafter.max_nodes = max(controller.round_stats.batch_sizes)
    decoding = TreeDecoding(
        drafter,
        parts.verifier,
        _observers(recorder, parts, controller, rpc_log),
        policy_report=(lambda: None) if controller is None else controller.report,
        captured_graphs=partial(num_captures, held.verifier, held.drafter),
        outages=(lambda: drafter.outages) if isinstance(drafter, FailoverDrafter) else tuple,
    )
    decoding.synthetic_acceptance_length = config.synthetic_acceptance_length
    return decoding


def _wrapper_inputs(
    parts: TreeRoles,
    config: EngineConfig,
    models: Models | None,
    measure: bool,
    stats: SharedStats | None = None,
    lookup: SharedLookup | None = None,
) -> WrapperInputs:
    """Returns what the wrappers of the drafter are built from. `measure`: whether this process may measure models that
    it runs alone. `stats`, `lookup`: what it shares with other drafters; None: nothing."""
    target, draft = parts.held.verifier, parts.held.drafter
    times, suffix, budgets = None if stats is None else stats.row_times, None, None
    if models is not None and target is not None:
        if measure and draft is not None and stats is None:
            times = models.row_times(config, target, draft)
        if measure and parts.remote is None and stats is None:
            budgets = models.draft_budgets(config)
        if config.grafts_suffix or (draft is not None and config.verify == "match"):
            target_times = None if times is None else times.target
            inputs = DrafterInputs(config, _model_limits(models, config), target_times=target_times, lookup=lookup)
            suffix = build_suffix_drafter(inputs)
    return WrapperInputs(config, parts.remote, suffix, stats or SharedStats(config, times, budgets))


def make_recorder(trace: Path | None) -> Recorder:
    """Returns the recorder of a run. `trace`: file of the trace; None: nothing is written."""
    return Recorder(None if trace is None else TraceFile(trace))


def trace_begin(recorder: Recorder, metadata: Record) -> Record:
    """Writes the first line of a trace, and returns it."""
    head = trace_header(metadata)
    if recorder.file is not None:
        recorder.file.write([head])
    return head


def check_request(config: EngineConfig, grammars: GrammarCompiler, sampling: SamplingParams) -> None:
    """Raises UserError if the mode does not support the sampling parameters, or if the grammar is invalid."""
    config.check_request(sampling)
    if sampling.grammar is not None:
        grammars.compile(sampling.grammar)


def _observers(
    recorder: Recorder, parts: TreeRoles, controller: Controller | None, rpc_log: RpcLog | None
) -> ObserverToggle:
    """Returns the observer that records the rounds of rank 0, with the draft's timeline if the draft runs in this
    process. It is enabled while there is a trace file or a listener."""
    drafter_active = (lambda: True) if controller is None else (lambda: controller.round_stats.speculating)
    link = parts.drafter.link if isinstance(parts.drafter, RemoteDrafter) else None
    on_change = (lambda on: None) if link is None or link.recorder is None else link.set_trace
    timeline = None if parts.held.drafter is None else DraftTimeline(parts.held.drafter)
    drain = () if rpc_log is None else (rpc_log.drain,)
    target = parts.held.verifier
    probabilities = (lambda tokens, parents: None) if target is None else target.probabilities
    watcher = TreeTrace(recorder, lambda: parts.verifier.busy, drafter_active, probabilities, timeline, *drain)
    return ObserverToggle(lambda: recorder.enabled, watcher, on_change)
