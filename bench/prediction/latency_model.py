"""Latency model of a forward on GPUs that are not present, from the bytes and fixed costs of its operators.

Each operator takes `fixed + bytes / bandwidth` seconds. There are two sets of constants, a pessimistic one (slow) and
an optimistic one (fast), so every latency is an interval. The constants are design targets for an H200 (CUDA graph,
cold caches), scaled by memory bandwidth for other GPUs, unless profiles/<gpu>-kernels.json contains measurements. The
latency of an all-reduce is always modelled, never measured.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from swiftspec import file_io
from swiftspec.errors import UserError
from swiftspec.file_io import Fields
from swiftspec.model.checkpoint_files import read_config
from swiftspec.model.config import ModelConfig
from swiftspec.model.formats import format_of
from swiftspec.model.spec import LayerSpec, MlpSpec

H200_COPY_BYTES_PER_S = 4.3e12  # memory bandwidth of a plain copy on an H200, for which `constants` was written
INT4_BITS = 4.156  # 4 bits per weight, plus a 16-bit scale and a 4-bit zero point per group of 128 weights
CONTEXT_TOKENS = 1000  # default tokens of context per request
MIN_FIT_POINTS = 3  # measurements that the fit of an operator needs


@dataclass(frozen=True, slots=True)
class Gpu:
    """Peak rates of one GPU.

    `copy`: bytes per second of a large copy in its memory.
    `link`: bytes per second that it sends to the other GPUs.
    `flops`: dense bfloat16 operations per second according to the data sheet.
    """

    copy: float
    link: float
    flops: float = 989e12


GPUS = {"h200": Gpu(4.3e12, 450e9), "h100": Gpu(3.0e12, 450e9), "h800": Gpu(3.0e12, 200e9)}
FLOPS_EFFICIENCY = (0.4, 0.7)  # (slow, fast): assumed share of `flops` that products with hundreds of rows reach


@dataclass(frozen=True, slots=True)
class LatencyLine:
    """Linear cost model of an operator: seconds = fixed + bytes / bandwidth."""

    fixed: float
    bandwidth: float

    def at(self, size: float) -> float:
        return self.fixed + size / self.bandwidth


@dataclass(frozen=True, slots=True)
class Constants:
    """Constants of the latency model, for the slow or the fast end of an interval.

    `sampler`: seconds of sampling per forward.
    `origin`: "measured" if `linear` is fitted to measurements, else "predicted".
    """

    linear: LatencyLine
    attention: LatencyLine
    all_reduce: LatencyLine  # of the bytes that one GPU sends
    sampler: float
    flops: float  # operations per second
    origin: str = "predicted"


def constants(gpu: Gpu) -> tuple[Constants, Constants]:
    """Returns the (slow, fast) constants of a GPU without measurements: the design targets, scaled to that GPU."""
    scale = gpu.copy / H200_COPY_BYTES_PER_S
    slow = Constants(
        LatencyLine(3.5e-6, 3.2e12 * scale),
        LatencyLine(5.0e-6, 2.4e12 * scale),
        LatencyLine(3.0e-6, gpu.link),
        6e-6,
        FLOPS_EFFICIENCY[0] * gpu.flops,
    )
    fast = Constants(
        LatencyLine(2.5e-6, 3.7e12 * scale),
        LatencyLine(3.8e-6, 3.0e12 * scale),
        LatencyLine(2.0e-6, 2 * gpu.link),
        4e-6,
        FLOPS_EFFICIENCY[1] * gpu.flops,
    )
    return slow, fast


def fitted(file: Path, gpu: Gpu) -> tuple[Constants, Constants]:
    """Returns the (slow, fast) constants of a GPU, with `linear` and `attention` fitted to measurements.

    The file contains `{"points": [{"op": "linear" or "attention", "bytes": number, "us": microseconds}, ...]}`. The
    slow and the fast line are the least-squares fit plus and minus the standard deviation of its residuals. An operator
    that cannot be fitted has its line from `constants`. Raises UserError if the file is invalid or has no points.
    """
    points = Fields(file_io.read_object(file), f"{file}: ").objects("points")
    if not points:
        raise UserError(f"{file} contains no measured operators: points is empty or missing")
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
    """Fits a line to (bytes, seconds) points. Returns (fixed, bandwidth, standard deviation of the residuals).

    Returns None if there are fewer than MIN_FIT_POINTS points, or if the time does not increase with the bytes.
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
    """Returns the seconds of a forward over `rows` rows on a tensor-parallel group of `tp` GPUs, sampling included.

    A matrix product takes the time to read its weights or the time of its arithmetic, whichever is longer.

    `lines`: constants of the slow or the fast end.
    `int4`: assumes 4-bit weights even if the config is not quantised.
    `context`: tokens in the KV cache of each request.
    `sequences`: number of requests that the rows belong to.
    """
    layout = format_of(config)
    bits = INT4_BITS if int4 or (layout is not None and layout.is_int4) else 16.0
    spec = config.spec

    def product(inputs: int, outputs: float, bits: float = bits, rows: float = rows) -> float:
        least = lines.linear.at(inputs * outputs * bits / 8 + 2 * rows * (inputs + outputs))
        return max(least, lines.linear.fixed + 2 * rows * inputs * outputs / lines.flops)

    def mlp_time(mlp: MlpSpec) -> float:
        inner, hidden = math.ceil(mlp.intermediate_size / tp), spec.hidden_size
        if mlp.experts is None:
            return product(hidden, 2 * inner) + product(inner, hidden)
        chosen, count = mlp.experts.experts_per_token, mlp.num_experts
        used = count * (1 - (1 - chosen / count) ** rows)  # experts, if rows choose independently
        each = rows * chosen / used  # rows of an expert
        experts = product(hidden, 2 * inner * used, rows=each) + product(inner, hidden * used, rows=each)
        shared = math.ceil(mlp.experts.shared_intermediate_size / tp)
        if shared:
            experts += product(hidden, 2 * shared) + product(shared, hidden)
        return product(hidden, mlp.experts.router_rows) + experts

    def time_of(layer: LayerSpec) -> float:
        mixer, hidden, width = layer.attention, spec.hidden_size, layer.attention.head_dim
        heads, kv_heads = math.ceil(mixer.num_heads / tp), math.ceil(mixer.num_kv_heads / tp)
        own_kv_heads = 0 if mixer.shares_kv else kv_heads
        seconds = product(hidden, (heads + 2 * own_kv_heads) * width) + product(heads * width, hidden)
        seconds += mlp_time(layer.mlp)
        if spec.per_layer_size:  # the part of a layer in the projection of all, gate and projection
            seconds += 2 * product(hidden, spec.per_layer_size) + product(spec.per_layer_size, hidden)
        seconds += lines.attention.at(2 * 2 * kv_heads * width * context * sequences)
        if tp > 1:
            # twice: half of an LL line is flags
            seconds += 2 * lines.all_reduce.at(2 * (tp - 1) * rows * hidden * 2)
        return seconds

    head = product(spec.hidden_size, math.ceil(spec.vocab_size / tp), 16.0)
    return sum(count * time_of(layer) for layer, count in Counter(spec.layers).items()) + head + lines.sampler


def config_at(path: Path) -> ModelConfig:
    """Reads the config of a model. `path`: its directory or config.json. Raises UserError if it cannot be read."""
    return read_config(path.parent if path.name == "config.json" else path)


def parse_hardware(text: str) -> tuple[str, int]:
    """Parses text such as `h200x8` to (GPU name, number of GPUs). Raises UserError if it does not name a known GPU and
    a number."""
    name, _, count = text.lower().partition("x")
    if name not in GPUS or not count.isdigit() or int(count) < 1:
        raise UserError(f"--hardware {text!r}: expected GPU and count, such as h200x8; GPUs: {', '.join(GPUS)}")
    return name, int(count)
