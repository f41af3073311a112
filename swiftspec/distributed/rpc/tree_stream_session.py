"""A session on a draft model whose tree grows ahead: it tells what the tree grows (see tree/replica.py)."""

from __future__ import annotations

from collections.abc import Callable

from swiftspec.config import EngineConfig
from swiftspec.distributed.group.request_state import ModelLimits, RequestState
from swiftspec.messages import RequestStart, VerifyResult
from swiftspec.runtime.ahead_drafter import AheadDrafter
from swiftspec.runtime.cancellation import CancelCheck
from swiftspec.runtime.tree_delta_sender import GroupLedDrafter, TreeDeltaSender
from swiftspec.tree.replica import TreeDelta


class TreeStreamSession:
    """One orchestrator's requests, one after the other. What fails ends its request; the opening may come again.

    `openings`: how many there were, by which a stream knows whether the request is still its own. `open`, `observe` and
    `grow` return whether the tree may grow on before the next result.
    """

    def __init__(
        self, drafter: AheadDrafter, led: GroupLedDrafter, shape: EngineConfig, bounds: ModelLimits, pause: CancelCheck
    ) -> None:
        """`led`: the same drafter with all ranks of its group; `pause`: what its runner calls while it reads a
        prompt."""
        self.shape = shape
        self.openings = 0
        self._grown: list[TreeDelta] = []
        self._drafter, self._pause = drafter, pause
        self._feed = TreeDeltaSender(drafter, lambda delta: self._grown.append(delta), shape, led)
        self._standing = RequestState(bounds)

    @property
    def busy(self) -> float:
        """Seconds in the model's forwards."""
        return self._drafter.busy

    @property
    def free(self) -> bool:
        """Whether the tree grows for as long as nothing comes; how often that is told is then nobody's concern."""
        return self._feed.free

    def open(self, opening: RequestStart, cancelled: Callable[[], bool]) -> bool:
        """Reads the text, which ends early, with Cancelled, once nobody waits for it."""
        self.openings += 1
        self._grown = []
        self._standing.open(opening)
        self._pause.cancelled = cancelled
        with self._standing.close_on_error():
            self._feed.open(opening)
        return True

    def observe(self, result: VerifyResult) -> bool:
        """Takes in a result, be it of several rounds. Raises ValueError on one that does not follow."""
        self._standing.advance(result)
        with self._standing.close_on_error():
            self._feed.observe(result)
        return True

    def grow(self) -> bool:
        """Grows the tree by an expansion, or by those that are due."""
        self._standing.require_open()
        with self._standing.close_on_error():
            return self._feed.grow()

    def take(self) -> list[TreeDelta]:
        """What has grown since this was last asked for."""
        grown, self._grown = self._grown, []
        return grown
