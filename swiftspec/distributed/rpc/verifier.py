"""Verifier whose model runs on a worker. It stores the verified tokens, so that a restarted worker can prefill them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from swiftspec.config import EngineConfig
from swiftspec.distributed.group.request_state import ModelLimits, RequestState
from swiftspec.distributed.rpc import swiftspec_pb2 as pb
from swiftspec.distributed.rpc.connection import MessageStream, WorkerConnection, rpc_record
from swiftspec.distributed.rpc.protobuf_codec import (
    ModelIdentity,
    check_result,
    proposal_to_proto,
    request_start_to_proto,
    result_from_proto,
)
from swiftspec.distributed.rpc.status import SessionGone, WorkerLost
from swiftspec.errors import UserError
from swiftspec.messages import Proposal, RequestStart, VerifyResult
from swiftspec.observe.rpc_latency import RpcLog
from swiftspec.runtime.verifier import PendingVerification

PREFILL_TIMEOUT_FACTOR = 10.0  # timeout of a prefill, as a multiple of the timeout of a round
RETRY_DELAY_S = 0.2  # seconds between two attempts to reach a lost worker
POLL_S = 2e-3  # seconds between two calls of `while_waiting`


class GrpcVerifier:
    """Verifier on a worker. It is its own `PendingVerification`, since there is one verification at a time.

    If the worker is lost, the round is repeated until the deadline: a worker that has already verified the proposal
    returns the same answer, and a restarted worker first receives all tokens so far. Raises UserError at the deadline,
    or if the worker refuses the request.

    `while_waiting`: called periodically while `wait` blocks.
    `rpc_log`: latency records of all answers.
    """

    def __init__(
        self,
        link: WorkerConnection[pb.VerifyAnswer],
        worker: ModelIdentity,
        shape: EngineConfig,
        bounds: ModelLimits,
        timeout: float,
    ) -> None:
        """`worker`: identity that the worker must have. `timeout`: seconds for one round."""
        self.busy, self.rpc_log, self._sent_at = 0.0, RpcLog(), 0
        self.while_waiting: Callable[[], None] | None = None
        self._connection, self._worker, self._shape, self._timeout = link, worker, shape, timeout
        self._state = RequestState(bounds)
        self._session = b""
        self._stream: MessageStream[pb.VerifyAnswer] | None = None  # stream of the open request
        self._proposal_sent = False  # whether the proposal was sent on that stream
        self._deadline = 0.0

    def open(self, start: RequestStart) -> int:
        self._cancel_stream()
        try:
            self._state.open(start)
        except ValueError as error:
            raise UserError(f"this request cannot be sent to {self._connection.peer}: {error}") from None
        self._opening, self._verified = start, list(start.tokens)
        self._deadline = time.monotonic() + PREFILL_TIMEOUT_FACTOR * self._timeout
        while True:
            try:
                return self._open()
            except WorkerLost as error:
                self._wait_before_retry(error)

    def submit(self, proposal: Proposal) -> PendingVerification:
        self._proposal = proposal
        self._deadline = time.monotonic() + self._timeout
        self._send_proposal()
        return self

    def wait(self) -> VerifyResult:
        known, read_again = True, False  # whether the worker has the request open; whether it was reopened
        while True:
            try:
                if not known:
                    self._open()
                    known = True
                if not self._proposal_sent:
                    self._send_proposal()
                return self._recv_result()
            except SessionGone:
                self._cancel_stream()
                if read_again:
                    raise UserError(
                        f"{self._connection.peer} ended this session twice, because other clients use all its sessions:"
                        " start it with a larger --max-sessions, or try again later"
                    ) from None
                self._deadline = time.monotonic() + PREFILL_TIMEOUT_FACTOR * self._timeout
                known, read_again = False, True
            except WorkerLost as error:
                self._wait_before_retry(error)

    def settle(self) -> None:
        pass  # the worker settles after its answer

    def close(self) -> None:
        """Ends the request. The session and its KV cache stay for the next request."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def end_session(self) -> None:
        """Ends the session."""
        self._cancel_stream()
        if self._session:
            self._connection.end_session(self._session)
        self._session = b""

    def _open(self) -> int:
        """Sends all tokens so far to the worker, which prefills them. Returns the number of cached tokens."""
        start = replace(self._opening, tokens=tuple(self._verified))
        if len(self._verified) > len(self._opening.tokens):  # the prompt's logprobs were returned already
            start = replace(start, sampling=replace(start.sampling, prompt_logprobs=None), num_cached_tokens=None)
        try:
            message = request_start_to_proto(start, self._shape, self._worker)
        except ValueError as error:
            raise UserError(f"this request cannot be sent to {self._connection.peer}: {error}") from None
        self._send(pb.VerifyRequest(session=self._session, opening=message))
        answer = self._recv()
        self._session = answer.session
        return answer.opened.kept

    def _send_proposal(self) -> None:
        self._send(pb.VerifyRequest(session=self._session, proposal=proposal_to_proto(self._proposal)))
        self._proposal_sent = True

    def _recv_result(self) -> VerifyResult:
        answer = self._recv(self.while_waiting)
        try:
            result = result_from_proto(answer.result)
            check_result(result, self._proposal)
            self._state.advance(result)
        except ValueError as error:
            self._cancel_stream()
            raise UserError(f"{self._connection.peer} sent an invalid result: {error}") from None
        self._proposal_sent = False
        self._verified += result.tokens
        return result

    def _send(self, message: pb.VerifyRequest) -> None:
        if self._stream is None:
            self._stream = self._connection.stream()
        self._sent_at = time.time_ns()
        self._stream.send(message)

    def _recv(self, meanwhile: Callable[[], None] | None = None) -> pb.VerifyAnswer:
        """Returns the next answer. Raises UserError at the deadline, and the errors of `MessageStream.recv`.
        `meanwhile`: called periodically while the call blocks."""
        assert self._stream is not None, "no request was sent"
        while True:
            left = self._deadline - time.monotonic()
            try:
                answer = self._stream.recv(left if meanwhile is None else min(left, POLL_S))
                break
            except TimeoutError:
                if meanwhile is not None and left > POLL_S:
                    meanwhile()
                    continue
                self._cancel_stream()
                late = (
                    f"{self._connection.peer} did not answer in time: send the request again, or raise --remote-timeout"
                )
                raise UserError(late) from None
        self.busy += 1e-9 * max(answer.telemetry.model, 0)
        round_ = answer.result.round if answer.HasField("result") else -1
        self.rpc_log.add(rpc_record("target", round_, self._sent_at, answer.telemetry), answer.session)
        return answer

    def _wait_before_retry(self, error: WorkerLost) -> None:
        """Sleeps before another attempt. Raises UserError if the deadline does not allow one."""
        self._cancel_stream()
        if time.monotonic() + RETRY_DELAY_S >= self._deadline:
            raise UserError(f"{error}; restart the worker, then send the request again") from None
        time.sleep(RETRY_DELAY_S)

    def _cancel_stream(self) -> None:
        self._proposal_sent = False
        if self._stream is not None:
            self._stream.cancel()
            self._stream = None
