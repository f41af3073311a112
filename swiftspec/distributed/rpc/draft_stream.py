"""Client side of the message stream to a draft worker."""

from __future__ import annotations

import time

from swiftspec.config import EngineConfig
from swiftspec.distributed.draft.client import LATE_MESSAGE, OPEN_TIMEOUT_S, DrafterLate
from swiftspec.distributed.group.request_state import ModelLimits, RequestState
from swiftspec.distributed.rpc import swiftspec_pb2 as pb
from swiftspec.distributed.rpc.connection import MessageStream, WorkerConnection, rpc_record
from swiftspec.distributed.rpc.protobuf_codec import ModelIdentity, request_start_to_proto, result_to_proto
from swiftspec.distributed.rpc.status import SessionGone, WorkerLost, WorkerRefused
from swiftspec.errors import DrafterLost
from swiftspec.messages import RequestStart, VerifyResult
from swiftspec.observe.rpc_latency import RpcLog


class DraftStream:
    """Client side of one session on a draft worker, with one stream per request.

    Every call raises DrafterLost if the worker is lost or sends an invalid message.

    `lost_reason`: the reason why the worker cannot be used; None while it can. `attach` resets it.
    `answer_timeout_s`, `open_timeout_s`: longest wait in seconds for a proposal, and for the first proposal of a
    request.
    `busy`: seconds of the draft's forwards, as reported by the worker.
    `state`: state of the request.
    `rpc_log`: latency records of all answers.
    """

    def __init__(
        self, link: WorkerConnection[pb.DraftAnswer], shape: EngineConfig, bounds: ModelLimits, answer_timeout: float
    ) -> None:
        """`shape`: config of the rounds. A worker refuses a config that exceeds its memory. `answer_timeout`: initial
        `answer_timeout_s`."""
        self.busy, self.rpc_log = 0.0, RpcLog()
        self._sent_at: dict[int, int] = {}  # send times of results in ns, by round; -1: request start
        self.state = RequestState(bounds, shape.verify == "reject")
        self.shape = shape
        self.round = 0
        self.lost_reason: str | None = f"{link.peer} has not been reached"
        self.answer_timeout_s, self.open_timeout_s = answer_timeout, OPEN_TIMEOUT_S
        self._connection = link
        self._session, self._worker = b"", ModelIdentity(b"", b"")
        self._stream: MessageStream[pb.DraftAnswer] | None = None  # stream of the open request

    @property
    def timeout_s(self) -> float:
        """Longest wait for the next proposal, in seconds."""
        return self.answer_timeout_s if self.round else self.open_timeout_s

    def attach(self, worker: ModelIdentity) -> None:
        """Marks the worker as reachable. The session need not exist any more, since every request start contains all
        tokens. `worker`: identity that the worker must have."""
        self._worker, self.lost_reason = worker, None

    def open(self, start: RequestStart, steps: int) -> None:
        """Opens a request with `steps` expansions per round."""
        self._cancel_stream()
        if self.lost_reason is not None:
            raise DrafterLost(self.lost_reason)
        try:
            self.state.open(start)
            message = request_start_to_proto(start, self.shape, self._worker)
        except ValueError as error:
            raise DrafterLost(f"this request cannot be sent to the draft: {error}") from None
        self.round, self._stream = 0, self._connection.stream()
        self._sent_at.clear()
        self._send(pb.DraftRequest(session=self._session, draft_steps=steps, opening=message))

    def send_result(self, result: VerifyResult, steps: int) -> None:
        """Sends a result, and in `steps` the d of all later expansions."""
        try:
            self.state.advance(result)
        except ValueError as error:
            raise DrafterLost(f"this result cannot be sent to the draft: {error}") from None
        self.round = result.round + 1
        told = result_to_proto(result, for_client=False)
        self._send(pb.DraftRequest(session=self._session, draft_steps=steps, result=told))

    def recv(self, until: float | None) -> pb.DraftAnswer:
        """Returns the next answer. Raises DrafterLate if it has not arrived at `until`, a `time.monotonic` time. None
        means that the call does not block."""
        if self._stream is None:
            raise DrafterLost(self.lost_reason or "the draft has no open request")
        try:
            answer = self._stream.recv(0.0 if until is None else until - time.monotonic())
        except TimeoutError:
            raise DrafterLate(LATE_MESSAGE) from None
        except (WorkerLost, SessionGone) as error:
            self._cancel_stream()
            self.lost_reason = str(error)
            raise DrafterLost(self.lost_reason) from None
        except WorkerRefused as error:
            self._cancel_stream()
            raise DrafterLost(str(error)) from None
        self._session = answer.session
        self.busy += 1e-9 * max(answer.telemetry.model, 0)
        if answer.HasField("telemetry"):  # if not, an earlier delta of the same expansion had it
            self._record_rpc(answer)
        return answer

    def _record_rpc(self, answer: pb.DraftAnswer) -> None:
        """Records the latency of the message that `answer` responds to. It is not always the last message sent."""
        ended = (answer.delta if answer.HasField("delta") else answer.proposal).round - 1
        asked = self._sent_at.get(ended, self._sent_at[self.round - 1])
        self.rpc_log.add(rpc_record("draft", ended, asked, answer.telemetry), answer.session)

    def protocol_error(self, why: object) -> DrafterLost:
        """Cancels the request after an invalid answer and returns the error to raise. `why`: what is invalid."""
        self._cancel_stream()
        return DrafterLost(f"{self._connection.peer} sent an invalid response: {why}")

    def close(self) -> None:
        """Ends the request. The session and its KV cache stay for the next request."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def end_session(self) -> None:
        """Ends the session."""
        self._cancel_stream()
        if self._session and self.lost_reason is None:
            self._connection.end_session(self._session)
        self._session = b""

    def _send(self, message: pb.DraftRequest) -> None:
        if self._stream is None:
            raise DrafterLost(self.lost_reason or "the draft has no open request")
        self._sent_at[self.round - 1] = time.time_ns()
        self._stream.send(message)

    def _cancel_stream(self) -> None:
        if self._stream is not None:
            self._stream.cancel()
            self._stream = None
