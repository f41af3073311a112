"""The draft's end of a replica: what its tree grows, told as it grows (see tree/replica.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from swiftspec.config import EngineConfig
from swiftspec.messages import RequestStart, VerifyResult
from swiftspec.runtime.ahead_drafter import AheadDrafter
from swiftspec.runtime.drafter import Drafter
from swiftspec.tree.replica import NodeIds, TreeDelta


class GroupLedDrafter(Drafter, Protocol):
    """A drafter as its group is led, d included."""

    @property
    def draft_steps(self) -> int: ...

    @draft_steps.setter
    def draft_steps(self, steps: int, /) -> None: ...


class TreeDeltaSender:
    """Has a drafter grow its tree ahead of the results, and sends what each growing adds.

    With d fixed a result is followed by the expansions that the tree alone asks for (`AheadDrafter.propose`), and
    `grow` adds d more, at the latest when the next result is there. With d free the tree grows for as long as `grow` is
    called, an expansion at a time. Drawn children are not for a feed: what of them is sent must not depend on the
    clock.
    """

    def __init__(
        self,
        drafter: AheadDrafter,
        send: Callable[[TreeDelta], None],
        config: EngineConfig,
        group_drafter: GroupLedDrafter | None = None,
    ) -> None:
        """`group_drafter`: the same drafter with all ranks of its group, where there are several."""
        assert config.proposal != "sample", "what is sent of drawn children must not depend on the clock"
        self._drafter, self._send, self._config = drafter, send, config
        self._group_drafter: GroupLedDrafter = group_drafter or drafter
        self._ids = NodeIds()
        drafter.hooks.append(self._send_delta)
        self.free = self._expansions_owed = False  # _owed: d expansions, where d is fixed

    def open(self, opening: RequestStart) -> None:
        """Begins a request. The prompt is read, and the first growth sent."""
        self._expansions_owed = False  # of a request that has ended
        shape = self._config.for_request(opening.sampling)
        self.free, self._max_expansions = shape.draft_steps_adaptive, shape.max_draft_steps
        steps = 1 if self.free else shape.initial_draft_steps
        if self._group_drafter.draft_steps != steps:
            self._group_drafter.draft_steps = steps
        self._request = opening.request
        self._ids.open()
        self._start_round(0)
        self._group_drafter.open(opening)
        self._after_update()

    def observe(self, result: VerifyResult) -> None:
        """Takes in a result."""
        self._expand_owed()
        self._drafter.settle()
        self._ids.follow(self._drafter.tree, result.tokens)
        self._start_round(result.round + 1)
        self._group_drafter.observe(result)
        self._after_update()

    def grow(self) -> bool:
        """To be called while there is nothing else to do. False: the tree is not to grow on before the next result,
        which has been said."""
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
        """Sends what has been added by so many expansions, be it nothing."""
        tree, first, known = self._drafter.tree, self._ids.next, len(self._ids)
        new = slice(known, tree.count)
        self._ids.add(tree.count - known)
        self._expansions += expansions
        self._ended = tree.count == known
        parents = self._ids.ids[tree.parent[new]]
        added = parents, tree.token[new].copy(), tree.logprob[new].copy()
        self._send(TreeDelta(self._request, self._round, expansions, first, *added))
