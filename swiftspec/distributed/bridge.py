"""The bridge between the two groups: the draft group behind a proxy on the target's leader (paper section 3.1).

A round takes one message each way. The result goes over, the draft re-roots and answers with the next proposal; while
the target verifies that, the draft expands d times. What the draft says late or about another request is dropped.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from swiftspec.config import MAX_TREE
from swiftspec.control.step_times import DraftTimes, draft_times
from swiftspec.distributed.calls import Call
from swiftspec.distributed.channel import Channel
from swiftspec.distributed.followers import LeadingDrafter, has_left
from swiftspec.distributed.orders import Orders
from swiftspec.distributed.standing import Bounds, Standing, in_range
from swiftspec.distributed.wire import (
    Words,
    one_word,
    pack,
    read_opening,
    read_proposal,
    read_record,
    read_result,
    to_text,
    to_words,
)  # fmt: skip
from swiftspec.errors import DrafterLost, RankLost, UserError
from swiftspec.messages import Opening, Proposal, VerifyResult
from swiftspec.observe.trace import Observer, Record, TraceLog
from swiftspec.runtime.fallback import FAILURES
from swiftspec.runtime.pause import Cancelled, Pause

ANSWER_TIMEOUT = 10.0  # seconds that a draft may take for a round before it counts as lost
OPEN_TIMEOUT = 60.0  # and for its prefill
LATE = 1.0  # seconds after its time in which what lies unread is still looked through
REASON = 300  # characters of a draft's reason to give up
ANSWERS = (Call.PROPOSAL, Call.TIME, Call.LOST, Call.TRACE)
LAST_ROUND = 1.0  # seconds to wait for what the draft says of a request's last round


class GroupDrafter:
    """Stands for the draft group on the target's leader. Every call may raise DrafterLost, and for whatever the draft
    says that it should not, nothing else."""

    def __init__(
        self,
        bridge: Channel,
        steps: int,
        bounds: Bounds,
        *,
        rejects: bool = False,
        answer_timeout: float = ANSWER_TIMEOUT,
        open_timeout: float = OPEN_TIMEOUT,
        records: TraceLog | None = None,
    ) -> None:
        """`rejects`: proposals say what they were drawn from. `records`: where the draft's records of its rounds go,
        which it sends while a trace is asked for."""
        self.busy = 0.0
        self._steps, self._records = steps, records
        if records is not None:
            records.drain = self.drain
        self._standing, self._round = Standing(bounds, rejects), 0
        self._bridge = bridge
        self._answer_timeout, self._open_timeout = answer_timeout, open_timeout

    def open(self, opening: Opening) -> None:
        try:
            self._standing.open(opening)
        except ValueError as error:
            raise DrafterLost(f"the draft cannot be told of this request: {error}") from None
        self._round = 0
        self._send(Call.DRAFTER_OPEN, pack(opening))

    def propose(self) -> Proposal:
        deadline = time.monotonic() + (self._answer_timeout if self._round else self._open_timeout)
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
        self._round = result.round + 1
        try:
            self._standing.move(result)
        except ValueError as error:
            raise DrafterLost(f"the draft cannot be told of this result: {error}") from None
        self._send(Call.OBSERVE, pack(result))

    def close(self) -> None:
        self._send(Call.DRAFTER_CLOSE)

    def measure(self, room: int) -> None:
        """Lets the draft begin to measure its expansions, in a context of `room` tokens."""
        self._send(Call.PACE, [room])

    def times(self) -> DraftTimes:
        """What has been measured since `measure`."""
        words = self._answer(Call.TIME, time.monotonic() + self._open_timeout)
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

    def drain(self, round_: int) -> None:
        """Takes records until that round's is there; what else comes belongs to a request that is over."""
        assert self._records is not None
        deadline = time.monotonic() + LAST_ROUND
        try:
            while self._records.lacks(round_) and time.monotonic() < deadline:
                kind, words = self._bridge.recv(max(deadline - time.monotonic(), 0.0))
                if kind == Call.TRACE:
                    self._records.draft(read_record(words))
        except (ConnectionError, TimeoutError, ValueError):
            return  # the line has no draft lane then

    def _send(self, call: Call, words: Sequence[int] = ()) -> None:
        try:
            self._bridge.send(call, words)
        except ConnectionError as error:
            raise DrafterLost(str(error)) from None

    def _answer(self, wanted: Call, deadline: float) -> Words:
        """The next message of that kind. Says why when the draft gives up this request. One look is always taken: the
        answer may have come in time and be read late."""
        while True:
            left = deadline - time.monotonic()
            try:
                kind, words = self._bridge.recv(max(left, 0.0))
                if kind == wanted:
                    return words
                if kind == Call.TRACE and self._records is not None:
                    self._records.draft(read_record(words))
                elif kind == Call.LOST and one_word(words[:1], "loss") == self._standing.request:
                    raise DrafterLost(to_text(words[1:])[:REASON])
                elif kind not in ANSWERS:
                    raise ValueError(f"a draft does not send messages of kind {kind}")
            except TimeoutError:
                raise DrafterLost("the draft group did not answer in time") from None
            except ConnectionError as error:
                raise DrafterLost(str(error)) from None
            except ValueError as error:
                raise _nonsense(error) from None
            if left < -LATE:  # however much it says
                raise DrafterLost("the draft group did not answer in time")


def _nonsense(error: object) -> DrafterLost:
    return DrafterLost(f"the draft group sent what is no message of ours: {error}")


class DraftService:
    """The life of the draft group's leader: it answers the target until that leaves or is gone.

    A result that the tree holds is answered as it arrives, in native code; the drafter then does the same once more,
    while the target is at work already. With an observer that is left to Python, which alone the observer sees.
    """

    def __init__(
        self, target: Channel, drafter: LeadingDrafter, bounds: Bounds, observer: Observer | None, pause: Pause
    ) -> None:
        """`pause`: what the draft's runner calls while it reads a prompt."""
        self._standing = Standing(bounds)
        self._target = target
        self._drafter = drafter
        self._tell = observer or (lambda event, *about: None)
        self._replies = observer is None
        self._request = 0
        self._open = False  # the request; not once it has failed, and nothing more is done for it
        self._told = 0  # microseconds in forwards that the target knows of
        self._orders = Orders(target)
        pause.cancelled = self._orders.over

    def run(self) -> None:
        """Serves until it is sent home; a failing draft model only ends the request, and a group out of step every
        request from then on. Raises RankLost when the target is gone without a word, or says what it should not."""
        try:
            while True:
                kind, words, answered = self._next()
                if kind == Call.LEAVE:
                    return
                try:
                    serve = self._read(kind, words, answered)
                except ValueError as error:
                    raise RankLost(f"{self._target.peer} sent what is no message of ours: {error}") from None
                try:
                    serve()
                except Cancelled:
                    self._open = False
                except (RankLost, UserError, *FAILURES) as error:
                    self._open = False
                    self._tell_failure(str(error) or type(error).__name__)
        except ConnectionError as error:
            if not has_left(self._target):
                raise RankLost(str(error)) from None

    def _next(self) -> tuple[int, Words, bool]:
        """The next message, and whether it is answered."""
        reply = self._drafter.reply() if self._open and self._replies else None
        if reply is None or self._orders.early:
            return *self._orders.recv(), False
        spent = self._spent()
        kind, words, answered = self._target.recv_or_reply(reply, Call.OBSERVE, Call.PROPOSAL, spent)
        self._told += spent if answered else 0
        return kind, words, answered

    def _read(self, kind: int, words: Words, answered: bool) -> Callable[[], object]:
        """What a message asks for. Raises ValueError on what no target sends."""
        bounds = self._standing.bounds
        match kind:
            case Call.DRAFTER_OPEN:
                opening = replace(read_opening(words), steps="", kept=None)  # which are chosen here
                self._standing.open(opening)
                return partial(self._serve_opening, opening)
            case Call.OBSERVE:
                if not self._open:  # the target has been told, or will read it in a moment
                    return lambda: None
                result = read_result(words)
                self._standing.move(result)
                return partial(self._serve_result, result, answered)
            case Call.DRAFTER_CLOSE:
                return self._serve_close
            case Call.STEPS:
                steps = in_range(one_word(words, "number of steps"), 1, MAX_TREE, "steps")
                return partial(setattr, self._drafter, "draft_steps", steps)
            case Call.PACE:
                room = in_range(one_word(words, "pace"), 1, bounds.context, "the room to measure in")
                return partial(self._serve_pace, room)
            case _:
                raise ValueError(f"a target does not send messages of kind {kind}")

    def _serve_opening(self, opening: Opening) -> None:
        """First the answer, then whatever can be done ahead."""
        self._request, self._told = opening.request, int(1e6 * self._drafter.busy)
        self._tell("opening", opening)
        self._drafter.open(opening)
        self._tell("drafter opened")
        self._open = True
        self._round(answered=False)

    def _serve_result(self, result: VerifyResult, answered: bool) -> None:
        self._tell("verified", None, result)
        self._drafter.observe(result)
        self._tell("observed", result)
        self._round(answered)

    def _serve_close(self) -> None:
        self._open = False
        self._drafter.close()

    def _serve_pace(self, room: int) -> None:
        self._open = False
        times = draft_times(self._drafter, room)
        self._target.send(Call.TIME, [int(1e6 * times.turn), max(int(1e6 * times.expansion), 1)])

    def _round(self, answered: bool) -> None:
        """The answer, unless it has been given, and the tree grown ahead."""
        proposal = self._drafter.propose()
        self._tell("proposed", proposal)
        if not answered:
            self._propose(proposal)
        self._drafter.grow()
        self._tell("grown")

    def _propose(self, proposal: Proposal) -> None:
        """Answers with a proposal, and with the microseconds in forwards since the answer before."""
        spent = self._spent()
        self._target.send(Call.PROPOSAL, [spent, *pack(proposal)])
        self._told += spent

    def _spent(self) -> int:
        return int(1e6 * self._drafter.busy) - self._told

    def _tell_failure(self, reason: str) -> None:
        self._target.send(Call.LOST, [self._request, *to_words(reason)])


def teller(bridge: Channel) -> Callable[[Record], None]:
    """What the draft's leader sends its records with. Request 0 is no request: the pace is measured under it."""

    def tell(record: Record) -> None:
        if record["request"] != 0:
            bridge.send(Call.TRACE, to_words(json.dumps(record)))

    return tell
