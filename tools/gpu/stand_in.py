"""Runs a step of tools/gpu_queue.py on a CPU: the same code with the operators in torch, and every model small.

    python -m tools.gpu.stand_in bench.gpu.chain --json out.json

It shows that a step runs to its end and that its results have the names that the rules of decisions.py read. Its
figures mean nothing.
"""

from __future__ import annotations

import runpy
import sys

import torch

from bench.gpu import cases, shapes
from swiftspec.backends.unfused import unfused
from tools.width_expand.shapes import SHAPES

SHARD = (512, 8, 4, 64, 512, 512)  # as bench.gpu.shapes.MODELS
TARGET, DRAFT = (512, 9, 8, 2, 128, 1152, 4224, False), (256, 3, 8, 2, 64, 512, 4224, False)  # as SHAPES
GB_BYTES = 1e5  # that a GB of a working set stands for
LAYERS = 5
# options of each module that make it short
OPTIONS: dict[str, dict[str, str]] = {
    "bench.gpu.kernels": {"--worker": ""},  # without a watchdog, which starts a process
    "bench.gpu.step": {"--ops": "unfused", "--tokens": "4", "--prompts": "1", "--context": "64"},
}
SHORTER = {"--trees": "4,8;3,16", "--rows": "8,16"}  # of bench.gpu.step


def shrink() -> None:
    """Replaces the models by small ones of the same names, and the operators by those in torch."""
    for name in shapes.MODELS:
        shapes.MODELS[name] = SHARD
    for name in shapes.LAYERS:
        shapes.LAYERS[name] = LAYERS
    for name in SHAPES:
        SHAPES[name] = DRAFT if name.endswith("1B") else TARGET
    shapes.GB = GB_BYTES
    cases.operators = lambda device: {cases.OURS: unfused, "unfused": unfused}


def shortened(module: str, arguments: list[str]) -> list[str]:
    """Returns the arguments of a module on a CPU."""
    # both models run at the same time only on a GPU
    short = ["serial" if module == "bench.gpu.step" and each == "async" else each for each in arguments]
    for name, value in SHORTER.items():
        if module == "bench.gpu.step" and name in short:
            short[short.index(name) + 1] = value
    for name, value in {**OPTIONS.get(module, {}), "--device": "cpu"}.items():
        if name in short:
            short[short.index(name) + 1] = value
        else:
            short += [name, value] if value else [name]
    return short


def main() -> None:
    if len(sys.argv) < 2:
        raise SystemExit("usage: python -m tools.gpu.stand_in MODULE [ARGUMENTS]")
    module = sys.argv[1]
    torch.set_num_threads(1)  # small operators gain nothing from more
    shrink()
    sys.argv = [module, *shortened(module, sys.argv[2:])]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
