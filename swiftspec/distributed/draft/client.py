"""Client of the draft group, on the target's leader (paper section 3.1).

A round takes one message in each direction. The client sends the result; the draft re-roots its tree and answers with
the next proposal, and expands d times while the target verifies it. Late answers, and answers to another request, are
discarded.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from functools import partial

from swiftspec.control.step_times import DraftTimes
from swiftspec.distributed.draft.trace_codec import unpack_record
from swiftspec.distributed.group.request_state import ModelLimits, RequestState, in_range
from swiftspec.distributed.transport.channel import Channel
from swiftspec.distributed.transport.codec import Words, pack_message, single_word, unpack_proposal, words_to_text
from swiftspec.distributed.transport.opcodes import Opcode
from swiftspec.errors import DrafterLost
from swiftspec.messages import Proposal, RequestStart, VerifyResult
from swiftspec.observe.recorder import Recorder

ANSWER_TIMEOUT_S = 10.0  # seconds; the longest wait for a proposal
OPEN_TIMEOUT_S = 60.0  # seconds; the longest wait for the first proposal, which includes the prefill
LATE_DRAIN_S = 1.0  # seconds after a deadline during which messages already received are still read
MAX_REASON_CHARS = 300  # characters of an error message from the draft
ANSWER_OPCODES = (Opcode.PROPOSAL, Opcode.STEP_TIMES, Opcode.ERROR, Opcode.TRACE_RECORD)
LATE_MESSAGE = "the draft group did not answer in time"
LAST_ROUND_TIMEOUT_S = 1.0  # seconds to wait for the trace record of a request's last round


class DrafterLate(DrafterLost):
    """The draft group has not answered in time; its answer may still arrive."""


class DraftGroupClient:
    """Drafter on the target's leader that forwards every call to the draft group.

    Every call raises DrafterLost if the connection is lost or the draft sends an invalid message. `propose` raises
    DrafterLate on a timeout; it can then be called again.

    `lost_reason`: why the connection is lost, until `attach` replaces it; else None.
    """

    def __init__(
        self,
        channel: Channel,
        steps: int,
        limits: ModelLimits,
        *,
        rejection_sampling: bool = False,
        answer_timeout_s: float = ANSWER_TIMEOUT_S,
        open_timeout_s: float = OPEN_TIMEOUT_S,
        recorder: Recorder | None = None,
    ) -> None:
        """`steps`: d at the start.

        `rejection_sampling`: proposals carry draft distributions.
        `recorder`: receives the trace records that the draft sends while tracing is on.
        """
        self.busy = 0.0
        self._steps, self._recorder, self._tracing = steps, recorder, False
        if recorder is not None:
            recorder.drain = self.drain
        self._state, self._round = RequestState(limits, rejection_sampling), 0
        self._channel = channel
        self._buffered: Proposal | None = None  # an answer that `poll` has received for `propose`
        self.lost_reason: str | None = None
        self.answer_timeout_s, self.open_timeout_s = answer_timeout_s, open_timeout_s

    def open(self, start: RequestStart) -> None:
        try:
            self._state.open(start)
        except ValueError as error:
            raise DrafterLost(f"the draft cannot be told of this request: {error}") from None
        self._round, self._buffered = 0, None
        self._send(Opcode.DRAFTER_OPEN, pack_message(start))

    def propose(self) -> Proposal:
        held, self._buffered = self._buffered, None
        return held or self._recv_proposal(self.answer_timeout_s if self._round else self.open_timeout_s)

    def poll(self) -> bool:
        """Whether the proposal that follows the last result has arrived. Does not block."""
        with contextlib.suppress(DrafterLate):
            self._buffered = self._buffered or self._recv_proposal(0.0)
        return self._buffered is not None

    def _recv_proposal(self, timeout: float) -> Proposal:
        deadline = time.monotonic() + timeout
        while True:
            words = self._recv_answer(Opcode.PROPOSAL, deadline)
            try:
                spent, proposal = single_word(words[:1], "time"), unpack_proposal(words[1:])
                if (proposal.request, proposal.round) != (self._state.request, self._round):
                    continue  # a late answer to an earlier round
                self._state.check_proposal(proposal)
                self.busy += in_range(spent, 0, 2**31 - 1, "the microseconds of a round") * 1e-6
            except ValueError as error:
                raise _protocol_error(error) from None
            return proposal

    def grow(self) -> None:
        pass  # the draft expands without a request

    def observe(self, result: VerifyResult) -> None:
        self._round, self._buffered = result.round + 1, None
        try:
            self._state.advance(result)
        except ValueError as error:
            raise DrafterLost(f"the draft cannot be told of this result: {error}") from None
        self._send(Opcode.OBSERVE, pack_message(result))

    def catch_up(self, result: VerifyResult) -> None:
        """Sends the rounds decoded without the draft, merged into one result."""
        self.observe(result)

    def close(self) -> None:
        self._send(Opcode.DRAFTER_CLOSE)

    def measure(self, room: int) -> None:
        """Starts the measurement of draft step times, in a context of `room` tokens."""
        self._send(Opcode.MEASURE_STEP, [room])

    def times(self) -> DraftTimes:
        """Blocks for the step times that `measure` has requested."""
        words = self._recv_answer(Opcode.STEP_TIMES, time.monotonic() + self.open_timeout_s)
        if len(words) != 2 or words[0] < 0 or words[1] < 1:
            raise _protocol_error(f"times of {len(words)} words are none")
        return DraftTimes(words[0] * 1e-6, words[1] * 1e-6)

    @property
    def draft_steps(self) -> int:
        """d, the number of expansions per round."""
        return self._steps

    @draft_steps.setter
    def draft_steps(self, steps: int) -> None:
        """Takes effect with the draft's next expansions."""
        self._send(Opcode.SET_DRAFT_STEPS, [steps])
        self._steps = steps

    def set_trace(self, on: bool) -> None:
        """Turns trace records of the draft's rounds on or off, from the next request on."""
        self._tracing = on
        with contextlib.suppress(DrafterLost):  # `attach` sends it on the next connection
            self._send(Opcode.SET_TRACE, [int(on)])

    def drain(self, round_: int) -> None:
        """Receives trace records up to that round's. Other messages belong to a request that has ended."""
        assert self._recorder is not None
        deadline = time.monotonic() + LAST_ROUND_TIMEOUT_S
        try:
            while self._recorder.awaits_draft(round_) and time.monotonic() < deadline:
                kind, words = self._channel.recv(max(deadline - time.monotonic(), 0.0))
                if kind == Opcode.TRACE_RECORD:
                    self._record(words)
        except (ConnectionError, TimeoutError, ValueError):
            return  # the trace then lacks the draft's timeline of this round

    def _record(self, words: Words) -> None:
        """Stores a trace record; it is decoded only when it is written, since the target is waiting here."""
        if len(words) < 2:
            raise ValueError("a record is of no round")
        if self._recorder is not None:
            self._recorder.draft(words[0], words[1], partial(unpack_record, words, self._state.limits.vocab_size))

    def attach(self, channel: Channel) -> None:
        """Replaces the connection by one to a restarted draft group, which has no open request."""
        self._channel.close()
        self._channel, self._buffered, self.lost_reason = channel, None, None
        self._send(Opcode.SET_DRAFT_STEPS, [self._steps])
        if self._tracing:
            self._send(Opcode.SET_TRACE, [1])

    def _disconnect(self, reason: str) -> DrafterLost:
        """Closes the connection, which a draft group that is alive detects. Returns the error to raise."""
        if self.lost_reason is None:
            self.lost_reason = reason
            self._channel.close()
        return DrafterLost(reason)

    def _send(self, call: Opcode, words: Sequence[int] = ()) -> None:
        if self.lost_reason is not None:
            raise DrafterLost(self.lost_reason)
        try:
            self._channel.send(call, words)
        except ConnectionError as error:
            raise self._disconnect(str(error)) from None

    def _recv_answer(self, wanted: Opcode, deadline: float) -> Words:
        """Receives the next message with opcode `wanted`. Raises DrafterLost if the draft reports an error.

        Reads the channel at least once, since an answer may have arrived before the deadline without being read.
        """
        while True:
            left = deadline - time.monotonic()
            if self.lost_reason is not None:
                raise DrafterLost(self.lost_reason)
            try:
                kind, words = self._channel.recv(max(left, 0.0))
                if kind == wanted:
                    return words
                if kind == Opcode.TRACE_RECORD:
                    self._record(words)
                elif kind == Opcode.ERROR and single_word(words[:1], "loss") == self._state.request:
                    raise DrafterLost(words_to_text(words[1:])[:MAX_REASON_CHARS])
                elif kind not in ANSWER_OPCODES:
                    raise ValueError(f"a draft does not send messages of kind {kind}")
            except TimeoutError:
                raise DrafterLate(LATE_MESSAGE) from None
            except ConnectionError as error:
                raise self._disconnect(str(error)) from None
            except ValueError as error:
                raise _protocol_error(error) from None
            if left < -LATE_DRAIN_S:  # even if the draft keeps sending other messages
                raise DrafterLate(LATE_MESSAGE)


def _protocol_error(error: object) -> DrafterLost:
    return DrafterLost(f"the draft group sent what is no message of ours: {error}")
