"""What an operator, a step and a whole decode should take on a Hopper GPU, and what others publish.

Formulas and figures: the H200 (4.3 TB/s of measured copy) with int4 weights in groups of 128. Where another copy speed
is measured, the share of it stays and the fixed part too. `accept` is what must be reached, `goal` what can be.
"""

from __future__ import annotations

from dataclasses import dataclass

H200 = 4300.0  # GB/s, copy, bytes read and written


@dataclass(frozen=True, slots=True)
class Target:
    """Microseconds, milliseconds or tokens a second, as the thing is measured."""

    accept: float
    goal: float


def linear(moved: int, copy: float) -> Target:
    """Microseconds of a projection that moves so many bytes, where a copy reaches `copy` GB/s."""
    return Target(3.5 + moved / (0.744e3 * copy), 2.5 + moved / (0.860e3 * copy))


def attention(moved: int, copy: float) -> Target:
    """Microseconds of attention over 8 rows that reads so many bytes of keys and values."""
    floor = moved / (1e3 * copy)
    return Target(5.0 + 1.7 * floor, 3.75 + 1.45 * floor)


# milliseconds of a forward of 8 rows at context 1000 on one H200, int4 body and bf16 head
STEPS = {
    "Llama-3.2-1B": Target(0.64, 0.53),
    "Llama-3.2-3B": Target(1.24, 1.04),
    "Llama-3-8B": Target(2.08, 1.76),
    "Llama-3-70B": Target(13.3, 11.4),
}


def step(shape: str, copy: float) -> Target | None:
    """Milliseconds of a step; None for shapes without a figure."""
    slower = max(1.0, H200 / copy)
    found = STEPS.get(shape)
    return None if found is None else Target(found.accept * slower, found.goal * slower)


def decode(target: str, copy: float) -> Target | None:
    """Tokens a second with a draft tree on one GPU; None for targets without a figure."""
    share = min(1.0, copy / H200)
    return Target(180.0 * share, 260.0 * share) if target == "Llama-3-70B" else None


def ratios(op: str, moved: float) -> list[tuple[str, float, float]]:
    """How many times as fast as a competitor an operator must be, and can be; `moved` is in MB.

    By what the same weights take in bfloat16, which is 3.85 times as much as in int4: from 30 MB on, from 5 MB, less.
    """
    if op.startswith("attention"):
        return [("unfused", 2.5, 2.5)]
    size = 3.85 * moved
    if size >= 30:
        return [("cublas bf16", 2.3, 3.0), ("torch int4", 1.5, 1.8)]
    return [("cublas bf16", 1.5, 1.5), ("torch int4", 1.3, 1.3)] if size >= 5 else [("cublas bf16", 1.0, 1.0)]


# Microseconds on an H800, quoted from the SwiftSpec paper's Table 7 (8 rows; O and down with their all-reduce)
PAPER: dict[tuple[str, int, str], float] = {
    ("Llama-3.2-1B", 4, "o"): 5.9, ("Llama-3.2-1B", 4, "swiglu"): 5.8, ("Llama-3.2-1B", 4, "down"): 8.3,
    ("Llama-3.2-3B", 4, "o"): 6.4, ("Llama-3.2-3B", 4, "swiglu"): 7.2, ("Llama-3.2-3B", 4, "down"): 8.7,
    ("Llama-3-8B", 4, "o"): 7.7, ("Llama-3-8B", 4, "swiglu"): 15.0, ("Llama-3-8B", 4, "down"): 10.5,
    ("Llama-3-70B", 4, "o"): 11.72, ("Llama-3-70B", 4, "swiglu"): 49.0, ("Llama-3-70B", 4, "down"): 24.3,
    ("Llama-3-70B", 8, "o"): 13.3, ("Llama-3-70B", 8, "swiglu"): 23.6, ("Llama-3-70B", 8, "down"): 19.9,
    ("Llama-3.2-1B", 4, "attention 500"): 6.3, ("Llama-3.2-1B", 4, "attention 1000"): 6.2,
    ("Llama-3.2-3B", 4, "attention 500"): 6.2, ("Llama-3.2-3B", 4, "attention 1000"): 8.0,
    ("Llama-3-8B", 4, "attention 500"): 6.4, ("Llama-3-8B", 4, "attention 1000"): 8.1,
    ("Llama-3-70B", 4, "attention 500"): 9.6, ("Llama-3-70B", 4, "attention 1000"): 13.4,
    ("Llama-3-70B", 8, "attention 500"): 6.4, ("Llama-3-70B", 8, "attention 1000"): 8.1,
}  # fmt: skip
