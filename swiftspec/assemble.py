"""What one rank holds: the models of its group and the roles on them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, Literal, Protocol, TypedDict

import torch

from swiftspec.backends import cpu as host
from swiftspec.backends import cuda, reference
from swiftspec.backends import library as unfused
from swiftspec.control.measure import MOST_STEPS
from swiftspec.distributed.groups.peers import PeerParallel
from swiftspec.errors import UserError
from swiftspec.model.config import ModelConfig
from swiftspec.model.group import Group
from swiftspec.model.loader import load_model
from swiftspec.model.transformer import Transformer
from swiftspec.observe.emulate import Emulation, PacedModel
from swiftspec.params import EngineConfig
from swiftspec.runtime.graph import CudaCapture
from swiftspec.runtime.local_drafter import AheadDrafter, LocalDrafter
from swiftspec.runtime.runner import Runner
from swiftspec.runtime.verifier import LocalVerifier
from swiftspec.smc.population import SMC, region
from swiftspec.tree.drawn import LIFETIME

Progress = Callable[[str, int, int], None]  # what is being done, step, steps
OpsName = Literal["auto", "reference", "unfused", "cuda"]


class Ranks(Protocol):
    """What of a job's ranks matters to one of them."""

    @property
    def size(self) -> int: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def local_size(self) -> int: ...


class Options(TypedDict, total=False):
    """How the models are loaded. What is left out, or None, is as the models say."""

    dtype: torch.dtype | None
    device: torch.device | str  # cpu if left out; with "cuda" each rank of a machine takes a GPU of its own
    share_device: bool  # more ranks than GPUs are fine
    max_model_len: int | None
    vocab_size: int | None  # the base vocabulary that both tokenizers share; beyond it a head's rows count as -inf
    ops: OpsName  # auto if left out: the fastest that fit; what serve's --ops says of the others
    load: Load  # what makes a model of a directory; load_model if left out
    emulate: Emulation | None  # step times that the models are to take at least
    trace: Path | None  # the file for rank 0's rounds; other ranks only look whether there is one
    progress: Progress | None


class Load(Protocol):
    """What model.loader.load_model does."""

    def __call__(
        self,
        path: Path,
        /,
        *,
        dtype: torch.dtype,
        device: torch.device,
        ops: Any,
        max_positions: int,
        group: Group | None,
        progress: Progress | None,
    ) -> Transformer: ...


@dataclass(frozen=True, slots=True)
class Models:
    """The pair that a job runs, and how this rank computes."""

    target: Path
    draft: Path | None
    dtype: torch.dtype | None
    device: torch.device
    share_device: bool
    max_model_len: int
    vocab_size: int
    ops: OpsName
    load: Load
    emulate: Emulation
    trace: Path | None
    capturing: Lock = field(default_factory=Lock)  # by one thread of this process at a time

    @staticmethod
    def check(
        target: str | Path, draft: str | Path | None, plan: EngineConfig, ranks: Ranks | None, options: Options
    ) -> Models:
        """Raises UserError where pair, plan, ranks and options do not fit each other; before anything is loaded."""
        if plan.mode != "ar" and draft is None:
            raise UserError(f"mode {plan.mode} needs a draft model: name one, or take mode ar")
        count = 1 if ranks is None else ranks.size
        if plan.ranks != count:
            split = f"mode {plan.mode} with target_tp {plan.target_tp} and draft_tp {plan.draft_tp}"
            raise UserError(f"{split} is for {plan.ranks} ranks, not {count}: start as many with torchrun")
        config = ModelConfig.from_dir(target)
        longest = config.max_position_embeddings
        length = options.get("max_model_len") or longest
        if not 2 <= length <= longest:
            raise UserError(f"max_model_len must lie in 2..{longest} for this target, not {length}")
        heads = [config.vocab_size, *([] if draft is None else [ModelConfig.from_dir(draft).vocab_size])]
        vocab = options.get("vocab_size") or min(heads)
        if vocab > min(heads):
            raise UserError(f"the tokenizer has {vocab} tokens, but a model's head only {min(heads)}")
        share = options.get("share_device", False)
        device = _own_device(torch.device(options.get("device", "cpu")), ranks, share)
        if plan.mode == "async" and plan.ranks == 1 and device.type != "cuda":
            raise UserError(f"mode async on one rank runs both models on a GPU, not on {device}: start two ranks")
        draft_path = None if draft is None else Path(draft)
        ops, load = options.get("ops", "auto"), options.get("load", load_model)
        emulate, trace = options.get("emulate") or Emulation(), options.get("trace")
        dtype = options.get("dtype")
        return Models(Path(target), draft_path, dtype, device, share, length, vocab, ops, load, emulate, trace)

    def facts(self, plan: EngineConfig) -> str:
        """What all ranks of a job must agree on, as text."""
        same_draft = "" if self.draft is None else fingerprint(self.draft)
        limits = (self.max_model_len, self.vocab_size)
        how = (str(plan), str(self.dtype), self.device.type, self.ops, str(self.emulate))
        return json.dumps([*how, *limits, same_draft])

    def described(self, plan: EngineConfig) -> dict[str, object]:
        """What the first line of a trace says of a run."""
        shape = {"verify_batch": plan.verify_batch, "draft_leaves": plan.draft_leaves, "draft_steps": plan.steps}
        split = {"target_tp": plan.target_tp, "draft_tp": plan.draft_tp}
        return {"mode": plan.mode, **shape, **split, "model": self.target.name, "emulate": asdict(self.emulate)}

    def runner(
        self, side: Literal["target", "draft"], plan: EngineConfig, tree_slots: int, group: Group | None,
        progress: Progress | None,
    ) -> Runner:  # fmt: skip
        """Loads one of the two models, or this rank's share of it."""
        path, times = (self.target, self.emulate.target) if side == "target" else (self.draft, self.emulate.draft)
        assert path is not None
        context = self.max_model_len + plan.verify_batch  # the last round may overshoot
        config = ModelConfig.from_dir(path)
        kind = self._kind(config)
        ops = operators(self.ops, config, kind, self.device)
        positions = context + tree_slots
        model = self.load(
            path, dtype=kind, device=self.device, ops=ops, max_positions=positions, progress=progress, group=group
        )
        # only operators that read nothing on the host say CAPTURES; sums over ranks in a library are not among them
        whole = group is None or isinstance(group, PeerParallel)
        captures = self.device.type == "cuda" and whole and getattr(ops, "CAPTURES", False)
        capture = CudaCapture(self.capturing) if captures else None
        paced = model if times is None else PacedModel(model, times)
        return Runner(paced, ops, context=context, tree_slots=tree_slots, capture=capture)

    def _kind(self, config: ModelConfig) -> torch.dtype:
        return self.dtype if self.dtype is not None else getattr(torch, config.dtype)

    def kernel_sums(self, *, target: bool, draft: bool) -> int:
        """How wide the products are that kernels of a group with these models sum over peer memory; 0: they do not."""
        width = 0
        for path in (self.target if target else None, self.draft if draft else None):
            if path is None:
                continue
            config = ModelConfig.from_dir(path)
            if self.share_device or operators(self.ops, config, self._kind(config), self.device) is not cuda:
                return 0
            width = max(width, config.hidden_size)
        return width

    def verifier(
        self, plan: EngineConfig, group: Group | None = None, progress: Progress | None = None
    ) -> LocalVerifier:
        """The target."""
        runner = self.runner("target", plan, plan.verify_batch, group, progress)
        return LocalVerifier(runner, self.vocab_size, plan.verify)

    def drafter(self, plan: EngineConfig, group: Group | None = None, progress: Progress | None = None) -> LocalDrafter:
        """The draft, of the kind that the mode wants."""
        measured = plan.adapt_steps or (plan.mode == "async" and plan.draft_steps is None)
        steps = max(MOST_STEPS, plan.steps) if measured else plan.steps
        slots = 4 * plan.draft_leaves * steps + plan.draft_leaves
        if plan.proposal == "sample":
            slots = plan.draft_leaves * (steps + 1) * (LIFETIME + 1)  # all that a tree expands in its life
        kind = AheadDrafter if plan.mode == "async" else LocalDrafter
        return kind(self.runner("draft", plan, slots, group, progress), plan, self.vocab_size)

    def population(self, plan: EngineConfig, group: Group | None = None, progress: Progress | None = None) -> SMC:
        """Both models, for mode smc."""
        slots = region(plan.population, self.max_model_len)
        target = self.runner("target", plan, slots, group, progress)
        draft = self.runner("draft", plan, slots, group, progress)
        lag = 1 if self.device.type == "cuda" else 0  # a CPU does not run ahead of its host
        return SMC(target, draft, plan.population, self.vocab_size, longest=self.max_model_len, lag=lag)


def operators(name: OpsName, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Any:
    """The module of operators that a model runs on. Raises UserError where those that were asked for cannot run it."""
    if name == "cuda" or (name == "auto" and device.type == "cuda"):
        if name == "cuda":
            cuda.require(config, dtype, device)
        return cuda if cuda.fits(config, dtype, device) else unfused
    if name == "unfused":
        return unfused
    return host if name == "auto" and host.fits(config, dtype, device) else reference


def _own_device(device: torch.device, ranks: Ranks | None, share: bool) -> torch.device:
    """This rank's GPU among those of its machine."""
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise UserError("device cuda: PyTorch finds no NVIDIA GPU here; take device cpu, or a CUDA build of torch")
    if device.index is not None or ranks is None:
        return device
    count = torch.cuda.device_count()
    if ranks.local_size > count and not share:
        raise UserError(
            f"{ranks.local_size} ranks on a machine with {count} GPUs: start fewer, or let ranks share one with"
            " --share-gpus"
        )
    return torch.device("cuda", ranks.local_rank % count)


def fingerprint(path: Path) -> str:
    """What tells one model directory from another: its configs, and of its weights the names, sizes and first bytes."""
    digest = hashlib.sha256()
    for file in sorted(path.glob("*.json")):
        digest.update(file.name.encode() + file.read_bytes())
    for file in sorted(path.glob("*.safetensors")):
        digest.update(f"{file.name} {file.stat().st_size}".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(1 << 20))
    return digest.hexdigest()
