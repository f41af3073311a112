"""Client of a drafter in another process: of the draft group, on the target's leader (paper section 3.1), or of a draft
worker.

A round takes one message in each direction. The client sends the result; the draft re-roots its tree, answers with the
next proposal, and expands its tree d times while the target verifies the proposal. In mode async a draft worker answers
with tree deltas instead, from which a replica of its tree proposes (`ReplicaDrafter`). Answers to earlier rounds and
requests are discarded.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial

from swiftspec.control.step_times import DraftTimes
from swiftspec.distributed.remote.server_link import LATE_DRAIN_S, RequestRefused, ServerLink
from swiftspec.distributed.remote.sessions import SessionGone
from swiftspec.distributed.remote.trace_codec import unpack_record
from swiftspec.distributed.transport.codec import Words, pack_message, unpack_proposal, unpack_tree_delta
from swiftspec.distributed.transport.opcodes import Opcode
from swiftspec.distributed.transport.request_state import RequestState
from swiftspec.distributed.transport.transport import Transport
from swiftspec.errors import DrafterLost, UserError
from swiftspec.messages import Proposal, RequestStart, VerifyResult
from swiftspec.observe.recorder import Recorder
from swiftspec.observe.rpc_latency import RpcLog
from swiftspec.tree.replica import TreeDelta

ANSWER_TIMEOUT_S = 10.0  # seconds; the longest wait for a proposal
OPEN_TIMEOUT_S = 60.0  # seconds; the longest wait for the first proposal, which includes the prefill
# Seconds that a request waits for its first proposal while others run, which wait with it. Until the draft group has
# prefilled its prompt, it is decoded without the draft.
JOINT_OPEN_TIMEOUT_S = 0.02
MAX_REASON_CHARS = 300  # characters of an error message from the draft
ANSWER_OPCODES = (Opcode.PROPOSAL, Opcode.TREE_DELTA, Opcode.STEP_TIMES, Opcode.SESSION_ATTACHED)
LATE_MESSAGE = "the draft did not answer in time"
LAST_ROUND_TIMEOUT_S = 1.0  # seconds to wait for the trace record of a request's last round


class DrafterLate(DrafterLost):
    """The draft has not answered in time; its answer may still arrive."""


class DraftLink:
    """Connection to a drafter in another process, with the state of the open request.

    Every call raises DrafterLost if the connection is lost or the draft sends an invalid message.

    `lost_reason`: the reason why the draft cannot be used; None while it can, and again after `attach`.
    `answer_timeout_s`, `open_timeout_s`: longest wait in seconds for a proposal, and for the first proposal of a
        request. That one follows the prefill, also if the request was opened after some rounds without the draft.
    `recorder`: receives the trace records that the draft sends while tracing is on.
    """

    def __init__(
        self,
        server: ServerLink,
        *,
        lost_reason: str | None = None,
        answer_timeout_s: float = ANSWER_TIMEOUT_S,
        open_timeout_s: float = OPEN_TIMEOUT_S,
        recorder: Recorder | None = None,
        in_company: Callable[[], bool] = lambda: False,
    ) -> None:
        """`in_company`: returns whether other requests run, which wait for the answers of this one."""
        self.lost_reason, self.recorder, self._in_company = lost_reason, recorder, in_company
        self.answer_timeout_s, self.open_timeout_s = answer_timeout_s, open_timeout_s
        self._server, self._tracing = server, False
        self._opened_at = 0.0  # `time.monotonic` time
        self.awaits_first_answer = False  # whether a request was sent that the draft has not answered yet

    @property
    def busy(self) -> float:
        """Seconds of the draft's forwards, as far as this process knows."""
        return self._server.busy

    @property
    def rpc_log(self) -> RpcLog:
        """Latency records of a worker's answers."""
        return self._server.rpc_log

    @property
    def state(self) -> RequestState:
        """State of the open request."""
        return self._server.state

    @property
    def is_opening(self) -> bool:
        """Whether other requests run, and the draft may still be prefilling the prompt of this one."""
        waiting = self.awaits_first_answer and self._in_company()
        return waiting and time.monotonic() - self._opened_at < self.open_timeout_s

    @property
    def timeout_s(self) -> float:
        """Longest wait for the next proposal, in seconds."""
        if self.is_opening:
            return JOINT_OPEN_TIMEOUT_S
        return self.open_timeout_s if self.awaits_first_answer and not self._in_company() else self.answer_timeout_s

    def note_answer(self, request: int) -> None:
        """Records that the draft has sent a proposal or a tree delta of a request."""
        if request == self.state.request:
            self.awaits_first_answer = False

    def attach(self, transport: Transport) -> None:
        """Replaces the lost connection by `transport`, to a draft that has no open request."""
        self._server.attach(transport)
        self.lost_reason, self.awaits_first_answer = None, False
        if self._tracing:
            self.send(Opcode.SET_TRACE, [1])

    def open(self, start: RequestStart, steps: int | None) -> None:
        """Opens a request. `steps`: its first d; None if the request itself determines it."""
        try:
            self.state.open(start)
        except ValueError as error:
            raise DrafterLost(f"this request cannot be sent to the draft: {error}") from None
        self.awaits_first_answer, self._opened_at = True, time.monotonic()
        self._send_all(
            [
                *([] if steps is None else [(Opcode.SET_DRAFT_STEPS, [steps])]),
                (Opcode.DRAFTER_OPEN, pack_message(start)),
            ],
            restart=True,
        )

    def send_result(self, result: VerifyResult, steps: int | None = None) -> None:
        """Sends a result. `steps`: the d of all later expansions; None if it has not changed."""
        try:
            self.state.advance(result)
        except ValueError as error:
            raise DrafterLost(f"this result cannot be sent to the draft: {error}") from None
        if steps is not None:
            self.send(Opcode.SET_DRAFT_STEPS, [steps])
        self.send(Opcode.OBSERVE, pack_message(result))

    def send(self, kind: Opcode, words: Sequence[int] = ()) -> None:
        self._send_all([(kind, words)])

    def set_trace(self, on: bool) -> None:
        """Makes the draft send trace records of its rounds, or stop that, from the next request on."""
        self._tracing = on
        with contextlib.suppress(DrafterLost):  # `attach` sends it on the next connection
            self.send(Opcode.SET_TRACE, [int(on)])

    def recv(self, wanted: Opcode, deadline: float | None) -> Words:
        """Receives the next message with opcode `wanted` and returns its words.

        Raises DrafterLate at `deadline`, a `time.monotonic` time; None means that the call does not block. Raises
        DrafterLost if the draft reports an error.
        """
        end = time.monotonic() if deadline is None else deadline
        while True:
            if self.lost_reason is not None:
                raise DrafterLost(self.lost_reason)
            try:
                kind, words = self._server.recv(end)
                if kind == wanted:
                    return words
                if kind == Opcode.TRACE_RECORD:
                    self._record(words)
                elif kind not in ANSWER_OPCODES:
                    raise ValueError(f"unexpected opcode {kind}")
                if time.monotonic() > end + LATE_DRAIN_S:  # even if the draft keeps sending other messages
                    raise TimeoutError
            except TimeoutError:
                raise DrafterLate(LATE_MESSAGE) from None
            except (ConnectionError, SessionGone) as error:
                raise self._disconnect(str(error)) from None
            except (RequestRefused, UserError) as error:
                raise DrafterLost(str(error)[:MAX_REASON_CHARS]) from None
            except ValueError as error:
                raise self.protocol_error(error) from None

    def drain_trace(self, round_: int) -> None:
        """Receives trace records until the record of round `round_` has arrived, for at most LAST_ROUND_TIMEOUT_S.
        Discards other messages, since the request has ended. Does nothing while other requests run, which would
        wait."""
        assert self.recorder is not None
        if self._in_company():
            return
        deadline = time.monotonic() + LAST_ROUND_TIMEOUT_S
        with contextlib.suppress(ConnectionError, TimeoutError, ValueError, RequestRefused):
            # without the record, the trace lacks the draft's timeline of this round
            while self.recorder.awaits_draft(round_) and time.monotonic() < deadline:
                kind, words = self._server.recv(deadline)
                if kind == Opcode.TRACE_RECORD:
                    self._record(words)

    def protocol_error(self, why: object) -> DrafterLost:
        """Ends the request after an invalid message and returns the error to raise. `why`: what is invalid."""
        self._server.transport.restart()
        return DrafterLost(f"{self._server.transport.peer} sent an invalid message: {why}")

    def close(self) -> None:
        """Ends the request. A worker keeps the session and its KV cache for the next request."""
        self.send(Opcode.DRAFTER_CLOSE)

    def end_session(self) -> None:
        """Ends the session on a worker."""
        if self.lost_reason is None:
            self._server.end_session()

    def _record(self, words: Words) -> None:
        """Gives a trace record to the recorder. It is decoded only when it is written, because the target waits during
        this call."""
        if len(words) < 2:
            raise ValueError("a trace record lacks its round")
        if self.recorder is not None:
            self.recorder.draft(words[0], words[1], partial(unpack_record, words, self.state.limits.vocab_size))

    def _send_all(self, messages: Sequence[tuple[Opcode, Sequence[int]]], *, restart: bool = False) -> None:
        if self.lost_reason is not None:
            raise DrafterLost(self.lost_reason)
        try:
            if restart:
                self._server.restart()
            for kind, words in messages:
                self._server.send(kind, words)
        except ConnectionError as error:
            raise self._disconnect(str(error)) from None

    def _disconnect(self, reason: str) -> DrafterLost:
        """Closes the connection, so that a draft that is alive detects the loss. Returns the error to raise."""
        if self.lost_reason is None:
            self.lost_reason = reason
            self._server.transport.close()
        return DrafterLost(reason)


class RemoteDrafter:
    """Drafter in another process, which answers each result with a proposal.

    Every call raises DrafterLost if the draft is lost or sends an invalid message. `propose` raises DrafterLate on a
    timeout; it can then be called again.

    `draft_steps`: d, the number of expansions per round. It is sent with the next result.
    """

    lost_reason = None  # each call raises DrafterLost instead

    def __init__(self, link: DraftLink, steps: int) -> None:
        """`steps`: initial d."""
        self.link, self.draft_steps = link, steps
        self._sent_steps = steps  # d that the draft uses
        self._buffered: Proposal | None = None  # an answer that `poll` has received for `propose`
        if link.recorder is not None:
            link.recorder.drain = link.drain_trace

    @property
    def busy(self) -> float:
        return self.link.busy

    def open(self, start: RequestStart) -> None:
        self._buffered, self._sent_steps = None, self.draft_steps
        self.link.open(start, self.draft_steps)

    def propose(self) -> Proposal:
        held, self._buffered = self._buffered, None
        return held or self._recv_proposal(time.monotonic() + self.link.timeout_s)

    def poll(self) -> bool:
        """Returns whether the proposal that follows the last result has arrived. Does not block."""
        with contextlib.suppress(DrafterLate):
            self._buffered = self._buffered or self._recv_proposal(None)
        return self._buffered is not None

    def grow(self) -> None:
        pass  # the draft expands without a request

    def observe(self, result: VerifyResult) -> None:
        self._buffered = None
        steps = None if self._sent_steps == self.draft_steps else self.draft_steps
        self._sent_steps = self.draft_steps
        self.link.send_result(result, steps)

    def catch_up(self, result: VerifyResult) -> None:
        """Sends `result`, which merges the rounds that were decoded without the draft."""
        self.observe(result)

    def close(self) -> None:
        self.link.close()

    def measure(self, room: int) -> None:
        """Requests a measurement of the draft's step times, in a context of at most `room` tokens."""
        self.link.send(Opcode.SET_DRAFT_STEPS, [self.draft_steps])
        self.link.send(Opcode.MEASURE_STEP, [room])

    def times(self) -> DraftTimes:
        """Returns the step times that `measure` has requested. Blocks until they arrive; raises DrafterLate after the
        timeout for a first proposal."""
        words = self.link.recv(Opcode.STEP_TIMES, time.monotonic() + self.link.open_timeout_s)
        if len(words) != 2 or words[0] < 0 or words[1] < 1:
            raise self.link.protocol_error(f"step times of {len(words)} words are invalid")
        return DraftTimes(words[0] * 1e-6, words[1] * 1e-6)

    def _recv_proposal(self, deadline: float | None) -> Proposal:
        """Returns the proposal of the current round; discards late proposals of earlier rounds and requests."""
        state = self.link.state
        while True:
            words = self.link.recv(Opcode.PROPOSAL, deadline)
            try:
                proposal = unpack_proposal(words)
                self.link.note_answer(proposal.request)
                if state.is_current(proposal):
                    state.check_proposal(proposal)
                    return proposal
            except ValueError as error:
                raise self.link.protocol_error(error) from None


class RemoteTreeDeltaLink:
    """A `TreeDeltaLink` (runtime/replica_drafter.py) to a draft worker."""

    def __init__(self, link: DraftLink) -> None:
        self._link = link

    @property
    def busy(self) -> float:
        return self._link.busy

    @property
    def answer_timeout_s(self) -> float:
        return self._link.timeout_s

    def open(self, start: RequestStart) -> None:
        self._link.open(start, None)

    def send(self, result: VerifyResult) -> None:
        self._link.send_result(result)

    def receive(self, deadline: float | None) -> TreeDelta | None:
        """Returns the next tree delta. Raises DrafterLate if it has not arrived at `deadline`, a `time.monotonic` time.
        Without a deadline, returns None if no tree delta has arrived yet."""
        try:
            delta = unpack_tree_delta(self._link.recv(Opcode.TREE_DELTA, deadline))
            self._link.note_answer(delta.request)
            return delta
        except DrafterLate:
            if deadline is None:
                return None
            raise
        except ValueError as error:
            raise self._link.protocol_error(error) from None

    def close(self) -> None:
        self._link.close()
