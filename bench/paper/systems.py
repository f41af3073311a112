"""The systems of the paper's ablation (Figure 8), and their step times in the paper."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from bench.gpu.targets import QUOTED
from swiftspec.config import EngineConfig
from swiftspec.profiles.emulation import paper_figures, parse_emulation

# Table 6 is of Qwen2-72B with Qwen2-1.5B. Table 7 has operators of Llama 3 only: those of 70B and of 1B stand for them.
# Which systems Table 6 measures is assumed to be the two without fused kernels: the text has lost their names.
TARGET_LAYERS, DRAFT_LAYERS = 80, 28
TARGET_LIKE, DRAFT_LIKE = "Llama-3-70B", "Llama-3.2-1B"
FUSED_OPERATORS = "o", "down", "swiglu"  # the first two with their all-reduce
PAPER_ROWS = 8  # of a forward
PAPER_SPLITS = (2, 6), (4, 4), (6, 2)  # target and draft GPUs in Figure 9
SERIAL_GPUS, PARALLEL_GPUS = (8, 0), (6, 2)  # in Table 6
Split = tuple[int, int]  # target and draft ranks; 0 draft ranks: both models on all ranks


@dataclass(frozen=True, slots=True)
class System:
    """A system of the ablation.

    `mode`: mode of the engine. `fused`: whether it runs on the project's own operators, which fuse several operations,
    instead of those of torch's libraries.
    """

    name: str
    mode: str
    fused: bool
    paper_name: str

    @property
    def asynchronous(self) -> bool:
        return self.mode == "async"


PLAIN = System("plain", "ar", True, "autoregressive decoding")
BASE = System("base", "serial", False, "SwiftSpec-base")
SPLIT = System("base + split", "async", False, "SwiftSpec-only-parallel-tree")
KERNELS = System("base + kernels", "serial", True, "SwiftSpec-only-kernel-opt")
ALL = System("all", "async", True, "SwiftSpec")
SYSTEMS = PLAIN, BASE, SPLIT, KERNELS, ALL


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of the tree: bs, w and d."""

    verify_batch: int = 8
    draft_leaves: int = 8
    draft_steps: int = 3


def engine_config(system: System, shape: Shape, target_tp: int, draft_tp: int) -> EngineConfig:
    """Returns the configuration of a system. `target_tp`, `draft_tp`: the split in mode async; the other modes run both
    models on `target_tp` ranks."""
    if system.mode == "ar":
        return EngineConfig("ar", target_tp=target_tp)
    return EngineConfig(
        system.mode,
        target_tp=target_tp,
        draft_tp=draft_tp if system.asynchronous else target_tp,
        verify_batch=shape.verify_batch,
        draft_leaves=shape.draft_leaves,
        draft_steps=shape.draft_steps,
    )


@dataclass(frozen=True, slots=True)
class StepMilliseconds:
    """Step times in milliseconds on a split of GPUs. `origin`: "quoted" from the paper, "assumed" to be those that it
    quotes for a system without a name, or "predicted" from its operators."""

    target: float
    draft: float
    split: Split
    origin: str

    @property
    def emulation(self) -> str:
        """The step times in the format of `--emulate`."""
        return f"target={self.target:.3f}ms,draft={self.draft:.3f}ms"

    @property
    def gpu_ms(self) -> tuple[float, float]:
        """GPU time of a verification and of an expansion in milliseconds, summed over the GPUs that run them."""
        x, y = self.split
        return x * self.target, (y or x) * self.draft


def paper_step_times(system: System) -> StepMilliseconds:
    """Returns the step times of a system on 8 H800: in serial mode both models on all 8, in mode async 6 and 2.

    Table 6 is assumed to have those without fused kernels. The others are predicted: a layer takes less time by what
    Table 7's operators save.
    """
    row = paper_figures()["table6"]["parallel" if system.asynchronous else "serial"]
    target, draft = float(row["target_ms"]), float(row["draft_ms"])
    split = PARALLEL_GPUS if system.asynchronous else SERIAL_GPUS
    if not system.fused:
        return StepMilliseconds(target, draft, split, "assumed")
    sizes = (4, 8) if system.asynchronous else (8,)  # of 6 GPUs: the mean of 4 and 8
    target -= TARGET_LAYERS * fmean(saved_per_layer_us(TARGET_LIKE, size) for size in sizes) / 1000
    draft -= DRAFT_LAYERS * saved_per_layer_us(DRAFT_LIKE, 4) / 1000  # Table 7 has no other size
    return StepMilliseconds(target, draft, split, "predicted")


def saved_per_layer_us(model: str, tp: int) -> float:
    """Returns the microseconds per layer that the paper's operators save relative to vLLM's. An operator that is slower
    than vLLM's saves nothing: its vLLM counterpart, Marlin, is not part of SwiftSpec-base."""
    times = (QUOTED[model, tp, operator] for operator in FUSED_OPERATORS)
    return sum(max(took["vLLM"] - took["SwiftSpec"], 0.0) for took in times)


def split_step_times(split: Split) -> StepMilliseconds:
    """Returns the step times of Llama 3 70B and 3B on a split: those of Table 1, interpolated for 6 GPUs."""
    table = parse_emulation("target=llama3-70b,draft=llama3-3b")
    assert table.target is not None and table.draft is not None
    target, draft = table.target.at(split[0], PAPER_ROWS), table.draft.at(split[1], PAPER_ROWS)
    return StepMilliseconds(1000 * target, 1000 * draft, split, "quoted")


def split_name(split: Split) -> str:
    """Returns a split as text, such as `6+2`, or the number of ranks if both models run on all of them."""
    return f"{split[0]}+{split[1]}" if split[1] else str(split[0])
