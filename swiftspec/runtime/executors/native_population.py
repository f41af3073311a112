"""Native executor of rounds of sequence groups: each round is one C++ call on a CPU.

The native code works on the population's tensors and on both KV caches, so eager and native rounds can alternate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from swiftspec.config import NativeRoundParams
from swiftspec.model.packed_model import LayerCaches
from swiftspec.runtime.executors.population_rounds import RoundProgram, SamplingSpan
from swiftspec.runtime.runner import Runner

ForwardCallback = Callable[[bool, int, float], None]  # after each forward: whether it is the target's, rows, seconds


class NativePopulation(Protocol):
    """Rounds of sequence groups in native code, on tensors at fixed addresses. csrc/bind/population.cpp implements and
    documents them."""

    def round(
        self, spans: Sequence[SamplingSpan], out: NDArray, on_forward: ForwardCallback | None, /
    ) -> tuple[float, float]: ...
    def compact(self, group: int, promoted: int, keep: Sequence[int], /) -> None: ...


class NativePopulationModel(Protocol):
    """A target in native code that also runs rounds of sequence groups with a draft in native code, see
    `NativeModel.population`."""

    def population(
        self,
        cache: LayerCaches,
        draft: Any,
        draft_cache: LayerCaches,
        tensors: Sequence[Tensor],
        params: NativeRoundParams,
        /,
    ) -> NativePopulation: ...


@dataclass(frozen=True, slots=True)
class ReadyResult:
    """A `RoundResult` that is already in host memory."""

    out: NDArray

    def read(self) -> NDArray:
        return self.out


class NativePopulationExecutor:
    """Native executor of rounds of sequence groups; both models must be in native code."""

    name = "native"
    columns = ("native round",)

    def __init__(
        self, target: Runner, draft: Runner, models: tuple[NativePopulationModel, Any], params: NativeRoundParams
    ) -> None:
        self._runners, self._models, self._params = (target, draft), models, params
        self._program: RoundProgram | None = None  # `_native` was made for this program and these caches
        self._target: Tensor | None = None
        self._draft: Tensor | None = None

    def window(self, slots: int) -> int:
        """See `PopulationExecutor.window`. Native rounds need no padding."""
        return slots

    def groups(self, live: int, max_groups: int) -> int:
        return live

    def round(self, program: RoundProgram, width: int, groups: int) -> ReadyResult:
        native = self._native_of(program)
        # NumPy: forwards evict the code of torch from the CPU caches, so a torch call would cost more here
        out = np.empty((groups, program.header_len + width), np.int64)
        target, draft = self._runners
        hooked = target.hooks or draft.hooks
        spent = native.round(program.sampling_spans(groups), out, self._record_forward if hooked else None)
        if not hooked:
            draft.busy, target.busy = draft.busy + spent[0], target.busy + spent[1]
        return ReadyResult(out)

    def compact(self, program: RoundProgram, group: int, path: Sequence[int], keep: Sequence[int]) -> None:
        self._native_of(program).compact(group, len(path), keep)

    def _native_of(self, program: RoundProgram) -> NativePopulation:
        target, draft = (runner.cache for runner in self._runners)
        if self._program is not program or self._target is not target.kv.k or self._draft is not draft.kv.k:
            self._native = self._models[0].population(target, self._models[1], draft, program.tensors, self._params)
            self._program, self._target, self._draft = program, target.kv.k, draft.kv.k
        return self._native

    def _record_forward(self, of_target: bool, rows: int, seconds: float) -> None:
        """Records a forward that has just finished."""
        self._runners[not of_target].record_step(time.perf_counter() - seconds, rows, seconds)
