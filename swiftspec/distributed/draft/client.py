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
from swiftspec.distributed.draft.trace_codec import read_record
from swiftspec.distributed.group.request_state import Bounds, Standing, in_range
from swiftspec.distributed.transport.channel import Channel
from swiftspec.distributed.transport.codec import Words, one_word, pack, read_proposal, to_text
from swiftspec.distributed.transport.opcodes import Call
from swiftspec.errors import DrafterLost
from swiftspec.messages import Opening, Proposal, VerifyResult
from swiftspec.observe.recorder import Recorder

ANSWER_TIMEOUT = 10.0  # seconds that a draft may take for a round before it counts as lost
OPEN_TIMEOUT = 60.0  # and for its prefill
LATE = 1.0  # seconds after its time in which what lies unread is still looked through
REASON = 300  # characters of a draft's reason to give up
ANSWERS = (Call.PROPOSAL, Call.TIME, Call.LOST, Call.TRACE)
LATE_ANSWER = "the draft group did not answer in time"
LAST_ROUND = 1.0  # seconds to wait for what the draft says of a request's last round


class DrafterLate(DrafterLost):
    """The draft group has not answered in time, and may yet."""


class GroupDrafter:
    """Stands for the draft group on the target's leader. Every call may raise DrafterLost, and for whatever the draft
    says that it should not, nothing else; `propose` DrafterLate, after which it may be asked again.

    `gone`: why there is no connection any more, until `attach` gives another.
    """

    def __init__(
        self,
        bridge: Channel,
        steps: int,
        bounds: Bounds,
        *,
        rejects: bool = False,
        answer_timeout: float = ANSWER_TIMEOUT,
        open_timeout: float = OPEN_TIMEOUT,
        records: Recorder | None = None,
    ) -> None:
        """`rejects`: proposals say what they were drawn from. `records`: where the draft's records of its rounds go,
        which it sends while it is watched."""
        self.busy = 0.0
        self._steps, self._records, self._watched = steps, records, False
        if records is not None:
            records.drain = self.drain
        self._standing, self._round = Standing(bounds, rejects), 0
        self._bridge = bridge
        self._held: Proposal | None = None  # an answer that was looked for, and not yet asked for
        self.gone: str | None = None
        self.answer_timeout, self.open_timeout = answer_timeout, open_timeout

    def open(self, opening: Opening) -> None:
        try:
            self._standing.open(opening)
        except ValueError as error:
            raise DrafterLost(f"the draft cannot be told of this request: {error}") from None
        self._round, self._held = 0, None
        self._send(Call.DRAFTER_OPEN, pack(opening))

    def propose(self) -> Proposal:
        held, self._held = self._held, None
        return held or self._proposal(self.answer_timeout if self._round else self.open_timeout)

    def answered(self) -> bool:
        """Whether the proposal for the result told last is there. Does not wait for it."""
        with contextlib.suppress(DrafterLate):
            self._held = self._held or self._proposal(0.0)
        return self._held is not None

    def _proposal(self, timeout: float) -> Proposal:
        deadline = time.monotonic() + timeout
        while True:
            words = self._answer(Call.PROPOSAL, deadline)
            try:
                spent, proposal = one_word(words[:1], "time"), read_proposal(words[1:])
                if (proposal.request, proposal.round) != (self._standing.request, self._round):
                    continue  # an answer that came too late
                self._standing.check(proposal)
                self.busy += in_range(spent, 0, 2**31 - 1, "the microseconds of a round") * 1e-6
            except ValueError as error:
                raise _nonsense(error) from None
            return proposal

    def grow(self) -> None:
        pass  # it is growing already

    def observe(self, result: VerifyResult) -> None:
        self._round, self._held = result.round + 1, None
        try:
            self._standing.move(result)
        except ValueError as error:
            raise DrafterLost(f"the draft cannot be told of this result: {error}") from None
        self._send(Call.OBSERVE, pack(result))

    def catch_up(self, result: VerifyResult) -> None:
        """Rounds without the draft, as the result of a long one."""
        self.observe(result)

    def close(self) -> None:
        self._send(Call.DRAFTER_CLOSE)

    def measure(self, room: int) -> None:
        """Lets the draft begin to measure its expansions, in a context of `room` tokens."""
        self._send(Call.PACE, [room])

    def times(self) -> DraftTimes:
        """What has been measured since `measure`."""
        words = self._answer(Call.TIME, time.monotonic() + self.open_timeout)
        if len(words) != 2 or words[0] < 0 or words[1] < 1:
            raise _nonsense(f"times of {len(words)} words are none")
        return DraftTimes(words[0] * 1e-6, words[1] * 1e-6)

    @property
    def draft_steps(self) -> int:
        """d, the expansions of a round."""
        return self._steps

    @draft_steps.setter
    def draft_steps(self, steps: int) -> None:
        """Holds from the draft's next growing on."""
        self._send(Call.STEPS, [steps])
        self._steps = steps

    def watch(self, on: bool) -> None:
        """Whether the draft is to tell of its rounds, from the next request on."""
        self._watched = on
        with contextlib.suppress(DrafterLost):  # `attach` tells the next one
            self._send(Call.WATCH, [int(on)])

    def drain(self, round_: int) -> None:
        """Takes records until that round's is there; what else comes belongs to a request that is over."""
        assert self._records is not None
        deadline = time.monotonic() + LAST_ROUND
        try:
            while self._records.lacks(round_) and time.monotonic() < deadline:
                kind, words = self._bridge.recv(max(deadline - time.monotonic(), 0.0))
                if kind == Call.TRACE:
                    self._record(words)
        except (ConnectionError, TimeoutError, ValueError):
            return  # the line has no draft lane then

    def _record(self, words: Words) -> None:
        """It is read when somebody writes it: here the target waits."""
        if len(words) < 2:
            raise ValueError("a record is of no round")
        if self._records is not None:
            self._records.draft(words[0], words[1], partial(read_record, words, self._standing.bounds.vocab))

    def attach(self, bridge: Channel) -> None:
        """Another connection, to a draft group that knows of no request."""
        self._bridge.close()
        self._bridge, self._held, self.gone = bridge, None, None
        self._send(Call.STEPS, [self._steps])
        if self._watched:
            self._send(Call.WATCH, [1])

    def _hang_up(self, reason: str) -> DrafterLost:
        """Hangs up for this reason; a draft group that still lives hears of it."""
        if self.gone is None:
            self.gone = reason
            self._bridge.close()
        return DrafterLost(reason)

    def _send(self, call: Call, words: Sequence[int] = ()) -> None:
        if self.gone is not None:
            raise DrafterLost(self.gone)
        try:
            self._bridge.send(call, words)
        except ConnectionError as error:
            raise self._hang_up(str(error)) from None

    def _answer(self, wanted: Call, deadline: float) -> Words:
        """The next message of that kind. Says why when the draft gives up this request. One look is always taken: the
        answer may have come in time and be read late."""
        while True:
            left = deadline - time.monotonic()
            if self.gone is not None:
                raise DrafterLost(self.gone)
            try:
                kind, words = self._bridge.recv(max(left, 0.0))
                if kind == wanted:
                    return words
                if kind == Call.TRACE:
                    self._record(words)
                elif kind == Call.LOST and one_word(words[:1], "loss") == self._standing.request:
                    raise DrafterLost(to_text(words[1:])[:REASON])
                elif kind not in ANSWERS:
                    raise ValueError(f"a draft does not send messages of kind {kind}")
            except TimeoutError:
                raise DrafterLate(LATE_ANSWER) from None
            except ConnectionError as error:
                raise self._hang_up(str(error)) from None
            except ValueError as error:
                raise _nonsense(error) from None
            if left < -LATE:  # however much it says
                raise DrafterLate(LATE_ANSWER)


def _nonsense(error: object) -> DrafterLost:
    return DrafterLost(f"the draft group sent what is no message of ours: {error}")
