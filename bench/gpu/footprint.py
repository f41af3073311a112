"""Projections over working sets of increasing size: whether the time of a call depends on the memory that a sequence of
calls reads in all.

    python -m bench.gpu.footprint [--model Llama-3-70B] [--ops swiglu,down] [--sizes 0.25,1,4,16,36] --json out.json

A graph calls the projection with one set of weights after the other, as the layers of a model do. All sets are larger
than the L2 together, so that memory is read each time; a time that rises with their size points to address translation,
one that falls at the smallest size to a cache. `--touch` measures the largest size again while each block loads one
byte per page of the next call's weights at its start; it requires an extension with SWIFTSPEC_STAMPS
(bench/gpu/with_extension.py). Not run on a GPU.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from bench.baselines.kernels import BaselineKernels
from bench.common.device import check_device
from bench.gpu import cases, shapes
from bench.gpu.cases import BF16, OURS, Maker, projection, random_int4
from bench.gpu.shapes import RankShape
from bench.gpu.timing import Call, eager_timer, graph_timer
from swiftspec.errors import UserError


def calls_of(make: Maker, ops: Any, op: str, shape: tuple[int, int, int], packed: list[Any]) -> list[Call]:
    """Returns a call per set of weights."""
    outputs, inputs, _ = shape
    x, residual, norm = make.rows(8, inputs), make.rows(8, outputs), make.norm(ops, inputs)
    return [projection(ops, op, x, norm, weight, residual, None) for weight in packed]


def touch_ahead(packed: list[Any], on: bool) -> None:
    """Makes each call touch the pages of the next call's weights, or ends this."""
    for weight, following in pairwise([*packed, packed[0]]):
        weight.native.touch(following.tiles if on else following.tiles[:0])


def require_touch(packed: Any) -> None:
    """Raises UserError if the extension cannot touch pages."""
    if not hasattr(getattr(packed, "native", None), "touch"):
        raise UserError("--touch needs an extension built with SWIFTSPEC_STAMPS=1, see bench/gpu/with_extension.py")


def measure(op: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields microseconds per call for each size, the smallest first."""
    make, found = Maker(args.device, BaselineKernels()), cases.operators(args.device)
    ops, shape = found.get(OURS, found["unfused"]), RankShape.of(args.model, 1).projection(op)
    timer = graph_timer if args.device == "cuda" else eager_timer
    outputs, inputs, group = shape
    one = outputs * inputs // 2 + inputs // group * outputs * 5 // 2  # bytes
    packed: list[Any] = []

    def point(size: float, touched: bool) -> dict[str, Any]:
        us = timer(calls_of(make, ops, op, shape, packed))
        return {"op": op, "GB": size, "sets": len(packed), "touched": touched, "us": us}

    sizes = sorted(args.sizes)
    for size in sizes:
        while len(packed) < max(1, round(size * shapes.GB / one)):
            packed.append(ops.pack(random_int4(outputs, inputs, group, args.device), BF16, args.device))
        yield point(size, False)
    if args.touch:
        require_touch(packed[0])
        for on in (True, False):  # and once more without, since the clock may have changed
            touch_ahead(packed, on)
            yield point(sizes[-1], on)


def by_size(points: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Returns the microseconds by operator and size; `touched` is the time with touched pages."""
    found: dict[str, dict[str, float]] = {}
    for point in points:
        found.setdefault(point["op"], {})["touched" if point["touched"] else f"{point['GB']:g}"] = point["us"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Llama-3-70B", help="of bench/gpu/shapes.py")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ops", default="swiglu,down")
    parser.add_argument(
        "--sizes",
        type=lambda text: [float(size) for size in text.split(",")],
        default=[0.25, 1, 4, 16, 36],
        help="GB of all sets of weights together",
    )
    parser.add_argument("--touch", action="store_true", help="also measure with touched pages")
    parser.add_argument("--json", type=Path, required=True, help="file for the results, written after every point")
    args = parser.parse_args()
    check_device(parser, args.device)
    whole: dict[str, Any] = {"model": args.model, "points": []}
    try:
        with torch.inference_mode():
            for op in args.ops.split(","):
                for point in measure(op, args):
                    whole["points"].append(point)
                    whole["us"] = by_size(whole["points"])
                    args.json.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
                    touched = ", pages touched" if point["touched"] else ""
                    print(f"{op:8} {point['GB']:6g} GB {point['us']:9.2f} us{touched}", flush=True)
    except UserError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
