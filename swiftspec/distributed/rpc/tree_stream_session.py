"""Draft worker session that expands its tree asynchronously and streams tree deltas (see tree/replica.py)."""

from __future__ import annotations

from collections.abc import Callable

from swiftspec.config import EngineConfig
from swiftspec.distributed.group.request_state import ModelLimits, RequestState
from swiftspec.messages import RequestStart, VerifyResult
from swiftspec.runtime.cancellation import CancelCheck
from swiftspec.runtime.lookahead_drafter import LookaheadDrafter
from swiftspec.runtime.tree_delta_sender import AdjustableDrafter, TreeDeltaSender
from swiftspec.tree.replica import TreeDelta


class TreeStreamSession:
    """Session of one client on a draft worker that streams tree deltas, for requests one after another. An error ends
    the current request, which the client may open again.

    `openings`: number of requests so far, from which a stream detects that another request has replaced its own.
    `open`, `observe` and `grow` return whether the tree may be expanded further before the next result.
    """

    def __init__(
        self,
        drafter: LookaheadDrafter,
        led: AdjustableDrafter,
        shape: EngineConfig,
        bounds: ModelLimits,
        pause: CancelCheck,
    ) -> None:
        """`led`: `drafter` as its group's leader runs it, on all ranks of the group. `pause`: cancellation check of the
        drafter's runner during prefill."""
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
        """Whether the tree is expanded until the next result arrives, instead of d times. Deltas of a round may then be
        merged."""
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
        """Applies a result, possibly of several merged rounds. Raises ValueError if the result does not fit the state
        of the request."""
        self._request.advance(result)
        with self._request.close_on_error():
            self._feed.observe(result)
        return True

    def grow(self) -> bool:
        """Expands the tree once if `free`, otherwise d times unless that was done in this round."""
        self._request.require_open()
        with self._request.close_on_error():
            return self._feed.grow()

    def take(self) -> list[TreeDelta]:
        """Returns the tree deltas since the previous call of `take`."""
        grown, self._grown = self._grown, []
        return grown
