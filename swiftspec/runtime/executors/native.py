"""Native executor: each phase as one C++ call on a CPU, since Python would dominate the round of a small model.

The native code computes rows, masks and positions itself, keeps the logits and returns tokens. An expansion supports a
token constraint, a bias, a temperature and noise; a verification also penalties and filters, and commits the accepted
path.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from swiftspec.config import NativeRoundParams
from swiftspec.messages import Proposal
from swiftspec.model.packed_model import FusedModel, LayerCaches
from swiftspec.params import FILTERS, PENALTIES
from swiftspec.runtime.executors import Accepted, ExecutorRequest
from swiftspec.runtime.executors.eager import EagerExecutor
from swiftspec.runtime.executors.native_population import NativePopulation
from swiftspec.runtime.executors.native_tree import NativeTree, NativeTreeHandle
from swiftspec.runtime.runner import Runner
from swiftspec.sampling.noise import TARGET_STREAM
from swiftspec.tree import mask as tree_mask
from swiftspec.tree.synthetic_acceptance import SyntheticAcceptance
from swiftspec.tree.tree import DraftTree

AllowedTokenBits = Callable[[list[int]], NDArray]  # leaf nodes -> uint8 bitmasks [leaves, bytes] of the allowed tokens


class NativeScoring(Protocol):
    """The logits processing of one request in native code; csrc/bind/rounds.cpp documents it."""

    def set_penalties(
        self, penalties: Mapping[str, float], prompt: Sequence[int], output: Sequence[int], /
    ) -> None: ...
    def set_filters(self, filters: Mapping[str, float], /) -> None: ...


class NativeTreeRounds(Protocol):
    """The phases of a round as native calls, on a KV cache with one sequence. They return tokens; `logits` copies the
    logits of the last verification. The ranks of a group must make the same calls, which raise OSError if a rank is
    lost. csrc/bind/rounds.cpp implements and documents them."""

    def scoring(
        self, vocab: int, temperature: float, bias: Tensor | None, noisy: bool, seed: int, stream: int, /
    ) -> NativeScoring: ...
    def expand(
        self,
        tree: Any,
        prefix: int,
        pending: list[int],
        leaves: int,
        children: int,
        scoring: Any,
        coupled: bool,
        tau: float,
        allowed: AllowedTokenBits | None,
    ) -> tuple[int, float]: ...
    def verify(
        self,
        tokens: Sequence[int],
        parents: Sequence[int],
        prefix: int,
        scoring: Any,
        allowed: NDArray | None,
        guidance: tuple[int, int, float] | None,
        forced: Sequence[int] | None,
    ) -> tuple[list[int], list[int], float]: ...
    def probabilities(self, tokens: Sequence[int], parents: Sequence[int], scoring: Any, /) -> list[float]: ...
    def logits(self, nodes: Sequence[int], out: Tensor, /) -> None: ...


class NativeModel(FusedModel, Protocol):
    """A model in native code that also implements the phases of a round, a draft tree and the rounds of a population
    (native_population.py)."""

    @property
    def num_logits(self) -> int:
        """Outputs of this rank's LM head."""
        ...

    def hidden_states(self, rows: int, /) -> Tensor | None:
        """Returns the hidden states [rows, hidden layers, hidden size] of the first `rows` rows of the last forward,
        that of a round included, or None if the model keeps none."""
        ...

    def rounds(self, cache: LayerCaches, /) -> NativeTreeRounds:
        """Returns the phases of a round on a cache with one sequence."""
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
        params: NativeRoundParams,
        /,
    ) -> NativePopulation:
        """Returns the native rounds of a population, with this model as the target, on the caches of both models.
        `tensors`: `RoundProgram.tensors`."""
        ...


class NativeExecutor(EagerExecutor):
    """Native executor of expansions and verifications. The draft tree must be a `NativeTree`."""

    name = "native"
    columns = ("native",)

    def __init__(self, runner: Runner, fused: NativeModel) -> None:
        super().__init__(runner)
        self._fused, self._group = fused, runner.model.group
        self._bound: Tensor | None = None  # the cache's keys, whose address `_rounds` holds

    def open(self, request: ExecutorRequest) -> None:
        super().open(request)
        cache = self.runner.cache
        if self._bound is not cache.kv.k:  # all buffers of a cache are allocated together
            self._rounds: NativeTreeRounds = self._fused.rounds(cache)
            self._bound = cache.kv.k
        sampler = request.sampler
        p = sampler.params
        temperature = 1.0 if p.greedy else p.temperature
        self._scoring = self._rounds.scoring(
            sampler.vocab, temperature, sampler.bias, not p.greedy, p.seed, TARGET_STREAM
        )
        if p.filtered:
            self._scoring.set_filters(p.values_of(FILTERS))
        if sampler.history is not None:
            self._scoring.set_penalties(p.values_of(PENALTIES), *sampler.history.tokens())

    def expand(self, tree: DraftTree, pending: list[int], count: int) -> None:
        assert isinstance(tree, NativeTree)
        runner, shape = self.runner, self._request.expansion
        assert shape is not None
        rules = self._request.sampler.constraint
        allowed = None if rules is None else lambda nodes: rules.bitmask(tree.path_tokens(nodes))
        for _ in range(count):
            if not self.has_room(tree, pending):
                return
            began = time.perf_counter()
            leaves = shape.leaves if tree.expanded > 0 else 1  # the root's row only
            rows = len(pending) + leaves
            prefix = runner.cache.prefix_len[0]
            try:
                expanded, seconds = self._rounds.expand(
                    tree.native,
                    prefix,
                    pending,
                    leaves,
                    shape.children,
                    self._scoring,
                    coupled=shape.coupled,
                    tau=shape.tau,
                    allowed=allowed,
                )
            except OSError as error:
                raise self._reason(error) from None
            runner.cache.append_written(len(pending), expanded)
            pending.clear()
            runner.record_step(began, rows, seconds)

    def verify(self, proposal: Proposal) -> Accepted:
        runner, began = self.runner, time.perf_counter()
        prefix, rules = runner.cache.prefix_len[0], self._request.sampler.constraint
        allowed = None if rules is None else rules.bitmask(tree_mask.paths(proposal.tokens, proposal.parents))
        accept = self._request.accept
        forced = accept.path(proposal) if isinstance(accept, SyntheticAcceptance) else None
        try:
            path, tokens, seconds = self._rounds.verify(
                proposal.tokens,
                proposal.parents,
                prefix,
                self._scoring,
                allowed,
                self._guidance(proposal.tokens[0]),
                forced=forced,
            )
        except OSError as error:
            raise self._reason(error) from None
        runner.cache.append_written(len(path))
        runner.record_step(began, len(proposal.tokens) * len(runner.cache.prefix_len), seconds)
        return Accepted(path, tokens)

    def _guidance(self, root: int) -> tuple[int, int, float] | None:
        """Returns root token, prefix and scale of the unconditional sequence, or None without guidance. `root`: root
        token of the conditional sequence, which is that of both unless it is the last token of the prompt."""
        guidance = self.runner.guidance
        if guidance is None:
            return None
        prefix = self.runner.cache.prefix_len[1]
        return guidance.tokens[-1] if prefix == len(guidance.tokens) - 1 else root, prefix, guidance.scale

    def probabilities(self, tokens: Sequence[int], parents: Sequence[int]) -> list[float] | None:
        """See `TreeExecutor.probabilities`."""
        return None if self._group is not None else self._rounds.probabilities(tokens, parents, self._scoring)

    def logits(self, nodes: Sequence[int]) -> Tensor:
        out = torch.empty(len(nodes), self._fused.num_logits)
        self._rounds.logits(nodes, out)
        return out

    def hidden_states(self, nodes: Sequence[int]) -> Tensor | None:
        states = self._fused.hidden_states(max(nodes) + 1)
        return None if states is None else states[list(nodes)]

    def _reason(self, error: OSError) -> Exception:
        """Returns RankLost if a lost rank has caused this error in the ranks' shared memory, otherwise the error."""
        lost = None if self._group is None else self._group.lost(error)
        return lost or error

    def settle(self, path: Sequence[int]) -> None:
        pass  # `verify` has already committed it
