"""Tree delta sender: sends the nodes that each expansion of the draft tree adds to a replica (see tree/replica.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from swiftspec.config import EngineConfig
from swiftspec.messages import RequestStart, VerifyResult
from swiftspec.runtime.drafter import Drafter
from swiftspec.runtime.lookahead_drafter import LookaheadDrafter
from swiftspec.tree.replica import NodeIds, TreeDelta


class AdjustableDrafter(Drafter, Protocol):
    """A drafter that the leader of a tensor-parallel group runs on all ranks of the group, with adjustable d."""

    @property
    def draft_steps(self) -> int: ...

    @draft_steps.setter
    def draft_steps(self, steps: int, /) -> None: ...


class TreeDeltaSender:
    """Runs a lookahead drafter for a tree replica, and sends the nodes that each expansion adds as a tree delta.

    With fixed d, a result is followed immediately by the expansions that `LookaheadDrafter.propose` makes. The d
    expansions before the next result follow in `grow`, or at the latest when that result arrives. With adaptive d
    (`free`), each call of `grow` expands the tree once. Sampled children are not supported: which of them are sent must
    not depend on timing.
    """

    def __init__(
        self,
        drafter: LookaheadDrafter,
        send: Callable[[TreeDelta], None],
        config: EngineConfig,
        group_drafter: AdjustableDrafter | None = None,
    ) -> None:
        """`send`: sends a delta to the replica. `group_drafter`: runs `drafter` on all ranks of its tensor-parallel
        group; None if there is one rank."""
        assert config.proposal != "sample", "sampled children are not supported: the deltas would depend on timing"
        self._drafter, self._send, self._config = drafter, send, config
        self._group_drafter: AdjustableDrafter = group_drafter or drafter
        self._ids = NodeIds()
        drafter.hooks.append(self._send_delta)
        # free: d is adaptive; _expansions_owed: with fixed d, whether the d expansions of this round are still due
        self.free = self._expansions_owed = False

    def open(self, start: RequestStart) -> None:
        """Starts a request: prefills the prompt and sends the first deltas."""
        self._expansions_owed = False  # may be left over from an earlier request
        shape = self._config.for_request(start.sampling)
        self.free, self._max_expansions = shape.draft_steps_adaptive, shape.max_draft_steps
        steps = 1 if self.free else shape.initial_draft_steps
        if self._group_drafter.draft_steps != steps:
            self._group_drafter.draft_steps = steps
        self._request, self._prefix_len = start.request, len(start.tokens) - 1
        self._ids.open()
        self._start_round(0)
        self._group_drafter.open(start)
        self._after_update()

    def observe(self, result: VerifyResult) -> None:
        """Re-roots the tree after a result. With fixed d it sends the deltas that the next proposal needs."""
        self._expand_owed()
        self._drafter.settle()
        self._ids.follow(self._drafter.tree, result.tokens)
        self._prefix_len = result.prefix_len + len(result.tokens)
        self._start_round(result.round + 1)
        self._group_drafter.observe(result)
        self._after_update()

    def grow(self) -> bool:
        """Expands the tree and sends the delta. To be called while no message is waiting. Returns False if the tree
        will not be expanded again before the next result; the replica has then been notified."""
        if not self.free:
            self._expand_owed()
            return False
        if self._ended:
            return False
        if self._expansions < self._max_expansions:
            self._group_drafter.grow()
        else:
            self._send_delta(1)
        return not self._ended

    def close(self) -> None:
        """Ends the request."""
        self._group_drafter.close()

    def _start_round(self, round_: int) -> None:
        self._round, self._expansions, self._ended = round_, 0, False

    def _after_update(self) -> None:
        if not self.free:
            self._group_drafter.propose()
            self._expansions_owed = True

    def _expand_owed(self) -> None:
        if self._expansions_owed:
            self._expansions_owed = False
            self._group_drafter.grow()

    def _send_delta(self, expansions: int) -> None:
        """Sends the nodes that were added since the previous delta, possibly none. `expansions`: number of expansions
        requested since then."""
        tree, first, known = self._drafter.tree, self._ids.next, len(self._ids)
        new = slice(known, tree.count)
        self._ids.add(tree.count - known)
        self._expansions += expansions
        self._ended = tree.count == known
        parents = self._ids.ids[tree.parent[new]]
        added = parents, tree.token[new].copy(), tree.logprob[new].copy()
        self._send(TreeDelta(self._request, self._round, self._prefix_len, expansions, first, *added))
