"""Verifier whose model runs on a worker. It stores the verified tokens, so that a restarted worker can prefill them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from swiftspec.distributed.remote.server_link import RequestRefused, ServerLink
from swiftspec.distributed.remote.session_messages import SessionStart
from swiftspec.distributed.remote.sessions import SessionGone
from swiftspec.distributed.transport.codec import Words, pack_message, unpack_scored_result
from swiftspec.distributed.transport.opcodes import Opcode
from swiftspec.distributed.transport.request_state import ModelLimits, RequestState, check_result
from swiftspec.distributed.transport.transport import Transport
from swiftspec.errors import UserError, WorkerUnavailable
from swiftspec.messages import Proposal, RequestStart, VerifyResult
from swiftspec.observe.rpc_latency import RpcLog
from swiftspec.runtime.verifier import PendingVerification

PREFILL_TIMEOUT_FACTOR = 10.0  # timeout of a prefill, as a multiple of the timeout of a round
RETRY_DELAY_S = 0.2  # seconds between two attempts to reach a lost worker
POLL_S = 2e-3  # seconds between two calls of `while_waiting`


class RemoteVerifier:
    """Verifier on a worker. It is its own `PendingVerification`, since there is one verification at a time.

    If the worker is lost, the round is repeated until the deadline: a worker that has already verified the proposal
    returns the same answer, and a restarted worker first receives all tokens so far. A prefill is repeated for as long
    as a round. Raises WorkerUnavailable at the deadline, and UserError if the worker refuses the request.

    `while_waiting`: called periodically while `wait` blocks.
    """

    def __init__(self, transport: Transport, session: SessionStart, limits: ModelLimits, timeout: float) -> None:
        """`timeout`: seconds for one round."""
        self.while_waiting: Callable[[], None] | None = None
        self._link = ServerLink(transport, RequestState(limits), "target", session)
        self._peer, self._timeout = transport.peer, timeout
        self._in_sync = self._proposal_sent = False  # whether the stream's session has the open request; the proposal
        self._deadline = 0.0

    @property
    def busy(self) -> float:
        return self._link.busy

    @property
    def rpc_log(self) -> RpcLog:
        """Latency records of all answers."""
        return self._link.rpc_log

    @rpc_log.setter
    def rpc_log(self, log: RpcLog) -> None:
        self._link.rpc_log = log

    def open(self, start: RequestStart) -> int:
        try:
            self._link.state.open(start)
        except ValueError as error:
            raise UserError(f"this request cannot be sent to {self._peer}: {error}") from None
        self._start, self._verified = start, list(start.tokens)
        self._deadline = time.monotonic() + PREFILL_TIMEOUT_FACTOR * self._timeout
        lost_at: float | None = None
        while True:
            try:
                return self._open()
            except ConnectionError as error:
                lost_at = time.monotonic() if lost_at is None else lost_at
                self._wait_before_retry(error, min(self._deadline, lost_at + self._timeout))
            except SessionGone as error:  # another client has used the session's memory before the prefill
                raise WorkerUnavailable(str(error)) from None

    def submit(self, proposal: Proposal) -> PendingVerification:
        self._proposal = proposal
        self._deadline = time.monotonic() + self._timeout
        if self._in_sync:
            self._send_proposal()
        return self

    def wait(self) -> VerifyResult:
        known, reopened = True, False  # whether the worker may have the request open; whether it was opened again
        while True:
            try:
                if not known:
                    self._open()
                    known = True
                elif not self._in_sync:
                    self._resume()
                if not self._proposal_sent:
                    self._send_proposal()
                return self._recv_result()
            except SessionGone:
                self._cancel()
                if reopened:
                    raise WorkerUnavailable(
                        f"{self._peer} ended this session twice, because other clients use all its sessions:"
                        " start it with a larger --max-sessions, or try again later"
                    ) from None
                self._deadline = time.monotonic() + PREFILL_TIMEOUT_FACTOR * self._timeout
                known, reopened = False, True
            except ConnectionError as error:
                self._wait_before_retry(error, self._deadline)

    def settle(self) -> None:
        pass  # the worker settles after its answer

    def close(self) -> None:
        """Ends the request. The session and its KV cache stay for the next request."""
        if self._in_sync:
            self._link.send(Opcode.VERIFIER_CLOSE)
        self._in_sync = self._proposal_sent = False

    def end_session(self) -> None:
        """Ends the session."""
        self._link.end_session()

    def _open(self) -> int:
        """Sends all tokens so far to the worker, which prefills them. Returns the number of cached tokens."""
        start = replace(self._start, tokens=tuple(self._verified))
        if len(self._verified) > len(self._start.tokens):  # the prompt's logprobs were returned already
            start = replace(start, sampling=replace(start.sampling, prompt_logprobs=None))
        self._proposal_sent = False
        self._link.restart()
        self._link.send(Opcode.VERIFIER_OPEN, pack_message(start))
        words = self._recv(Opcode.REQUEST_OPENED)
        if len(words) != 4 or not 0 <= words[3] <= len(start.tokens):
            raise self._invalid("answer", "the number of cached tokens")
        self._in_sync = True
        return words[3]

    def _resume(self) -> None:
        """Opens another stream to the session. Raises SessionGone if the worker no longer has it."""
        self._link.restart()
        self._recv(Opcode.SESSION_ATTACHED)
        if not self._link.resumed:
            raise SessionGone("the worker has opened another session")
        self._in_sync = True

    def _send_proposal(self) -> None:
        self._link.send(Opcode.VERIFY, pack_message(self._proposal))
        self._proposal_sent = True

    def _recv_result(self) -> VerifyResult:
        words = self._recv(Opcode.RESULT, self.while_waiting)
        try:
            result = unpack_scored_result(words)
            check_result(result, self._proposal)
            self._link.state.advance(result)
        except ValueError as error:
            raise self._invalid("result", error) from None
        self._proposal_sent = False
        self._verified += result.tokens
        return result

    def _recv(self, wanted: Opcode, meanwhile: Callable[[], None] | None = None) -> Words:
        """Returns the body of the next answer with opcode `wanted`. Raises WorkerUnavailable at the deadline, and
        UserError if the worker refuses the request. `meanwhile`: called periodically while the call blocks."""
        while True:
            now = time.monotonic()
            until = self._deadline if meanwhile is None else min(self._deadline, now + POLL_S)
            try:
                kind, words = self._link.recv(until)
            except TimeoutError:
                if meanwhile is not None and self._deadline - now > POLL_S:
                    meanwhile()
                    continue
                self._cancel()
                raise WorkerUnavailable(
                    f"{self._peer} did not answer in time: send the request again, or raise --remote-timeout"
                ) from None
            except RequestRefused as error:
                self._cancel()
                raise UserError(str(error)) from None
            except ValueError as error:
                raise self._invalid("answer", error) from None
            if kind == wanted:
                return words
            if kind != Opcode.SESSION_ATTACHED:
                raise self._invalid("result", f"unexpected opcode {kind}")

    def _invalid(self, what: str, why: object) -> UserError:
        """Cancels the request and returns the error to raise after an invalid answer."""
        self._cancel()
        return UserError(f"{self._peer} sent an invalid {what}: {why}")

    def _wait_before_retry(self, error: ConnectionError, deadline: float) -> None:
        """Sleeps before another attempt. Raises WorkerUnavailable if the deadline does not allow one."""
        self._cancel()
        if time.monotonic() + RETRY_DELAY_S >= deadline:
            raise WorkerUnavailable(f"{error}; restart the worker, then send the request again") from None
        time.sleep(RETRY_DELAY_S)

    def _cancel(self) -> None:
        """Cancels the stream. The next message opens another one."""
        self._in_sync = self._proposal_sent = False
        self._link.transport.restart()
