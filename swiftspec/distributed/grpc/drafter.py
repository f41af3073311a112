"""The drafter whose model a worker runs, on another machine or another device of this one.

A round takes one message each way, as on the bridge between two groups of ranks (bridge.py): the result goes over, the
worker re-roots and answers with the next proposal; while the target verifies that, the worker expands d times.
"""

from __future__ import annotations

import contextlib
import time

from swiftspec.config import EngineConfig
from swiftspec.distributed.bridge import LATE_ANSWER, OPEN_TIMEOUT, DrafterLate
from swiftspec.distributed.grpc import swiftspec_pb2 as pb
from swiftspec.distributed.grpc.convert import Identity, opening_to, read_proposal, result_to
from swiftspec.distributed.grpc.link import Link, Stream
from swiftspec.distributed.grpc.status import Refused, SessionGone, WorkerLost
from swiftspec.distributed.standing import Bounds, Standing
from swiftspec.errors import DrafterLost
from swiftspec.messages import Opening, Proposal, VerifyResult


class GrpcDrafter:
    """Every call may raise DrafterLost, and for whatever the worker says that it should not, nothing else; `propose`
    DrafterLate, after which it may be asked again.

    `gone`: why there is no worker, until `attach` gives one; `answer_timeout`, `open_timeout`: seconds that a proposal
    may take, and the first of a request.
    """

    def __init__(self, link: Link[pb.DraftAnswer], shape: EngineConfig, bounds: Bounds, answer_timeout: float) -> None:
        """`shape`: of the rounds; a worker refuses one that it has no room for."""
        self.busy = 0.0
        self._link, self._shape = link, shape
        self._standing = Standing(bounds, shape.verify == "reject")
        self._session = b""
        self._stream: Stream[pb.DraftAnswer] | None = None  # of the request that is open
        self._steps, self._worker = shape.steps, Identity(b"", b"")
        self._round = 0
        self._held: Proposal | None = None  # an answer that was looked for, and not yet asked for
        self.gone: str | None = f"{link.peer} has not been reached"
        self.answer_timeout, self.open_timeout = answer_timeout, OPEN_TIMEOUT

    @property
    def draft_steps(self) -> int:
        """d, the expansions of a round."""
        return self._steps

    @draft_steps.setter
    def draft_steps(self, steps: int) -> None:
        """Goes with the next message."""
        self._steps = steps

    def attach(self, worker: Identity) -> None:
        """A worker that can be reached. It may know the session still; it is told the text in any case."""
        self._worker, self.gone = worker, None

    def open(self, opening: Opening) -> None:
        self._hang_up()
        if self.gone is not None:
            raise DrafterLost(self.gone)
        try:
            self._standing.open(opening)
            message = opening_to(opening, self._shape, self._worker)
        except ValueError as error:
            raise DrafterLost(f"the draft cannot be told of this request: {error}") from None
        self._round, self._held = 0, None
        self._stream = self._link.stream()
        self._send(pb.DraftRequest(session=self._session, draft_steps=self._steps, opening=message))

    def propose(self) -> Proposal:
        held, self._held = self._held, None
        return held or self._proposal(self.answer_timeout if self._round else self.open_timeout)

    def answered(self) -> bool:
        """Whether the proposal for the result told last is there. Does not wait for it."""
        with contextlib.suppress(DrafterLate):
            self._held = self._held or self._proposal(0.0)
        return self._held is not None

    def grow(self) -> None:
        pass  # it is growing already

    def observe(self, result: VerifyResult) -> None:
        self._round, self._held = result.round + 1, None
        try:
            self._standing.move(result)
        except ValueError as error:
            raise DrafterLost(f"the draft cannot be told of this result: {error}") from None
        told = result_to(result, whole=False)
        self._send(pb.DraftRequest(session=self._session, draft_steps=self._steps, result=told))

    def catch_up(self, result: VerifyResult) -> None:
        """Rounds without the draft, as the result of a long one."""
        self.observe(result)

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

    def _proposal(self, timeout: float) -> Proposal:
        """The next proposal that is asked for; those that came too late are passed over."""
        deadline = time.monotonic() + timeout
        while True:
            answer = self._recv(deadline - time.monotonic())
            self._session = answer.session
            self.busy += 1e-9 * max(answer.telemetry.model, 0)
            try:
                proposal = read_proposal(answer.proposal)
                if (proposal.request, proposal.round) == (self._standing.request, self._round):
                    self._standing.check(proposal)
                    return proposal
            except ValueError as error:
                self._hang_up()
                raise DrafterLost(f"{self._link.peer} sent what is no proposal of ours: {error}") from None

    def _recv(self, timeout: float) -> pb.DraftAnswer:
        if self._stream is None:
            raise DrafterLost(self.gone or "the draft has no request open")
        try:
            return self._stream.recv(timeout)
        except TimeoutError:
            raise DrafterLate(LATE_ANSWER) from None
        except (WorkerLost, SessionGone) as error:
            self._hang_up()
            self.gone = str(error)
            raise DrafterLost(self.gone) from None
        except Refused as error:
            self._hang_up()
            raise DrafterLost(str(error)) from None

    def _send(self, message: pb.DraftRequest) -> None:
        if self._stream is None:
            raise DrafterLost(self.gone or "the draft has no request open")
        self._stream.send(message)

    def _hang_up(self) -> None:
        if self._stream is not None:
            self._stream.cancel()
            self._stream = None
