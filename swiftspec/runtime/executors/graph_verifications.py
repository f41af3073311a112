"""Graph executor of verifications: the target's forward, the logits processing and a token for every node are one CUDA
graph; with rejection sampling also the acceptance of every node's children.

The batch, the noise, the logits parameters, the bias and the tokens that penalties count are in tensors at fixed
addresses. The host copies a batch to the device, waits for the copy of the result and reads tokens. Sampling uses the
operators of `Sampler.draw`, so results are bitwise identical to the eager executor's. Requests without filters and
penalties have graphs of their own, in which one kernel samples.

A filter ranks only the most likely tokens if they suffice. The graph assumes that they do and marks rows where they do
not as UNDECIDED. Such a batch is sampled again eagerly, from the logits that the graph has left in its buffer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from swiftspec.messages import Proposal
from swiftspec.model.batch import Batch, HostBatch
from swiftspec.params import SamplingParams
from swiftspec.runtime.async_copy import HostCopies
from swiftspec.runtime.executors import Accepted, ExecutorRequest
from swiftspec.runtime.executors.graph import (
    CAPTURED_ROWS,
    BatchKey,
    BatchShape,
    GraphCache,
    GraphForwardExecutor,
    RowOutputs,
    StaticNoiseBuffer,
    load_bias,
    padded_rows,
)
from swiftspec.runtime.runner import Runner
from swiftspec.sampling.sampler import History, Paths, Sampler
from swiftspec.tree import acceptance, rejection
from swiftspec.tree.rejection import RejectionSampling
from swiftspec.tree.synthetic_acceptance import SyntheticAcceptance

UNDECIDED = -2  # result of a row whose top candidates do not suffice for a filter; -1 marks logits that are not finite


class GraphVerificationExecutor(GraphForwardExecutor):
    """Graph executor of verifications: one CUDA graph and one wait of the host each."""

    name = "graph"
    columns = ("graph of a verification",)

    def __init__(self, runner: Runner, graphs: GraphCache, guided: bool = True) -> None:
        super().__init__(runner, graphs, guided)
        self._static = graphs.shared("verifications", lambda: VerificationTensors.of(runner))

    def open(self, request: ExecutorRequest) -> None:
        super().open(request)
        params, accept = request.sampler.params, request.accept
        self._rejection = accept if isinstance(accept, RejectionSampling) else None
        self._shape: Hashable = None  # shape of the graph's inputs other than the batch: of the packed probabilities
        self._select(params.filtered or params.penalised)

    def load_parameters(self, request: ExecutorRequest) -> None:
        super().load_parameters(request)
        self._draws.open(request.sampler)
        if self._rejection is not None:
            self._draws.rejection.uniform_stream_key.copy_(self._rejection.uniform_stream_key)

    def _select(self, processed: bool) -> None:
        """Selects the sampler and the graph set of a request."""
        self._draws = self._static.sampler(self.runner, processed)
        self._graph_set = "verifications", processed, self._rejection is not None

    def verification_captures(self, shapes: Sequence[BatchShape]) -> list[Callable[[], None]]:
        """Returns functions that each capture a verification of a batch of one of these shapes, by token comparison.
        See `forward_captures`."""

        lengths = self.captured_lengths()

        def capture(processed: bool, shape: BatchShape, kv_len: int) -> None:
            self.open_cache()
            self._rejection, self._shape = None, None
            self._select(processed)
            self.capture_batch(self._graph_set, shape, kv_len, partial(self._tokens, self._draws))
            if (shape, kv_len) == (shapes[-1], lengths[-1]):
                self.graphs.mark_complete(self._graph_set)

        return [
            partial(capture, processed, shape, kv_len)
            for processed in (False, True)
            for kv_len in lengths
            for shape in shapes
        ]

    def verify(self, proposal: Proposal) -> Accepted:
        runner, began, self._logits = self.runner, time.perf_counter(), None
        batch, depths = self.proposal_batch(proposal)
        count = batch.rows_per_block
        if runner.in_company or count > CAPTURED_ROWS[-1]:
            with runner.translate_peer_errors():
                return self.accept(proposal, depths, self.forward(batch))
        self.load_request()
        sampler = self._request.sampler
        if not sampler.params.greedy:
            noise = sampler.noise if self._rejection is None else self._rejection.noise
            first, last = int(batch.positions[0]), int(batch.positions[:count].max())
            self._static.noise.ensure(noise, first + 1, last + 2)
        with runner.translate_peer_errors():
            found = self._static.copies.start(self._drawn(proposal, batch)).read()
            runner.record_step(began, len(batch))
            if found.min() == UNDECIDED:
                return self.accept(proposal, depths, self._draws.logits[self._key(batch)][:count])
        if self._rejection is not None:
            return rejection.rejection_path(proposal, found)
        if isinstance(self._request.accept, SyntheticAcceptance):
            return self._request.accept.accept(proposal, found.tolist())
        return Accepted(*acceptance.match_path(proposal.tokens, proposal.parents, found.tolist()))

    def _drawn(self, proposal: Proposal, batch: HostBatch) -> Tensor:
        """Returns the target's token after each node, [nodes] int64, or with rejection sampling the result of
        `RejectionSampling.verdicts`. Rows in which the top candidates do not suffice for a filter are UNDECIDED."""
        if self._rejection is None:
            return self.run_batch(self._graph_set, batch, partial(self._tokens, self._draws))
        numbers, width = rejection.pack_draft_probs(proposal, padded_rows(batch.rows_per_block), padded_rows)
        packed = self._draws.place(torch.from_numpy(numbers))
        self._shape = numbers.shape, width
        work = partial(self._verdicts, self._draws, packed, self._shape)
        return self.run_batch(self._graph_set, batch, work, self._shape)

    def _key(self, batch: HostBatch) -> BatchKey:
        """Returns the key of the graph that has run this batch."""
        return self.graphs.batch_key(self._graph_set, batch, self._shape)

    def _tokens(self, draws: GraphSampler, batch: Batch) -> RowOutputs:
        return self._shaped(draws, batch, draws.sampler.draw)

    def _verdicts(self, draws: GraphSampler, packed: Tensor, shape: tuple[Any, int], batch: Batch) -> RowOutputs:
        verdicts, (_, width) = draws.rejection.verdicts, shape
        return self._shaped(
            draws, batch, lambda logits, paths, positions: verdicts(logits, paths, positions, packed, width), shape
        )

    def _shaped(
        self,
        draws: GraphSampler,
        batch: Batch,
        draw: Callable[[Tensor, Any, Tensor], Tensor],
        shape: Hashable = None,
    ) -> RowOutputs:
        """Runs the forward of a batch and returns the result of `draw` on its logits, paths and positions, with rows
        UNDECIDED where an assumption of `draw` does not hold, and the hidden states. `shape`: as in `BatchKey`."""
        logits, hidden = self.model_forward(batch)
        draws.assumptions.clear()  # left over from a failed draw
        ancestors = None if draws.history is None else AncestorPaths.of(batch, len(logits))
        found = draw(logits, ancestors, batch.positions[: len(logits)])
        if draws.assumptions:
            # keep a reference, so that the graph's memory is not reused
            key = BatchKey(len(logits), batch.mask.shape[1], shape, batch.max_kv_len, batch.blocks)
            draws.logits[key] = logits
        while draws.assumptions:
            holds = draws.assumptions.pop().view(-1)
            found = found.masked_fill(~(holds if found.dim() == 1 else holds.unsqueeze(1)), UNDECIDED)
        return found, hidden


@dataclass(frozen=True, slots=True)
class VerificationTensors:
    """What the verification graphs of a model read and write, for the one request whose parameters are loaded."""

    noise: StaticNoiseBuffer
    copies: HostCopies = field(default_factory=HostCopies)
    samplers: dict[bool, GraphSampler] = field(default_factory=dict)  # by whether it applies penalties and filters

    @staticmethod
    def of(runner: Runner) -> VerificationTensors:
        """Returns the tensors for the model of a runner."""
        # of the logits and the noise
        dtype = torch.float64 if runner.model.dtype == torch.float64 else torch.float32
        return VerificationTensors(StaticNoiseBuffer(runner.vocab, dtype, runner.model.device))

    def sampler(self, runner: Runner, processed: bool) -> GraphSampler:
        """Returns the sampler with or without penalties and filters."""
        if processed not in self.samplers:
            self.samplers[processed] = GraphSampler(runner, self.noise, processed)
        return self.samplers[processed]


class GraphSampler:
    """The sampler that graphs are captured with, whose tensors `open` sets for each request. Sampling does not
    synchronise with the device. `processed`: whether it applies penalties and filters."""

    def __init__(self, runner: Runner, noise: StaticNoiseBuffer, processed: bool) -> None:
        device = runner.model.device
        sampler = self.sampler = runner.sampler(SamplingParams(), ())
        sampler.noise_rows, sampler.check_all, sampler.filtered = noise.rows, self._assume, processed
        # added to the logits of every request, since graphs with and without bias would be twice as many
        self._bias = sampler.bias = torch.zeros(runner.vocab, device=device)
        self.history: DeviceHistory | None = None
        self._counting: Sampler | None = None  # sampler of the request that counts tokens in `history`
        if processed:
            self.history = sampler.history = DeviceHistory((), runner.vocab, device)
        self.rejection = RejectionSampling(sampler)
        self.rejection.noise_rows = noise.rows
        self._packed: dict[tuple[int, ...], Tensor] = {}  # packed draft probabilities, by shape
        self.assumptions: list[Tensor] = []  # bools that a draw assumed to be True, [rows] or [rows, 1] each
        self.logits: dict[BatchKey, Tensor] = {}  # logits of graphs with assumptions

    def open(self, sampler: Sampler) -> None:
        """Sets the tensors that graphs read to the parameters of a request's `sampler`, and makes it count tokens in
        these tensors from then on."""
        params = sampler.params
        self.sampler.values.load(params, noisy=not params.greedy)
        load_bias(self._bias, sampler)
        if self.history is None:
            return
        if self._counting is not None:  # it may go on after this request
            self._counting.history = self.history.copy()
        self._counting = None if sampler.history is None else sampler
        if sampler.history is None:
            self.history.clear()
        else:
            self.history.load(sampler.history)
            sampler.history = self.history

    def place(self, numbers: Tensor) -> Tensor:
        """Copies packed draft probabilities (`rejection.pack_draft_probs`) into the tensor that graphs read."""
        placed = self._packed.setdefault(tuple(numbers.shape), torch.empty_like(numbers, device=self.sampler.device))
        return placed.copy_(numbers)

    def _assume(self, holds: Tensor) -> bool:
        self.assumptions.append(holds)
        return True


@dataclass(frozen=True, slots=True)
class AncestorPaths:
    """The paths (`sampler.Paths`) of the rows of a proposal's batch, computed on the device."""

    tokens: Tensor  # [rows] int64
    on_path: Tensor  # [rows, rows] bool: whether the path of row i contains the token of row j

    @staticmethod
    def of(batch: Batch, rows: int) -> AncestorPaths:
        """Returns the paths of the first `rows` rows, which are of one sequence. The first row must be the root, and
        the mask window must cover all tree slots."""
        slots, mask = batch.slots[:rows], batch.mask[:rows]
        column = slots - (batch.kv_len.index_select(0, batch.sequence[:1]) - mask.shape[1])
        # the root is not on any path, and padding rows repeat the last row
        counts = F.pad(slots[1:] > slots[:-1], (1, 0))
        return AncestorPaths(batch.tokens[:rows], mask.index_select(1, column) & counts)


class DeviceHistory(History):
    """A `History` whose tensors stay the same across requests, and which also counts the tokens of `AncestorPaths`."""

    def clear(self) -> None:
        """Removes all tokens."""
        self.prompt.zero_()
        self.output.zero_()

    def load(self, other: History) -> None:
        """Copies the contents of another history."""
        self.prompt.copy_(other.prompt)
        self.output.copy_(other.output)

    def copy(self) -> History:
        """Returns a history with the same contents and tensors of its own."""
        made = History((), len(self.output), self.output.device)
        made.prompt.copy_(self.prompt)
        made.output.copy_(self.output)
        return made

    def counts(self, paths: Paths | AncestorPaths) -> Tensor:
        if not isinstance(paths, AncestorPaths):
            return super().counts(paths)
        counts = self.output.repeat(len(paths.tokens), 1)
        return counts.index_add_(1, paths.tokens, paths.on_path.to(counts.dtype))
