"""How long a forward would take on GPUs that are not here: bytes and fixed costs of its operators.

Per operator `fixed + bytes / bandwidth`, once as it should at least be reached (slow) and once as it could be (fast):
the two ends of every interval. The constants are design targets for an H200 (CUDA graph, cold caches), scaled by the
memory bandwidth for other GPUs, unless profiles/<gpu>-kernels.json has measured ones. The link terms are modelled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from swiftspec import file_io
from swiftspec.errors import UserError
from swiftspec.file_io import Fields
from swiftspec.model.checkpoint_files import read_config
from swiftspec.model.config import ModelConfig

H200_COPY_BYTES_PER_S = 4.3e12  # bytes a second of a plain copy, which the constants below were set by
INT4_BITS = 4.156  # a weight with its share of fp16 scale and 4-bit zero point, groups of 128
CONTEXT_TOKENS = 1000  # tokens before the rows
MIN_FIT_POINTS = 3  # of one kind of operator, to fit a line


@dataclass(frozen=True, slots=True)
class Gpu:
    """`copy`: bytes a second of a large copy; `link`: bytes a second that one GPU sends to the others; `flops`: dense
    bfloat16 operations a second by its data sheet."""

    copy: float
    link: float
    flops: float = 989e12


GPUS = {"h200": Gpu(4.3e12, 450e9), "h100": Gpu(3.0e12, 450e9), "h800": Gpu(3.0e12, 200e9)}
FLOPS_EFFICIENCY = (0.4, 0.7)  # of the operations, by products of some hundred rows: assumed


@dataclass(frozen=True, slots=True)
class LatencyLine:
    """Seconds = fixed + bytes / bandwidth."""

    fixed: float
    bandwidth: float

    def at(self, size: float) -> float:
        return self.fixed + size / self.bandwidth


@dataclass(frozen=True, slots=True)
class Constants:
    """The lines of one end of the interval; `origin`: measured or predicted."""

    linear: LatencyLine
    attention: LatencyLine
    all_reduce: LatencyLine  # by the bytes that one GPU sends
    sampler: float
    flops: float  # operations a second
    origin: str = "predicted"


def constants(gpu: Gpu) -> tuple[Constants, Constants]:
    """(slow, fast) for a GPU that nothing was measured on."""
    scale = gpu.copy / H200_COPY_BYTES_PER_S
    slow = Constants(LatencyLine(3.5e-6, 3.2e12 * scale), LatencyLine(5.0e-6, 2.4e12 * scale),
                     LatencyLine(3.0e-6, gpu.link), 6e-6,
                     FLOPS_EFFICIENCY[0] * gpu.flops)  # fmt: skip
    fast = Constants(LatencyLine(2.5e-6, 3.7e12 * scale), LatencyLine(3.8e-6, 3.0e12 * scale),
                     LatencyLine(2.0e-6, 2 * gpu.link), 4e-6,
                     FLOPS_EFFICIENCY[1] * gpu.flops)  # fmt: skip
    return slow, fast


def fitted(file: Path, gpu: Gpu) -> tuple[Constants, Constants]:
    """The same with the lines of the operators that were measured: `{"points": [{"op": "linear" or "attention",
    "bytes": B, "us": T}, ...]}`. Slow and fast are the fit plus and minus what it leaves unexplained."""
    points = Fields(file_io.read_object(file), f"{file}: ").objects("points")
    if not points:
        raise UserError(f"{file} does not hold measured operators: it has no points")
    found = [(p.string("op"), p.number("bytes", ge=0, le=1e15), p.number("us", ge=0, le=1e9)) for p in points]
    lines = {kind: _fit([(size, 1e-6 * us) for op, size, us in found if op == kind]) for kind in KINDS}
    made = []
    for sign, base in zip((1, -1), constants(gpu)):
        found = {
            op: LatencyLine(max(fit[0] + sign * fit[2], 0.0), fit[1]) if fit is not None else getattr(base, op)
            for op, fit in lines.items()
        }
        origin = "measured" if lines["linear"] is not None else "predicted"
        made.append(Constants(found["linear"], found["attention"], base.all_reduce, base.sampler, base.flops, origin))
    return made[0], made[1]


KINDS = ("linear", "attention")


def _fit(points: list[tuple[float, float]]) -> tuple[float, float, float] | None:
    """(fixed, bandwidth, deviation) by least squares; None for too few points or a line that makes no sense."""
    if len(points) < MIN_FIT_POINTS:
        return None
    size, seconds = np.array(points).T
    slope, fixed = np.polyfit(size, seconds, 1)
    if slope <= 0:
        return None
    return float(fixed), float(1 / slope), float(np.std(seconds - fixed - slope * size))


def forward(
    config: ModelConfig,
    tp: int,
    rows: int,
    lines: Constants,
    int4: bool,
    context: int = CONTEXT_TOKENS,
    sequences: int = 1,
) -> float:
    """Seconds of a forward over `rows` with sampling, on a group of `tp` GPUs. The rows are those of so many
    `sequences`, each with a context of its own. Few rows cost what the weights cost to read; where a product has more
    operations than fit into that time, it takes theirs."""
    bits = INT4_BITS if int4 or config.quantization else 16.0
    heads, kv_heads = math.ceil(config.num_heads / tp), math.ceil(config.num_kv_heads / tp)
    hidden, inner, width = config.hidden_size, math.ceil(config.intermediate_size / tp), config.head_dim

    def product(inputs: int, outputs: int, bits: float = bits) -> float:
        least = lines.linear.at(inputs * outputs * bits / 8 + 2 * rows * (inputs + outputs))
        return max(least, lines.linear.fixed + 2 * rows * inputs * outputs / lines.flops)

    layer = product(hidden, (heads + 2 * kv_heads) * width) + product(heads * width, hidden)
    layer += product(hidden, 2 * inner) + product(inner, hidden)
    layer += lines.attention.at(2 * 2 * kv_heads * width * context * sequences)
    if tp > 1:
        layer += 2 * lines.all_reduce.at(2 * (tp - 1) * rows * hidden * 2)  # LL lines are half flags
    head = product(hidden, math.ceil(config.vocab_size / tp), 16.0)
    return config.num_layers * layer + head + lines.sampler


def config_at(path: Path) -> ModelConfig:
    """A model directory or its config.json. Raises UserError."""
    return read_config(path.parent if path.name == "config.json" else path)


def parse_hardware(text: str) -> tuple[str, int]:
    """`h200x8`: the GPU and how many. Raises UserError."""
    name, _, count = text.lower().partition("x")
    if name not in GPUS or not count.isdigit() or int(count) < 1:
        raise UserError(f"--hardware {text!r}: write GPU and number, such as h200x8; known are {', '.join(GPUS)}")
    return name, int(count)
