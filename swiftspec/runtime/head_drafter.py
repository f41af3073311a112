"""Drafters on a draft head (EAGLE-3, MTP, DFlash), in the process of the target."""

from __future__ import annotations

from collections.abc import Sequence

from swiftspec.messages import NodeSource, RequestStart
from swiftspec.runtime.executors.head import StateExecutor
from swiftspec.runtime.local_drafter import LocalDrafter, TreeConfig
from swiftspec.runtime.runner import Runner
from swiftspec.runtime.target_states import TargetStates
from swiftspec.tree.children import ChildSelector
from swiftspec.tree.tree import DraftTree


class HeadDrafter(LocalDrafter):
    """Serial drafter on a draft head, which reads the target's hidden states.

    A row of the head has the target's hidden state at a position and the token after it, so that its cache begins with
    the second token of a request. The rows of drafted tokens follow from the output of the head itself. Verified tokens
    are therefore computed again, with the target's states: each round begins with a new tree.
    """

    source = NodeSource.DRAFT_HEAD
    first_token = 1  # index of the first token of a request that the cache holds
    commits_root = True  # whether the root's KV, as the draft tree has it, becomes that of a verified token

    def __init__(
        self,
        runner: Runner,
        executor: StateExecutor,
        tree: DraftTree,
        children: ChildSelector,
        config: TreeConfig,
        states: TargetStates,
        target: Runner,
    ) -> None:
        """`states`: the target's hidden states. `target`: the runner of the target."""
        super().__init__(runner, [executor], tree, children, config)
        self._rows, self._states, self._target = executor, states, target
        runner.first_token = self.first_token

    def close(self) -> None:
        super().close()
        self._target.max_cached_tokens = None

    def expand(self, count: int = 1) -> None:
        self._skip_missing_states()
        super().expand(count)
        self._states.drop(self.runner.cache.prefix_len[0] + self._rows.offset)

    def _open_cache(self, start: RequestStart) -> None:
        """Resets cache and tree. The prompt becomes pending, because the target has not prefilled it yet."""
        skipped = min(self.first_token, len(start.tokens) - 1)  # the only token of a prompt has a state of zeros
        self._begin(start.tokens[skipped:], skipped - self.first_token, start.num_cached_tokens)
        cached = self.runner.cache.prefix_len[0]
        self._target.max_cached_tokens = max(cached + self._rows.offset, 0)  # states of later positions are needed

    def _begin(self, text: Sequence[int], offset: int, max_cached: Sequence[int] | None) -> None:
        """Sets the tokens of the cache, whose last one is the root. `offset`: see `StateExecutor`."""
        kept = self.runner.match_prefix([text], max_cached)[0]
        self.pending, self._rows.offset = list(text[kept:-1]), offset
        self.tree.reset(text[-1])

    def _skip_missing_states(self) -> None:
        """Begins the context of the head at the first position with a state, if the states of earlier pending tokens
        are missing, because the request began without this drafter."""
        needed, first = self.runner.cache.prefix_len[0] + self._rows.offset, self._states.first
        missing = min(first - needed, len(self.pending))
        if missing > 0:
            self._begin([*self.pending[missing:], int(self.tree.token[0])], first, [0])

    def _reroot(self, tokens: Sequence[int]) -> None:
        """Starts a new tree. Of the old one only the root has the KV that follows from the target's state."""
        computed = self.commits_root and self.tree.expanded > 0
        self.runner.cache.commit([0] if computed else [])
        if not computed:
            self.pending.append(int(self.tree.token[0]))
        self.pending += tokens[:-1]
        self.tree.reset(tokens[-1])
        self._children.retain_slots([])


class BlockDrafter(HeadDrafter):
    """Serial drafter on a block head (DFlash), which drafts d positions in one forward.

    The cache of the head holds keys and values of the verified tokens before the root, which follow from the target's
    states. Those of a block are dropped after the round.
    """

    first_token = 0
    commits_root = False
