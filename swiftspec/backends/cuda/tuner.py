"""Tuner: times several tilings of each projection and the shapes of the attention kernel on this GPU, and keeps those
that are faster than the default ones.

The last step of a GPU trial (trial.py). A tiling or shape is timed only if its results are those of the default one up
to the order of the sums, and kept only if it passes the checks of the trial. The default tilings come from estimated
times (csrc/cuda/linear/tiling.h), for GPUs that were never tuned.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from swiftspec.backends.cuda import CudaBackend
from swiftspec.backends.cuda.attention import heads_name
from swiftspec.backends.cuda.linear import ProjectionTiling
from swiftspec.backends.cuda.trial_checks import (
    BF16,
    NORM_EPS,
    AttentionShape,
    ProjectionShape,
    TrialCache,
    TrialDevice,
    TrialPlan,
    check_append,
    check_attention,
    check_projection,
    check_repeats,
    check_replays,
    difference,
    first_of,
    norm_weight,
    product,
    random_weight,
    rope_of,
    tree_batch,
)

TUNE_S = 4.0  # after this time, the shapes that remain keep their default tilings
EACH_VARIANT = 4  # tilings that are timed besides the default one
FINALISTS = 3  # of these, the ones that are timed with every number of rows
CALLS, MIN_CALLS, GRAPH_S = 20, 3, 2e-3  # calls per measurement, fewer if these would take longer than GRAPH_S
BYTES_PER_S = 3e12  # of memory, to estimate the duration of a call
MARGIN = 0.02  # a tiling replaces the default one if it is faster by more than this share
ROWS = {1: 2, 8: 8, 16: 1}  # weights of the times by number of rows
MAIN_ROWS = 8
KEYS = (1000, 4000, 16_000)  # of attention, whose times relative to the default shape count the same
MAX_LAYERS = 64  # of a cache that is timed
ORDER_BOUND = 4e-3  # largest relative difference between results that sum in another order; bfloat16 rounds by 2e-3

LAYER_CHECKS = (check_append, check_repeats, check_replays)


@dataclass(frozen=True, slots=True)
class Tuning:
    """What is faster on a GPU than the defaults. `tilings`: of projections, by `linear.shape_name`. `kernel_shapes`: of
    attention, by `attention.heads_name`."""

    tilings: Mapping[str, ProjectionTiling] = field(default_factory=dict)
    kernel_shapes: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.tilings or self.kernel_shapes)

    def under(self, first: Tuning) -> Tuning:
        """Returns what `first` has, and what only this one has."""
        return Tuning({**self.tilings, **first.tilings}, {**self.kernel_shapes, **first.kernel_shapes})

    def to_json(self) -> dict[str, Any]:
        return {"tilings": dict(self.tilings), "kernel_shapes": dict(self.kernel_shapes)}

    @staticmethod
    def from_json(values: object) -> Tuning:
        """Returns what `to_json` has converted. Raises ValueError if `values` is something else."""
        match values:
            case {"tilings": dict() as rows, "kernel_shapes": dict() as shapes}:
                pass
            case _:
                raise ValueError("not a tuning")
        if not all(isinstance(shape, str) for shape in shapes.values()):
            raise ValueError("not a tuning")
        return Tuning({str(name): _tiling(row) for name, row in rows.items()}, shapes)


def _tiling(row: object) -> ProjectionTiling:
    match row:
        case [str(variant), int(cluster), int(warps), int(strips), int(blocks)]:
            return ProjectionTiling(variant, cluster, warps, strips, blocks)
        case _:
            raise ValueError("not a tuning")


Timer = Callable[[Sequence[Callable[[], Tensor]]], float]  # seconds that the calls take together


@dataclass(frozen=True, slots=True)
class TuningBench:
    """What a GPU is tuned with. `timer`: times calls. `clock`: returns the time in seconds. `cold_bytes`: bytes of
    weights, or of keys and values, that a measurement reads at least, several times the L2 cache. `log`: called with
    each tiling or kernel shape before it runs for the first time, since it may hang."""

    ops: CudaBackend
    at: TrialDevice
    timer: Timer
    cold_bytes: int
    clock: Callable[[], float] = time.monotonic
    log: Callable[[str], object] = lambda text: None

    def tune(self, plan: TrialPlan, seconds: float = TUNE_S) -> Tuning:
        """Returns what is faster than the defaults; nothing if layers with it fail. `seconds`: after this time, the
        shapes that remain keep their defaults."""
        until = self.clock() + seconds
        shapes = self._kernel_shapes(plan, until)  # takes little time
        found = Tuning(self._tilings(plan, until), shapes)
        tuned = self.ops.with_operators(tilings=found.tilings, kernel_shapes=found.kernel_shapes)
        checks = (partial(check, layer, tuned, self.at) for layer in plan.layers for check in LAYER_CHECKS)
        return found if found and first_of(check() for check in checks) is None else Tuning()

    def _tilings(self, plan: TrialPlan, until: float) -> dict[str, ProjectionTiling]:
        """Returns the tilings that are faster than the default ones, by shape, of those that are timed before the time
        `until`. Small projections come first: they take the least time and can gain the most."""
        distinct, found = dict[tuple[int, int, int], ProjectionShape](), dict[str, ProjectionTiling]()
        for shape in (*(each for layer in plan.layers for each in layer.projections), *plan.heads):
            distinct.setdefault((shape.inputs, shape.outputs, shape.group), shape)
        smallest_first = sorted(distinct.values(), key=lambda shape: shape.inputs * shape.outputs)
        for shape in smallest_first if self.ops.TILINGS else ():
            if self.clock() < until:
                found |= ShapeBench.of(self, shape).faster()
        return found

    def _kernel_shapes(self, plan: TrialPlan, until: float) -> dict[str, str]:
        """Returns the shapes of the attention kernel that are faster than the default ones, as `_tilings`."""
        found = dict[str, str]()
        for shape in dict.fromkeys(layer.attention for layer in plan.layers):
            if self.clock() < until:
                found = dict(AttentionBench(self, shape).faster()) | found
        return found


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
        self.bench.log(f"{packed.shape_name}: {' '.join(map(str, tiling))}")
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
        count = max(MIN_CALLS, min(CALLS, int(GRAPH_S * BYTES_PER_S / nbytes)), len(self.copies))
        matrices = [ops.with_tiling(packed, tiling) for packed in self.copies]
        calls = [partial(self._result, matrix, rows) for matrix in itertools.islice(itertools.cycle(matrices), count)]
        return self.bench.timer(calls) / count


@dataclass(frozen=True, slots=True)
class AttentionBench:
    """Measurements of the attention of one model."""

    bench: TuningBench
    shape: AttentionShape

    def faster(self) -> Mapping[str, str]:
        """Returns the fastest shape of the kernel under the name of the heads, or nothing if it is the default one."""
        kernels = self.bench.ops.attention_shapes(self.shape.capacity)
        if len(kernels) < 2:
            return {}
        default, costs = kernels[0], dict.fromkeys(kernels[1:], 0.0)  # relative to the default shape
        contexts = [keys for keys in KEYS if keys <= self.shape.capacity] or [self.shape.capacity]
        for keys in contexts:
            self.bench.log(f"{self.shape}, {keys} keys: {', '.join(costs)}")
            calls = self._calls(keys, (default, *costs))
            want = calls[default][0]().float()
            costs = {each: costs[each] for each in costs if difference(calls[each][0](), want, ORDER_BOUND, "") is None}
            usual = self.bench.timer(calls[default])
            costs = {each: cost + self.bench.timer(calls[each]) / usual / len(contexts) for each, cost in costs.items()}
        name = heads_name(self.shape.heads, self.shape.kv_heads, self.shape.head_dim, default)
        for kernel in sorted(costs, key=lambda kernel: costs[kernel]):
            tuned = self.bench.ops.with_operators(kernel_shapes={name: kernel})
            if costs[kernel] < 1 - MARGIN and check_attention(self.shape, tuned, self.bench.at) is None:
                return {name: kernel}
        return {}

    def _calls(self, keys: int, kernels: Sequence[str]) -> dict[str, list[Callable[[], Tensor]]]:
        """Returns calls of attention over `keys` keys by shape of the kernel, each on another layer of a cache that the
        L2 does not hold."""
        shape, at = self.shape, self.bench.at
        one = TrialCache.of(shape, 1, keys, keys, at)
        layers = min(math.ceil(self.bench.cold_bytes / (one.k.nbytes + one.v.nbytes)), MAX_LAYERS)
        cache = TrialCache(*(part.expand(layers, *part.shape[1:]).contiguous() for part in (one.k, one.v)))
        batch, (cos, sin) = tree_batch([keys], at), rope_of(shape, keys, at)
        qkv = at.random(len(batch), (shape.heads + 2 * shape.kv_heads) * shape.head_dim, seed=8).to(BF16)
        plans = {each: self.bench.ops.prepare(batch, cache, cos, sin, shape.heads, shape=each) for each in kernels}
        attend = self.bench.ops.tree_attention
        return {each: [partial(attend, qkv, plan, layer) for layer in range(layers)] for each, plan in plans.items()}
