"""Client of the draft group, on the target's leader (paper section 3.1).

A round takes one message in each direction. The client sends the result; the draft re-roots its tree, answers with the
next proposal, and expands its tree d times while the target verifies the proposal. Proposals of earlier rounds, and
answers to earlier requests, are discarded.
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

    `lost_reason`: the reason why the connection is lost; None before that, and again after `attach`.
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
        """`steps`: initial d.

        `limits`: limits against which proposals are validated.
        `rejection_sampling`: whether proposals must carry draft distributions.
        `answer_timeout_s`, `open_timeout_s`: longest wait in seconds for a proposal, and for the first proposal of a
        request.
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
            raise DrafterLost(f"this request cannot be sent to the draft: {error}") from None
        self._round, self._buffered = 0, None
        self._send(Opcode.DRAFTER_OPEN, pack_message(start))

    def propose(self) -> Proposal:
        held, self._buffered = self._buffered, None
        return held or self._recv_proposal(self.answer_timeout_s if self._round else self.open_timeout_s)

    def poll(self) -> bool:
        """Returns whether the proposal that follows the last result has arrived. Does not block."""
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
            raise DrafterLost(f"this result cannot be sent to the draft: {error}") from None
        self._send(Opcode.OBSERVE, pack_message(result))

    def catch_up(self, result: VerifyResult) -> None:
        """Sends `result`, which merges the rounds that were decoded without the draft."""
        self.observe(result)

    def close(self) -> None:
        self._send(Opcode.DRAFTER_CLOSE)

    def measure(self, room: int) -> None:
        """Requests a measurement of the draft's step times, in a context of at most `room` tokens."""
        self._send(Opcode.MEASURE_STEP, [room])

    def times(self) -> DraftTimes:
        """Returns the step times that `measure` has requested. Blocks until they arrive; raises DrafterLate after
        `open_timeout_s`."""
        words = self._recv_answer(Opcode.STEP_TIMES, time.monotonic() + self.open_timeout_s)
        if len(words) != 2 or words[0] < 0 or words[1] < 1:
            raise _protocol_error(f"step times of {len(words)} words are invalid")
        return DraftTimes(words[0] * 1e-6, words[1] * 1e-6)

    @property
    def draft_steps(self) -> int:
        """d, the number of expansions per round."""
        return self._steps

    @draft_steps.setter
    def draft_steps(self, steps: int) -> None:
        """Sends d to the draft group, which applies it from its next expansions on."""
        self._send(Opcode.SET_DRAFT_STEPS, [steps])
        self._steps = steps

    def set_trace(self, on: bool) -> None:
        """Makes the draft group send trace records of its rounds, or stop that, from the next request on."""
        self._tracing = on
        with contextlib.suppress(DrafterLost):  # `attach` sends it on the next connection
            self._send(Opcode.SET_TRACE, [int(on)])

    def drain(self, round_: int) -> None:
        """Receives trace records until the record of round `round_` has arrived, for at most LAST_ROUND_TIMEOUT_S.
        Discards other messages, since the request has ended."""
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
        """Gives a trace record to the recorder. It is decoded only when it is written, because the target waits during
        this call."""
        if len(words) < 2:
            raise ValueError("a trace record lacks its round")
        if self._recorder is not None:
            self._recorder.draft(words[0], words[1], partial(unpack_record, words, self._state.limits.vocab_size))

    def attach(self, channel: Channel) -> None:
        """Replaces the lost connection by `channel`, to a restarted draft group, which has no open request."""
        self._channel.close()
        self._channel, self._buffered, self.lost_reason = channel, None, None
        self._send(Opcode.SET_DRAFT_STEPS, [self._steps])
        if self._tracing:
            self._send(Opcode.SET_TRACE, [1])

    def _disconnect(self, reason: str) -> DrafterLost:
        """Closes the connection, so that a draft group that is alive detects the loss. Returns the error to raise."""
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
        """Receives the next message with opcode `wanted` and returns its words.

        Raises DrafterLate at `deadline`, a `time.monotonic` time, and DrafterLost if the draft reports an error. Reads
        the channel at least once, since an answer may have arrived before the deadline without being read.
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
                elif kind == Opcode.ERROR and single_word(words[:1], "request number") == self._state.request:
                    raise DrafterLost(words_to_text(words[1:])[:MAX_REASON_CHARS])
                elif kind not in ANSWER_OPCODES:
                    raise ValueError(f"unexpected opcode {kind} from the draft group")
            except TimeoutError:
                raise DrafterLate(LATE_MESSAGE) from None
            except ConnectionError as error:
                raise self._disconnect(str(error)) from None
            except ValueError as error:
                raise _protocol_error(error) from None
            if left < -LATE_DRAIN_S:  # even if the draft keeps sending other messages
                raise DrafterLate(LATE_MESSAGE)


def _protocol_error(error: object) -> DrafterLost:
    return DrafterLost(f"the draft group sent an invalid message: {error}")
