"""Microseconds of every tiling of a model's projections on this GPU, measured as the tuner of a GPU trial does.

    python -m bench.gpu.tilings [--models Llama-3-8B,Llama-3-70B] [--most 40] --json out.json

All tilings of each variant are timed with 8 rows, the fastest ones with 1 and 16 rows, too. Shows what the tuner, which
times a few, can gain at most, and whether a variant is the fastest for any shape. Weights are random int4 and larger
than the L2 cache together. Exits with 5 without the CUDA operators. Not run on a GPU.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from bench.gpu.shapes import RankShape
from swiftspec import _C
from swiftspec.backends.cuda import cuda
from swiftspec.backends.cuda.devices import require_usable
from swiftspec.backends.cuda.trial import COLD, capture_graph, replay_seconds
from swiftspec.backends.cuda.trial_checks import Projection, ProjectionShape, TrialDevice
from swiftspec.backends.cuda.tuner import FINALISTS, MAIN_ROWS, ROWS, ShapeBench, TuningBench
from swiftspec.errors import UserError

SKIPPED = 5  # exit code
OPS: dict[str, Projection] = {
    "qkv": "qkv",
    "o": "o",
    "swiglu": "gate_up",
    "down": "down",
}  # names of bench.gpu.shapes, and of the trial
Json = dict[str, Any]


def timed(bench: TuningBench, shape: ProjectionShape, most: int) -> list[Json]:
    """Returns the tilings of a shape with their microseconds by number of rows, the default one first."""
    measured = ShapeBench.of(bench, shape)
    tilings = bench.ops.tilings_of(measured.copies[0], most)
    found = list[Json]()
    for tiling in tilings:
        print(f"{shape}: {' '.join(map(str, tiling))}", flush=True)  # before its kernel can hang
        found.append({"tiling": [*tiling], "us": {MAIN_ROWS: 1e6 * measured.seconds(tiling, MAIN_ROWS)}})
    fastest = sorted(range(len(tilings)), key=lambda i: found[i]["us"][MAIN_ROWS])[:FINALISTS]
    for i in {0, *fastest}:
        found[i]["us"] |= {rows: 1e6 * measured.seconds(tilings[i], rows) for rows in ROWS if rows != MAIN_ROWS}
    return found


def summary(shapes: dict[str, list[Json]]) -> Json:
    """Returns the microseconds of the projections of a layer with 8 rows: with the default tilings, with the fastest of
    all, and with the fastest ones if there were only the variant "ring" and one other."""
    variants = {str(each["tiling"][0]) for found in shapes.values() for each in found}
    sums: Json = {"default us": 0.0, "fastest us": 0.0} | {f"{variant} us": 0.0 for variant in sorted(variants)}
    for found in shapes.values():
        times = [(str(each["tiling"][0]), each["us"][MAIN_ROWS]) for each in found]
        sums["default us"] += times[0][1]
        sums["fastest us"] += min(us for _, us in times)
        for variant in variants:
            sums[f"{variant} us"] += min(us for name, us in times if name in ("ring", variant))
    return sums | {"shapes": shapes}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="Llama-3-8B,Llama-3-70B,Llama-3.2-1B")
    parser.add_argument("--most", type=int, default=40, help="tilings of each variant")
    parser.add_argument("--json", type=Path, required=True, help="file for the result")
    args = parser.parse_args()
    try:
        device = require_usable("cuda")
    except (UserError, RuntimeError) as error:
        print(error)
        return SKIPPED
    torch.cuda.set_device(device)
    bench = TuningBench(cuda, TrialDevice(device, capture_graph), replay_seconds, COLD * _C.cuda_device()["l2"])
    whole: Json = {"models": {}}
    with torch.inference_mode():
        for model in args.models.split(","):
            shapes: dict[str, list[Json]] = {}
            for name, op in OPS.items():
                outputs, inputs, group = RankShape.of(model, 1).projection(name)
                shapes[name] = timed(bench, ProjectionShape(op, outputs, inputs, group), args.most)
                whole["models"][model] = summary(shapes)
                args.json.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    for model, sums in whole["models"].items():
        print(model, {name: round(value, 1) for name, value in sums.items() if name != "shapes"})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
