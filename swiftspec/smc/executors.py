"""Executors of rounds of sequence groups. A round runs as a whole, with the forwards of both models."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from swiftspec.config import PopulationConfig
from swiftspec.runtime.async_copy import HostCopies
from swiftspec.runtime.executors import Executor
from swiftspec.runtime.executors.available import ExecutorDeps, can_capture
from swiftspec.runtime.executors.graph import ROUND_GRAPHS, CapturedGraph, GraphCache
from swiftspec.runtime.executors.native import NativeModel, NativePopulation
from swiftspec.runtime.runner import PREFILL_CHUNK_TOKENS, Runner
from swiftspec.smc.round import GroupRound
from swiftspec.smc.row_sampler import SamplingClass
from swiftspec.tree.mask import MASK_WIDTHS

EAGER_WINDOW_SLOTS = 16  # windows of eager rounds are multiples of it
AHEAD_ROUNDS = 4  # rounds captured ahead have windows for the tree slots of up to so many rounds


class RoundResult(Protocol):
    """The result of a round that was launched on the device."""

    def read(self) -> NDArray:
        """Waits for the round. Returns [groups, `GroupRound.header_len` + width] int64: per group the values that
        `GroupRound` returns."""
        ...


class PopulationExecutor(Executor, Protocol):
    """An executor of rounds of sequence groups."""

    def window(self, slots: int) -> int:
        """Returns the width of the mask window for a round over `slots` tree slots: at least `slots`."""
        ...

    def groups(self, live: int, max_groups: int) -> int:
        """Returns the number of groups that a round runs over if `live` of at most `max_groups` take part. It may be
        larger than `live`; the further groups are idle."""
        ...

    def round(self, program: GroupRound, width: int, groups: int, /) -> RoundResult:
        """Launches a round of the first `groups` groups over a mask window of `width` tree slots."""
        ...

    def compact(self, program: GroupRound, group: int, path: Sequence[int], keep: Sequence[int], /) -> None:
        """Calls `GroupRound.compact`, which takes effect after the rounds launched so far."""
        ...


@dataclass(frozen=True, slots=True)
class ReadyResult:
    """A `RoundResult` that is already in host memory."""

    out: NDArray

    def read(self) -> NDArray:
        return self.out


class NativePopulationExecutor:
    """Native executor of rounds of sequence groups: each round is one C++ call; both models must be in native code.

    The native code works on the tensors of the round and on both KV caches, so eager and native rounds can
    alternate.
    """

    name = "native"
    columns: Sequence[str] = ()

    def __init__(
        self, target: Runner, draft: Runner, models: tuple[NativeModel, NativeModel], config: PopulationConfig
    ) -> None:
        self._runners, self._models, self._config = (target, draft), models, config
        self._program: GroupRound | None = None  # `_native` was made for this program and these caches
        self._target: Tensor | None = None
        self._draft: Tensor | None = None

    def window(self, slots: int) -> int:
        """See `PopulationExecutor.window`. Native rounds need no padding."""
        return slots

    def groups(self, live: int, max_groups: int) -> int:
        return live

    def round(self, program: GroupRound, width: int, groups: int) -> ReadyResult:
        native = self._native_of(program)
        # NumPy: forwards evict the code of torch from the CPU caches, so a torch call would cost more here
        out = np.empty((groups, program.header_len + width), np.int64)
        target, draft = self._runners
        hooked = target.hooks or draft.hooks
        spent = native.round(program.requests.sampling_spans(groups), out, self._record_forward if hooked else None)
        if not hooked:
            draft.busy, target.busy = draft.busy + spent[0], target.busy + spent[1]
        return ReadyResult(out)

    def compact(self, program: GroupRound, group: int, path: Sequence[int], keep: Sequence[int]) -> None:
        self._native_of(program).compact(group, len(path), keep)

    def _native_of(self, program: GroupRound) -> NativePopulation:
        target, draft = (runner.cache for runner in self._runners)
        if self._program is not program or self._target is not target.kv.k or self._draft is not draft.kv.k:
            self._native = self._models[0].population(
                target, self._models[1], draft, program.native_tensors, self._config
            )
            self._program, self._target, self._draft = program, target.kv.k, draft.kv.k
        return self._native

    def _record_forward(self, of_target: bool, rows: int, seconds: float) -> None:
        """Records a forward that has just finished."""
        self._runners[not of_target].record_step(time.perf_counter() - seconds, rows, seconds)


class EagerPopulationExecutor:
    """Eager executor of rounds of sequence groups: launches operator by operator; supports every device."""

    name = "eager"
    columns: Sequence[str] = ()

    def __init__(self) -> None:
        self._copies = HostCopies()

    def window(self, slots: int) -> int:
        return -(-slots // EAGER_WINDOW_SLOTS) * EAGER_WINDOW_SLOTS

    def groups(self, live: int, max_groups: int) -> int:
        return live

    def round(self, program: GroupRound, width: int, groups: int) -> RoundResult:
        return self._copies.start(program(width, groups))

    def compact(self, program: GroupRound, group: int, path: Sequence[int], keep: Sequence[int]) -> None:
        program.compact(group, path, keep)


class GraphPopulationExecutor(EagerPopulationExecutor):
    """Executor that runs a round of sequence groups as one CUDA graph, with the forwards of both models and everything
    between them. The time of each model cannot be measured, so `Runner.busy` does not include it."""

    name = "graph"

    def __init__(self, graphs: GraphCache) -> None:
        super().__init__()
        self.graphs = graphs

    def window(self, slots: int) -> int:
        """See `PopulationExecutor.window`. Returns one of a few widths, because a graph is captured for each."""
        step = MASK_WIDTHS[-1]
        if slots < step:
            step = next(width for width in MASK_WIDTHS if width >= slots)
        return -(-slots // step) * step

    def groups(self, live: int, max_groups: int) -> int:
        """See `PopulationExecutor.groups`. Returns a power of two or `max_groups`, because a graph is captured for
        each number."""
        return min(1 << (live - 1).bit_length(), max_groups)

    def round(self, program: GroupRound, width: int, groups: int) -> RoundResult:
        graph = self._graph(program, width, groups)
        graph.replay()
        return self._copies.start(graph.out)

    def captures(self, program: GroupRound, max_groups: int, slots: int) -> list[Callable[[], None]]:
        """Returns functions that each capture a round of requests without penalties and bias, with or without filters.
        Other requests, and longer windows, capture theirs when they need them. `slots`: tree slots of each group."""
        step, vocab = program.particles.count * program.particles.step, program.requests.stops.shape[1]
        widths = sorted({min(self.window(used), slots) for used in range(step + 1, AHEAD_ROUNDS * step + 1)})
        groups = sorted({self.groups(live, max_groups) for live in range(1, max_groups + 1)})

        def capture(kind: SamplingClass, width: int, count: int) -> None:
            program.requests.assume_class(kind)
            program.particles.reset_idle(slice(0, count))
            self._graph(program, width, count)

        kinds = (SamplingClass(penalised=False, biased=False, num_candidates=ranked) for ranked in (0, vocab))
        return [partial(capture, kind, width, count) for kind in kinds for width in widths for count in groups]

    def _graph(self, program: GroupRound, width: int, groups: int) -> CapturedGraph:
        run, key = partial(program, width, groups), program.graph_key(width, groups)
        return self.graphs.ensure(ROUND_GRAPHS, key, run, program.particles.state)


def population_executors(
    target: Runner, draft: Runner, deps: ExecutorDeps, draft_deps: ExecutorDeps, config: PopulationConfig
) -> list[PopulationExecutor]:
    """Returns the executors that can run rounds of sequence groups, the fastest first. `deps`: of the target.
    `draft_deps`: of the draft."""
    executors: list[PopulationExecutor] = []
    alone, groups = target.model.group is None, config.smc_groups
    fused = deps.fused, draft_deps.fused
    if alone and fused[0] is not None and fused[1] is not None and config.smc_exact == 0:
        executors.append(NativePopulationExecutor(target, draft, (fused[0], fused[1]), config))
    sequences = min(deps.ops.MAX_CAPTURED_SEQUENCES, draft_deps.ops.MAX_CAPTURED_SEQUENCES)
    if groups <= max(sequences, 1) and deps.graphs is not None and draft_deps.graphs is not None:
        # largest number of rows of a forward; the ranks of a group gather its logits
        rows = min(groups * config.slots_per_round, PREFILL_CHUNK_TOKENS)
        if all(can_capture(runner, rows, runner.vocab) for runner in (target, draft)):
            executors.append(GraphPopulationExecutor(deps.graphs))
    return [*executors, EagerPopulationExecutor()]
