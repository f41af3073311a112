"""The plan of a job: what runs where, with which shapes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import get_args

import torch

from swiftspec import __version__
from swiftspec.backends.cpu import cpu
from swiftspec.backends.cuda import trial
from swiftspec.backends.cuda.attention import CLUSTER_MAJORS
from swiftspec.backends.cuda.devices import gpu_uuid, machine_facts, why_gpu_unused
from swiftspec.backends.cuda.trial_checks import TreeShape
from swiftspec.backends.reference import Backend
from swiftspec.backends.unfused import has_int4_kernels
from swiftspec.builder import gpu_trial, hardware
from swiftspec.builder.gpu_trial import GpuVerdict
from swiftspec.builder.load_options import (
    PREFIX_CACHE_MEMORY_MIB,
    ActivationsName,
    HeadName,
    LoadModel,
    LoadOptions,
    OpsName,
    RankLayout,
    Side,
    TrialName,
    option_features,
    rank_device,
    resolve_cache_dtype,
    select_operators,
    why_not_native,
)
from swiftspec.builder.memory_estimate import (
    BYTES_PER_GB,
    CONTEXT_STEP,
    FLOAT_BYTES,
    MIN_CONTEXT,
    MemoryEstimate,
    fit_context,
    free_memory,
    kv_bytes_per_token,
    memory_by_purpose,
    snapshot_bytes,
)
from swiftspec.builder.rules import ENGINE_FIELDS, GIVEN, SERVER, Choices, Reason, Resolution, default_reason
from swiftspec.builder.trial_plan import TrialModel, make_trial_plan
from swiftspec.builder.verdict_file import VerdictFile
from swiftspec.capabilities import check_features
from swiftspec.config import MAX_THREADS, EngineConfig
from swiftspec.distributed.launch.config_check import RankConfig, settings_of
from swiftspec.drafter_kinds import MODEL_FREE, MTP_HEAD
from swiftspec.errors import UserError, truncated_repr
from swiftspec.model.checkpoint_files import read_config
from swiftspec.model.config import ModelConfig
from swiftspec.model.end_tokens import end_tokens
from swiftspec.model.fingerprint import fingerprint
from swiftspec.model.formats import format_of
from swiftspec.model.formats.int8 import LoadTimeQuantization
from swiftspec.model.gguf.file import GgufFile, is_gguf
from swiftspec.model.gguf.tokenizer import missing_rule, tokenizer_json
from swiftspec.model.head_loader import head_config
from swiftspec.model.loader import load_model
from swiftspec.model.spec import BlockSpec, ModelSpec
from swiftspec.observe.step_time_emulation import StepTimeEmulation
from swiftspec.runtime.current_device import set_current_device
from swiftspec.sampling.grammar import GrammarCompiler
from swiftspec.settings_schema import require
from swiftspec.smc.limits import DEFAULT_REGION_SLOTS, particle_region_slots
from swiftspec.tree.mask import MASK_WIDTHS
from swiftspec.tree.sampled_children import MAX_REROOTS

INT8_NUMBERS = {"native": 0, "int8": 1, "int16": 2}  # to which an activation is quantised; --activations
# hidden size up to which a target's activations are int16 by default (docs/decisions/cpu-kernels.md)
MAX_INT16_HIDDEN_SIZE = 1024
ROPE_TABLES_SHARE = 32  # of a CPU's memory, if the context is not given; decides only for small models


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Where the models of a job are, and what of them this process loads.

    `draft`: None: there is none in this job. `draft_is_mtp`: it is the MTP layer in the target's checkpoint.
    `only`: the only model that this process loads; None: both.
    `hidden_layers`: layers of the target whose hidden states the draft head reads, which forwards keep.
    """

    target: Path
    draft: Path | None
    draft_is_mtp: bool = False
    only: Side | None = None
    hidden_layers: tuple[int, ...] = ()

    def config(self, side: Side) -> ModelConfig:
        """Returns the configuration of target or draft."""
        if side == "draft" and self.draft_is_mtp:
            return head_config(None, self.target)
        path = self.target if side == "target" else self.draft
        assert path is not None
        return read_config(path)

    @property
    def block(self) -> BlockSpec | None:
        """The block of the draft if it is a block head."""
        head = None if self.draft is None else self.config("draft").spec.draft_head
        return None if head is None else head.block

    def block_size(self) -> int | None:
        """Returns the positions that one forward of the draft drafts if that is a block head, else None."""
        return None if self.block is None else self.block.size - 1


@dataclass(frozen=True, slots=True)
class TokenIds:
    """`size`: of the base vocabulary. `masked_tokens`: those that the draft never proposes, ascending.
    `eos_token_ids`: end-of-text tokens of the target."""

    size: int
    masked_tokens: tuple[int, ...]
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NumberFormats:
    """Formats of numbers besides the dtype of the models. `cache_dtype`: of keys and values; None: the models'."""

    activations: ActivationsName = "auto"
    head: HeadName = "auto"
    cache_dtype: torch.dtype | None = None


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """`sessions`: maximum number of a worker's sessions. `region_slots`: mode smc: maximum number of tree slots of all
    groups together."""

    sessions: int = 1
    region_slots: int = DEFAULT_REGION_SLOTS


@dataclass(frozen=True, slots=True)
class GpuUse:
    """`share_device`: several ranks may use one GPU. `verdict`: what falls back on the GPU of this process.
    `verdict_file`: which the next start reads; None: the verdict is not stored."""

    share_device: bool = False
    verdict: GpuVerdict = field(default_factory=GpuVerdict)
    verdict_file: VerdictFile | None = None


@dataclass(frozen=True, slots=True)
class Loading:
    """How weights are loaded, and what is written.

    `load`: loads a model. `emulate`: minimum times of forwards. `trace`: file of the trace; None: there is none.
    `packed_cache`: folder of the disk cache of packed weights; None: they are not stored.
    `note`: receives notices.
    """

    load: LoadModel = load_model
    emulate: StepTimeEmulation = field(default_factory=StepTimeEmulation)
    trace: Path | None = None
    packed_cache: Path | None = None
    note: Callable[[str], None] = lambda line: None


@dataclass(frozen=True, slots=True)
class Plan:
    """What runs where, with which shapes: the resolved options of a job on this rank. `models.Models` loads it.

    `threads`: CPU threads of one operator. `prefix_cache_memory`: MiB, of both models on all ranks.
    `reasons`: why options have their values, by name.
    """

    engine: EngineConfig
    checkpoints: Checkpoints
    vocabulary: TokenIds
    grammars: GrammarCompiler
    device: torch.device
    dtype: torch.dtype
    ops: OpsName
    threads: int
    max_model_len: int
    prefix_cache_memory: int = 0
    caches: CacheSizes = CacheSizes()
    formats: NumberFormats = NumberFormats()
    gpu: GpuUse = GpuUse()
    loading: Loading = Loading()
    reasons: Mapping[str, Reason] = field(default_factory=dict[str, Reason])

    @staticmethod
    def create(
        target: str | Path,
        draft: str | Path | None,
        config: EngineConfig | Choices | None,
        ranks: RankLayout | None,
        options: LoadOptions,
    ) -> Plan:
        """Resolves the options of a job, of which only the configurations of the models are read. Raises UserError if
        models, configuration, ranks and options are not consistent, or if the memory of a GPU does not suffice.
        `config`: of the engine, or the choices for it. `ranks`: None for a single process."""
        share, mtp = options.get("share_device", False), str(draft) == MTP_HEAD
        device = hardware.resolve_device(options.get("device", "auto"))
        path = Path(target) if mtp else None if draft is None or draft in MODEL_FREE else Path(draft)
        checkpoints = Checkpoints(Path(target), path, mtp, options.get("only"))
        resolution = Resolution(Choices.of(config, draft), device.type, checkpoints.block_size)
        engine, model = resolution.config(), _target_config(target)
        _check_ranks(engine, draft, ranks)
        if engine.drafts_without_model:
            checkpoints = replace(checkpoints, draft=None)
        head = _head_config(checkpoints, engine, options)
        if head is not None and head.spec.draft_head is not None:
            layers = head.spec.draft_head.hidden_layers(len(model.spec.layers))
            checkpoints = replace(checkpoints, hidden_layers=layers)
        longest, masked = _context_length(model, options), tuple(options.get("masked_tokens", ()))
        vocab = _vocab_size(checkpoints, options.get("vocab_size"), masked)
        device = rank_device(device, ranks, share)
        set_current_device(device)
        check_features(engine.features | option_features(options, device) | ({"draft head"} if head else set()))
        ops, ends = options.get("ops", "auto"), end_tokens(Path(target))
        prefix_cache = options.get("prefix_cache_memory", PREFIX_CACHE_MEMORY_MIB)
        require(prefix_cache >= 0, f"prefix_cache_memory must be at least 0 MiB, not {prefix_cache}")
        plan = Plan(
            engine,
            checkpoints,
            TokenIds(vocab, masked, ends),
            grammar_compiler(Path(target), ends, vocab),
            device=device,
            dtype=hardware.resolve_dtype(options.get("dtype"), model.dtype, ops, device),
            ops=ops,
            threads=hardware.thread_count(options.get("threads"), 1 if ranks is None else ranks.local_size),
            max_model_len=longest,
            prefix_cache_memory=prefix_cache,
            caches=CacheSizes(options.get("sessions", 1)),
            formats=NumberFormats(
                options.get("activations", "auto"),
                options.get("head", "auto"),
                resolve_cache_dtype(options.get("kv_cache_dtype", "auto")),
            ),
            gpu=GpuUse(share),
            loading=Loading(
                options.get("load", load_model),
                options.get("emulate") or StepTimeEmulation(),
                options.get("trace"),
                options.get("packed_cache"),
                options.get("note") or (lambda line: None),
            ),
            reasons=resolution.reasons,
        )
        plan._note_machine(given_device=options.get("device", "auto") != "auto")
        plan.check_operators(engine, plan.loading.note)
        plan = plan.with_gpu_trial(engine, options.get("gpu_trial", "auto"), options.get("trial_cache"))
        # the ranks of a job must have the same context, but may have different amounts of free memory
        adjust = options.get("max_model_len") is None and (ranks is None or ranks.size == 1)
        plan = plan.fit_memory(engine, adjust=adjust, note=plan.loading.note)
        return plan._fit_requests().explained(options, model)

    @property
    def vocab_size(self) -> int:
        """Size of the base vocabulary."""
        return self.vocabulary.size

    def _note_machine(self, *, given_device: bool) -> None:
        """Reports what makes the models slower on this machine, or their text another one."""
        note, on_cpu, target = self.loading.note, self.device.type == "cpu", self.checkpoints.target
        if on_cpu and not given_device and (why := why_gpu_unused()) is not None:
            note(f"the models run on the CPU although this machine has a GPU: {why}")
        if is_gguf(target) and (line := missing_rule(GgufFile.read(target))) is not None:
            note(line)
        if on_cpu and hardware.matrix_tiles_refused():
            note(
                "products of many rows are slower than on this CPU's matrix tiles (AMX), which the operating "
                "system refuses to this process; allow arch_prctl(ARCH_REQ_XCOMP_PERM)"
            )

    def sides(self, engine: EngineConfig) -> dict[Side, ModelConfig]:
        """Returns the configurations of the models that the ranks of this job load."""
        paths: dict[Side, Path] = {"target": self.checkpoints.target}
        if self.checkpoints.draft is not None and engine.mode != "ar":
            paths["draft"] = self.checkpoints.draft
        return {side: self.checkpoints.config(side) for side in paths if self.checkpoints.only in (None, side)}

    def check_operators(self, engine: EngineConfig, note: Callable[[str], None]) -> None:
        """Reports to `note` which models do not run on the native operators, and why. Raises UserError if the CUDA
        operators were requested for such a model."""
        for side, config in self.sides(engine).items():
            ops = select_operators(self.ops, config.spec, self.dtype, self.device)
            why = why_not_native(config.spec, self.dtype, self.device) if self.ops == "auto" else None
            if why is not None:
                note(f"the {side} runs on torch's own operators: {why}")
            layout = format_of(config)
            need = ops.int4_needs(self.dtype, self.device)
            if layout is not None and layout.is_int4 and need is not None and self.device.type == "cuda":
                bits = 8 * self.dtype.itemsize
                note(f"the int4 weights of the {side} are expanded to {bits} bits; {need} would keep them")

    def memory_needs(self, engine: EngineConfig) -> list[dict[Side, MemoryEstimate]]:
        """Returns for each kind of rank estimates of the models that it holds. The device must be a GPU."""
        major, _ = torch.cuda.get_device_capability(self.device)
        needs: dict[Side, MemoryEstimate] = {}
        for side, config in self.sides(engine).items():
            ops = select_operators(self.ops, config.spec, self.dtype, self.device, self.gpu.verdict)
            needs[side] = MemoryEstimate(
                config,
                self.dtype,
                capacity=self.capacity(side, engine),
                ranks=rank_count(side, engine),
                sequences=self.caches.sessions * engine.num_sequences,
                ops=ops,
                cache_dtype=None if config.spec.draft_head is not None else self.formats.cache_dtype,
                int4_head=self.quantization(side, ops).head == "int4",
                prefix_tokens=0 if engine.mode == "smc" else self.prefix_cache_tokens(engine),
                tree_slots=self.tree_slots(side, engine),
                clusters=major in CLUSTER_MAJORS,
                int4_kernels=has_int4_kernels(self.device),
            )
        apart = engine.mode == "async" and engine.num_ranks > 1  # each rank holds one of the two models
        return [{side: need} for side, need in needs.items()] if apart else [needs]

    def fit_memory(self, engine: EngineConfig, *, adjust: bool, note: Callable[[str], None]) -> Plan:
        """Returns a copy whose context fits the memory of this rank's GPU, as `fit_context` does, or on a CPU with
        `adjust` that of this machine. Not checked if several ranks share a GPU."""
        if self.device.type == "cpu":
            plan, most = self._fit_machine(engine, note) if adjust else self, hardware.memory_bytes() // 2
            return plan._fit_region(engine, lambda other: other._region_bytes(engine) <= most)
        if self.gpu.share_device or self.device.type != "cuda":
            return self
        needs = self.memory_needs(engine)

        def needs_at(tokens: int) -> list[list[MemoryEstimate]]:
            resized = replace(self, max_model_len=tokens)
            return [
                [replace(need, capacity=resized.capacity(side, engine)) for side, need in held.items()]
                for held in needs
            ]

        try:
            length = fit_context(needs_at, self.max_model_len, self.device, adjust=adjust, note=note)
        except UserError as error:
            raise UserError(f"{error}, or fewer particles") if engine.mode == "smc" else error from None
        plan = replace(self, max_model_len=length)
        used = max(sum(memory_by_purpose(held).values()) for held in needs_at(length))
        most = plan._region_bytes(engine) + (free_memory(self.device) - used) / 2
        return plan._fit_region(engine, lambda other: other._region_bytes(engine) <= most)

    def _fit_region(self, engine: EngineConfig, fits: Callable[[Plan], bool]) -> Plan:
        """Returns a copy whose tree region holds N different texts of the whole context, or as many slots as fit, but
        at least `region_slots`, for which the context was chosen. `fits`: whether the region of a copy fits the memory.
        Raises UserError if two rounds need more than `region_slots` and do not fit. The ranks of a job, whose regions
        must be equal, and models with delta layers, whose slots are large, keep `region_slots`."""
        if engine.mode != "smc":
            return self
        population = engine.population
        groups, step = population.smc_groups, MASK_WIDTHS[-1] * population.smc_groups
        least, most = (
            particle_region_slots(population, self.max_model_len, limit) * groups
            for limit in (self.caches.region_slots, 1 << 62)
        )
        if least > self.caches.region_slots and not fits(self):
            raise UserError(
                f"{population.particles} particles with {population.smc_draft_tokens} draft tokens in {groups} group"
                f"{'s' * (groups > 1)} need {self._region_bytes(engine) / BYTES_PER_GB:.1f} GB for the keys and values"
                " of two rounds, which do not fit the memory: use fewer particles, draft tokens or groups"
            )
        if engine.num_ranks > 1 or any(spec.delta_mixers for spec in self.specs(engine)):
            return self
        low, high = least // step, most // step
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(self._with_region(middle * step)) else (low, middle - 1)
        return self._with_region(max(low * step, self.caches.region_slots))

    def _with_region(self, slots: int) -> Plan:
        return replace(self, caches=replace(self.caches, region_slots=slots))

    def _region_bytes(self, engine: EngineConfig) -> int:
        """Returns the bytes of the keys, values and mask rows in the tree regions of all groups, of both models."""
        slot = self._token_bytes(engine) + engine.population.particles
        return engine.population.smc_groups * self.tree_slots("target", engine) * slot

    def _fit_machine(self, engine: EngineConfig, note: Callable[[str], None]) -> Plan:
        """Returns a copy with a context of at most the tokens whose keys and values fit this machine's memory, and
        whose RoPE tables fit 1 / ROPE_TABLES_SHARE of it: the former use memory as a text grows, but the tables from
        the start."""
        kinds = [{mixer.kind for mixer in spec.attention_mixers} for spec in self.specs(engine)]
        tables = sum(2 * FLOAT_BYTES * mixer.head_dim for each in kinds for mixer in each)
        memory = hardware.memory_bytes()
        tokens = memory // max(self._token_bytes(engine), ROPE_TABLES_SHARE * tables, 1)
        most = max(tokens // CONTEXT_STEP * CONTEXT_STEP, MIN_CONTEXT)
        if self.max_model_len <= most:
            return self
        note(
            f"the context is limited to {most} of {self.max_model_len} tokens, which fit the"
            f" {memory / BYTES_PER_GB:.1f} GB of memory of this machine; --max-model-len sets the limit"
        )
        return replace(self, max_model_len=most)

    def _fit_requests(self) -> Plan:
        """Returns a copy in which the contexts of a server's concurrent requests fit half of this machine's memory,
        unless their number was chosen."""
        reason = self.reasons.get("max_num_seqs")
        if reason is None or reason.rule != SERVER:
            return self
        most = hardware.memory_bytes() // 2 // (self._token_bytes(self.engine) * self.max_model_len)
        count = min(max(most, 1), reason.value)
        reasons = {**self.reasons, "max_num_seqs": replace(reason, value=count)}
        return replace(self, engine=replace(self.engine, max_num_seqs=count), reasons=reasons)

    def capacity(self, side: Side, engine: EngineConfig) -> int:
        """Returns the number of slots of a sequence in the KV cache of target or draft."""
        return self.context(engine) + self.tree_slots(side, engine)

    def with_gpu_trial(self, engine: EngineConfig, requested: TrialName, cache: Path | None) -> Plan:
        """Returns a copy with the verdict of the GPU trial, if this process will use the CUDA operators. Reports to
        `note` what falls back. `requested`: "again" ignores the verdict of an earlier trial, "off" tries nothing.
        `cache`: folder of the verdicts; None: every start tries again. Raises UserError if `requested` is unknown."""
        names = get_args(TrialName)
        require(requested in names, f"gpu_trial must be one of {', '.join(names)}, not {truncated_repr(requested)}")
        models = self._trial_models(engine)
        if requested == "off" or not models:
            return self
        tree = None
        if "draft" in self.sides(engine) and engine.mode != "smc":
            tree = TreeShape(self.tree_slots("draft", engine), engine.children_per_leaf, engine.leaves_per_expansion)
        shapes = make_trial_plan(models, tree, engine.population.particles if engine.mode == "smc" else 0)
        facts = {**machine_facts(self.device), "plan": shapes.to_json()}
        file = None if cache is None else VerdictFile.of(cache, facts)
        verdict = file.read() if file is not None and requested == "auto" else None
        stored = verdict is not None
        if verdict is None:
            verdict, problem = gpu_trial.run_trial(shapes, str(self.device))
            if problem is not None:
                self.loading.note(f"the GPU trial was not completed: {problem}; --ops unfused skips it")
            elif file is not None:
                file.write(verdict)
        hint = f"; the verdict of an earlier start, remove {cache} to repeat the trial" if stored else ""
        return replace(self, gpu=replace(self.gpu, verdict_file=file))._with_verdict(verdict, hint)

    def _trial_models(self, engine: EngineConfig) -> list[TrialModel]:
        """Returns the models that run on the CUDA operators."""
        if self.device.type != "cuda" or self.ops not in ("auto", "cuda"):
            return []
        found: list[TrialModel] = []
        for side, config in self.sides(engine).items():
            if why_not_native(config.spec, self.dtype, self.device) is None:
                ops = select_operators(self.ops, config.spec, self.dtype, self.device)
                int4_head, dtype = self.quantization(side, ops).head == "int4", self.formats.cache_dtype or self.dtype
                found.append(
                    TrialModel(config, rank_count(side, engine), self.capacity(side, engine), dtype, int4_head)
                )
        return found

    def _with_verdict(self, verdict: GpuVerdict, hint: str = "") -> Plan:
        """Returns a copy with a verdict, and reports it with a `hint`. Must be called before the first kernel is
        launched."""
        if not verdict.early_starts:
            trial.disable_early_starts()
        if (line := verdict.note()) is not None:
            self.loading.note(f"{line}{hint}")
        return replace(self, gpu=replace(self.gpu, verdict=verdict))

    def with_common_verdict(self, exchange: Callable[[str], Sequence[str]]) -> Plan:
        """Returns a copy with the fallbacks and tilings that all ranks of this rank's group use (`GpuVerdict.union`).
        `exchange`: returns the texts that all ranks of the group pass to it."""
        said = exchange(json.dumps(self.gpu.verdict.to_json()))
        common = self.gpu.verdict.union([GpuVerdict.from_json(json.loads(text)) for text in said])
        return self if common == self.gpu.verdict else self._with_verdict(common)

    def with_vocab(self, vocab_size: int, masked_tokens: tuple[int, ...]) -> Plan:
        """Returns a copy with the vocabulary size and the masked tokens of rank 0, the only rank that has the
        tokenizers. Raises UserError if a model's LM head has fewer rows."""
        _vocab_size(self.checkpoints, vocab_size, masked_tokens)
        tokens = TokenIds(vocab_size, masked_tokens, self.vocabulary.eos_token_ids)
        grammars = grammar_compiler(self.checkpoints.target, tokens.eos_token_ids, vocab_size)
        return replace(self, vocabulary=tokens, grammars=grammars)

    def rank_config(self, config: EngineConfig, *, target: bool, draft: bool) -> RankConfig:
        """Returns the settings and model fingerprints of this rank that must equal those of the other ranks of its job
        or group. `target`, `draft`: whether the rank's group runs the model. The vocabulary size is not included,
        because only rank 0 has the tokenizer. Raises UserError if a model file cannot be read."""
        paces = {"emulate target": self.loading.emulate.target, "emulate draft": self.loading.emulate.draft}
        settings = {
            **settings_of(config),
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": self.device.type,
            "share_gpus": self.gpu.share_device,
            "ops": self.ops,
            "activations": self.formats.activations,
            "kv_cache_dtype": "auto" if self.formats.cache_dtype is None else "fp8",
            "head": self.formats.head,
            **{name: None if times is None else str(times.points) for name, times in paces.items()},
            "max_model_len": self.max_model_len,
            "prefix_cache_memory": self.prefix_cache_memory,
            "trace": self.loading.trace is not None,
            "version": __version__,
        }
        files = {} if self.checkpoints.draft is None else {"draft": model_fingerprint(self.checkpoints.draft)}
        group_files = {"target": model_fingerprint(self.checkpoints.target)} if target else {}
        return RankConfig(settings, files, group_files, None if self.gpu.share_device else gpu_uuid(self.device))

    def measurement_facts(self, engine: EngineConfig) -> dict[str, object]:
        """Returns everything that determines a measurement of the models, serialisable as JSON. Raises UserError if a
        model file cannot be read."""
        facts: dict[str, object] = {
            "version": __version__,
            "cpu": hardware.cpu_name(),
            **cpu.machine_facts(),
            "threads": self.threads,
            "models": [
                model_fingerprint(path)
                for path in (self.checkpoints.target, self.checkpoints.draft)
                if path is not None
            ],
            "dtype": str(self.dtype),
            "cache": str(self.formats.cache_dtype),
            "ops": self.ops,
            "activations": self.formats.activations,
            "head": self.formats.head,
            "emulate": asdict(self.loading.emulate),
            "mtp": self.checkpoints.draft_is_mtp,
            "leaves": engine.leaves_per_expansion,
            "nodes": engine.max_nodes,
        }
        if self.device.type == "cuda":
            facts["gpu"] = machine_facts(self.device)
        return facts

    def trace_metadata(self, engine: EngineConfig) -> dict[str, object]:
        """Returns the description of a run for the first line of a trace."""
        shape: dict[str, object] = {
            "verify_batch": engine.verify_batch,
            "draft_leaves": engine.leaves_per_expansion,
            "draft_steps": engine.initial_draft_steps,
        }
        if engine.synthetic_acceptance_length is not None:
            shape["synthetic_acceptance_length"] = engine.synthetic_acceptance_length
        split = {"target_tp": engine.target_tp, "draft_tp": engine.draft_tp}
        return {
            "mode": engine.mode,
            **shape,
            **split,
            "model": self.checkpoints.target.name,
            "emulate": asdict(self.loading.emulate),
        }

    def peer_all_reduce_width(self, *, target: bool, draft: bool) -> int:
        """Returns the largest hidden size of the models whose kernels all-reduce through peer memory, or 0 if they do
        not: other projections than those of cuda, ranks that share a GPU, or a verdict against peer memory. `target`,
        `draft`: whether the rank's group runs the model."""
        width = 0
        for spec in self._model_specs(target=target, draft=draft):
            ops = select_operators(self.ops, spec, self.dtype, self.device, self.gpu.verdict)
            if self.gpu.share_device or not self.gpu.verdict.peers or not ops.PEER_ALL_REDUCE:
                return 0
            width = max(width, spec.hidden_size)
        return width

    def context(self, engine: EngineConfig) -> int:
        return self.max_model_len + engine.max_nodes  # the last round may overshoot

    def tree_slots(self, side: Side, engine: EngineConfig) -> int:
        """Returns the number of tree slots in the KV cache of target or draft."""
        if engine.mode == "smc":
            return particle_region_slots(engine.population, self.max_model_len, self.caches.region_slots)
        if side == "target":
            return engine.max_nodes
        block = self.checkpoints.block
        return draft_tree_slots(engine) if block is None else block.size

    def quantization(self, side: Side, ops: Backend) -> LoadTimeQuantization:
        """Returns what is quantised when the target or the draft is loaded."""
        activations = self.activations_reason(side, ops).value
        # int8 activations of the target's head would have more error than its weights
        head_activations = 2 if side == "target" else max(activations, 1)
        return LoadTimeQuantization(activations, self.head_reason(side, ops).value, head_activations)

    def activations_reason(self, side: Side, ops: Backend) -> Reason:
        """Returns to how many int8 numbers an activation of a model is quantised, and why."""
        if self.formats.activations != "auto":
            return Reason(INT8_NUMBERS[self.formats.activations], GIVEN)
        if not ops.INT8_ACTIVATIONS or self.dtype != torch.bfloat16:
            return Reason(0, "dense products", "only the native operators of a CPU quantise, in bfloat16")
        if side == "target" and self.checkpoints.config(side).spec.hidden_size <= MAX_INT16_HIDDEN_SIZE:
            return Reason(2, "small target", f"its hidden size is at most {MAX_INT16_HIDDEN_SIZE}")
        return Reason(1, "integer products", "they are faster than those of bfloat16")

    def head_reason(self, side: Side, ops: Backend) -> Reason:
        """Returns the format of a model's LM head if it is quantised, else None, and why."""
        if self.formats.head != "auto":
            return Reason(None if self.formats.head == "native" else self.formats.head, GIVEN)
        activations = self.activations_reason(side, ops).value
        if side == "draft":
            return Reason(
                ops.DRAFT_HEAD or ("int8" if activations else None), "draft", "its error costs acceptance only"
            )
        layout = format_of(self.checkpoints.config(side))
        if layout is not None and layout.is_int4 and activations == INT8_NUMBERS["int8"]:
            return Reason("int8", "int4 target", "it has less error than the rest of the weights")
        return Reason(None, "checkpoint", "its error would change the text")

    def explained(self, options: LoadOptions, model: ModelConfig) -> Plan:
        """Returns a copy with the reasons of what is resolved outside of the engine. `model`: the target."""
        whole = self.max_model_len == model.max_position_embeddings
        dtype = hardware.dtype_reason(options.get("dtype"), model.dtype, self.ops, self.device)
        reasons = {
            "device": Reason(self.device, "fastest", "a GPU if PyTorch finds one"),
            "dtype": replace(dtype, value=self.dtype),
            "threads": Reason(self.threads, "physical cores", f"the share of this rank, at most {MAX_THREADS}"),
            "max_model_len": Reason(
                self.max_model_len, *(("target", "its longest") if whole else ("memory", "it fits"))
            ),
            "vocab_size": Reason(self.vocab_size, "LM head", "rows of the smaller one"),
            "kv_cache_dtype": Reason(self.formats.cache_dtype or self.dtype, "same as dtype"),
            "prefix_cache_memory": Reason(self.prefix_cache_memory, "default", "MiB"),
        }
        usual = {"vocab_size": None, "prefix_cache_memory": PREFIX_CACHE_MEMORY_MIB}
        for name, reason in reasons.items():
            if options.get(name) not in (None, "auto", usual.get(name)):
                reasons[name] = Reason(reason.value, GIVEN)
        return replace(self, reasons={**self.reasons, **reasons})

    def describe(self) -> list[str]:
        """Returns one line per option: its value, and the rule or the choice that has set it."""
        engine, rows = self.engine, list[tuple[str, Reason]]()
        for name in ENGINE_FIELDS:
            value = getattr(engine, name)
            if name != "population":
                rows.append((name, replace(self.reasons.get(name) or default_reason(name), value=value)))
            elif engine.mode == "smc":
                rows += [(each, Reason(found, "")) for each, found in asdict(value).items()]
        rows += [(name, reason) for name, reason in self.reasons.items() if name not in ENGINE_FIELDS]
        for side, config in self.sides(engine).items():
            ops = select_operators(self.ops, config.spec, self.dtype, self.device, self.gpu.verdict)
            why = why_not_native(config.spec, self.dtype, self.device)
            operators = Reason(type(ops).__name__, GIVEN)
            if self.ops == "auto":
                operators = replace(operators, rule="fastest" if why is None else "fallback", why=why or "")
            slots, room = self.tree_slots(side, engine), self.capacity(side, engine)
            rows += [
                (f"{side} ranks", Reason(rank_count(side, engine), "")),
                (f"{side} operators", operators),
                (f"{side} activations", self.activations_reason(side, ops)),
                (f"{side} LM head", self.head_reason(side, ops)),
                (
                    f"{side} KV slots",
                    Reason(room, "shape", f"context, one round, and {slots} slots of the tree region"),
                ),
            ]
        cells = [(name, _shown(each.value), ": ".join(filter(None, (each.rule, each.why)))) for name, each in rows]
        widths = [max(len(row[column]) for row in cells) for column in (0, 1)]
        return [f"{name:{widths[0]}}  {value:{widths[1]}}  {why}".rstrip() for name, value, why in cells]

    def prefix_cache_tokens(self, engine: EngineConfig) -> int:
        """Returns the budget of the prefix cache in tokens. The KV of both models is counted for each token, so that
        all ranks have the same budget."""
        return self.prefix_cache_memory * 2**20 // self._token_bytes(engine)

    def snapshot_tokens(self, engine: EngineConfig) -> int:
        """Returns the size of a snapshot of the delta layers of both models in tokens."""
        size = sum(snapshot_bytes(spec, self.dtype) for spec in self.specs(engine))
        return -(-size // self._token_bytes(engine))

    def _token_bytes(self, engine: EngineConfig) -> int:
        """Returns the bytes of one token's keys and values in both models."""
        return sum(kv_bytes_per_token(spec, self.formats.cache_dtype or self.dtype) for spec in self.specs(engine))

    def specs(self, engine: EngineConfig) -> list[ModelSpec]:
        return self._model_specs(target=True, draft=engine.mode != "ar")

    def _model_specs(self, *, target: bool, draft: bool) -> list[ModelSpec]:
        """Returns the specs of the models that this process loads. `target`, `draft`: whether to include the model."""
        sides = list[Side]()
        if target and self.checkpoints.only != "draft":
            sides.append("target")
        if draft and self.checkpoints.draft is not None and self.checkpoints.only != "target":
            sides.append("draft")
        return [self.checkpoints.config(side).spec for side in sides]


def _shown(value: object) -> str:
    """Returns a value as `Plan.describe` shows it."""
    words = {None: "none", True: "on", False: "off"}
    return words[value] if value is None or isinstance(value, bool) else str(value).removeprefix("torch.")


def rank_count(side: Side, engine: EngineConfig) -> int:
    """Returns the number of ranks that share target or draft."""
    return max(engine.draft_tp if side == "draft" and engine.mode == "async" else engine.target_tp, 1)


def _check_ranks(engine: EngineConfig, draft: str | Path | None, ranks: RankLayout | None) -> None:
    """Raises UserError if the mode requires a draft and there is none, or if the number of ranks is wrong."""
    if engine.has_draft_model and draft is None and not engine.draft_remote:
        check_features(engine.features | {"no draft"})
    count = 1 if ranks is None else ranks.size
    if engine.num_ranks != count:
        split = f"mode {engine.mode} with target_tp {engine.target_tp} and draft_tp {engine.draft_tp}"
        required = f"{engine.num_ranks} rank{'s' if engine.num_ranks > 1 else ''}"
        raise UserError(f"{split} requires {required}, not {count}: start that many with torchrun")


def grammar_compiler(target: Path, eos: tuple[int, ...], vocab_size: int) -> GrammarCompiler:
    """Returns the compiler of grammars for the tokenizer of a model, which it reads on first use."""
    tokenizer = (lambda: tokenizer_json(GgufFile.read(target))) if is_gguf(target) else None
    return GrammarCompiler(target, eos, vocab_size, tokenizer)


def _context_length(config: ModelConfig, options: LoadOptions) -> int:
    """Returns the maximum number of prompt and output tokens. Raises UserError if the target does not support it."""
    longest, length = config.max_position_embeddings, options.get("max_model_len")
    length = longest if length is None else length
    if not 2 <= length <= longest:
        raise UserError(f"max_model_len must lie in 2..{longest} for this target, not {length}")
    return length


def _vocab_size(checkpoints: Checkpoints, vocab: int | None, masked: tuple[int, ...]) -> int:
    """Returns the size of the base vocabulary: `vocab`, or for None the number of rows of the smaller LM head. Raises
    UserError if the target's LM head has fewer rows, or the draft's has no row for a token that is not `masked`."""
    paths = (checkpoints.target, checkpoints.draft)
    rows = {path: read_config(path).spec.vocab_size for path in paths if path is not None}
    vocab = vocab or min(rows.values())
    require(
        all(0 <= token < vocab for token in masked) and len({*masked}) < vocab,
        f"masked_tokens must be token ids in 0..{vocab - 1}, and not all of them",
    )
    for path, count in rows.items():
        if vocab > count and (path == checkpoints.target or not {*range(count, vocab)} <= {*masked}):
            raise UserError(f"the tokenizer has {vocab} tokens, but the LM head of {path} has only {count} rows")
    return vocab


def _target_config(target: str | Path) -> ModelConfig:
    """Returns the configuration of the target. Raises UserError if it is a draft head."""
    config = read_config(target)
    if config.spec.draft_head is not None:
        raise UserError(
            f"{target} is a draft head, which cannot run alone: name its target as the model, and this as"
            " the draft model"
        )
    return config


def _head_config(checkpoints: Checkpoints, engine: EngineConfig, options: LoadOptions) -> ModelConfig | None:
    """Returns the configuration of the draft head, or None for another draft. Raises UserError if the head does not fit
    the target, or if `engine` or `options` do not support draft heads."""
    draft, mtp = checkpoints.draft, checkpoints.draft_is_mtp
    if engine.mode == "ar" or draft is None or not (mtp or read_config(draft).spec.draft_head is not None):
        return None
    away = {"target worker"} if options.get("only") is not None else set()
    check_features(engine.features | away | {"draft head"})
    return head_config(None if mtp else draft, checkpoints.target)


def model_fingerprint(path: Path) -> str:
    """Returns the fingerprint of a model directory's contents. Raises UserError if a file cannot be read."""
    try:
        return fingerprint(path)
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read: {error.strerror}") from None


def draft_tree_slots(engine: EngineConfig) -> int:
    """Returns the number of tree slots of the draft's KV cache, which is also that of the draft tree."""
    if engine.proposal == "sample":
        return (
            engine.leaves_per_expansion * (engine.max_draft_steps + 1) * (MAX_REROOTS + 1)
        )  # every slot that a tree uses before it is rebuilt
    return (4 * engine.max_draft_steps + 1) * engine.leaves_per_expansion
