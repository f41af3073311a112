"""A verification as one graph: the target's forward, what shapes its logits, a draw in every row; by rejection a
verdict over every node's children, too.

The graph holds by value the batch's shape and how a request shapes logits; the batch, the noise and the tokens that
penalties count lie in tensors that stay where they are. The host sends a batch, waits for one copy and reads tokens.
The draws are `Sampler.draw`'s, operator by operator, so they are the same to the bit.

A filter may want a look at the device: whether the few likeliest tokens settle it. The graph takes it that they do and
marks the rows where they do not; then the draw is done once more outside, from the logits that it has left.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from swiftspec.messages import Proposal
from swiftspec.model.batch import Batch, HostBatch
from swiftspec.params import SamplingParams
from swiftspec.runtime.async_copy import AsyncCopy
from swiftspec.runtime.executors import Accepted, ExecutorRequest, Features
from swiftspec.runtime.executors.graph import (
    CAPTURED_ROWS,
    GraphCache,
    GraphForwardExecutor,
    logits_key,
    padded_rows,
    rows_per_sequence,
)
from swiftspec.runtime.executors.static_noise import StaticNoiseBuffer
from swiftspec.runtime.runner import Runner
from swiftspec.sampling.sampler import History, Paths, Sampler
from swiftspec.tree import acceptance, rejection
from swiftspec.tree.rejection import RejectionSampling

UNDECIDED = -2  # below -1, which a draw gives where logits are not finite


class GraphVerificationExecutor(GraphForwardExecutor):
    """Verifications that the host waits for once."""

    name = "graph"
    TAKES: Features = frozenset({"greedy", "sampled", "logit bias", "filters", "penalties", "rejection"})

    def __init__(self, runner: Runner, graphs: GraphCache, guided: bool = False) -> None:
        super().__init__(runner, graphs, guided)
        # of logits, as operators give them
        dtype = torch.float64 if runner.model.dtype == torch.float64 else torch.float32
        self._noise = StaticNoiseBuffer(runner.vocab, dtype, runner.model.device)

    def open(self, request: ExecutorRequest) -> None:
        super().open(request)
        params, accept = request.sampler.params, request.accept
        self._rejection = accept if isinstance(accept, RejectionSampling) else None
        self._shape: Any = None  # of what a graph is told besides the batch
        self._family = "verifications", logits_key(params), self._rejection is not None
        self._draws = self.graphs.open(self._family, lambda: _GraphSampler(self.runner, params, self._noise))
        self._draws.share_history(request.sampler)
        if self._rejection is not None:
            self._draws.rejection.coins.copy_(self._rejection.coins)

    def verify(self, proposal: Proposal) -> Accepted:
        runner, began, self._logits = self.runner, time.perf_counter(), None
        batch, depths = self.proposal_batch(proposal)
        count = rows_per_sequence(batch)
        if count > CAPTURED_ROWS[-1]:
            with runner.translate_peer_errors():
                return self.accept(proposal, depths, self.forward(batch))
        sampler = self._request.sampler
        if not sampler.params.greedy:
            noise = sampler.noise if self._rejection is None else self._rejection.noise
            first, last = int(batch.positions[0]), int(batch.positions[:count].max())
            self._noise.ensure(noise, first + 1, last + 2)
        with runner.translate_peer_errors():
            found = AsyncCopy(self._drawn(proposal, batch)).read()
            runner.record_step(began, len(batch))
            if found.min() == UNDECIDED:
                return self.accept(proposal, depths, self._draws.logits[self._key(batch)][:count])
        if self._rejection is not None:
            return rejection.rejection_path(proposal, found)
        return Accepted(*acceptance.match_path(proposal.tokens, proposal.parents, found.tolist()))

    def _drawn(self, proposal: Proposal, batch: HostBatch) -> Tensor:
        """The target's token after each node [n] int64, or by rejection what `Rejection.judged` has; UNDECIDED in a row
        where a filter would have had to look."""
        device = self.runner.model.device
        if self._rejection is None:
            return self.graphs.run_batch(self._family, batch, self._tokens, device)
        numbers, width = rejection.pack_draft_probs(proposal, padded_rows(rows_per_sequence(batch)), padded_rows)
        told = self._draws.told(torch.from_numpy(numbers))
        self._shape = numbers.shape, width
        return self.graphs.run_batch(
            self._family, batch, lambda placed: self._judged(placed, told, width), device, self._shape
        )

    def _key(self, batch: Batch | HostBatch) -> tuple[Any, ...]:
        """Tells graphs apart, as `run_batch` does."""
        return padded_rows(len(batch) // len(batch.kv_len)), batch.mask.shape[1], self._shape

    def _tokens(self, batch: Batch) -> Tensor:
        return self._shaped(batch, self._draws.sampler.draw)

    def _judged(self, batch: Batch, told: Tensor, width: int) -> Tensor:
        judged = self._draws.rejection.verdicts
        return self._shaped(batch, lambda logits, paths, positions: judged(logits, paths, positions, told, width))

    def _shaped(self, batch: Batch, draw: Callable[[Tensor, Any, Tensor], Tensor]) -> Tensor:
        """What `draw` makes of a batch's logits, paths and positions."""
        draws, logits = self._draws, self.model_forward(batch)
        draws.assumptions.clear()  # of a draw that failed
        lineage = None if draws.history is None else AncestorPaths.of(batch)
        found = draw(logits, lineage, batch.positions[: len(logits)])
        if draws.assumptions:
            # kept: the graph's memory is not given to anybody else
            draws.logits[self._key(batch)] = logits
        while draws.assumptions:
            holds = draws.assumptions.pop().view(-1)
            found = found.masked_fill(~(holds if found.dim() == 1 else holds.unsqueeze(1)), UNDECIDED)
        return found


class _GraphSampler:
    """Draws for requests that shape logits alike, one request after the other, without a look at the device."""

    def __init__(self, runner: Runner, params: SamplingParams, noise: StaticNoiseBuffer) -> None:
        self.sampler = runner.sampler(params, ())
        self.sampler.noise_rows, self.sampler.check_all = noise.rows, self._assume
        self.history: DeviceHistory | None = None
        if params.penalised:
            self.history = self.sampler.history = DeviceHistory((), runner.vocab, runner.model.device)
        self.rejection = RejectionSampling(self.sampler)
        self.rejection.noise_rows = noise.rows
        self._told: dict[tuple[int, ...], Tensor] = {}  # by shape
        self.assumptions: list[Tensor] = []  # what a draw took for granted, [n] or [n, 1] each
        self.logits: dict[tuple[Any, ...], Tensor] = {}  # by graph, where something was

    def share_history(self, sampler: Sampler) -> None:
        """Takes over the tokens that a request's penalties count; from then on it counts in these tensors."""
        if self.history is not None and sampler.history is not None:
            self.history.load(sampler.history)
            sampler.history = self.history

    def told(self, numbers: Tensor) -> Tensor:
        """What a proposal says of its children, where graphs read it."""
        placed = self._told.setdefault(tuple(numbers.shape), torch.empty_like(numbers, device=self.sampler.device))
        return placed.copy_(numbers)

    def _assume(self, holds: Tensor) -> bool:
        self.assumptions.append(holds)
        return True


@dataclass(frozen=True, slots=True)
class AncestorPaths:
    """The paths of rows whose tokens are each other's, without the host."""

    tokens: Tensor  # [n] int64
    on_path: Tensor  # [n, n] bool: whether column j's token is on row i's path

    @staticmethod
    def of(batch: Batch) -> AncestorPaths:
        """Of a tree whose slots all lie in the window, the root's first; in the first sequence."""
        rows = len(batch) // len(batch.kv_len)
        slots, mask = batch.slots[:rows], batch.mask[:rows]
        column = slots - (batch.kv_len[:1] - mask.shape[1])
        # the root is on nobody's path, and rows that pad repeat the last
        counts = F.pad(slots[1:] > slots[:-1], (1, 0))
        return AncestorPaths(batch.tokens[:rows], mask.index_select(1, column) & counts)


class DeviceHistory(History):
    """A history that stays in its tensors from request to request, and counts lineages too."""

    def load(self, other: History) -> None:
        """What another request's history holds."""
        self.prompt.copy_(other.prompt)
        self.output.copy_(other.output)

    def counts(self, paths: Paths | AncestorPaths) -> Tensor:
        if not isinstance(paths, AncestorPaths):
            return super().counts(paths)
        counts = self.output.repeat(len(paths.tokens), 1)
        return counts.index_add_(1, paths.tokens, paths.on_path.to(counts.dtype))
