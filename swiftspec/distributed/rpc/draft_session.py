"""A session on a draft model: a proposal for each result."""

from __future__ import annotations

from collections.abc import Callable

from swiftspec.config import EngineConfig
from swiftspec.distributed.group.request_state import ModelLimits, RequestState, in_range
from swiftspec.distributed.rpc.status import StaleRound
from swiftspec.messages import Proposal, RequestStart, VerifyResult
from swiftspec.runtime.cancellation import CancelCheck
from swiftspec.runtime.tree_delta_sender import GroupLedDrafter


class DraftSession:
    """One orchestrator's requests, one after the other. What fails ends its request; the opening may come again."""

    def __init__(self, drafter: GroupLedDrafter, shape: EngineConfig, bounds: ModelLimits, pause: CancelCheck) -> None:
        """`pause`: what the drafter's runner calls while it reads a prompt."""
        self.shape = shape
        self._drafter, self._pause = drafter, pause
        self._standing = RequestState(bounds)
        self._round, self._grown = 0, True  # of the proposal given last; whether the tree has grown ahead of its result

    @property
    def busy(self) -> float:
        """Seconds in the model's forwards."""
        return self._drafter.busy

    def set_steps(self, steps: int) -> None:
        """d from the next growing on; 0: as before."""
        if steps:
            self._drafter.draft_steps = in_range(steps, 1, self.shape.max_draft_steps, "the steps of a draft")

    def open(self, opening: RequestStart, cancelled: Callable[[], bool]) -> Proposal:
        """Reads the text, which ends early, with Cancelled, once nobody waits for it."""
        self._standing.open(opening)
        self._pause.cancelled = cancelled
        with self._standing.close_on_error():
            self._drafter.open(opening)
            return self._propose(0)

    def observe(self, result: VerifyResult) -> Proposal:
        """Raises Stale on the result of a round that is over."""
        self._standing.require_open()
        if result.round < self._round:
            raise StaleRound(f"round {result.round} is over: round {self._round} is next")
        self._standing.advance(result)
        self.grow()
        with self._standing.close_on_error():
            self._drafter.observe(result)
            return self._propose(result.round + 1)

    def grow(self) -> None:
        """Grows the tree ahead of the next result, unless that is done."""
        if not self._grown:
            self._grown = True
            with self._standing.close_on_error():
                self._drafter.grow()

    def _propose(self, round_: int) -> Proposal:
        proposal = self._drafter.propose()
        self._round, self._grown = round_, False
        return proposal
