"""Latency model of a forward on GPUs that are not present, from the bytes and fixed costs of its operators.

Each operator takes `fixed + bytes / bandwidth` seconds. Two sets of constants, what should at least be reached (slow)
and what could be reached (fast), give the ends of every interval. The constants are design targets for an H200 (CUDA
graph, cold caches), scaled by memory bandwidth for other GPUs, unless profiles/<gpu>-kernels.json contains measured
ones. The link terms are modelled, not measured.
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

H200_COPY_BYTES_PER_S = 4.3e12  # bytes per second of a plain copy on the GPU that the constants below were set for
INT4_BITS = 4.156  # bits per weight, with its share of fp16 scale and 4-bit zero point, groups of 128
CONTEXT_TOKENS = 1000  # tokens in the cache before the rows
MIN_FIT_POINTS = 3  # points per kind of operator that a fit needs


@dataclass(frozen=True, slots=True)
class Gpu:
    """`copy`: bytes per second of a large copy.

    `link`: bytes per second that one GPU sends to the others. `flops`: dense bfloat16 operations per second according
    to the data sheet.
    """

    copy: float
    link: float
    flops: float = 989e12


GPUS = {"h200": Gpu(4.3e12, 450e9), "h100": Gpu(3.0e12, 450e9), "h800": Gpu(3.0e12, 200e9)}
FLOPS_EFFICIENCY = (0.4, 0.7)  # assumed share of the peak that products with some hundred rows reach


@dataclass(frozen=True, slots=True)
class LatencyLine:
    """Linear cost model: seconds = fixed + bytes / bandwidth."""

    fixed: float
    bandwidth: float

    def at(self, size: float) -> float:
        return self.fixed + size / self.bandwidth


@dataclass(frozen=True, slots=True)
class Constants:
    """The cost lines of one end of the interval. `origin`: measured or predicted."""

    linear: LatencyLine
    attention: LatencyLine
    all_reduce: LatencyLine  # as a function of the bytes that one GPU sends
    sampler: float
    flops: float  # operations per second
    origin: str = "predicted"


def constants(gpu: Gpu) -> tuple[Constants, Constants]:
    """Returns the (slow, fast) constants of a GPU without measurements."""
    scale = gpu.copy / H200_COPY_BYTES_PER_S
    slow = Constants(LatencyLine(3.5e-6, 3.2e12 * scale), LatencyLine(5.0e-6, 2.4e12 * scale),
                     LatencyLine(3.0e-6, gpu.link), 6e-6,
                     FLOPS_EFFICIENCY[0] * gpu.flops)  # fmt: skip
    fast = Constants(LatencyLine(2.5e-6, 3.7e12 * scale), LatencyLine(3.8e-6, 3.0e12 * scale),
                     LatencyLine(2.0e-6, 2 * gpu.link), 4e-6,
                     FLOPS_EFFICIENCY[1] * gpu.flops)  # fmt: skip
    return slow, fast


def fitted(file: Path, gpu: Gpu) -> tuple[Constants, Constants]:
    """Returns the (slow, fast) constants with the lines of measured operators fitted.

    The file contains `{"points": [{"op": "linear" or "attention", "bytes": B, "us": T}, ...]}`. Slow and fast are the
    fit plus and minus its residual deviation.
    """
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
    """Least-squares fit (fixed, bandwidth, deviation).

    Returns None for too few points or a line that is not physical.
    """
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
    """Seconds of a forward over `rows`, sampling included, on a tensor-parallel group of `tp` GPUs.

    The rows belong to `sequences` requests, each with its own context. With few rows a product takes the time to read
    its weights; a product whose operations take longer than that takes the time of its operations.
    """
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
        layer += 2 * lines.all_reduce.at(2 * (tp - 1) * rows * hidden * 2)  # half of each LL line is flags
    head = product(hidden, math.ceil(config.vocab_size / tp), 16.0)
    return config.num_layers * layer + head + lines.sampler


def config_at(path: Path) -> ModelConfig:
    """Reads the config of a model directory or of its config.json. Raises UserError."""
    return read_config(path.parent if path.name == "config.json" else path)


def parse_hardware(text: str) -> tuple[str, int]:
    """Parses `h200x8` to the GPU name and the number of GPUs. Raises UserError."""
    name, _, count = text.lower().partition("x")
    if name not in GPUS or not count.isdigit() or int(count) < 1:
        raise UserError(f"--hardware {text!r}: write GPU and number, such as h200x8; known are {', '.join(GPUS)}")
    return name, int(count)
