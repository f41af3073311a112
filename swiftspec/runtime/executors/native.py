"""Native executor: each phase as one C++ call on a CPU, since Python would dominate the round of a small model.

The native code computes rows, masks and positions itself, keeps the logits and returns tokens. An expansion supports a
token constraint, a bias, a temperature and noise; sampled children and a verification also penalties and filters. A
verification commits the accepted path.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swiftspec.config import PopulationConfig
from swiftspec.messages import Proposal
from swiftspec.model.packed_model import FusedModel, LayerCaches
from swiftspec.params import FILTERS, PENALTIES
from swiftspec.runtime.coroutines import EXPANSION, VERIFICATION
from swiftspec.runtime.executors import Accepted, ExecutorRequest
from swiftspec.runtime.executors.eager import EagerExecutor
from swiftspec.runtime.executors.native_tree import NativeTree, NativeTreeHandle
from swiftspec.runtime.runner import Runner
from swiftspec.sampling.noise import TARGET_STREAM
from swiftspec.sampling.sampler import TokenConstraint
from swiftspec.tree import mask as tree_mask
from swiftspec.tree.rejection import RejectionSampling, draft_probs_of
from swiftspec.tree.sampled_children import DrawState
from swiftspec.tree.synthetic_acceptance import SyntheticAcceptance
from swiftspec.tree.tree import DraftTree


class NativeScoring(Protocol):
    """The logits processing of one request in native code; csrc/bind/rounds.cpp documents it."""

    def set_penalties(
        self, penalties: Mapping[str, float], prompt: Sequence[int], output: Sequence[int], /
    ) -> None: ...
    def set_filters(self, filters: Mapping[str, float], /) -> None: ...
    def observe(self, tokens: Sequence[int], /) -> None: ...


class NativeExpansion(NamedTuple):
    """The expansion of one tree; csrc/bind/rounds.cpp documents the fields."""

    tree: Any
    sequence: int
    prefix: int
    pending: list[int]
    leaves: int
    children: int
    scoring: NativeScoring
    coupled: bool
    tau: float
    allowed: Callable[[list[int]], NDArray] | None
    sampled: DrawState | None


class NativeVerification(NamedTuple):
    """The verification of one proposal; csrc/bind/rounds.cpp documents the fields."""

    tokens: Sequence[int]
    parents: Sequence[int]
    sequence: int
    prefix: int
    scoring: NativeScoring
    allowed: NDArray | None
    guidance: tuple[int, int, int, float] | None
    forced: Sequence[int] | None
    drafted: tuple[NDArray[np.int32], NDArray[np.float32]] | None


class NativeTreeRounds(Protocol):
    """The phases of a round as native calls, each for one request or for several with a sequence of their own. They
    return tokens; `logits` copies rows of the logits of the last verification. The ranks of a group must make the same
    calls, which raise OSError if a rank is lost. csrc/bind/rounds.cpp implements and documents them."""

    def scoring(
        self, vocab: int, temperature: float, bias: Tensor | None, noisy: bool, seed: int, stream: int, /
    ) -> NativeScoring: ...
    def expand(self, expansions: Sequence[Any], /) -> tuple[list[int], float]: ...
    def verify(
        self, verifications: Sequence[Any], /
    ) -> tuple[list[tuple[list[int], list[int], int, list[float]]], float]: ...
    def probabilities(
        self, tokens: Sequence[int], parents: Sequence[int], scoring: Any, row: int, /
    ) -> list[float]: ...
    def logits(self, rows: Sequence[int], out: Tensor, /) -> None: ...


class NativePopulation(Protocol):
    """Rounds of particles in native code, on tensors at fixed addresses. csrc/bind/population.cpp implements and
    documents them."""

    def round(
        self, spans: Sequence[tuple[Any, ...]], out: NDArray, on_forward: Callable[[bool, int, float], None] | None, /
    ) -> tuple[float, float]: ...
    def compact(self, group: int, promoted: int, keep: Sequence[int], /) -> None: ...


class NativeModel(FusedModel, Protocol):
    """A model in native code that also implements the phases of a round, a draft tree and the rounds of a
    population."""

    @property
    def num_logits(self) -> int:
        """Outputs of this rank's LM head."""
        ...

    def hidden_states(self, rows: int, /) -> Tensor | None:
        """Returns the hidden states [rows, hidden layers, hidden size] of the first `rows` rows of the last forward,
        that of a round included, or None if the model keeps none."""
        ...

    def rounds(self, cache: LayerCaches, /) -> NativeTreeRounds:
        """Returns the phases of a round on the sequences of a cache."""
        ...

    def tree(self, arrays: Sequence[NDArray], /) -> NativeTreeHandle:
        """Returns a native tree on the arrays of a `DraftTree`; see `NativeTree`."""
        ...

    def population(
        self,
        cache: LayerCaches,
        draft: Any,
        draft_cache: LayerCaches,
        tensors: Sequence[Tensor],
        config: PopulationConfig,
        /,
    ) -> NativePopulation:
        """Returns the native rounds of a population, with this model as the target, on the caches of both models.
        `tensors`: `GroupRound.tensors` (smc/round.py)."""
        ...


class NativeExecutor(EagerExecutor):
    """Native executor of expansions and verifications. The draft tree must be a `NativeTree`."""

    name = "native"
    columns = ("native",)

    def __init__(self, runner: Runner, fused: NativeModel) -> None:
        super().__init__(runner)
        self.fused, self._group = fused, runner.model.group
        self._bound: Tensor | None = None  # the cache's keys, whose address `rounds` holds
        self._row = 0  # row of the root of the proposal verified last, in the logits and hidden states

    def open(self, request: ExecutorRequest) -> None:
        super().open(request)
        cache = self.runner.cache
        if self._bound is not cache.kv.k:  # all buffers of a cache are allocated together
            self.rounds: NativeTreeRounds = self.fused.rounds(cache)
            self._bound = cache.kv.k
        sampler = request.sampler
        p = sampler.params
        temperature = 1.0 if p.greedy else p.temperature
        self._scoring = self.rounds.scoring(
            sampler.vocab, temperature, sampler.bias, not p.greedy, p.seed, TARGET_STREAM
        )
        if p.filtered:
            self._scoring.set_filters(p.values_of(FILTERS))
        if sampler.history is not None:
            self._scoring.set_penalties(p.values_of(PENALTIES), *sampler.history.tokens())
            if request.expansion is not None:  # a verification counts its own tokens
                sampler.followers.append(self._scoring)

    def expand(self, tree: DraftTree, pending: list[int], count: int) -> None:
        assert isinstance(tree, NativeTree)
        runner, shape = self.runner, self._request.expansion
        assert shape is not None
        rules, failures = self._request.sampler.constraint, list[Exception]()
        allowed = None if rules is None else partial(_bitmask, rules, tree, self._request.sampler.vocab, failures)
        for _ in range(count):
            if not self.has_room(tree, pending):
                return
            leaves = shape.leaves if tree.expanded > 0 else 1  # the root's row only
            cache = runner.cache
            expansion = NativeExpansion(
                tree=tree.native,
                sequence=cache.buffers[0],
                prefix=cache.prefix_len[0],
                pending=pending,
                leaves=leaves,
                children=shape.children,
                scoring=self._scoring,
                coupled=shape.coupled,
                tau=shape.tau,
                allowed=allowed,
                sampled=None if shape.sampled is None else shape.sampled.draw_state(),
            )
            call = NativeCall(self, expansion, rows=len(pending) + leaves)
            expanded = runner.run_call(call)
            runner.cache.append_written(len(pending), expanded)
            if shape.sampled is not None:
                shape.sampled.count_leaves(expanded)
            pending.clear()
            if failures:
                raise failures[0]

    def verify(self, proposal: Proposal) -> Accepted:
        runner, rules = self.runner, self._request.sampler.constraint
        cache = runner.cache
        allowed = None if rules is None else rules.bitmask(tree_mask.paths(proposal.tokens, proposal.parents))
        accept = self._request.accept
        verification = NativeVerification(
            tokens=proposal.tokens,
            parents=proposal.parents,
            sequence=cache.buffers[0],
            prefix=cache.prefix_len[0],
            scoring=self._scoring,
            allowed=allowed,
            guidance=self._guidance(proposal.tokens[0]),
            forced=accept.path(proposal) if isinstance(accept, SyntheticAcceptance) else None,
            drafted=_drafted(proposal) if isinstance(accept, RejectionSampling) else None,
        )
        call = NativeCall(self, verification, rows=len(proposal.tokens) * len(cache.prefix_len))
        path, tokens, self._row, overlaps = runner.run_call(call)
        cache.append_written(len(path))
        return Accepted(path, tokens, tuple(overlaps))

    def _guidance(self, root: int) -> tuple[int, int, int, float] | None:
        """Returns index, root token, prefix and scale of the unconditional sequence, or None without guidance. `root`:
        root token of the conditional sequence, which is that of both unless it is the last token of the prompt."""
        guidance, cache = self.runner.guidance, self.runner.cache
        if guidance is None:
            return None
        prefix = cache.prefix_len[1]
        token = guidance.tokens[-1] if prefix == len(guidance.tokens) - 1 else root
        return cache.buffers[1], token, prefix, guidance.scale

    def probabilities(self, tokens: Sequence[int], parents: Sequence[int]) -> list[float] | None:
        """See `TreeExecutor.probabilities`."""
        if self._group is not None:
            return None
        return self.rounds.probabilities(tokens, parents, self._scoring, self._row)

    def logits(self, nodes: Sequence[int]) -> Tensor:
        out = torch.empty(len(nodes), self.fused.num_logits)
        self.rounds.logits([self._row + node for node in nodes], out)
        return out

    def hidden_states(self, nodes: Sequence[int]) -> Tensor | None:
        rows = [self._row + node for node in nodes]
        states = self.fused.hidden_states(max(rows) + 1)
        return None if states is None else states[rows]

    def reason(self, error: OSError) -> Exception:
        """Returns RankLost if a lost rank has caused this error in the ranks' shared memory, otherwise the error."""
        lost = None if self._group is None else self._group.lost(error)
        return lost or error

    def settle(self, path: Sequence[int]) -> None:
        pass  # `verify` has already committed it


@dataclass(eq=False, slots=True)
class NativeCall:
    """A phase of one request, which those of other requests join in one native call. `rows`: of its forward."""

    executor: NativeExecutor
    phase: NativeExpansion | NativeVerification
    rows: int
    result: Any = None
    error: Exception | None = None

    @property
    def key(self) -> object:
        return self.executor.fused, type(self.phase)

    @property
    def priority(self) -> int:
        return EXPANSION if isinstance(self.phase, NativeExpansion) else VERIFICATION

    def run(self, others: Sequence[NativeCall]) -> None:
        calls, began = [self, *others], time.perf_counter()
        rounds, runner = self.executor.rounds, self.executor.runner
        run = rounds.expand if isinstance(self.phase, NativeExpansion) else rounds.verify
        try:
            results, seconds = run([call.phase for call in calls])
        except OSError as error:
            raise self.executor.reason(error) from None
        runner.record_step(began, sum(call.rows for call in calls), seconds)
        for call, result in zip(calls, results, strict=True):
            call.result = result
            call.executor.rounds = rounds  # it has the logits


def _bitmask(
    rules: TokenConstraint, tree: NativeTree, vocab: int, failures: list[Exception], nodes: list[int]
) -> NDArray[np.uint8]:
    """Returns the token masks of leaves. An error is added to `failures` and all tokens are allowed, since the call
    runs for other requests, too."""
    try:
        return rules.bitmask(tree.path_tokens(nodes))
    except Exception as error:
        failures.append(error)
        return np.full((len(nodes), -(-vocab // 8)), 255, np.uint8)


def _drafted(proposal: Proposal) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Returns tokens and probabilities of the draft distributions of a proposal; see `draft_probs_of`."""
    drawn = draft_probs_of(proposal)
    return drawn.tokens, drawn.probs
