"""A session on a target model: a result for each proposal."""

from __future__ import annotations

from collections.abc import Callable

from swiftspec.config import EngineConfig
from swiftspec.distributed.group.request_state import ModelLimits, RequestState
from swiftspec.distributed.rpc.status import StaleRound
from swiftspec.messages import Proposal, RequestStart, VerifyResult
from swiftspec.runtime.cancellation import CancelCheck
from swiftspec.runtime.verifier import Verifier


class VerifySession:
    """One orchestrator's requests, one after the other. What fails ends its request; the opening may come again."""

    def __init__(self, verifier: Verifier, shape: EngineConfig, bounds: ModelLimits, pause: CancelCheck) -> None:
        """`pause`: what the verifier's runner calls while it reads a prompt."""
        self.shape = shape
        self._verifier, self._pause = verifier, pause
        self._standing = RequestState(bounds, rejection_sampling=shape.verify == "reject")
        self._round, self._settled = -1, True  # the one verified last; whether its path has joined the prefix

    @property
    def busy(self) -> float:
        """Seconds in the model's forwards."""
        return self._verifier.busy

    def open(self, opening: RequestStart, cancelled: Callable[[], bool]) -> int:
        """Reads the text, which ends early, with Cancelled, once nobody waits for it. Returns how many of its tokens
        were kept from earlier ones."""
        self.settle()
        self._standing.open(opening)
        self._pause.cancelled, self._round = cancelled, -1
        with self._standing.close_on_error():
            return self._verifier.open(opening)

    def verify(self, proposal: Proposal) -> VerifyResult:
        """Raises Stale on a round that is over."""
        self._standing.require_open()
        if proposal.round <= self._round:
            raise StaleRound(f"round {proposal.round} is over: round {self._round + 1} is next")
        self.settle()
        self._standing.check_proposal(proposal)
        with self._standing.close_on_error():
            result = self._verifier.submit(proposal).wait()
            self._settled, self._round = False, proposal.round
        self._standing.advance(result)
        return result

    def settle(self) -> None:
        """Commits the path accepted last to the prefix, unless that is done."""
        if not self._settled:
            self._settled = True
            self._verifier.settle()
