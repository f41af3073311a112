"""The models of a job, their options, and what follows from these: checks, sizes and formats."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
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
from swiftspec.batching.chains import chain_region_slots
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
    kv_bytes_per_token,
    snapshot_bytes,
)
from swiftspec.builder.trial_plan import TrialModel, make_trial_plan
from swiftspec.builder.verdict_file import VerdictFile
from swiftspec.capabilities import check_features
from swiftspec.config import MTP_HEAD, SUFFIX_LOOKUP, EngineConfig
from swiftspec.distributed.launch.config_check import RankConfig, settings_of
from swiftspec.errors import UserError, truncated_repr
from swiftspec.model.checkpoint_files import read_config
from swiftspec.model.config import ModelConfig
from swiftspec.model.end_tokens import end_tokens
from swiftspec.model.fingerprint import fingerprint
from swiftspec.model.formats import format_of
from swiftspec.model.formats.int8 import HeadFormat, LoadTimeQuantization
from swiftspec.model.gguf.file import GgufFile, is_gguf
from swiftspec.model.gguf.tokenizer import missing_rule, tokenizer_json
from swiftspec.model.head_loader import head_config
from swiftspec.model.loader import load_model
from swiftspec.model.spec import BlockSpec, ModelSpec
from swiftspec.observe.step_time_emulation import StepTimeEmulation
from swiftspec.runtime.current_device import set_current_device
from swiftspec.sampling.grammar import GrammarCompiler
from swiftspec.settings_schema import require
from swiftspec.smc.limits import particle_region_slots
from swiftspec.tree.sampled_children import MAX_REROOTS

INT8_NUMBERS = {"native": 0, "int8": 1, "int16": 2}  # to which an activation is quantised; --activations
# hidden size up to which a target's activations are int16 by default (docs/decisions/cpu-kernels.md)
MAX_INT16_HIDDEN_SIZE = 1024
ROPE_TABLES_SHARE = 32  # of a CPU's memory, if the context is not given; decides only for small models


@dataclass(frozen=True, slots=True)
class ModelPair:
    """Target and draft of a job, and how this rank loads and runs them. `models.Models` loads them."""

    target: Path
    draft: Path | None  # None: none in this job; the target for the MTP layer in its checkpoint
    dtype: torch.dtype  # of both models
    device: torch.device
    threads: int  # CPU threads of one operator
    share_device: bool
    max_model_len: int
    vocab_size: int
    ops: OpsName
    activations: ActivationsName
    cache_dtype: torch.dtype | None  # of keys and values; None: the model's dtype
    head: HeadName
    load: LoadModel
    emulate: StepTimeEmulation
    trace: Path | None
    prefix_cache_memory: int  # MiB, of both models on all ranks
    packed_cache: Path | None  # folder of the disk cache of packed weights; None: they are not stored
    eos_token_ids: tuple[int, ...]  # end-of-text tokens of the target
    grammars: GrammarCompiler
    only: Side | None = None  # the only model that this process loads; None: both
    sessions: int = 1  # maximum number of a worker's sessions
    masked_tokens: tuple[int, ...] = ()  # tokens that the draft never proposes, ascending
    hidden_layers: tuple[int, ...] = ()  # layers of the target after which forwards keep the hidden states
    draft_is_mtp: bool = False  # whether the draft is the MTP layer in the target's checkpoint
    verdict: GpuVerdict = field(default_factory=GpuVerdict)  # what falls back on the GPU of this process
    verdict_file: VerdictFile | None = None  # which the next start reads; None: the verdict is not stored
    note: Callable[[str], None] = lambda line: None  # receives notices

    @staticmethod
    def create(
        target: str | Path, draft: str | Path | None, plan: EngineConfig, ranks: RankLayout | None, options: LoadOptions
    ) -> ModelPair:
        """Returns the model pair of a job, from the configuration of the models alone. Raises UserError if models,
        configuration, ranks and options are not consistent, or if the memory of a GPU does not suffice. `plan`: the
        engine configuration. `ranks`: None for a single process."""
        _check_ranks(plan, draft, ranks)
        mtp, config = str(draft) == MTP_HEAD, _target_config(target)
        draft_path = None if draft is None or plan.drafts_by_lookup or draft == SUFFIX_LOOKUP else Path(draft)
        draft_path = Path(target) if mtp else draft_path
        draft_head = _head_config(draft_path, Path(target), plan, options, mtp=mtp)
        length, masked = _context_length(config, options), tuple(options.get("masked_tokens", ()))
        vocab = _vocab_size(Path(target), draft_path, options.get("vocab_size"), masked)
        share = options.get("share_device", False)
        device = rank_device(hardware.resolve_device(options.get("device", "auto")), ranks, share)
        set_current_device(device)
        check_features(plan.features | option_features(options, device) | ({"draft head"} if draft_head else set()))
        ops, load = options.get("ops", "auto"), options.get("load", load_model)
        dtype = hardware.resolve_dtype(options.get("dtype"), config.dtype, ops, device)
        threads = hardware.thread_count(options.get("threads"), 1 if ranks is None else ranks.local_size)
        emulate, trace = options.get("emulate") or StepTimeEmulation(), options.get("trace")
        activations, head = options.get("activations", "auto"), options.get("head", "auto")
        stored = resolve_cache_dtype(options.get("kv_cache_dtype", "auto"))
        prefix_cache = options.get("prefix_cache_memory", PREFIX_CACHE_MEMORY_MIB)
        require(prefix_cache >= 0, f"prefix_cache_memory must be at least 0 MiB, not {prefix_cache}")
        packed, ends = options.get("packed_cache"), end_tokens(Path(target))
        models = ModelPair(
            Path(target),
            draft_path,
            dtype,
            device,
            threads,
            share,
            length,
            vocab,
            ops,
            activations,
            stored,
            head,
            load,
            emulate,
            trace,
            prefix_cache,
            packed,
            ends,
            grammar_compiler(Path(target), ends, vocab),
            options.get("only"),
            options.get("sessions", 1),
            masked,
            _hidden_layers(config, options, draft_head),
            draft_is_mtp=mtp,
            note=options.get("note") or (lambda line: None),
        )
        if device.type == "cpu" and options.get("device", "auto") == "auto" and (why := why_gpu_unused()) is not None:
            models.note(f"the models run on the CPU although this machine has a GPU: {why}")
        if is_gguf(target) and (line := missing_rule(GgufFile.read(Path(target)))) is not None:
            models.note(line)
        if device.type == "cpu" and hardware.matrix_tiles_refused():
            models.note(
                "products of many rows are slower than on this CPU's matrix tiles (AMX), which the operating "
                "system refuses to this process; allow arch_prctl(ARCH_REQ_XCOMP_PERM)"
            )
        models.check_operators(plan, models.note)
        models = models.with_gpu_trial(plan, options.get("gpu_trial", "auto"), options.get("trial_cache"))
        # the ranks of a job must have the same context, but may have different amounts of free memory
        adjust = options.get("max_model_len") is None and (ranks is None or ranks.size == 1)
        return models.fit_memory(plan, adjust=adjust, note=models.note)

    def sides(self, plan: EngineConfig) -> dict[Side, ModelConfig]:
        """Returns the configurations of the models that the ranks of this job load."""
        paths: dict[Side, Path] = {"target": self.target}
        if self.draft is not None and plan.mode != "ar":
            paths["draft"] = self.draft
        return {side: self.config_of(side) for side in paths if self.only in (None, side)}

    def config_of(self, side: Side) -> ModelConfig:
        """Returns the configuration of target or draft."""
        if side == "draft" and self.draft_is_mtp:
            return head_config(None, self.target)
        path = self.target if side == "target" else self.draft
        assert path is not None
        return read_config(path)

    @property
    def _block(self) -> BlockSpec | None:
        """The block of the draft if it is a block head."""
        head = None if self.draft is None else self.config_of("draft").spec.draft_head
        return None if head is None else head.block

    def for_draft(self, plan: EngineConfig) -> EngineConfig:
        """Returns the configuration with what a block head determines: d is at most the number of drafted positions of
        a block, which is the default, and does not adapt, because one forward drafts all of them."""
        block = self._block if plan.mode == "serial" else None
        if block is None:
            return plan
        steps = block.size - 1
        steps = min(plan.draft_steps or steps, steps)
        return replace(plan, draft_steps=steps, adapt_steps=False, time_rows=False)

    def check_operators(self, plan: EngineConfig, note: Callable[[str], None]) -> None:
        """Reports to `note` which models do not run on the native operators, and why. Raises UserError if the CUDA
        operators were requested for such a model."""
        for side, config in self.sides(plan).items():
            ops = select_operators(self.ops, config.spec, self.dtype, self.device)
            why = why_not_native(config.spec, self.dtype, self.device) if self.ops == "auto" else None
            if why is not None:
                note(f"the {side} runs on torch's own operators: {why}")
            layout = format_of(config)
            need = ops.int4_needs(self.dtype, self.device)
            if layout is not None and layout.is_int4 and need is not None and self.device.type == "cuda":
                bits = 8 * self.dtype.itemsize
                note(f"the int4 weights of the {side} are expanded to {bits} bits; {need} would keep them")

    def memory_needs(self, plan: EngineConfig) -> list[dict[Side, MemoryEstimate]]:
        """Returns for each kind of rank estimates of the models that it holds. The device must be a GPU."""
        major, _ = torch.cuda.get_device_capability(self.device)
        needs: dict[Side, MemoryEstimate] = {}
        for side, config in self.sides(plan).items():
            ops = select_operators(self.ops, config.spec, self.dtype, self.device, self.verdict)
            needs[side] = MemoryEstimate(
                config,
                self.dtype,
                capacity=self.capacity(side, plan),
                ranks=rank_count(side, plan),
                sequences=self.sessions * plan.num_sequences,
                ops=ops,
                cache_dtype=None if config.spec.draft_head is not None else self.cache_dtype,
                int4_head=self.quantization(side, ops).head == "int4",
                prefix_tokens=0 if plan.num_sequences > 1 else self.prefix_cache_tokens(plan),
                tree_slots=self.tree_slots(side, plan),
                clusters=major in CLUSTER_MAJORS,
                int4_kernels=has_int4_kernels(self.device),
            )
        apart = plan.mode == "async" and plan.num_ranks > 1  # each rank holds one of the two models
        return [{side: need} for side, need in needs.items()] if apart else [needs]

    def fit_memory(self, plan: EngineConfig, *, adjust: bool, note: Callable[[str], None]) -> ModelPair:
        """Returns a copy whose context fits the memory of this rank's GPU, as `fit_context` does, or on a CPU with
        `adjust` that of this machine. Not checked if several ranks share a GPU."""
        if self.device.type == "cpu" and adjust:
            return self._fit_machine(plan, note)
        if self.share_device or self.device.type != "cuda":
            return self
        needs = self.memory_needs(plan)

        def needs_at(tokens: int) -> list[list[MemoryEstimate]]:
            resized = replace(self, max_model_len=tokens)
            return [
                [replace(need, capacity=resized.capacity(side, plan)) for side, need in held.items()] for held in needs
            ]

        length = fit_context(needs_at, self.max_model_len, self.device, adjust=adjust, note=note)
        return replace(self, max_model_len=length)

    def _fit_machine(self, plan: EngineConfig, note: Callable[[str], None]) -> ModelPair:
        """Returns a copy with a context of at most the tokens whose keys and values fit this machine's memory, and
        whose RoPE tables fit 1 / ROPE_TABLES_SHARE of it: the former use memory as a text grows, but the tables from
        the start."""
        kinds = [{mixer.kind for mixer in spec.attention_mixers} for spec in self.specs(plan)]
        tables = sum(2 * FLOAT_BYTES * mixer.head_dim for each in kinds for mixer in each)
        memory = hardware.memory_bytes()
        tokens = memory // max(self._token_bytes(plan), ROPE_TABLES_SHARE * tables, 1)
        most = max(tokens // CONTEXT_STEP * CONTEXT_STEP, MIN_CONTEXT)
        if self.max_model_len <= most:
            return self
        note(
            f"the context is limited to {most} of {self.max_model_len} tokens, which fit the"
            f" {memory / BYTES_PER_GB:.1f} GB of memory of this machine; --max-model-len sets the limit"
        )
        return replace(self, max_model_len=most)

    def capacity(self, side: Side, plan: EngineConfig) -> int:
        """Returns the number of slots of a sequence in the KV cache of target or draft."""
        return self.context(plan) + self.tree_slots(side, plan)

    def with_gpu_trial(self, plan: EngineConfig, requested: TrialName, cache: Path | None) -> ModelPair:
        """Returns a copy with the verdict of the GPU trial, if this process will use the CUDA operators. Reports to
        `note` what falls back. `requested`: "again" ignores the verdict of an earlier trial, "off" tries nothing.
        `cache`: folder of the verdicts; None: every start tries again. Raises UserError if `requested` is unknown."""
        names = get_args(TrialName)
        require(requested in names, f"gpu_trial must be one of {', '.join(names)}, not {truncated_repr(requested)}")
        models = self._trial_models(plan)
        if requested == "off" or not models:
            return self
        tree = None
        if "draft" in self.sides(plan) and plan.group_shape is None:
            tree = TreeShape(self.tree_slots("draft", plan), plan.children_per_leaf, plan.leaves_per_expansion)
        shapes = make_trial_plan(models, tree, plan.population.particles if plan.mode == "smc" else 0)
        facts = {**machine_facts(self.device), "plan": shapes.to_json()}
        file = None if cache is None else VerdictFile.of(cache, facts)
        verdict = file.read() if file is not None and requested == "auto" else None
        stored = verdict is not None
        if verdict is None:
            verdict, problem = gpu_trial.run_trial(shapes, str(self.device))
            if problem is not None:
                self.note(f"the GPU trial was not completed: {problem}; --gpu-trial off skips it")
            elif file is not None:
                file.write(verdict)
        hint = "; the verdict of an earlier start, --gpu-trial again repeats the trial" if stored else ""
        return replace(self, verdict_file=file)._with_verdict(verdict, hint)

    def _trial_models(self, plan: EngineConfig) -> list[TrialModel]:
        """Returns the models that run on the CUDA operators."""
        if self.device.type != "cuda" or self.ops not in ("auto", "cuda"):
            return []
        found: list[TrialModel] = []
        for side, config in self.sides(plan).items():
            if why_not_native(config.spec, self.dtype, self.device) is None:
                ops = select_operators(self.ops, config.spec, self.dtype, self.device)
                int4_head, dtype = self.quantization(side, ops).head == "int4", self.cache_dtype or self.dtype
                found.append(TrialModel(config, rank_count(side, plan), self.capacity(side, plan), dtype, int4_head))
        return found

    def _with_verdict(self, verdict: GpuVerdict, hint: str = "") -> ModelPair:
        """Returns a copy with a verdict, and reports it with a `hint`. Must be called before the first kernel is
        launched."""
        if not verdict.early_starts:
            trial.disable_early_starts()
        if (line := verdict.note()) is not None:
            self.note(f"{line}{hint}")
        return replace(self, verdict=verdict)

    def with_common_verdict(self, exchange: Callable[[str], Sequence[str]]) -> ModelPair:
        """Returns a copy with the fallbacks and tilings that all ranks of this rank's group use (`GpuVerdict.union`).
        `exchange`: returns the texts that all ranks of the group pass to it."""
        said = exchange(json.dumps(self.verdict.to_json()))
        common = self.verdict.union([GpuVerdict.from_json(json.loads(text)) for text in said])
        return self if common == self.verdict else self._with_verdict(common)

    def with_vocab(self, vocab_size: int, masked_tokens: tuple[int, ...]) -> ModelPair:
        """Returns a copy with the vocabulary size and the masked tokens of rank 0, the only rank that has the
        tokenizers. Raises UserError if a model's LM head has fewer rows."""
        _vocab_size(self.target, self.draft, vocab_size, masked_tokens)
        grammars = grammar_compiler(self.target, self.eos_token_ids, vocab_size)
        return replace(self, vocab_size=vocab_size, masked_tokens=masked_tokens, grammars=grammars)

    def rank_config(self, config: EngineConfig, *, target: bool, draft: bool) -> RankConfig:
        """Returns the settings and model fingerprints of this rank that must equal those of the other ranks of its job
        or group. `target`, `draft`: whether the rank's group runs the model. The vocabulary size is not included,
        because only rank 0 has the tokenizer. Raises UserError if a model file cannot be read."""
        paces = {"emulate target": self.emulate.target, "emulate draft": self.emulate.draft}
        settings = {
            **settings_of(config),
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": self.device.type,
            "share_gpus": self.share_device,
            "ops": self.ops,
            "activations": self.activations,
            "kv_cache_dtype": "auto" if self.cache_dtype is None else "fp8",
            "head": self.head,
            "hidden_layers": list(self.hidden_layers),
            **{name: None if times is None else str(times.points) for name, times in paces.items()},
            "max_model_len": self.max_model_len,
            "prefix_cache_memory": self.prefix_cache_memory,
            "trace": self.trace is not None,
            "version": __version__,
        }
        files = {} if self.draft is None else {"draft": model_fingerprint(self.draft)}
        group_files = {"target": model_fingerprint(self.target)} if target else {}
        return RankConfig(settings, files, group_files, None if self.share_device else gpu_uuid(self.device))

    def measurement_facts(self, plan: EngineConfig) -> dict[str, object]:
        """Returns everything that determines a measurement of the models, serialisable as JSON. Raises UserError if a
        model file cannot be read."""
        facts: dict[str, object] = {
            "version": __version__,
            "cpu": hardware.cpu_name(),
            **cpu.machine_facts(),
            "threads": self.threads,
            "models": [model_fingerprint(path) for path in (self.target, self.draft) if path is not None],
            "dtype": str(self.dtype),
            "cache": str(self.cache_dtype),
            "ops": self.ops,
            "activations": self.activations,
            "head": self.head,
            "emulate": asdict(self.emulate),
            "mtp": self.draft_is_mtp,
            "leaves": plan.leaves_per_expansion,
            "nodes": plan.max_nodes,
        }
        if self.device.type == "cuda":
            facts["gpu"] = machine_facts(self.device)
        return facts

    def trace_metadata(self, plan: EngineConfig) -> dict[str, object]:
        """Returns the description of a run for the first line of a trace."""
        shape: dict[str, object] = {
            "verify_batch": plan.verify_batch,
            "draft_leaves": plan.leaves_per_expansion,
            "draft_steps": plan.initial_draft_steps,
        }
        if plan.synthetic_acceptance_length is not None:
            shape["synthetic_acceptance_length"] = plan.synthetic_acceptance_length
        split = {"target_tp": plan.target_tp, "draft_tp": plan.draft_tp}
        return {"mode": plan.mode, **shape, **split, "model": self.target.name, "emulate": asdict(self.emulate)}

    def peer_all_reduce_width(self, *, target: bool, draft: bool) -> int:
        """Returns the largest hidden size of the models whose kernels all-reduce through peer memory, or 0 if they do
        not: other projections than those of cuda, ranks that share a GPU, or a verdict against peer memory. `target`,
        `draft`: whether the rank's group runs the model."""
        width = 0
        for spec in self._model_specs(target=target, draft=draft):
            ops = select_operators(self.ops, spec, self.dtype, self.device, self.verdict)
            if self.share_device or not self.verdict.peers or not ops.PEER_ALL_REDUCE:
                return 0
            width = max(width, spec.hidden_size)
        return width

    def context(self, plan: EngineConfig) -> int:
        return self.max_model_len + plan.max_nodes  # the last round may overshoot

    def tree_slots(self, side: Side, plan: EngineConfig) -> int:
        """Returns the number of tree slots in the KV cache of target or draft."""
        if plan.batch is not None:
            return chain_region_slots(plan.batch)
        if plan.mode == "smc":
            return particle_region_slots(plan.population, self.max_model_len)
        if side == "target":
            return plan.max_nodes
        block = self._block
        return draft_tree_slots(plan) if block is None else block.size

    def quantization(self, side: Side, ops: Backend) -> LoadTimeQuantization:
        """Returns what is quantised when the target or the draft is loaded."""
        activations = self._usual_activations(side, ops)
        if self.activations != "auto":
            activations = INT8_NUMBERS[self.activations]
        head = None if self.head == "native" else self.head
        if head == "auto":
            head = self._usual_head(side, ops, activations)
        # int8 activations of the target's head would have more error than its weights
        return LoadTimeQuantization(activations, head, 2 if side == "target" else max(activations, 1))

    def _usual_head(self, side: Side, ops: Backend, activations: int) -> HeadFormat | None:
        """Returns the default of `LoadTimeQuantization.head` for the target or the draft, whose products quantise an
        activation to `activations` int8 numbers."""
        if side == "draft":
            return ops.DRAFT_HEAD or ("int8" if activations else None)
        layout = format_of(self.config_of(side))
        is_int4 = layout is not None and layout.is_int4
        return "int8" if is_int4 and activations == INT8_NUMBERS["int8"] else None

    def _usual_activations(self, side: Side, ops: Backend) -> int:
        """Returns the default of `LoadTimeQuantization.activations` for the target or the draft."""
        if not ops.INT8_ACTIVATIONS or self.dtype != torch.bfloat16:
            return 0
        small = side == "target" and self.config_of(side).spec.hidden_size <= MAX_INT16_HIDDEN_SIZE
        return INT8_NUMBERS["int16" if small else "int8"]

    def prefix_cache_tokens(self, plan: EngineConfig) -> int:
        """Returns the budget of the prefix cache in tokens. The KV of both models is counted for each token, so that
        all ranks have the same budget."""
        return self.prefix_cache_memory * 2**20 // self._token_bytes(plan)

    def snapshot_tokens(self, plan: EngineConfig) -> int:
        """Returns the size of a snapshot of the delta layers of both models in tokens."""
        size = sum(snapshot_bytes(spec, self.dtype) for spec in self.specs(plan))
        return -(-size // self._token_bytes(plan))

    def _token_bytes(self, plan: EngineConfig) -> int:
        """Returns the bytes of one token's keys and values in both models."""
        return sum(kv_bytes_per_token(spec, self.cache_dtype or self.dtype) for spec in self.specs(plan))

    def specs(self, plan: EngineConfig) -> list[ModelSpec]:
        return self._model_specs(target=True, draft=plan.mode != "ar")

    def _model_specs(self, *, target: bool, draft: bool) -> list[ModelSpec]:
        """Returns the specs of the models that this process loads. `target`, `draft`: whether to include the model."""
        sides = list[Side]()
        if target and self.only != "draft":
            sides.append("target")
        if draft and self.draft is not None and self.only != "target":
            sides.append("draft")
        return [self.config_of(side).spec for side in sides]


def rank_count(side: Side, plan: EngineConfig) -> int:
    """Returns the number of ranks that share target or draft."""
    return max(plan.draft_tp if side == "draft" and plan.mode == "async" else plan.target_tp, 1)


def _check_ranks(plan: EngineConfig, draft: str | Path | None, ranks: RankLayout | None) -> None:
    """Raises UserError if the mode requires a draft and there is none, or if the number of ranks is wrong."""
    if plan.has_draft_model and draft is None and not plan.draft_remote:
        check_features(plan.features | {"no draft"})
    count = 1 if ranks is None else ranks.size
    if plan.num_ranks != count:
        split = f"mode {plan.mode} with target_tp {plan.target_tp} and draft_tp {plan.draft_tp}"
        required = f"{plan.num_ranks} rank{'s' if plan.num_ranks > 1 else ''}"
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


def _vocab_size(target: Path, draft: Path | None, vocab: int | None, masked: tuple[int, ...]) -> int:
    """Returns the size of the base vocabulary: `vocab`, or for None the number of rows of the smaller LM head. Raises
    UserError if the target's LM head has fewer rows, or the draft's has no row for a token that is not `masked`."""
    rows = {path: read_config(path).spec.vocab_size for path in (target, draft) if path is not None}
    vocab = vocab or min(rows.values())
    require(
        all(0 <= token < vocab for token in masked) and len({*masked}) < vocab,
        f"masked_tokens must be token ids in 0..{vocab - 1}, and not all of them",
    )
    for path, count in rows.items():
        if vocab > count and (path == target or not {*range(count, vocab)} <= {*masked}):
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


def _head_config(
    draft: Path | None, target: Path, plan: EngineConfig, options: LoadOptions, *, mtp: bool
) -> ModelConfig | None:
    """Returns the configuration of the draft head, or None for another draft. Raises UserError if the head does not fit
    the target, or if `plan` or `options` do not support draft heads. `mtp`: whether the draft is the MTP layer of the
    target."""
    if plan.mode == "ar" or draft is None or not (mtp or read_config(draft).spec.draft_head is not None):
        return None
    away = {"target worker"} if options.get("only") is not None else set()
    check_features(plan.features | away | {"draft head"})
    return head_config(None if mtp else draft, target)


def _hidden_layers(config: ModelConfig, options: LoadOptions, head: ModelConfig | None) -> tuple[int, ...]:
    """Returns the layers of the target after which forwards keep the hidden states: those that the draft head reads, if
    there is one. Raises UserError if they are not ascending layers of the model."""
    if head is not None and head.spec.draft_head is not None:
        return head.spec.draft_head.hidden_layers(len(config.spec.layers))
    layers, count = options.get("hidden_layers", ()), len(config.spec.layers)
    valid = isinstance(layers, list | tuple) and all(type(layer) is int and 0 <= layer < count for layer in layers)
    require(
        valid and sorted({*layers}) == [*layers],
        f"hidden_layers must be ascending layers in 0..{count - 1}, not {truncated_repr(layers)}",
    )
    return tuple(layers)


def model_fingerprint(path: Path) -> str:
    """Returns the fingerprint of a model directory's contents. Raises UserError if a file cannot be read."""
    try:
        return fingerprint(path)
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read: {error.strerror}") from None


def draft_tree_slots(plan: EngineConfig) -> int:
    """Returns the number of tree slots of the draft's KV cache, which is also that of the draft tree."""
    if plan.proposal == "sample":
        return (
            plan.leaves_per_expansion * (plan.max_draft_steps + 1) * (MAX_REROOTS + 1)
        )  # every slot that a tree uses before it is rebuilt
    return (4 * plan.max_draft_steps + 1) * plan.leaves_per_expansion
