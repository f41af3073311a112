"""The bridge between the two groups: the draft group behind a proxy on the target's leader (paper section 3.1).

A round takes one message each way. The result goes over, the draft re-roots and answers with the next proposal; while
the target verifies that, the draft expands d times. What the draft says late or about another request is dropped.
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

ANSWER_TIMEOUT_S = 10.0  # seconds that a draft may take for a round before it counts as lost
OPEN_TIMEOUT_S = 60.0  # and for its prefill
LATE_DRAIN_S = 1.0  # seconds after its time in which what lies unread is still looked through
MAX_REASON_CHARS = 300  # characters of a draft's reason to give up
ANSWER_OPCODES = (Opcode.PROPOSAL, Opcode.STEP_TIMES, Opcode.ERROR, Opcode.TRACE_RECORD)
LATE_MESSAGE = "the draft group did not answer in time"
LAST_ROUND_TIMEOUT_S = 1.0  # seconds to wait for what the draft says of a request's last round


class DrafterLate(DrafterLost):
    """The draft group has not answered in time, and may yet."""


class DraftGroupClient:
    """Stands for the draft group on the target's leader. Every call may raise DrafterLost, and for whatever the draft
    says that it should not, nothing else; `propose` DrafterLate, after which it may be asked again.

    `gone`: why there is no connection any more, until `attach` gives another.
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
        """`rejects`: proposals say what they were drawn from. `records`: where the draft's records of its rounds go,
        which it sends while it is watched."""
        self.busy = 0.0
        self._steps, self._recorder, self._tracing = steps, recorder, False
        if recorder is not None:
            recorder.drain = self.drain
        self._state, self._round = RequestState(limits, rejection_sampling), 0
        self._channel = channel
        self._buffered: Proposal | None = None  # an answer that was looked for, and not yet asked for
        self.lost_reason: str | None = None
        self.answer_timeout_s, self.open_timeout_s = answer_timeout_s, open_timeout_s

    def open(self, opening: RequestStart) -> None:
        try:
            self._state.open(opening)
        except ValueError as error:
            raise DrafterLost(f"the draft cannot be told of this request: {error}") from None
        self._round, self._buffered = 0, None
        self._send(Opcode.DRAFTER_OPEN, pack_message(opening))

    def propose(self) -> Proposal:
        held, self._buffered = self._buffered, None
        return held or self._recv_proposal(self.answer_timeout_s if self._round else self.open_timeout_s)

    def poll(self) -> bool:
        """Whether the proposal for the result told last is there. Does not wait for it."""
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
                    continue  # an answer that came too late
                self._state.check_proposal(proposal)
                self.busy += in_range(spent, 0, 2**31 - 1, "the microseconds of a round") * 1e-6
            except ValueError as error:
                raise _protocol_error(error) from None
            return proposal

    def grow(self) -> None:
        pass  # it is growing already

    def observe(self, result: VerifyResult) -> None:
        self._round, self._buffered = result.round + 1, None
        try:
            self._state.advance(result)
        except ValueError as error:
            raise DrafterLost(f"the draft cannot be told of this result: {error}") from None
        self._send(Opcode.OBSERVE, pack_message(result))

    def catch_up(self, result: VerifyResult) -> None:
        """Rounds without the draft, as the result of a long one."""
        self.observe(result)

    def close(self) -> None:
        self._send(Opcode.DRAFTER_CLOSE)

    def measure(self, room: int) -> None:
        """Lets the draft begin to measure its expansions, in a context of `room` tokens."""
        self._send(Opcode.MEASURE_STEP, [room])

    def times(self) -> DraftTimes:
        """What has been measured since `measure`."""
        words = self._recv_answer(Opcode.STEP_TIMES, time.monotonic() + self.open_timeout_s)
        if len(words) != 2 or words[0] < 0 or words[1] < 1:
            raise _protocol_error(f"times of {len(words)} words are none")
        return DraftTimes(words[0] * 1e-6, words[1] * 1e-6)

    @property
    def draft_steps(self) -> int:
        """d, the expansions of a round."""
        return self._steps

    @draft_steps.setter
    def draft_steps(self, steps: int) -> None:
        """Holds from the draft's next growing on."""
        self._send(Opcode.SET_DRAFT_STEPS, [steps])
        self._steps = steps

    def set_trace(self, on: bool) -> None:
        """Whether the draft is to tell of its rounds, from the next request on."""
        self._tracing = on
        with contextlib.suppress(DrafterLost):  # `attach` tells the next one
            self._send(Opcode.SET_TRACE, [int(on)])

    def drain(self, round_: int) -> None:
        """Takes records until that round's is there; what else comes belongs to a request that is over."""
        assert self._recorder is not None
        deadline = time.monotonic() + LAST_ROUND_TIMEOUT_S
        try:
            while self._recorder.awaits_draft(round_) and time.monotonic() < deadline:
                kind, words = self._channel.recv(max(deadline - time.monotonic(), 0.0))
                if kind == Opcode.TRACE_RECORD:
                    self._record(words)
        except (ConnectionError, TimeoutError, ValueError):
            return  # the line has no draft lane then

    def _record(self, words: Words) -> None:
        """It is read when somebody writes it: here the target waits."""
        if len(words) < 2:
            raise ValueError("a record is of no round")
        if self._recorder is not None:
            self._recorder.draft(words[0], words[1], partial(unpack_record, words, self._state.limits.vocab_size))

    def attach(self, bridge: Channel) -> None:
        """Another connection, to a draft group that knows of no request."""
        self._channel.close()
        self._channel, self._buffered, self.lost_reason = bridge, None, None
        self._send(Opcode.SET_DRAFT_STEPS, [self._steps])
        if self._tracing:
            self._send(Opcode.SET_TRACE, [1])

    def _disconnect(self, reason: str) -> DrafterLost:
        """Hangs up for this reason; a draft group that still lives hears of it."""
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
        """The next message of that kind. Says why when the draft gives up this request. One look is always taken: the
        answer may have come in time and be read late."""
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
            if left < -LATE_DRAIN_S:  # however much it says
                raise DrafterLate(LATE_MESSAGE)


def _protocol_error(error: object) -> DrafterLost:
    return DrafterLost(f"the draft group sent what is no message of ours: {error}")
