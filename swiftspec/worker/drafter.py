"""Drafters propose what the target might say: on this device, in another group, over the network, or nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch

from swiftspec.batch import Proposal, VerifyResult
from swiftspec.errors import DrafterLost
from swiftspec.params import Plan, SamplingParams
from swiftspec.spec.sampler import Sampler
from swiftspec.spec.tree import DraftTree
from swiftspec.worker.runner import Runner

T = TypeVar("T")
FAILURES = (DrafterLost, RuntimeError, MemoryError)  # torch reports a failed device or a full memory as RuntimeError


class Drafter(Protocol):
    """Proposes sub-trees of likely continuations. May raise DrafterLost at any call; `open` attaches it again."""

    def open(self, request: int, tokens: Sequence[int], sampling: SamplingParams, prompt_len: int) -> None:
        """Starts from `tokens`, of which the last is the root and those from `prompt_len` on are output."""
        ...

    def propose(self) -> Proposal:
        """The first proposal after `open`."""
        ...

    def grow(self) -> None:
        """Called while the target verifies: the place to expand ahead of the result."""
        ...

    def observe(self, result: VerifyResult) -> Proposal:
        """Re-roots after a result and answers with the next proposal."""
        ...

    def close(self) -> None:
        """Ends the request."""
        ...


class NoDrafter:
    """Proposes nothing but the root: plain decoding."""

    def open(self, request: int, tokens: Sequence[int], sampling: SamplingParams, prompt_len: int) -> None:
        self._next = Proposal.root_only(request, 0, len(tokens) - 1, tokens[-1])

    def propose(self) -> Proposal:
        return self._next

    def grow(self) -> None:
        pass

    def observe(self, result: VerifyResult) -> Proposal:
        at = result.prefix_len + len(result.tokens)
        return Proposal.root_only(result.request, result.round + 1, at, result.tokens[-1])

    def close(self) -> None:
        pass


class Expendable:
    """Stands for a drafter and, once that is lost, for none: the request goes on with root-only proposals.

    `lost` is the reason, for whoever reports it. The next `open` attaches the drafter again.
    """

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._none = NoDrafter()
        self.lost: str | None = None

    def open(self, request: int, tokens: Sequence[int], sampling: SamplingParams, prompt_len: int) -> None:
        self.lost = None
        self._none.open(request, tokens, sampling, prompt_len)
        self._guard(lambda: self._drafter.open(request, tokens, sampling, prompt_len), lambda: None)

    def propose(self) -> Proposal:
        return self._guard(self._drafter.propose, self._none.propose)

    def grow(self) -> None:
        self._guard(self._drafter.grow, self._none.grow)

    def observe(self, result: VerifyResult) -> Proposal:
        return self._guard(lambda: self._drafter.observe(result), lambda: self._none.observe(result))

    def close(self) -> None:
        with contextlib.suppress(*FAILURES):
            self._drafter.close()

    def _guard(self, ask: Callable[[], T], otherwise: Callable[[], T]) -> T:
        if self.lost is None:
            try:
                return ask()
            except FAILURES as error:
                self.lost = str(error) or type(error).__name__
        return otherwise()


class LocalDrafter:
    """Grows the tree on a model of its own, in this process, between the target's forwards (serial decoding).

    Its cache holds the prefix of verified tokens before the root, then the expanded nodes. `pending` are verified
    tokens before the root whose draft KV is missing, because the target accepted a node that was never expanded here.
    They ride along with the root's forward, or are prefilled when there are more than w.
    """

    def __init__(self, runner: Runner, plan: Plan, vocab: int) -> None:
        self.runner = runner
        self._plan = plan
        self._vocab = vocab
        nodes = 1 + runner.tree_slots * plan.children
        self.tree = DraftTree(nodes, runner.tree_slots)
        self.pending: list[int] = []

    def open(self, request: int, tokens: Sequence[int], sampling: SamplingParams, prompt_len: int) -> None:
        self._request, self._round = request, 0
        self._sampler = Sampler(sampling, tokens[:prompt_len], self._vocab, self.runner.model.device)
        self._sampler.observe(tokens[prompt_len:])
        self.runner.reset()
        self.runner.prefill(tokens[:-1])
        self.pending = []
        self._root_at = len(tokens) - 1
        self.tree.reset(tokens[-1])

    def propose(self) -> Proposal:
        for _ in range(self._plan.draft_steps):
            self.expand()
        _, tokens, parents = self.tree.best_subtree(self._plan.verify_batch)
        return Proposal(self._request, self._round, self._root_at, tuple(tokens), tuple(parents))

    def grow(self) -> None:
        pass  # serial: the tree grows after the result, on the same device

    def observe(self, result: VerifyResult) -> Proposal:
        self._sampler.observe(result.tokens)
        self._reroot(result.tokens)
        self._root_at += len(result.tokens)
        self._round = result.round + 1
        return self.propose()

    def close(self) -> None:
        self.runner.reset()

    def expand(self) -> None:
        """One expansion: a forward on the best w leaves, and their best k children into the tree."""
        room = min(self.tree.room(self._plan.children), self.runner.cache.room - len(self.pending))
        if room < self._plan.draft_leaves:
            return
        leaves = self.tree.best_leaves(self._plan.draft_leaves)
        if len(leaves.nodes) == 0:
            return
        if self.tree.expanded == 1:  # the root: pending tokens go with it
            logits = self.runner.forward_chain([*self.pending, int(leaves.tokens[0])])
            self.pending = []
        else:
            logits = self.runner.forward_tree(leaves.tokens, leaves.depths, leaves.mask)
        paths = self.tree.path_tokens(leaves.nodes) if self._sampler.params.penalised else None
        tokens, logprobs = self._sampler.children(
            logits,
            paths,
            torch.from_numpy(leaves.depths + self._root_at).to(logits.device),
            k=self._plan.children,
            tau=self._plan.tau if self._plan.coupled else None,
            log_top_k=self.runner.ops.log_top_k,
        )
        self.tree.add_children(leaves.nodes, tokens.cpu().numpy(), logprobs.cpu().numpy())

    def _reroot(self, tokens: Sequence[int]) -> None:
        """Walks the verified tokens down the tree, moves their KV to the prefix and keeps the new root's sub-tree."""
        path = [0, *self.tree.walk(tokens)]
        if len(path) > len(tokens):  # all of them are nodes
            above, keep = self.tree.reroot(path[-1])
            self.runner.cache.commit(above, keep)
            return
        # The last token, and perhaps more, is not in the tree: a fresh root. The nodes on the way have KV if expanded.
        spelled = [int(self.tree.token[0]), *tokens[:-1]]
        slots = [slot for slot in self.tree.slot[path].tolist() if slot < self.tree.slots]
        self.runner.cache.commit(slots)
        self.pending += spelled[len(slots) :]
        self.tree.reset(tokens[-1])
        if len(self.pending) > self._plan.draft_leaves:
            self.runner.prefill(self.pending)
            self.pending = []
