"""Draft worker session that returns a proposal for each result."""

from __future__ import annotations

from collections.abc import Callable

from swiftspec.config import EngineConfig
from swiftspec.distributed.group.request_state import ModelLimits, RequestState, in_range
from swiftspec.distributed.rpc.status import StaleRound
from swiftspec.messages import Proposal, RequestStart, VerifyResult
from swiftspec.runtime.cancellation import CancelCheck
from swiftspec.runtime.tree_delta_sender import AdjustableDrafter


class DraftSession:
    """Session of one client on a draft worker, for requests one after another. An error ends the current request, which
    the client may open again."""

    def __init__(
        self, drafter: AdjustableDrafter, shape: EngineConfig, bounds: ModelLimits, pause: CancelCheck
    ) -> None:
        """`pause`: cancellation check of the drafter's runner during prefill."""
        self.shape = shape
        self._drafter, self._pause = drafter, pause
        self._request = RequestState(bounds)
        self._round, self._grown = 0, True  # round of the last proposal; whether the tree was expanded since then

    @property
    def busy(self) -> float:
        """Seconds spent in forwards of the model."""
        return self._drafter.busy

    def set_steps(self, steps: int) -> None:
        """Sets d for all later expansions; 0 leaves d unchanged. Raises ValueError if `steps` is out of range."""
        if steps:
            self._drafter.draft_steps = in_range(steps, 1, self.shape.max_draft_steps, "draft_steps")

    def open(self, start: RequestStart, cancelled: Callable[[], bool]) -> Proposal:
        """Prefills the tokens and returns the first proposal. Raises Cancelled when `cancelled` returns True."""
        self._request.open(start)
        self._pause.cancelled = cancelled
        with self._request.close_on_error():
            self._drafter.open(start)
            return self._propose(0)

    def observe(self, result: VerifyResult) -> Proposal:
        """Applies a result and returns the next proposal. Raises StaleRound if the result is of an earlier round."""
        self._request.require_open()
        if result.round < self._round:
            raise StaleRound(f"round {result.round} has already ended; expected round {self._round}")
        self._request.advance(result)
        self.grow()
        with self._request.close_on_error():
            self._drafter.observe(result)
            return self._propose(result.round + 1)

    def grow(self) -> None:
        """Expands the tree ahead of the next result, unless that was done in this round."""
        if not self._grown:
            self._grown = True
            with self._request.close_on_error():
                self._drafter.grow()

    def _propose(self, round_: int) -> Proposal:
        proposal = self._drafter.propose()
        self._round, self._grown = round_, False
        return proposal
