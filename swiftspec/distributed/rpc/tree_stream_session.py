"""Draft worker session that expands its tree asynchronously and streams tree deltas (see tree/replica.py)."""

from __future__ import annotations

from collections.abc import Callable

from swiftspec.config import EngineConfig
from swiftspec.distributed.group.request_state import ModelLimits, RequestState
from swiftspec.messages import RequestStart, VerifyResult
from swiftspec.runtime.cancellation import CancelCheck
from swiftspec.runtime.lookahead_drafter import LookaheadDrafter
from swiftspec.runtime.tree_delta_sender import GroupLedDrafter, TreeDeltaSender
from swiftspec.tree.replica import TreeDelta


class TreeStreamSession:
    """Requests of one client, sequentially. A failure ends the request, which the client may open again.

    `openings`: number of requests so far, from which a stream detects that another request has replaced its own.
    `open`, `observe` and `grow` return whether the tree may be expanded further before the next result.
    """

    def __init__(
        self,
        drafter: LookaheadDrafter,
        led: GroupLedDrafter,
        shape: EngineConfig,
        bounds: ModelLimits,
        pause: CancelCheck,
    ) -> None:
        """`led`: the drafter on all ranks of its group. `pause`: cancellation check of its runner during prefill."""
        self.shape = shape
        self.openings = 0
        self._grown: list[TreeDelta] = []
        self._drafter, self._pause = drafter, pause
        self._feed = TreeDeltaSender(drafter, lambda delta: self._grown.append(delta), shape, led)
        self._request = RequestState(bounds)

    @property
    def busy(self) -> float:
        """Seconds spent in forwards of the model."""
        return self._drafter.busy

    @property
    def free(self) -> bool:
        """Whether the tree is expanded until the next result arrives; deltas of a round may then be merged."""
        return self._feed.free

    def open(self, start: RequestStart, cancelled: Callable[[], bool]) -> bool:
        """Prefills the tokens. Raises Cancelled when `cancelled` returns True."""
        self.openings += 1
        self._grown = []
        self._request.open(start)
        self._pause.cancelled = cancelled
        with self._request.close_on_error():
            self._feed.open(start)
        return True

    def observe(self, result: VerifyResult) -> bool:
        """Applies a result, possibly of several merged rounds. Raises ValueError if it does not fit the position."""
        self._request.advance(result)
        with self._request.close_on_error():
            self._feed.observe(result)
        return True

    def grow(self) -> bool:
        """Expands the tree once, or by the d expansions that are due."""
        self._request.require_open()
        with self._request.close_on_error():
            return self._feed.grow()

    def take(self) -> list[TreeDelta]:
        """Returns the deltas since the previous call."""
        grown, self._grown = self._grown, []
        return grown
