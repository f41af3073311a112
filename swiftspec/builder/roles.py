"""Builds the roles that rank 0, or a single process, decodes with, and their observers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from swiftspec.batching.decoding import BatchDecoding
from swiftspec.batching.scheduler import BatchScheduler
from swiftspec.batching.tree_batch import TreeBatchDecoding
from swiftspec.builder.models import Models, build_drafter, build_verifier
from swiftspec.cache.prefix_cache import TokenText
from swiftspec.config import EngineConfig
from swiftspec.control.controller import Controller
from swiftspec.control.shared_stats import SharedStats
from swiftspec.control.step_times import SteppedDrafter
from swiftspec.distributed.launch.world import World
from swiftspec.distributed.rank_startup import EngineRank, Progress
from swiftspec.distributed.remote.client import RemoteDrafter
from swiftspec.distributed.remote.failover import FailoverDrafter, Outage, RemoteDraft
from swiftspec.distributed.transport.request_state import ModelLimits
from swiftspec.engine import Decoding, TreeDecoding
from swiftspec.errors import UserError
from swiftspec.observe.recorder import Recorder
from swiftspec.observe.rpc_latency import RpcLog, clock_reading
from swiftspec.observe.trace import DraftTimeline, ObserverToggle, ParticleTrace, Probabilities, TreeTrace
from swiftspec.observe.trace_file import TraceFile
from swiftspec.observe.trace_format import Record, trace_header
from swiftspec.params import MAX_LOGPROB_VALUES, MAX_LOGPROBS, SamplingParams
from swiftspec.runtime.drafter import NoDrafter
from swiftspec.runtime.coroutines import EXPANSION, VERIFICATION, CallQueue
from swiftspec.runtime.executors.available import ExecutorDeps, graph_captures
from swiftspec.runtime.fallback_drafter import FallbackDrafter
from swiftspec.runtime.graph_capture import capture_graphs, num_captures
from swiftspec.runtime.local_drafter import LocalDrafter
from swiftspec.runtime.overlapped import ThreadedVerifier, warm_up
from swiftspec.runtime.prefix_caching import PrefixCachingRunner
from swiftspec.runtime.runner import Runner
from swiftspec.runtime.sequence_runner import SequencePool, SequenceRunner
from swiftspec.runtime.suffix_drafter import SuffixDrafter
from swiftspec.runtime.target_verifier import TargetVerifier
from swiftspec.runtime.verifier import Verifier
from swiftspec.sampling.grammar import GrammarCompiler


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
    """Drafter and verifier of a draft tree. The drafter is not wrapped yet, by a controller or for failover. `target`:
    the runner of the target, if that runs in this process."""

    drafter: SteppedDrafter
    verifier: Verifier
    target: Runner | None = None


# returns the remote draft and a function that disconnects from its worker
MakeRemoteDrafter = Callable[[EngineConfig, ModelLimits], tuple[RemoteDraft, Callable[[], None]]]


@dataclass(frozen=True, slots=True)
class Roles:
    """The roles that rank 0 or a single process decodes with. `config`: the engine configuration, in which a measured d
    is filled in."""

    decoding: Decoding
    inner_roles: TreeRoles | BatchScheduler
    config: EngineConfig
    limits: EngineLimits
    rank: EngineRank | None
    recorder: Recorder
    trace_header: Record  # the first line of traces
    disconnect_workers: Callable[[], None] = lambda: None  # disconnects from workers
    rpc_log: RpcLog | None = None  # RPCs with workers; None without workers
    models: Models | None = None  # the models of this process; None without any

    @property
    def outages(self) -> Sequence[Outage]:
        """Intervals of the latest request during which a draft in another process was unavailable."""
        drafter = self.decoding.active_drafter if isinstance(self.decoding, TreeDecoding) else None
        return drafter.outages if isinstance(drafter, FailoverDrafter) else ()

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
        budget = target.prefix_cache.budget if isinstance(target, PrefixCachingRunner) else 0
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
    worker: MakeRemoteDrafter | None = None,
) -> Roles:
    """Loads the models and builds the roles of rank 0, or of a single process. `world`: the ranks of the job; None for
    a single process. `worker`: builds the drafter on a worker, if the config has a remote draft."""
    options = models.options
    recorder = Recorder(None if options.trace is None else TraceFile(options.trace))
    rank = None if world is None else EngineRank(world, config, models, progress)
    check = partial(check_request, config, options.grammars)  # before d is measured, when the config allows a larger d
    away, leave = None, lambda: None
    if worker is not None and config.draft_remote and config.mode != "ar":
        away, leave = worker(config, ModelLimits(options.vocab_size, options.max_model_len, config.verify_batch))
    if config.group_shape is not None:
        parts, decoding = _batch(models, config, rank, recorder, progress)
    elif config.max_num_seqs > 1:
        parts, decoding = _trees(models, config, recorder, progress)
    else:
        parts, decoding, config = _tree(models, config, rank, away, recorder, progress)
    rpc_log = None if away is None else away.rpc_log
    head = trace_header(options.trace_metadata(config) | ({} if rpc_log is None else clock_reading()))
    if recorder.file is not None:
        recorder.file.write([head])
    limits = EngineLimits(options.max_model_len, options.vocab_size, options.eos_token_ids, check, config.max_nodes)
    return Roles(decoding, parts, config, limits, rank, recorder, head, leave, rpc_log, models)


def check_request(config: EngineConfig, grammars: GrammarCompiler, sampling: SamplingParams) -> None:
    """Raises UserError if the mode does not support the sampling parameters, or if the grammar is invalid."""
    config.check_request(sampling)
    if sampling.grammar is not None:
        grammars.compile(sampling.grammar)


def _batch(
    models: Models, config: EngineConfig, rank: EngineRank | None, recorder: Recorder, progress: Progress | None
) -> tuple[BatchScheduler, BatchDecoding]:
    """Returns the scheduler of sequence groups on rank 0 and the decoding on it, which forwards every call to the
    followers if there are several ranks."""
    scheduler = models.scheduler(config, None, progress) if rank is None else rank.scheduler
    assert scheduler is not None
    on_event = ObserverToggle(lambda: recorder.enabled, ParticleTrace(scheduler.target, scheduler.draft, recorder))
    leading = scheduler if rank is None else rank.leader_scheduler()
    return scheduler, BatchDecoding(leading, on_event, partial(graph_captures, scheduler.executors))


def _trees(
    models: Models, config: EngineConfig, recorder: Recorder, progress: Progress | None
) -> tuple[TreeRoles, TreeBatchDecoding]:
    """Returns the roles of the first of several concurrent requests, and the decoding with roles for each of them."""
    calls, runners = CallQueue(), list[tuple[SequencePool, ExecutorDeps]]()
    for side, priority in (("target", VERIFICATION), ("draft", EXPANSION)):
        if side == "target" or config.has_draft_model:
            runner, deps = models.runner(side, config, None, progress)
            reuse = models.options.prefix_cache_memory > 0
            runners.append((SequencePool(runner, config.max_num_seqs, calls, priority, reuse_prefixes=reuse), deps))
    (target, target_deps), *draft = runners

    def make_roles() -> tuple[TreeRoles, LocalDrafter | None]:
        alone = build_verifier(SequenceRunner(target), target_deps, config)
        local = next((build_drafter(SequenceRunner(pool), deps, config) for pool, deps in draft), None)
        return TreeRoles(local or NoDrafter(), alone, alone.runner), local

    made = [make_roles() for _ in range(config.max_num_seqs)]
    (first, first_local), decodings = made[0], list[TreeDecoding]()
    assert isinstance(first.verifier, TargetVerifier)
    times = None if first_local is None else models.row_times(config, first.verifier, first_local)
    target_times = models.target_times(config, first.verifier) if config.drafts_by_lookup else times and times.target
    stats = SharedStats(config, times, models.trial_budgets(config), lambda: calls.num_requests)
    for parts, local in made:
        assert isinstance(parts.verifier, TargetVerifier)
        suffix = None
        if config.drafts_by_lookup or (local is not None and config.verify == "match"):
            suffix = models.suffix_drafter(config, target_times)
        if config.drafts_by_lookup and suffix is not None:
            parts, suffix = replace(parts, drafter=suffix), None
        captured = partial(num_captures, parts.verifier, local)
        probabilities = parts.verifier.probabilities
        decodings.append(
            make_tree_decoding(
                parts, config, recorder, probabilities, captured, local, None, suffix=suffix, stats=stats
            )
        )
    return first, TreeBatchDecoding(decodings, [pool for pool, _ in runners], calls)


def _tree(
    models: Models,
    config: EngineConfig,
    rank: EngineRank | None,
    away: RemoteDraft | None,
    recorder: Recorder,
    progress: Progress | None,
) -> tuple[TreeRoles, TreeDecoding, EngineConfig]:
    """Returns drafter and verifier, the decoding on them, and the config, in which a measured d is filled in. `away`:
    the remote draft on a worker, if there is one."""
    if rank is not None:
        verifier, drafter, config = rank.leader_roles(config, recorder)
        assert rank.verifier is not None
        alone, local, parts = rank.verifier, rank.drafter, TreeRoles(drafter, verifier, rank.verifier.runner)
        away = RemoteDraft(drafter, drafter.link, rank.recovery) if isinstance(drafter, RemoteDrafter) else None
    else:
        alone = models.verifier(config, None, progress)
        local = None
        if config.has_draft_model and not config.draft_remote:
            local = models.drafter(config, None, progress, alone)
        threaded = config.mode == "async" and not config.draft_remote
        drafter = local or (NoDrafter() if away is None else away.drafter)
        parts = TreeRoles(drafter, ThreadedVerifier(alone) if threaded else alone, alone.runner)
        capture_graphs(alone, local, config, progress)
        if config.overlap_on_one_gpu and local is not None:
            warm_up(local, alone)
    assert isinstance(alone, TargetVerifier)
    if config.drafts_by_lookup:
        target_times = models.target_times(config, alone) if rank is None else None
        parts = replace(parts, drafter=models.suffix_drafter(config, target_times))
    times = None if rank is not None or local is None else models.row_times(config, alone, local)
    stats = SharedStats(config, times, models.trial_budgets(config) if rank is None and away is None else None)
    rpc_log = None if away is None else away.rpc_log
    captured = partial(num_captures, alone, local)
    suffix = None
    if config.grafts_suffix or (local is not None and config.verify == "match"):
        suffix = models.suffix_drafter(config, None if times is None else times.target)
    decoding = make_tree_decoding(
        parts, config, recorder, alone.probabilities, captured, local, away, rpc_log, suffix, stats
    )
    return parts, decoding, config


def make_tree_decoding(
    parts: TreeRoles,
    config: EngineConfig,
    recorder: Recorder,
    probabilities: Probabilities,
    captured_graphs: Callable[[], int],
    local: LocalDrafter | None,
    away: RemoteDraft | None,
    rpc_log: RpcLog | None = None,
    suffix: SuffixDrafter | None = None,
    stats: SharedStats | None = None,
) -> TreeDecoding:
    """Returns the decoding with a draft tree: wraps the drafter in a controller, if the config is adaptive or grafts
    suffix lookup, and for failover or fallback, and adds observers.

    `local`: the drafter, if its model runs in this process.
    `away`: the remote draft, if it runs in another process. Both are None without a draft.
    `probabilities`: returns the target's probabilities of a proposal's tokens, for traces (see `TreeTrace`).
    `captured_graphs`: returns the number of CUDA graphs that the models in this process have captured.
    `rpc_log`: log of the RPCs with workers; None without workers.
    `suffix`: proposes after the draft has failed, and with grafting adds to its proposals. None: only the root is
        proposed then.
    `stats`: measurements for the controller, which several decodings can share; None: none yet.
    """
    controller = None
    if config.has_draft_model and (config.is_adaptive or config.grafts_suffix):
        stats = stats or SharedStats(config)
        controller = Controller(
            parts.drafter, stats.of, suffix=suffix if config.grafts_suffix else None, keep_budget=stats.keep
        )
        if local is not None and stats.row_times is not None:
            local.max_nodes = max(controller.round_stats.batch_sizes)
    on_event = _observers(recorder, parts, probabilities, local, controller, rpc_log)
    report = (lambda: None) if controller is None else controller.report
    drafter: FailoverDrafter | FallbackDrafter
    if away is not None:
        drafter = FailoverDrafter(controller or away.drafter, away, suffix)
    else:
        drafter = FallbackDrafter(controller or parts.drafter, suffix)
    decoding = TreeDecoding(drafter, parts.verifier, on_event, lambda: drafter.lost_reason, report, captured_graphs)
    decoding.synthetic_acceptance_length = config.synthetic_acceptance_length
    return decoding


def _observers(
    recorder: Recorder,
    parts: TreeRoles,
    probabilities: Probabilities,
    local: LocalDrafter | None,
    controller: Controller | None,
    rpc_log: RpcLog | None,
) -> ObserverToggle:
    """Returns the observer that records the rounds of rank 0, with the draft's timeline if the draft runs in this
    process. It is enabled while there is a trace file or a listener."""
    drafter_active = (lambda: True) if controller is None else (lambda: controller.round_stats.speculating)
    link = parts.drafter.link if isinstance(parts.drafter, RemoteDrafter) else None
    on_change = (lambda on: None) if link is None or link.recorder is None else link.set_trace
    timeline = None if local is None else DraftTimeline(local)
    drain = () if rpc_log is None else (rpc_log.drain,)
    watcher = TreeTrace(recorder, lambda: parts.verifier.busy, drafter_active, probabilities, timeline, *drain)
    return ObserverToggle(lambda: recorder.enabled, watcher, on_change)
