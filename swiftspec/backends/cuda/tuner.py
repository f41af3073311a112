"""Tuner of the projections: times several tilings of each shape on this GPU, and keeps those that are faster than the
default ones.

The last step of a GPU trial (trial.py). A tiling is timed only if its results are those of the default one up to the
order of the sums, and kept only if it passes the checks of the trial. The default tilings come from estimated times
(csrc/cuda/linear/tiling.h), for GPUs that were never tuned.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from swiftspec.backends.cuda import CudaBackend
from swiftspec.backends.cuda.linear import ProjectionTiling
from swiftspec.backends.cuda.trial_checks import (
    BF16,
    NORM_EPS,
    ProjectionShape,
    TrialDevice,
    TrialPlan,
    check_projection,
    check_repeats,
    check_replays,
    difference,
    first_of,
    norm_weight,
    product,
    random_weight,
)

TUNE_S = 2.0  # after this time, the shapes that remain keep their default tilings
EACH_VARIANT = 4  # tilings that are timed besides the default one
FINALISTS = 3  # of these, the ones that are timed with every number of rows
CALLS, MIN_CALLS, GRAPH_S = 20, 3, 2e-3  # calls per measurement, fewer if these would take longer than GRAPH_S
BYTES_PER_S = 3e12  # of memory, to estimate the duration of a call
MARGIN = 0.02  # a tiling replaces the default one if it is faster by more than this share
ROWS = {1: 2, 8: 8, 16: 1}  # weights of the times by number of rows
MAIN_ROWS = 8
ORDER_BOUND = 4e-3  # largest relative difference between results that sum in another order; bfloat16 rounds by 2e-3

LAYER_CHECKS = (check_repeats, check_replays)
Timer = Callable[[Sequence[Callable[[], Tensor]]], float]  # seconds that the calls take together


@dataclass(frozen=True, slots=True)
class TuningBench:
    """What a GPU is tuned with. `timer`: times calls. `clock`: returns the time in seconds. `cold_bytes`: bytes of
    weights that a measurement reads at least, several times the L2 cache."""

    ops: CudaBackend
    at: TrialDevice
    timer: Timer
    cold_bytes: int
    clock: Callable[[], float] = time.monotonic

    def tune(self, plan: TrialPlan) -> dict[str, ProjectionTiling]:
        """Returns the tilings that are faster than the default ones, by shape; empty if layers with them fail."""
        until, found = self.clock() + TUNE_S, dict[str, ProjectionTiling]()
        distinct = dict[tuple[int, int, int], ProjectionShape]()
        for shape in (*(each for layer in plan.layers for each in layer.projections), *plan.heads):
            distinct.setdefault((shape.inputs, shape.outputs, shape.group), shape)
        for shape in distinct.values():
            if self.clock() < until:
                found |= ShapeBench.of(self, shape).faster()
        tuned = self.ops.with_operators(tilings=found)
        checks = (partial(check, layer, tuned, self.at) for layer in plan.layers for check in LAYER_CHECKS)
        return found if found and first_of(check() for check in checks) is None else {}


@dataclass(frozen=True, slots=True)
class ShapeBench:
    """Measurements of one projection. `copies`: packed weights that together have `cold_bytes`."""

    bench: TuningBench
    shape: ProjectionShape
    copies: list[Any]
    norm: Any
    x: Tensor
    residual: Tensor

    @staticmethod
    def of(bench: TuningBench, shape: ProjectionShape) -> ShapeBench:
        ops, at = bench.ops, bench.at
        packed = ops.pack(random_weight(shape, at), BF16, at.device)
        default, copies = ops.tilings_of(packed, 0)[0], [packed]
        for _ in range(1, math.ceil(bench.cold_bytes / packed.tiles.nbytes)):
            memory = torch.empty(packed.tiles.shape, dtype=torch.uint8, device=at.device)
            copies.append(ops.with_tiling(packed, default, memory.copy_(packed.tiles)))
        norm = ops.pack_norm(norm_weight(shape.inputs, at), NORM_EPS, BF16, at.device)
        x = at.random(max(ROWS), shape.inputs, seed=3).to(BF16)
        residual = at.random(max(ROWS), shape.outputs, seed=4).to(BF16)
        at.finish()  # a projection may load its weights before it waits for preceding kernels
        return ShapeBench(bench, shape, copies, norm, x, residual)

    def faster(self) -> Mapping[str, ProjectionTiling]:
        """Returns the fastest tiling under the name of the shape, or nothing if it is the default one."""
        default, *others = self.bench.ops.tilings_of(self.copies[0], EACH_VARIANT)
        equal = [tiling for tiling in others if self._agrees(tiling, default)]
        first = {tiling: self.seconds(tiling, MAIN_ROWS) for tiling in (default, *equal)}
        finalists = sorted(equal, key=lambda tiling: first[tiling])[:FINALISTS]
        costs = {tiling: self._cost(tiling, first[tiling]) for tiling in (default, *finalists)}
        name = self.copies[0].shape_name
        for tiling in sorted(finalists, key=lambda tiling: costs[tiling]):
            if costs[tiling] >= (1 - MARGIN) * costs[default]:
                break
            tuned = self.bench.ops.with_operators(tilings={name: tiling})
            if check_projection(self.shape, tuned, self.bench.at) is None:
                return {name: tiling}
        return {}

    def _result(self, packed: Any, rows: int) -> Tensor:
        return product(self.shape, self.bench.ops, self.norm, packed, self.x[:rows], self.residual[:rows])

    def _agrees(self, tiling: ProjectionTiling, default: ProjectionTiling) -> bool:
        ops, packed = self.bench.ops, self.copies[0]
        mine, theirs = ops.with_tiling(packed, tiling), ops.with_tiling(packed, default)
        return all(
            difference(self._result(mine, rows), self._result(theirs, rows).float(), ORDER_BOUND, "") is None
            for rows in ROWS
        )

    def _cost(self, tiling: ProjectionTiling, main_seconds: float) -> float:
        others = {rows: self.seconds(tiling, rows) for rows in ROWS if rows != MAIN_ROWS}
        return sum(ROWS[rows] * seconds for rows, seconds in {**others, MAIN_ROWS: main_seconds}.items())

    def seconds(self, tiling: ProjectionTiling, rows: int) -> float:
        """Returns the seconds of a call on weights that are not in the caches."""
        ops, nbytes = self.bench.ops, self.copies[0].tiles.nbytes
        count = max(MIN_CALLS, min(CALLS, int(GRAPH_S * BYTES_PER_S / nbytes)))
        matrices = [ops.with_tiling(packed, tiling) for packed in self.copies[:count]]
        calls = [partial(self._result, matrix, rows) for matrix in itertools.islice(itertools.cycle(matrices), count)]
        return self.bench.timer(calls) / count
