"""The lookahead drafter: expands its tree while the target verifies a part of it (paper section 3.1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from swiftspec.config import EngineConfig
from swiftspec.messages import Proposal, RequestStart
from swiftspec.runtime.executors import TreeExecutor
from swiftspec.runtime.local_drafter import LocalDrafter
from swiftspec.runtime.runner import Runner
from swiftspec.tree.children import ChildSelector
from swiftspec.tree.tree import EXPANSION_YIELD, DraftTree, expansion_pays


class LookaheadDrafter(LocalDrafter):
    """Drafter that expands its tree while the target verifies a part of it (parallel tree generation, paper section
    3.1).

    Each round has d expansions before the result, regardless of when it arrives, and further ones after it if the tree
    has too few nodes or another expansion pays (`expansion_pays`). This does not depend on time, so for a fixed d the
    rounds of a request are always the same. `hooks`: called after expansions, with the number that was requested.
    """

    grows = True

    def __init__(
        self,
        runner: Runner,
        executors: Sequence[TreeExecutor],
        tree: DraftTree,
        children: ChildSelector,
        config: EngineConfig,
    ) -> None:
        super().__init__(runner, executors, tree, children, config)
        # Sampled children: only the paper's rule applies, since which are proposed must not depend on their own draw.
        self._catch_up = config.catch_up and not children.sampled
        self.hooks: list[Callable[[int], None]] = []

    def open(self, start: RequestStart) -> None:
        super().open(start)
        self.grow()

    def expand(self, count: int = 1) -> None:
        super().expand(count)
        for hook in self.hooks:
            hook(count)

    def propose(self) -> Proposal:
        best = self._best_proposal()
        if len(best.tokens) < self._nodes:
            there = self.tree.count
            self.expand()  # the paper's rule: expand once more if too few nodes are left to propose
            best = self._best_proposal(there if self._children.sampled else 0)
        while self._catch_up and self._worth_expanding():
            self.settle()  # before the comparison, since a re-root changes the number of expanded nodes
            before = self.tree.expanded
            self.expand()
            if self.tree.expanded == before:  # tree or KV cache is full
                break
            best = self._best_proposal()
        return best

    def fast_reply(self) -> Any:
        if self._children.sampled or self._root != 0:
            return None
        config, worth = self._config, EXPANSION_YIELD if self._catch_up else 0.0
        shape = self._nodes, config.leaves_per_expansion, self.expansions
        return self.tree.fast_reply(self._request, self._root_at, *shape, worth)

    def _worth_expanding(self) -> bool:
        prospects = self.tree.expected_mass(self._nodes, self._config.leaves_per_expansion, self._root)
        return expansion_pays(*prospects, self.expansions)

    def grow(self) -> None:
        self.expand(self.expansions)
