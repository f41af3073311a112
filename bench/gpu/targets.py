"""What an operator, a step and a whole decode should take on a Hopper GPU, and what others publish.

Every target is a formula over `Constants`: the fixed part of an operator is what a launch, the first bytes and an
exchange among CTAs take, and work that no other constant tells; the rest is bytes at a share of the read speed. ASSUMED
is an H200 before anything was measured on one, and gives the figures that were set (int4 weights in groups of 128).
`bench.gpu.constants` measures a GPU's own, and these formulas then give the targets again. `accept` is what must be
reached, `goal` what can be.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

LAUNCHES = 5  # kernels of a layer


@dataclass(frozen=True, slots=True)
class Target:
    """Microseconds, milliseconds or tokens a second, as the thing is measured."""

    accept: float
    goal: float


@dataclass(frozen=True, slots=True)
class Constants:
    """A GPU's: speeds in GB/s, times in microseconds."""

    copy: float  # of a plain copy, bytes read and written
    read: float  # of bulk copies to shared memory, as much as the kernels could have under way
    gap: float  # from a kernel's end to the next one's first instruction in a graph, launched early
    latency: float  # of the first bulk copy from memory
    exchange: float  # of a line from one CTA to another, one way

    @staticmethod
    def of(found: dict[str, Any] | None, copy: float) -> Constants:
        """Those that `bench.gpu.constants` has written, beside the copy of this run. What it could not measure is
        assumed, the read speed in proportion to the copy."""
        made = asdict(ASSUMED) | {"copy": copy, "read": ASSUMED.read * copy / ASSUMED.copy}
        measured = {} if found is None else found["constants"]
        return Constants(**made | {name: measured[name] for name in made if name != "copy" and name in measured})


ASSUMED = Constants(copy=4300.0, read=4300.0, gap=0.85, latency=0.8, exchange=0.85)


def linear(moved: int, on: Constants) -> Target:
    """Microseconds of a projection that moves so many bytes."""
    fixed, bytes_ = on.gap + on.latency, moved / (1e3 * on.read)
    return Target(fixed + 1.85 + bytes_ / 0.744, fixed + 0.85 + bytes_ / 0.860)


def attention(moved: int, on: Constants) -> Target:
    """Microseconds of attention over 8 rows that reads so many bytes of keys and values."""
    fixed, bytes_ = on.gap + on.latency + on.exchange, moved / (1e3 * on.read)
    return Target(fixed + 2.5 + 1.57 * bytes_, fixed + 1.25 + 1.45 * bytes_)


def sampling(logits: int, on: Constants) -> Target:
    """Microseconds from so many bytes of logits to tokens."""
    took = on.gap + on.latency + 3.21 + 1.2 * logits / (1e3 * on.read)
    return Target(took, took)


SUMMED = Target(2.5, 1.5)  # microseconds that an all-reduce among a group of one adds to a projection

# layers, and milliseconds of a forward of 8 rows at context 1000 on one H200, int4 body and bf16 head
STEPS = {
    "Llama-3.2-1B": (16, Target(0.64, 0.53)),
    "Llama-3.2-3B": (28, Target(1.24, 1.04)),
    "Llama-3-8B": (32, Target(2.08, 1.76)),
    "Llama-3-70B": (80, Target(13.3, 11.4)),
}


def step(shape: str, on: Constants) -> Target | None:
    """Milliseconds of a step; None for shapes without a figure. Fixed parts are what their constants make of them."""
    if shape not in STEPS:
        return None
    layers, found = STEPS[shape]
    assumed, here = (LAUNCHES * (c.gap + c.latency) + c.exchange for c in (ASSUMED, on))
    slower = max(1.0, ASSUMED.read / on.read)

    def at(took: float) -> float:
        return slower * (took - layers * assumed / 1e3) + layers * here / 1e3

    return Target(at(found.accept), at(found.goal))


def decode(target: str, on: Constants) -> Target | None:
    """Tokens a second with a draft tree on one GPU; None for targets without a figure."""
    share = min(1.0, on.copy / ASSUMED.copy)
    return Target(180.0 * share, 260.0 * share) if target == "Llama-3-70B" else None


def ratios(op: str, moved: float, rows: int) -> list[tuple[str, float, float]]:
    """How many times as fast as a competitor an operator must be, and can be; `moved` is in MB.

    By what the same weights take in bfloat16, which is 3.85 times as much as in int4: from 30 MB on, from 5 MB, less.
    """
    if op.startswith("attention"):
        return [("sdpa", 2.5, 2.5), ("flexattention", 2.5, 2.5), ("flashinfer", 2.5, 2.5)]
    if op in ("head", "draw", "children"):
        return []
    size = 3.85 * moved
    if size >= 30:
        int4 = 1.3 if rows < 8 else 1.5 if rows < 16 else 1.8
        return [("cublas bf16", 2.3, 3.0), ("torch int4", int4, max(int4, 1.8)), ("marlin", 1.4, 1.7)]
    if size >= 5:
        return [("cublas bf16", 1.5, 1.5), ("torch int4", 1.3, 1.3), ("marlin", 1.2, 1.2)]
    return [("cublas bf16", 1.0, 1.0), ("marlin", 1.0, 1.0)]


# Microseconds of vLLM's Marlin at one row on an H200, quoted from TileOps (its pull request 1874), by megabytes
MARLIN = {34.9: 20.3, 69.7: 38.1, 76.2: 40.6, 348.7: 138.4}
MARLIN_FROM = 30.0  # megabytes
INT4 = ("qkv", "o", "swiglu", "down")


def marlin_published(moved: float, on: Constants) -> float | None:
    """Microseconds that Marlin is published to take for so many MB, between its points at their speed; None below."""
    if moved < MARLIN_FROM:
        return None
    speeds = [size / took for size, took in MARLIN.items()]
    return moved / float(np.interp(moved, list(MARLIN), speeds)) * max(1.0, ASSUMED.copy / on.copy)


_WHO = {"gemm": ("SwiftSpec", "vLLM", "TensorRT-LLM"), "attention": ("SwiftSpec", "FlashInfer", "FlashAttention")}
_OPS = ("o", "down", "swiglu", "attention 500", "attention 1000")
_TABLE_7 = {
    ("Llama-3.2-1B", 4): (5.9, 12.9, 10.2, 8.3, 18.8, 11.0, 5.8, 12.3, 11.5, 6.3, 13.6, 13.8, 6.2, 22.8, 13.8),
    ("Llama-3.2-3B", 4): (6.4, 12.3, 10.0, 8.7, 17.0, 10.3, 7.2, 12.5, 11.8, 6.2, 19.1, 17.2, 8.0, 33.4, 18.3),
    ("Llama-3-8B", 4): (7.7, 14.6, 10.3, 10.5, 16.5, 11.9, 15.0, 16.3, 15.0, 6.4, 19.4, 17.75, 8.1, 33.4, 18.13),
    ("Llama-3-70B", 4): (11.72, 16.9, 15.5, 24.3, 25.4, 26.1, 49.0, 36.7, 31.9, 9.6, 19.2, 19.0, 13.4, 33.2, 19.1),
    ("Llama-3-70B", 8): (13.3, 25.7, 17.2, 19.9, 29.5, 20.7, 23.6, 22.5, 22.0, 6.4, 18.6, 17.8, 8.1, 32.7, 18.2),
}
# Microseconds on an H800 at 8 rows, by who, O and down with their all-reduce: the SwiftSpec paper's Table 7, and its
# Table 3, the operators of a stack that it does not name.
QUOTED: dict[tuple[str, int, str], dict[str, float]] = {
    (*split, op): dict(zip(_WHO["attention" if op.startswith("attention") else "gemm"], row[3 * i : 3 * i + 3]))
    for split, row in _TABLE_7.items()
    for i, op in enumerate(_OPS)
}
for _op, _took in (("qkv", 16.9), ("o", 10.8 + 12.0), ("swiglu", 39.3), ("down", 18.1 + 15.3)):
    QUOTED.setdefault(("Llama-3-70B", 4, _op), {})["Table 3"] = round(_took, 1)
