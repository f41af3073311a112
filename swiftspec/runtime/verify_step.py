"""A verification's step as one graph: the target's forward, what shapes its logits, a draw in every row.

The graph holds by value the batch's shape and how a request shapes logits; the batch, the noise and the tokens that
penalties count lie in tensors that stay where they are. The host sends a batch, waits for one copy and reads tokens.
The draws are `Sampler.draw`'s, operator by operator, so they are the same to the bit.

Where that cannot be, the forward alone is a graph, or nothing is, and the draw follows by itself (runtime/verifier.py):

- guided requests: `Runner` captures no forward over two sequences;
- drawn proposals under rejection: coins decide from node to node what is looked at next (tree/reject.py);
- proposals of more nodes than `Graphs` takes;
- groups of ranks where a gather is a library's: all of theirs, those of messages too long for a kernel, and those of
  whole rows, which a top_k beyond the shards' heads asks for;
- operators without a capture; native rounds on a CPU are one call as it is (`Runner.verify`).

A filter may want a look at the device: whether the few likeliest tokens settle it. The graph takes it that they do and
marks the rows where they do not, by -1; then the draw is done once more outside, from the logits that it has left.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from swiftspec.distributed.groups.peers import PeerParallel
from swiftspec.model.batch import Batch
from swiftspec.params import SamplingParams
from swiftspec.runtime.async_copy import AsyncCopy
from swiftspec.runtime.graph import ROWS, Graphs, HostBatch
from swiftspec.runtime.runner import Runner
from swiftspec.sampling import filters
from swiftspec.sampling.noise import HeldNoise
from swiftspec.sampling.sampler import Lineage, Sampler
from swiftspec.sampling.vocab import HEAD

MOST_STEPS = 4  # ways to shape logits whose graphs are kept
UNSURE = -1


class VerifySteps:
    """The steps of one target, one for each way to shape logits that requests have had lately."""

    def __init__(self, runner: Runner, vocab: int) -> None:
        self._runner, self._vocab = runner, vocab
        self._noise: HeldNoise | None = None
        self._steps: dict[tuple[object, ...], VerifyStep] = {}
        self._bound: Graphs | None = None  # new whenever model or cache are

    def open(self, sampler: Sampler) -> VerifyStep | None:
        """The step for a request that the runner has opened; None where its step cannot be captured."""
        runner, params = self._runner, sampler.params
        if self._bound is not runner.graphs:
            while self._steps:
                self._steps.popitem()[1].close()
            self._bound = runner.graphs
        if not self._captures(params):
            return None
        if self._noise is None:
            # of logits, as the operators give them
            dtype = torch.float64 if runner.model.dtype == torch.float64 else torch.float32
            self._noise = HeldNoise(self._vocab, dtype, runner.model.device)
        penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        filtered = params.top_k, params.top_p, params.min_p
        shaping = (params.temperature, *penalties, *filtered, *params.logit_bias.items())
        step = self._steps.pop(shaping, None) or VerifyStep(runner, params, self._vocab, self._noise)
        if len(self._steps) == MOST_STEPS:
            self._steps.pop(next(iter(self._steps))).close()
        self._steps[shaping] = step
        step.open(sampler)
        return step

    def _captures(self, params: SamplingParams) -> bool:
        model = self._runner.model
        if self._runner.graphs is None:
            return False
        if model.group is None:
            return True
        longest = torch.empty(ROWS[-1], HEAD + 1, device=model.device)  # what VocabShard's filters gather
        settled = not filters.active(params) or params.top_k < HEAD * model.group.size
        return isinstance(model.group, PeerParallel) and model.group.takes(longest) and settled


class VerifyStep:
    """Forward and draw for requests that shape logits alike, one after the other."""

    def __init__(self, runner: Runner, params: SamplingParams, vocab: int, noise: HeldNoise) -> None:
        model, capture = runner.model, runner.capture
        assert capture is not None
        self._runner, self._noise = runner, noise
        device, group, ops = model.device, model.group, runner.ops
        self._sampler = Sampler(params, (), vocab, device, group, ops, rows=noise.rows, sure=self._assume)
        self._graphs = Graphs(self._drawn, device, capture)
        self._assumed: list[Tensor] = []  # what a draw took for granted, [n] or [n, 1] each
        self._logits: dict[torch.Size, Tensor] = {}  # by the mask's shape, where something was

    def open(self, sampler: Sampler) -> None:
        """Takes the noise of this request, and shares the tokens that its penalties count."""
        self._request = sampler
        if sampler.history is not None:
            assert self._sampler.history is not None
            self._sampler.history.take(sampler.history)
            sampler.history = self._sampler.history

    def close(self) -> None:
        """Lets go of graphs and logits at once: step and graphs name each other."""
        self._graphs.forget()
        self._logits.clear()

    def __call__(self, batch: HostBatch) -> list[int] | Tensor:
        """The target's token after each row of a proposal's batch, the root's first. Where the graph was not sure of
        them, the raw logits [n, >= V or width] instead, to be read before the next call."""
        if not self._request.params.greedy:
            self._noise.hold(self._request.noise, int(batch.positions[0]) + 1, int(batch.positions.max()) + 2)
        tokens = AsyncCopy(self._graphs(batch)).read().tolist()
        if min(tokens) > UNSURE:
            return tokens
        count, width = batch.mask.shape
        return self._logits[torch.Size((Graphs.padded(count), width))][:count]

    def _drawn(self, batch: Batch) -> Tensor:
        """[n] int64."""
        logits = self._runner.model.forward(batch, self._runner.cache)
        assert logits is not None
        self._assumed.clear()  # of a draw that failed
        paths = None if self._sampler.history is None else _lineage(batch)
        tokens = self._sampler.draw(logits, paths, batch.positions)
        if self._assumed:
            self._logits[batch.mask.shape] = logits  # kept: the graph's memory is not given to anybody else
        while self._assumed:
            tokens = tokens.masked_fill(~self._assumed.pop().view(-1), UNSURE)
        return tokens

    def _assume(self, holds: Tensor) -> bool:
        self._assumed.append(holds)
        return True


def _lineage(batch: Batch) -> Lineage:
    """Of a tree whose slots all lie in the window, the root's first."""
    column = batch.slots - (batch.kv_len - batch.mask.shape[1])
    # the root is on nobody's path, and rows that pad repeat the last
    counts = F.pad(batch.slots[1:] > batch.slots[:-1], (1, 0))
    return Lineage(batch.tokens, batch.mask.index_select(1, column) & counts)
