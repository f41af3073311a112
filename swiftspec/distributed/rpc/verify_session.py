"""Target worker session that returns a result for each proposal."""

from __future__ import annotations

from collections.abc import Callable

from swiftspec.config import EngineConfig
from swiftspec.distributed.group.request_state import ModelLimits, RequestState
from swiftspec.distributed.rpc.status import StaleRound
from swiftspec.messages import Proposal, RequestStart, VerifyResult
from swiftspec.runtime.cancellation import CancelCheck
from swiftspec.runtime.verifier import Verifier


class VerifySession:
    """Session of one client on a target worker, for requests one after another. An error ends the current request,
    which the client may open again."""

    def __init__(self, verifier: Verifier, shape: EngineConfig, bounds: ModelLimits, pause: CancelCheck) -> None:
        """`pause`: cancellation check of the verifier's runner during prefill."""
        self.shape = shape
        self._verifier, self._pause = verifier, pause
        self._request = RequestState(bounds, rejection_sampling=shape.verify == "reject")
        self._round, self._settled = -1, True  # last verified round; whether its path is committed

    @property
    def busy(self) -> float:
        """Seconds spent in forwards of the model."""
        return self._verifier.busy

    def open(self, start: RequestStart, cancelled: Callable[[], bool]) -> int:
        """Prefills the tokens; returns the number of cached tokens. Raises Cancelled when `cancelled` returns True."""
        self.settle()
        self._request.open(start)
        self._pause.cancelled, self._round = cancelled, -1
        with self._request.close_on_error():
            return self._verifier.open(start)

    def verify(self, proposal: Proposal) -> VerifyResult:
        """Verifies a proposal and returns the result. Raises StaleRound if the proposal's round is already verified."""
        self._request.require_open()
        if proposal.round <= self._round:
            raise StaleRound(f"round {proposal.round} has already ended; expected round {self._round + 1}")
        self.settle()
        self._request.check_proposal(proposal)
        with self._request.close_on_error():
            result = self._verifier.submit(proposal).wait()
            self._settled, self._round = False, proposal.round
        self._request.advance(result)
        return result

    def settle(self) -> None:
        """Commits the last accepted path to the prefix, unless that was done already."""
        if not self._settled:
            self._settled = True
            self._verifier.settle()
