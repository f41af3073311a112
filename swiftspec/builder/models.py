"""The models of a process: loading, runners and roles on them, and their state at run time."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Lock
from typing import Any, TypeVar
from weakref import WeakSet

from swiftspec.backends.cpu.packed_weight_cache import CACHE_FOLDER, PackedWeightCache
from swiftspec.backends.cuda.devices import is_device_error
from swiftspec.backends.reference import Backend
from swiftspec.builder import hardware
from swiftspec.builder.drafters import DRAFTERS, DrafterInputs, local_drafter_key
from swiftspec.builder.load_options import Side, select_operators
from swiftspec.builder.plan import Plan, rank_count
from swiftspec.builder.verdict_file import VerdictRecord
from swiftspec.config import EngineConfig
from swiftspec.control.draft_budget import DraftBudgets, StoredBudgets
from swiftspec.control.measurement_file import M, MeasurementFile
from swiftspec.control.row_times import (
    PairTimes,
    RowTimes,
    measure_pair_times,
    measure_target_times,
    one_row_seconds,
)
from swiftspec.distributed.collectives.join import RankGroup
from swiftspec.file_io import one_line
from swiftspec.model.checkpoint_files import Progress
from swiftspec.model.head_loader import load_draft_head
from swiftspec.model.spec import DraftHeadSpec
from swiftspec.model.transformer import Transformer
from swiftspec.observe import step_time_emulation
from swiftspec.runtime.cancellation import CancelCheck
from swiftspec.runtime.coroutines import EXPANSION, VERIFICATION, CallQueue
from swiftspec.runtime.executors import available
from swiftspec.runtime.executors.available import ExecutorDeps
from swiftspec.runtime.executors.eager import EagerExecutor
from swiftspec.runtime.executors.graph import Capture, CudaCapture
from swiftspec.runtime.local_drafter import LocalDrafter
from swiftspec.runtime.overlapped import DRAFT_STREAM_PRIORITY
from swiftspec.runtime.prefix_caching import PrefixCachingRunner
from swiftspec.runtime.runner import Runner, StepHook
from swiftspec.runtime.sequence_runner import SequencePool, SequenceRunner
from swiftspec.runtime.target_verifier import TargetVerifier
from swiftspec.runtime.verifier import LocalVerifier
from swiftspec.sampling.sampler import TokenConstraint
from swiftspec.sampling.vocab import VocabShard
from swiftspec.smc.executors import population_executors
from swiftspec.smc.scheduler import BatchScheduler
from swiftspec.tree.rejection import RejectionSampling

T = TypeVar("T", PairTimes, RowTimes)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A loaded model, or this rank's shard of it, shared by any number of runners. Each runner has its own KV cache,
    and only one of them runs at a time."""

    model: Transformer
    ops: Backend
    vocab: int  # size of the base vocabulary
    context: int  # maximum tokens of a sequence, including the overshoot of its last round
    prefix_cache_tokens: int  # budget of each runner; 0 disables the prefix cache
    snapshot_tokens: int  # size of a snapshot in tokens; 0 unless a model has delta layers
    make_constraint: Callable[[str], TokenConstraint]  # compiles a grammar
    eos_token_ids: tuple[int, ...]  # end-of-text tokens of the target
    hook: StepHook | None  # prolongs steps, for emulated step times
    capture: Callable[[], Capture] | None  # creates a graph capture; each runner has its own

    def runner(self, tree_slots: int, cancel_check: CancelCheck) -> tuple[Runner, ExecutorDeps]:
        """Returns a runner with a new KV cache, and the dependencies from which its executors are built. `tree_slots`:
        slots of the cache's tree region. `cancel_check`: called before each prefill chunk."""
        group = self.model.group
        shard = None if group is None else VocabShard(group, self.model.head_rows, self.vocab)
        sizes: Any = {"context": self.context, "tree_slots": tree_slots, "shard": shard}
        if self.prefix_cache_tokens > 0:
            sizes |= {"budget": self.prefix_cache_tokens, "snapshot_tokens": self.snapshot_tokens}
            runner = PrefixCachingRunner(self.model, self.ops, self.vocab, **sizes)
        else:
            runner = Runner(self.model, self.ops, self.vocab, **sizes)
        runner.make_constraint, runner.cancel_check = self.make_constraint, cancel_check
        runner.eos_token_ids = self.eos_token_ids
        if self.hook is not None:
            runner.hooks.append(self.hook)
        return runner, ExecutorDeps(self.ops, self.model.fused, None if self.capture is None else self.capture())


@dataclass(slots=True)
class LocalRoles:
    """The roles on the models that this process holds; None where it does not hold the model.

    `scheduler`: of sequence groups, which takes the place of the other two.
    `others`: the roles of further concurrent requests on the same models.
    """

    verifier: TargetVerifier | None = None
    drafter: LocalDrafter | None = None
    scheduler: BatchScheduler | None = None
    others: Sequence[LocalRoles] = ()

    @property
    def pools(self) -> list[SequencePool]:
        """The sequences of concurrent requests, those of the target first; empty if there is only one request."""
        runners = [role.runner for role in (self.verifier, self.drafter) if role is not None]
        return [runner.pool for runner in runners if isinstance(runner, SequenceRunner)]

    @property
    def executor_names(self) -> set[str]:
        """Names of the executors that the roles support."""
        return {kind.name for role in self._each() for kind in role.executors}

    def restrict_executors(self, common: Container[str]) -> None:
        """Removes all executors except those in `common`, the names that all ranks of the group support."""
        for role in self._each():
            agreed: list[Any] = [kind for kind in role.executors if kind.name in common]
            role.executors = agreed
        for pool in self.pools:
            if pool.executor.name not in common:
                pool.executor = EagerExecutor(pool.runner)

    def _each(self) -> Iterator[LocalVerifier | LocalDrafter | BatchScheduler]:
        yield from (role for role in (self.verifier, self.drafter, self.scheduler) if role is not None)
        for each in self.others:
            yield from each._each()


@dataclass(frozen=True, slots=True)
class Models:
    """The models of a job that this process loads, and what their runners share.

    `cache`: disk cache of packed weights; None if they are not stored.
    `record`: records errors of the GPU for the next start; None: nothing does. Shared by copies.
    `cancel_check`: shared by the runners of this process.
    `capture_lock`: serialises the graph captures of this process.
    `captures`: those of the runners of this process.
    """

    options: Plan
    cache: PackedWeightCache | None
    record: VerdictRecord | None
    cancel_check: CancelCheck = field(default_factory=CancelCheck)
    capture_lock: Lock = field(default_factory=Lock)
    captures: WeakSet[CudaCapture] = field(default_factory=WeakSet)

    @staticmethod
    def of(options: Plan) -> Models:
        """Returns the models that `options` name, none of which is loaded yet."""
        folder, file = options.loading.packed_cache, options.gpu.verdict_file
        return Models(
            options,
            None if folder is None else PackedWeightCache(folder / CACHE_FOLDER),
            None if file is None else VerdictRecord(file, options.gpu.verdict),
        )

    @property
    def draft_head(self) -> DraftHeadSpec | None:
        """What makes the draft a draft head; None if it is a model."""
        paths = self.options.checkpoints
        return None if paths.draft is None else paths.config("draft").spec.draft_head

    def with_vocab(self, vocab_size: int, masked_tokens: tuple[int, ...]) -> Models:
        """Returns a copy with the vocabulary of rank 0; see `Plan.with_vocab`."""
        return replace(self, options=self.options.with_vocab(vocab_size, masked_tokens))

    def with_common_verdict(self, exchange: Callable[[str], Sequence[str]]) -> Models:
        """Returns a copy with the verdict of this rank's group; see `Plan.with_common_verdict`."""
        options = self.options.with_common_verdict(exchange)
        if self.record is not None:
            self.record.verdict = options.gpu.verdict
        return replace(self, options=options)

    def record_device_error(self, error: Exception, plan: EngineConfig) -> None:
        """Records that the GPU of this process has failed, so that the next start is one rung lower
        (`GpuVerdict.lower`). Does nothing if no verdict is kept, and for other errors."""
        failed = next((each for each in (error, error.__cause__) if each and is_device_error(each)), None)
        if self.record is not None and failed is not None:
            grouped = max(rank_count(side, plan) for side in self.options.sides(plan)) > 1
            self.record.lower(error, f"the GPU failed at run time: {one_line(failed)}", grouped=grouped)

    @contextmanager
    def device_errors_recorded(self, plan: EngineConfig) -> Iterator[None]:
        """Context manager that records the error that leaves it (`record_device_error`)."""
        try:
            yield
        except Exception as error:
            self.record_device_error(error, plan)
            raise

    def set_thread_counts(self, plan: EngineConfig, *, set_torch_threads: bool = True) -> None:
        """Sets the CPU threads of the native operators, and with `set_torch_threads` those of torch, for the whole
        process. Called before the models are loaded, since packing uses the threads, too."""
        options = self.options
        specs = options.specs(plan)
        native = all(select_operators(options.ops, spec, options.dtype, options.device).OWN_THREADS for spec in specs)
        hardware.set_thread_counts(options.threads, native=native, set_torch_threads=set_torch_threads)

    def row_times(self, plan: EngineConfig, verifier: LocalVerifier, drafter: LocalDrafter) -> PairTimes | None:
        """Returns the row times of the pair; see `_stored_times`."""
        leaves = plan.leaves_per_expansion
        return self._stored_times(
            plan, PairTimes, verifier, lambda: measure_pair_times(verifier, drafter, leaves, plan.max_nodes)
        )

    def target_times(self, plan: EngineConfig, verifier: LocalVerifier) -> RowTimes | None:
        """Returns the times of the verifications of `verifier`, on the target of this process, by their number of rows;
        see `_stored_times`."""
        return self._stored_times(
            plan, RowTimes, verifier, lambda: measure_target_times(verifier, plan.max_nodes, self.options.vocab_size)
        )

    def _stored_times(
        self, plan: EngineConfig, kind: type[T], verifier: LocalVerifier, measure: Callable[[], T | None]
    ) -> T | None:
        """Returns row times if `plan` requires them: those of an earlier start, from the folder of packed weights,
        unless another process has slowed them down, or else those that `measure` returns. Returns None if the models
        are too slow for the measurement."""
        if not plan.time_rows:
            return None
        file = self._measurement_file(plan, kind)
        if file is None:
            return measure()
        times = file.read()
        if times is not None and not times.slowed_down(lambda: one_row_seconds(verifier)):
            return times
        measured = measure()
        if measured is not None:
            file.write(measured)
        return measured or times

    def draft_budgets(self, plan: EngineConfig) -> StoredBudgets:
        """Returns what the draft has gained in earlier starts, by kind of request."""
        return StoredBudgets.read(self._measurement_file(plan, DraftBudgets) if plan.self_switch else None)

    def _measurement_file(self, plan: EngineConfig, kind: type[M]) -> MeasurementFile[M] | None:
        """Returns the file of a measurement, in the folder of packed weights; None if these are not stored."""
        if self.cache is None:
            return None
        facts = self.options.measurement_facts(plan)
        if kind is DraftBudgets:
            facts |= {"drafter": plan.drafter, "mode": plan.mode, "device": str(self.options.device)}
        return MeasurementFile.of(self.cache.folder, facts, kind)

    def load_roles(
        self, plan: EngineConfig, group: RankGroup | None, progress: Progress | None, *, target: bool, draft: bool
    ) -> LocalRoles:
        """Loads the models that this process holds, and returns the roles on them. `target`, `draft`: whether it holds
        the model. `group`: the ranks that hold the other shards."""
        if plan.mode == "smc":
            return LocalRoles(scheduler=self._scheduler(plan, group, progress))
        calls, count = CallQueue(), plan.max_num_seqs
        verifiers: list[TargetVerifier | None] = [None] * count
        drafters: list[LocalDrafter | None] = [None] * count
        if target:
            runners, deps = self._runners("target", plan, group, progress, calls)
            verifiers = [build_verifier(runner, deps, plan) for runner in runners]
        if draft:
            runners, deps = self._runners("draft", plan, group, progress, calls)
            drafters = [
                self._drafter(plan, (runner, deps), verifier)
                for runner, verifier in zip(runners, verifiers, strict=True)
            ]
        first, *others = (LocalRoles(*roles) for roles in zip(verifiers, drafters, strict=True))
        return replace(first, others=others)

    def _drafter(
        self, plan: EngineConfig, model: tuple[Runner, ExecutorDeps], verifier: LocalVerifier | None
    ) -> LocalDrafter:
        entry = DRAFTERS[local_drafter_key(plan, self.draft_head)]
        drafter = entry.build(DrafterInputs(plan, model=model, verifier=verifier))
        assert isinstance(drafter, LocalDrafter)
        return drafter

    def _runners(
        self, side: Side, plan: EngineConfig, group: RankGroup | None, progress: Progress | None, calls: CallQueue
    ) -> tuple[Sequence[Runner], ExecutorDeps]:
        """Loads a model. Returns a runner for each concurrent request, and the dependencies of the executors. `calls`:
        of these requests."""
        runner, deps = self.runner(side, plan, group, progress)
        if plan.max_num_seqs == 1:
            return [runner], deps
        priority = VERIFICATION if side == "target" else EXPANSION
        pool = SequencePool(
            runner,
            plan.max_num_seqs,
            calls,
            priority,
            prefix_tokens=self.options.prefix_cache_tokens(plan),
            snapshot_tokens=self.options.snapshot_tokens(plan),
        )
        rows = plan.max_nodes if side == "target" else plan.leaves_per_expansion + 1
        if side == "target" or self.draft_head is None:  # captured forwards do not take a head's hidden states
            pool.executor = available.joint_executor(runner, deps, plan.max_num_seqs, rows)
        return [SequenceRunner(pool) for _ in range(plan.max_num_seqs)], deps

    def _scheduler(self, plan: EngineConfig, group: RankGroup | None, progress: Progress | None) -> BatchScheduler:
        """Loads both models and returns a scheduler of sequence groups on them, for the population of `plan`."""
        target, deps = self.runner("target", plan, group, progress)
        draft, draft_deps = self.runner("draft", plan, group, progress)
        lag = 1 if self.options.device.type == "cuda" else 0  # on a CPU rounds are synchronous
        return BatchScheduler(
            target,
            draft,
            population_executors(target, draft, deps, draft_deps, plan.population),
            plan.population,
            max_tokens=self.options.max_model_len,
            lag=lag,
            reuse_prefixes=self.options.prefix_cache_memory > 0,
        )

    def runner(
        self, side: Side, plan: EngineConfig, group: RankGroup | None, progress: Progress | None
    ) -> tuple[Runner, ExecutorDeps]:
        """Loads a model, or this rank's shard of it. Returns a runner and the dependencies of the executors."""
        return self.load_side(side, plan, group, progress).runner(
            self.options.tree_slots(side, plan), self.cancel_check
        )

    def load_side(
        self, side: Side, plan: EngineConfig, group: RankGroup | None, progress: Progress | None
    ) -> LoadedModel:
        """Loads target or draft, or this rank's shard of it."""
        options = self.options
        if group is not None and self.record is not None:
            self.record.groups.append(group)
        path = options.checkpoints.target if side == "target" else options.checkpoints.draft
        times = options.loading.emulate.target if side == "target" else options.loading.emulate.draft
        assert path is not None
        context, config = options.context(plan), options.checkpoints.config(side)
        ops = select_operators(options.ops, config.spec, options.dtype, options.device, options.gpu.verdict)
        how: Any = {
            "dtype": options.dtype,
            "device": options.device,
            "ops": ops,
            "max_positions": options.capacity(side, plan),
            "context": options.max_model_len,
            "progress": progress,
            "group": group,
            "quantization": options.quantization(side, ops),
        }
        if config.spec.draft_head is not None:
            model = load_draft_head(
                None if options.checkpoints.draft_is_mtp else path, options.checkpoints.target, **how
            )
        else:
            model = options.loading.load(
                path,
                cache_dtype=options.formats.cache_dtype,
                packed_cache=self.cache if ops.PACKED_CACHE else None,
                hidden_layers=options.checkpoints.hidden_layers if side == "target" else (),
                vocab_rows=options.vocab_size if side == "draft" else 0,
                **how,
            )
        if side == "draft":
            model = model.with_masked_tokens(options.vocabulary.masked_tokens)
        hook = None if times is None else step_time_emulation.make_hook(times, 1 if group is None else group.size)
        captures = options.device.type == "cuda" and ops.MAX_CAPTURED_SEQUENCES > 0 and options.gpu.verdict.graphs
        priority = DRAFT_STREAM_PRIORITY if side == "draft" and plan.overlap_on_one_gpu else 0
        capture = partial(self._new_capture, priority) if captures else None
        prefix_tokens = options.prefix_cache_tokens(plan) // options.caches.sessions if plan.num_sequences == 1 else 0
        return LoadedModel(
            model,
            ops,
            vocab=options.vocab_size,
            context=context,
            prefix_cache_tokens=prefix_tokens,
            snapshot_tokens=options.snapshot_tokens(plan),
            make_constraint=options.grammars.compile,
            eos_token_ids=options.grammars.eos_token_ids,
            hook=hook,
            capture=capture,
        )

    def _new_capture(self, priority: int) -> CudaCapture:
        """Returns a capture for a runner. `priority`: CUDA priority of its graphs."""
        capture = CudaCapture(self.capture_lock, self.options.device, priority)
        self.captures.add(capture)
        return capture

    def release_graphs(self) -> None:
        """Frees all CUDA graphs of this process; see `CudaCapture.release`."""
        for capture in list(self.captures):
            capture.release()


def build_verifier(runner: Runner, deps: ExecutorDeps, plan: EngineConfig) -> TargetVerifier:
    """Returns a verifier on a model of this process."""
    rejection = RejectionSampling if plan.verify == "reject" else None
    executors = available.target_executors(runner, deps)
    return TargetVerifier(runner, executors, rejection, plan.synthetic_acceptance_length)
