"""The verifier whose model a worker runs. The tokens stay here too: a worker that has lost them reads them again."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from swiftspec.config import EngineConfig
from swiftspec.distributed.group.request_state import Bounds, Standing
from swiftspec.distributed.rpc import swiftspec_pb2 as pb
from swiftspec.distributed.rpc.connection import Link, Stream, hop_of
from swiftspec.distributed.rpc.protobuf_codec import Identity, check_result, opening_to, proposal_to, read_result
from swiftspec.distributed.rpc.status import SessionGone, WorkerLost
from swiftspec.errors import UserError
from swiftspec.messages import Opening, Proposal, VerifyResult
from swiftspec.observe.rpc_latency import Hops
from swiftspec.runtime.verifier import Pending

READING = 10.0  # an opening, which reads the prompt, may take as many times as long as a round
PAUSE = 0.2  # seconds between two attempts to reach a worker
LOOK = 2e-3  # seconds between two looks at what else there is to do while an answer is waited for


class GrpcVerifier:
    """It is its own `Pending`, as there is one verification at a time.

    A worker that is lost on the way is asked again, for the same round, until the deadline: one that has answered gives
    the same answer, one that was started anew is told the text so far. At the deadline, and at whatever a worker
    refuses, the request ends with a UserError. `meanwhile` is called again and again while a result is waited for.
    `hops`: where each exchange is noted.
    """

    def __init__(
        self, link: Link[pb.VerifyAnswer], worker: Identity, shape: EngineConfig, bounds: Bounds, timeout: float
    ) -> None:
        """`worker`: as it has told of itself; another one in its place is refused. `timeout`: seconds of a round."""
        self.busy, self.hops, self._sent_at = 0.0, Hops(), 0
        self.meanwhile: Callable[[], None] | None = None
        self._link, self._worker, self._shape, self._timeout = link, worker, shape, timeout
        self._standing = Standing(bounds)
        self._session = b""
        self._stream: Stream[pb.VerifyAnswer] | None = None  # of the request that is open
        self._asked = False  # whether the proposal has gone down that stream
        self._deadline = 0.0

    def open(self, opening: Opening) -> int:
        self._hang_up()
        try:
            self._standing.open(opening)
        except ValueError as error:
            raise UserError(f"{self._link.peer} cannot be told of this request: {error}") from None
        self._opening, self._verified = opening, list(opening.tokens)
        self._deadline = time.monotonic() + READING * self._timeout
        while True:
            try:
                return self._open()
            except WorkerLost as error:
                self._before_another(error)

    def submit(self, proposal: Proposal) -> Pending:
        self._proposal = proposal
        self._deadline = time.monotonic() + self._timeout
        self._ask()
        return self

    def wait(self) -> VerifyResult:
        known, read_again = True, False  # whether the worker knows the request; whether it was told of it once more
        while True:
            try:
                if not known:
                    self._open()
                    known = True
                if not self._asked:
                    self._ask()
                return self._result()
            except SessionGone as error:
                self._hang_up()
                if read_again:
                    raise UserError(f"{error}; it has too few sessions for all who ask") from None
                self._deadline = time.monotonic() + READING * self._timeout
                known, read_again = False, True
            except WorkerLost as error:
                self._before_another(error)

    def settle(self) -> None:
        pass  # the worker does so once it has answered

    def close(self) -> None:
        """Ends the request; the session and its cache stay for the next one."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def leave(self) -> None:
        """Ends the session."""
        self._hang_up()
        if self._session:
            self._link.end(self._session)
        self._session = b""

    def _open(self) -> int:
        """Tells the worker of the text so far. Returns how many of its tokens it need not read."""
        opening = replace(self._opening, tokens=tuple(self._verified))
        if len(self._verified) > len(self._opening.tokens):  # what is to be said of the prompt has been said
            opening = replace(opening, sampling=replace(opening.sampling, prompt_logprobs=None), kept=None)
        try:
            message = opening_to(opening, self._shape, self._worker)
        except ValueError as error:
            raise UserError(f"{self._link.peer} cannot be told of this request: {error}") from None
        self._send(pb.VerifyRequest(session=self._session, opening=message))
        answer = self._recv()
        self._session = answer.session
        return answer.opened.kept

    def _ask(self) -> None:
        self._send(pb.VerifyRequest(session=self._session, proposal=proposal_to(self._proposal)))
        self._asked = True

    def _result(self) -> VerifyResult:
        answer = self._recv(self.meanwhile)
        try:
            result = read_result(answer.result)
            check_result(result, self._proposal)
            self._standing.move(result)
        except ValueError as error:
            self._hang_up()
            raise UserError(f"{self._link.peer} sent what is no result of ours: {error}") from None
        self._asked = False
        self._verified += result.tokens
        return result

    def _send(self, message: pb.VerifyRequest) -> None:
        if self._stream is None:
            self._stream = self._link.stream()
        self._sent_at = time.time_ns()
        self._stream.send(message)

    def _recv(self, meanwhile: Callable[[], None] | None = None) -> pb.VerifyAnswer:
        """The next answer. Raises UserError at the deadline, and what the worker says."""
        assert self._stream is not None, "nothing was asked"
        while True:
            left = self._deadline - time.monotonic()
            try:
                answer = self._stream.recv(left if meanwhile is None else min(left, LOOK))
                break
            except TimeoutError:
                if meanwhile is not None and left > LOOK:
                    meanwhile()
                    continue
                self._hang_up()
                late = f"{self._link.peer} did not answer in time: ask again, or raise --remote-timeout"
                raise UserError(late) from None
        self.busy += 1e-9 * max(answer.telemetry.model, 0)
        round_ = answer.result.round if answer.HasField("result") else -1
        self.hops.add(hop_of("target", round_, self._sent_at, answer.telemetry), answer.session)
        return answer

    def _before_another(self, error: WorkerLost) -> None:
        """Before another attempt. Raises UserError where there is no time for one."""
        self._hang_up()
        if time.monotonic() + PAUSE >= self._deadline:
            raise UserError(f"{error}; start the worker again, then ask again") from None
        time.sleep(PAUSE)

    def _hang_up(self) -> None:
        self._asked = False
        if self._stream is not None:
            self._stream.cancel()
            self._stream = None
