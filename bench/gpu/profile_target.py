"""Launches four operators a few times each, as the target of a profiler.

    ncu --kernel-name regex:swiftspec ... python -m bench.gpu.profile_target [--shape Llama-3-70B] [--rows 8]

Every operator has one set of weights, so that caches are warm unless the profiler flushes them.
"""

from __future__ import annotations

import argparse

import torch

from bench.baselines.kernels import BaselineKernels
from bench.gpu.cases import OURS, Case, Maker

OPERATORS = ("swiglu", "o", "head")
LAUNCHES = 2


def chosen(make: Maker, shape: str, rows: int) -> list[Case]:
    """Returns the cases of OPERATORS and of attention on one rank."""
    linear = [make.linear(shape, 1, op, rows) for op in OPERATORS]
    return [*linear, make.attention(shape, 1, 1000, rows)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="Llama-3-70B")
    parser.add_argument("--rows", type=int, default=8)
    args = parser.parse_args()
    for case in chosen(Maker("cuda", BaselineKernels(), cold=1), args.shape, args.rows):
        call = case.variants[OURS]()[0]
        for _ in range(LAUNCHES):
            call()
        torch.cuda.synchronize()
        print(case.name, flush=True)


if __name__ == "__main__":
    main()
