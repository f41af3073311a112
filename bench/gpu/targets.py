"""Target figures for operators and steps on a Hopper GPU, and published figures of other projects.

Every target is a formula over `Constants`. The fixed part of an operator is the time of a launch, of the first bytes,
of an exchange among CTAs, and of work that the other constants do not cover; the rest is bytes at a share of the read
speed. ASSUMED describes an H200 before any measurement, and gives the original figures (int4 weights in groups of 128).
`bench.gpu.constants` measures a GPU's own constants, from which the same formulas derive its targets. `accept` must be
reached, `goal` can be reached.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

LAUNCHES = 5  # kernels per layer that the targets assume; today there are six


@dataclass(frozen=True, slots=True)
class Target:
    """Target of a quantity, in its unit: microseconds or milliseconds.

    `accept` must be reached, `goal` can be reached.
    """

    accept: float
    goal: float


@dataclass(frozen=True, slots=True)
class Constants:
    """Constants of a GPU: speeds in GB/s, times in microseconds."""

    copy: float  # a plain copy, bytes read and written
    read: float  # bulk copies to shared memory, as many in flight as the kernels allow
    gap: float  # from a kernel's end to the first instruction of the next one in a graph, launched early
    latency: float  # the first bulk copy from memory
    exchange: float  # one line from one CTA to another, one way

    @staticmethod
    def of(found: dict[str, Any] | None, copy: float) -> Constants:
        """Returns the measured constants, completed by assumed ones.

        `found`: document of `bench.gpu.constants`, or None. `copy`: copy speed of this run in GB/s. Constants that
        `found` lacks are those of ASSUMED, with the read speed scaled like the copy speed.
        """
        made = asdict(ASSUMED) | {"copy": copy, "read": ASSUMED.read * copy / ASSUMED.copy}
        measured = {} if found is None else found["constants"]
        return Constants(**made | {name: measured[name] for name in made if name != "copy" and name in measured})


ASSUMED = Constants(copy=4300.0, read=4300.0, gap=0.85, latency=0.8, exchange=0.85)


def linear(moved: int, on: Constants) -> Target:
    """Returns the target in microseconds for a projection that moves `moved` bytes."""
    fixed, bytes_ = on.gap + on.latency, moved / (1e3 * on.read)
    return Target(fixed + 1.85 + bytes_ / 0.744, fixed + 0.85 + bytes_ / 0.860)


def attention(moved: int, on: Constants) -> Target:
    """Returns the target in microseconds for attention over 8 rows that reads `moved` bytes of keys and values."""
    fixed, bytes_ = on.gap + on.latency + on.exchange, moved / (1e3 * on.read)
    return Target(fixed + 2.5 + 1.57 * bytes_, fixed + 1.25 + 1.45 * bytes_)


def sampling(logits: int, on: Constants) -> Target:
    """Returns the target in microseconds for sampling from `logits` bytes of logits."""
    took = on.gap + on.latency + 3.21 + 1.2 * logits / (1e3 * on.read)
    return Target(took, took)


# layers, and milliseconds of a forward over 8 rows at context 1000 on one H200, int4 body and bf16 head
STEPS = {
    "Llama-3.2-1B": (16, Target(0.64, 0.53)),
    "Llama-3.2-3B": (28, Target(1.24, 1.04)),
    "Llama-3-8B": (32, Target(2.08, 1.76)),
    "Llama-3-70B": (80, Target(13.3, 11.4)),
}


def step(shape: str, on: Constants) -> Target | None:
    """Returns the target in milliseconds for a step of the model `shape`, adapted to the constants `on`; None if STEPS
    lacks it."""
    if shape not in STEPS:
        return None
    layers, found = STEPS[shape]
    assumed, here = (LAUNCHES * (c.gap + c.latency) + c.exchange for c in (ASSUMED, on))
    slower = max(1.0, ASSUMED.read / on.read)

    def at(took: float) -> float:
        return slower * (took - layers * assumed / 1e3) + layers * here / 1e3

    return Target(at(found.accept), at(found.goal))


INT4 = ("qkv", "o", "swiglu", "down")


_WHO = {"gemm": ("SwiftSpec", "vLLM", "TensorRT-LLM"), "attention": ("SwiftSpec", "FlashInfer", "FlashAttention")}
_OPS = ("o", "down", "swiglu", "attention 500", "attention 1000")
_TABLE_7 = {
    ("Llama-3.2-1B", 4): (5.9, 12.9, 10.2, 8.3, 18.8, 11.0, 5.8, 12.3, 11.5, 6.3, 13.6, 13.8, 6.2, 22.8, 13.8),
    ("Llama-3.2-3B", 4): (6.4, 12.3, 10.0, 8.7, 17.0, 10.3, 7.2, 12.5, 11.8, 6.2, 19.1, 17.2, 8.0, 33.4, 18.3),
    ("Llama-3-8B", 4): (7.7, 14.6, 10.3, 10.5, 16.5, 11.9, 15.0, 16.3, 15.0, 6.4, 19.4, 17.75, 8.1, 33.4, 18.13),
    ("Llama-3-70B", 4): (11.72, 16.9, 15.5, 24.3, 25.4, 26.1, 49.0, 36.7, 31.9, 9.6, 19.2, 19.0, 13.4, 33.2, 19.1),
    ("Llama-3-70B", 8): (13.3, 25.7, 17.2, 19.9, 29.5, 20.7, 23.6, 22.5, 22.0, 6.4, 18.6, 17.8, 8.1, 32.7, 18.2),
}
# Microseconds on an H800 at 8 rows by system, O and down with their all-reduce. Sources: the SwiftSpec paper's Table 7,
# and its Table 3, with the operators of a stack that it does not name.
QUOTED: dict[tuple[str, int, str], dict[str, float]] = {
    (*split, op): dict(zip(_WHO["attention" if op.startswith("attention") else "gemm"], row[3 * i : 3 * i + 3]))
    for split, row in _TABLE_7.items()
    for i, op in enumerate(_OPS)
}
# The paper's Table 3, 8 rows of Llama-3-70B on 4 GPUs: microseconds, and percent of the peaks of tensor cores (None:
# less than 0.01) and of memory, of the all-reduces percent of NVLink.
TABLE_3: dict[str, tuple[float, float | None, float]] = {
    "qkv": (16.9, 2.0, 18.7),
    "attention": (18.8, None, 6.5),
    "o": (10.8, 2.5, 23.3),
    "all-reduce of o": (12.0, None, 8.5),
    "swiglu": (39.3, 4.8, 44.6),
    "down": (18.1, 5.2, 48.5),
    "all-reduce of down": (15.3, None, 6.6),
}
TABLE_3_SHARD = "Llama-3-70B", 4
for _op in INT4:
    _took = sum(TABLE_3[name][0] for name in (_op, f"all-reduce of {_op}") if name in TABLE_3)
    QUOTED.setdefault((*TABLE_3_SHARD, _op), {})["Table 3"] = round(_took, 1)
