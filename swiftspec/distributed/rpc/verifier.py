"""The verifier whose model a worker runs. The tokens stay here too: a worker that has lost them reads them again."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from swiftspec.config import EngineConfig
from swiftspec.distributed.group.request_state import ModelLimits, RequestState
from swiftspec.distributed.rpc import swiftspec_pb2 as pb
from swiftspec.distributed.rpc.connection import MessageStream, WorkerConnection, hop_of
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

PREFILL_TIMEOUT_FACTOR = 10.0  # an opening, which reads the prompt, may take as many times as long as a round
RETRY_DELAY_S = 0.2  # seconds between two attempts to reach a worker
POLL_S = 2e-3  # seconds between two looks at what else there is to do while an answer is waited for


class GrpcVerifier:
    """It is its own `PendingVerification`, as there is one verification at a time.

    A worker that is lost on the way is asked again, for the same round, until the deadline: one that has answered gives
    the same answer, one that was started anew is told the text so far. At the deadline, and at whatever a worker
    refuses, the request ends with a UserError. `meanwhile` is called again and again while a result is waited for.
    `rpc_log`: where each exchange is noted.
    """

    def __init__(
        self,
        link: WorkerConnection[pb.VerifyAnswer],
        worker: ModelIdentity,
        shape: EngineConfig,
        bounds: ModelLimits,
        timeout: float,
    ) -> None:
        """`worker`: as it has told of itself; another one in its place is refused. `timeout`: seconds of a round."""
        self.busy, self.rpc_log, self._sent_at = 0.0, RpcLog(), 0
        self.while_waiting: Callable[[], None] | None = None
        self._connection, self._worker, self._shape, self._timeout = link, worker, shape, timeout
        self._state = RequestState(bounds)
        self._session = b""
        self._stream: MessageStream[pb.VerifyAnswer] | None = None  # of the request that is open
        self._proposal_sent = False  # whether the proposal has gone down that stream
        self._deadline = 0.0

    def open(self, opening: RequestStart) -> int:
        self._cancel_stream()
        try:
            self._state.open(opening)
        except ValueError as error:
            raise UserError(f"{self._connection.peer} cannot be told of this request: {error}") from None
        self._opening, self._verified = opening, list(opening.tokens)
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
        known, read_again = True, False  # whether the worker knows the request; whether it was told of it once more
        while True:
            try:
                if not known:
                    self._open()
                    known = True
                if not self._proposal_sent:
                    self._send_proposal()
                return self._recv_result()
            except SessionGone as error:
                self._cancel_stream()
                if read_again:
                    raise UserError(f"{error}; it has too few sessions for all who ask") from None
                self._deadline = time.monotonic() + PREFILL_TIMEOUT_FACTOR * self._timeout
                known, read_again = False, True
            except WorkerLost as error:
                self._wait_before_retry(error)

    def settle(self) -> None:
        pass  # the worker does so once it has answered

    def close(self) -> None:
        """Ends the request; the session and its cache stay for the next one."""
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
        """Tells the worker of the text so far. Returns how many of its tokens it need not read."""
        opening = replace(self._opening, tokens=tuple(self._verified))
        if len(self._verified) > len(self._opening.tokens):  # what is to be said of the prompt has been said
            opening = replace(opening, sampling=replace(opening.sampling, prompt_logprobs=None), num_cached_tokens=None)
        try:
            message = request_start_to_proto(opening, self._shape, self._worker)
        except ValueError as error:
            raise UserError(f"{self._connection.peer} cannot be told of this request: {error}") from None
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
            raise UserError(f"{self._connection.peer} sent what is no result of ours: {error}") from None
        self._proposal_sent = False
        self._verified += result.tokens
        return result

    def _send(self, message: pb.VerifyRequest) -> None:
        if self._stream is None:
            self._stream = self._connection.stream()
        self._sent_at = time.time_ns()
        self._stream.send(message)

    def _recv(self, meanwhile: Callable[[], None] | None = None) -> pb.VerifyAnswer:
        """The next answer. Raises UserError at the deadline, and what the worker says."""
        assert self._stream is not None, "nothing was asked"
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
                late = f"{self._connection.peer} did not answer in time: ask again, or raise --remote-timeout"
                raise UserError(late) from None
        self.busy += 1e-9 * max(answer.telemetry.model, 0)
        round_ = answer.result.round if answer.HasField("result") else -1
        self.rpc_log.add(hop_of("target", round_, self._sent_at, answer.telemetry), answer.session)
        return answer

    def _wait_before_retry(self, error: WorkerLost) -> None:
        """Before another attempt. Raises UserError where there is no time for one."""
        self._cancel_stream()
        if time.monotonic() + RETRY_DELAY_S >= self._deadline:
            raise UserError(f"{error}; start the worker again, then ask again") from None
        time.sleep(RETRY_DELAY_S)

    def _cancel_stream(self) -> None:
        self._proposal_sent = False
        if self._stream is not None:
            self._stream.cancel()
            self._stream = None
