"""An orchestrator's end of what it says to a draft's worker and hears from it."""

from __future__ import annotations

import time

from swiftspec.config import EngineConfig
from swiftspec.distributed.draft.client import LATE_ANSWER, OPEN_TIMEOUT, DrafterLate
from swiftspec.distributed.group.request_state import Bounds, Standing
from swiftspec.distributed.rpc import swiftspec_pb2 as pb
from swiftspec.distributed.rpc.connection import Link, Stream, hop_of
from swiftspec.distributed.rpc.protobuf_codec import Identity, opening_to, result_to
from swiftspec.distributed.rpc.status import Refused, SessionGone, WorkerLost
from swiftspec.errors import DrafterLost
from swiftspec.messages import Opening, VerifyResult
from swiftspec.observe.rpc_latency import Hops


class DraftStream:
    """One session at a worker, and in it a stream for each request. Every call may raise DrafterLost, and for whatever
    the worker says that it should not, nothing else.

    `gone`: why there is no worker, until `attach` gives one; `answer_timeout`, `open_timeout`: seconds that a proposal
    may take, and the first of a request; `busy`: seconds in the draft's forwards, as far as the worker has told;
    `standing`: where the request stands; `hops`: where each answer is noted.
    """

    def __init__(self, link: Link[pb.DraftAnswer], shape: EngineConfig, bounds: Bounds, answer_timeout: float) -> None:
        """`shape`: of the rounds; a worker refuses one that it has no room for."""
        self.busy, self.hops = 0.0, Hops()
        self._sent_at: dict[int, int] = {}  # by the round that a message ends; -1: the opening
        self.standing = Standing(bounds, shape.verify == "reject")
        self.shape = shape
        self.round = 0
        self.gone: str | None = f"{link.peer} has not been reached"
        self.answer_timeout, self.open_timeout = answer_timeout, OPEN_TIMEOUT
        self._link = link
        self._session, self._worker = b"", Identity(b"", b"")
        self._stream: Stream[pb.DraftAnswer] | None = None  # of the request that is open

    @property
    def patience(self) -> float:
        """Seconds that the next proposal may take."""
        return self.answer_timeout if self.round else self.open_timeout

    def attach(self, worker: Identity) -> None:
        """A worker that can be reached. It may know the session still; it is told the text in any case."""
        self._worker, self.gone = worker, None

    def open(self, opening: Opening, steps: int) -> None:
        """Begins a request, with so many expansions a round."""
        self._hang_up()
        if self.gone is not None:
            raise DrafterLost(self.gone)
        try:
            self.standing.open(opening)
            message = opening_to(opening, self.shape, self._worker)
        except ValueError as error:
            raise DrafterLost(f"the draft cannot be told of this request: {error}") from None
        self.round, self._stream = 0, self._link.stream()
        self._sent_at.clear()
        self._send(pb.DraftRequest(session=self._session, draft_steps=steps, opening=message))

    def tell(self, result: VerifyResult, steps: int) -> None:
        """Sends a result on its way, and d from the next growing on."""
        try:
            self.standing.move(result)
        except ValueError as error:
            raise DrafterLost(f"the draft cannot be told of this result: {error}") from None
        self.round = result.round + 1
        told = result_to(result, whole=False)
        self._send(pb.DraftRequest(session=self._session, draft_steps=steps, result=told))

    def recv(self, until: float | None) -> pb.DraftAnswer:
        """The next answer, waited for until then (`time.monotonic`). Raises DrafterLate where it has not come; None
        waits for nothing."""
        if self._stream is None:
            raise DrafterLost(self.gone or "the draft has no request open")
        try:
            answer = self._stream.recv(0.0 if until is None else until - time.monotonic())
        except TimeoutError:
            raise DrafterLate(LATE_ANSWER) from None
        except (WorkerLost, SessionGone) as error:
            self._hang_up()
            self.gone = str(error)
            raise DrafterLost(self.gone) from None
        except Refused as error:
            self._hang_up()
            raise DrafterLost(str(error)) from None
        self._session = answer.session
        self.busy += 1e-9 * max(answer.telemetry.model, 0)
        if answer.HasField("telemetry"):  # else another one has told what it cost
            self._note(answer)
        return answer

    def _note(self, answer: pb.DraftAnswer) -> None:
        """Books an exchange to the message that it answers, which need not be the last one."""
        ended = (answer.delta if answer.HasField("delta") else answer.proposal).round - 1
        asked = self._sent_at.get(ended, self._sent_at[self.round - 1])
        self.hops.add(hop_of("draft", ended, asked, answer.telemetry), answer.session)

    def nonsense(self, why: object) -> DrafterLost:
        """Gives the request up. The error to raise."""
        self._hang_up()
        return DrafterLost(f"{self._link.peer} sent what is no answer of ours: {why}")

    def close(self) -> None:
        """Ends the request; the session and its cache stay for the next one."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def leave(self) -> None:
        """Ends the session."""
        self._hang_up()
        if self._session and self.gone is None:
            self._link.end(self._session)
        self._session = b""

    def _send(self, message: pb.DraftRequest) -> None:
        if self._stream is None:
            raise DrafterLost(self.gone or "the draft has no request open")
        self._sent_at[self.round - 1] = time.time_ns()
        self._stream.send(message)

    def _hang_up(self) -> None:
        if self._stream is not None:
            self._stream.cancel()
            self._stream = None
