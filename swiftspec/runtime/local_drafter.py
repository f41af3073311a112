"""Drafters that grow the tree on a model in this process: in turn with the target, or ahead of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swiftspec.messages import Proposal, VerifyResult
from swiftspec.params import EngineConfig, SamplingParams
from swiftspec.runtime.draft_rounds import DraftRounds
from swiftspec.runtime.native_tree import NativeTree
from swiftspec.runtime.runner import Runner
from swiftspec.sampling.sampler import Sampler
from swiftspec.tree.drawn import Draws
from swiftspec.tree.tree import DraftTree, Ints, Leaves


class LocalDrafter:
    """Grows the tree between the target's forwards (serial decoding).

    Its cache holds the prefix of verified tokens before the root, then the expanded nodes. `pending` are verified
    tokens before the root whose draft KV is missing, because the target accepted a node that was never expanded here.
    They ride along with the root's forward, or are prefilled when there are more than w. `steps` is d.
    """

    def __init__(self, runner: Runner, plan: EngineConfig, vocab: int) -> None:
        self.runner = runner
        self._plan = plan
        self._vocab = vocab
        nodes = 1 + runner.tree_slots * plan.children
        rounds = runner.rounds
        self.tree = (
            DraftTree(nodes, runner.tree_slots) if rounds is None else NativeTree(nodes, runner.tree_slots, rounds.tree)
        )
        self.pending: list[int] = []
        self._root = 0  # node that is the root by now; `settle` makes it node 0
        self._draws = Draws(runner.tree_slots, vocab) if plan.proposal == "sample" else None
        self.steps = plan.steps
        self._on_device = (
            None if self._draws is not None else DraftRounds.of(runner, plan.draft_leaves, plan.children, vocab)
        )

    @property
    def busy(self) -> float:
        return self.runner.busy

    def open(self, request: int, tokens: Sequence[int], sampling: SamplingParams, prompt_len: int) -> None:
        self._request, self._round = request, 0
        model = self.runner.model
        self._sampler = Sampler(sampling, tokens[:prompt_len], self._vocab, model.device, model.group, self.runner.ops)
        self._sampler.observe(tokens[prompt_len:])
        self.runner.open(tokens)
        self._scoring = self._sampler.scoring(self.runner.rounds)
        self._calibration = self._plan.calibrated(sampling.greedy)
        self.pending, self._root = [], 0
        self._root_at = len(tokens) - 1
        if self._draws is not None:
            self._draws.open(sampling.seed, self._root_at)
        self.tree.reset(tokens[-1])

    def propose(self) -> Proposal:
        self._expand(self.steps)
        return self._best()

    def grow(self) -> None:
        pass  # in turn: the tree grows after the result

    def offer(self) -> Any:
        return None

    def observe(self, result: VerifyResult) -> None:
        self.settle()
        self._sampler.observe(result.tokens)
        self._reroot(result.tokens)
        self._root_at += len(result.tokens)
        self._round = result.round + 1

    def settle(self) -> None:
        """Re-roots tree and cache where `observe` only noted the new root; a proposal need not wait for that."""
        if self._root != 0:
            path, kept = self.tree.reroot(self._root)
            self.runner.cache.commit(path, kept)
            self._root = 0
            if self._draws is not None:
                self._draws.keep(kept)

    def close(self) -> None:
        self.runner.reset()

    def expand(self) -> None:
        """One expansion: a forward on the best w leaves, and their best k children into the tree."""
        self.settle()
        if len(self.pending) > self._plan.draft_leaves:
            self.runner.prefill(self.pending)
            self.pending = []
        room = min(self.tree.room(self._plan.children), self.runner.cache.room - len(self.pending))
        if room < self._plan.draft_leaves:
            return
        if self._scoring is not None and self._draws is None and isinstance(self.tree, NativeTree):
            k, tau = min(self._plan.children, self._vocab), self._calibration
            noise = self._plan.proposal == "coupled" and not self._sampler.params.greedy
            leaves = self._plan.draft_leaves if self.tree.expanded > 0 else 1  # as many rows as there are: the root's
            self.runner.expand(self.tree, self.pending, leaves, k, self._scoring, noise, tau)
            self.pending = []
        else:
            self._expand_in_steps()

    def _expand(self, count: int) -> None:
        """`count` expansions: the root's, then all others in one go where the device needs no host in between."""
        if self._on_device is not None and self._sampler.plain and len(self.runner.cache.prefix_len) == 1:
            self.settle()
            if self.tree.expanded == 0:
                self.expand()
                count -= 1
            if self.tree.expanded > 0 and 1 < count <= self._on_device.room(self.tree):
                params = self._sampler.params
                temperature = 1.0 if params.greedy else params.temperature
                noise = self._sampler.noise if self._plan.proposal == "coupled" and not params.greedy else None
                tau = self._calibration
                self._on_device.grow(self.tree, count, temperature=temperature, tau=tau, noise=noise)
                return
        for _ in range(count):
            self.expand()

    def _expand_in_steps(self) -> None:
        """Where Python must see the logits."""
        leaves = self.tree.best_leaves(self._plan.draft_leaves)
        if len(leaves.nodes) == 0:
            return
        if self.tree.expanded == 1:  # the root: pending tokens go with it
            logits = self.runner.forward_chain([*self.pending, int(leaves.tokens[0])])
            self.pending = []
        else:
            logits = self.runner.forward_tree(leaves.tokens, leaves.depths, leaves.mask)
        with self.runner.naming_lost():  # a group's ranks speak here, too
            children = self._children(logits, leaves)
        self.tree.add_children(leaves.nodes, *children)

    def _children(self, logits: Tensor, leaves: Leaves) -> tuple[Ints, NDArray[np.floating]]:
        """k children of each leaf, and their weights: the best ones, or drawn ones."""
        sampler, plan = self._sampler, self._plan
        paths = self.tree.path_tokens(leaves.nodes) if sampler.params.penalised else None
        positions = torch.from_numpy(leaves.depths + self._root_at).to(logits.device)
        if self._draws is not None:
            likeliest = sampler.children(logits, paths, positions, k=self._draws.width)
            return self._draws.children(
                int(self.tree.slot[leaves.nodes[0]]), *likeliest, plan.children, self._calibration
            )
        coupled = plan.proposal == "coupled"
        tokens, weights = sampler.children(
            logits, paths, positions, k=plan.children, coupled=coupled, tau=self._calibration
        )
        return tokens.cpu().numpy(), weights.cpu().numpy()

    def _best(self, first: int = 0) -> Proposal:
        nodes, tokens, parents = self.tree.best_subtree(self._plan.verify_batch, self._root, first)
        drawn = None
        if self._draws is not None and self._plan.verify == "reject" and len(nodes) > 1:
            above = np.unique(np.array(parents[1:]))
            drawn = self._draws.of(self.tree.slot[np.array(nodes)[above]])
        return Proposal(self._request, self._round, self._root_at, tuple(tokens), tuple(parents), drawn)

    def _reroot(self, tokens: Sequence[int]) -> None:
        """Walks the verified tokens down the tree; the sub-tree under the last of them stays."""
        path = [0, *self.tree.walk(tokens)]
        if len(path) > len(tokens) and (self._draws is None or self._draws.reroot()):  # all of them are nodes
            self._root = path[-1]
            return
        # The last token, and perhaps more, is not in the tree: a fresh root. The nodes on the way have KV if expanded.
        spelled = [int(self.tree.token[0]), *tokens[:-1]]
        slots = [slot for slot in self.tree.slot[path[: len(tokens)]].tolist() if slot < self.tree.slots]
        self.runner.cache.commit(slots)
        self.pending += spelled[len(slots) :]
        self.tree.reset(tokens[-1])
        if self._draws is not None:
            self._draws.keep([])


class AheadDrafter(LocalDrafter):
    """Grows the tree while the target verifies a part of it (parallel tree generation, paper section 3.1).

    Each round expands d times ahead of the result, whenever that comes, and after it by the tree alone, so for a fixed
    d the rounds of a request are always the same.
    """

    YIELD = 0.3  # what an expansion adds to a round's expected tokens, per probability of its leaves (docs/log.md)

    def open(self, request: int, tokens: Sequence[int], sampling: SamplingParams, prompt_len: int) -> None:
        super().open(request, tokens, sampling, prompt_len)
        self.grow()

    def propose(self) -> Proposal:
        best = self._best()
        if len(best.tokens) < self._plan.verify_batch:
            self.settle()
            there = self.tree.count
            self.expand()  # the paper's rule: with too few nodes left to propose, one more expansion at once
            best = self._best(there if self._draws is not None else 0)
        # Drawn children stay with the paper's rule: which of them are sent must not depend on their own draw.
        if not self._plan.catch_up or self._draws is not None:
            return best
        while self._worth_expanding():
            self.settle()
            before = self.tree.expanded
            self.expand()
            if self.tree.expanded == before:  # no room
                break
            best = self._best()
        return best

    def offer(self) -> Any:
        if self._draws is not None or self._root != 0 or not isinstance(self.tree, NativeTree):
            return None
        plan, worth = self._plan, self.YIELD if self._plan.catch_up else 0.0
        shape = plan.verify_batch, plan.draft_leaves, self.steps
        return self.tree.native.offer(self._request, self._root_at, *shape, worth)

    def _worth_expanding(self) -> bool:
        """Whether one more expansion now, which takes a d-th of a round, would add more than a d-th of the tokens that
        the round can expect without."""
        tokens, leaves = self.tree.prospects(self._plan.verify_batch, self._plan.draft_leaves, self._root)
        return self.YIELD * leaves > tokens / self.steps

    def grow(self) -> None:
        self._expand(self.steps)
