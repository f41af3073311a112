"""The bridge between the two groups: the draft group behind a proxy on the target's leader (paper section 3.1).

A round takes one message each way. The result goes over, the draft re-roots and answers with the next proposal; while
the target verifies that, the draft expands d times. What the draft says late or about another request is dropped.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence

from swiftspec.control.step_times import DraftTimes, draft_times
from swiftspec.distributed.channel import Channel
from swiftspec.distributed.followers import Call, LeadingDrafter, has_left
from swiftspec.distributed.wire import Words, pack, read_opening, read_proposal, read_result, to_text, to_words
from swiftspec.errors import DrafterLost, RankLost
from swiftspec.messages import Opening, Proposal, VerifyResult
from swiftspec.observe.trace import Observer, Record, TraceLog
from swiftspec.runtime.fallback import FAILURES

ANSWER_TIMEOUT = 10.0  # seconds that a draft may take for a round before it counts as lost
OPEN_TIMEOUT = 60.0  # and for its prefill
LAST_ROUND = 1.0  # seconds to wait for what the draft says of a request's last round


class GroupDrafter:
    """Stands for the draft group on the target's leader. Every call may raise DrafterLost."""

    def __init__(
        self,
        bridge: Channel,
        steps: int,
        *,
        answer_timeout: float = ANSWER_TIMEOUT,
        open_timeout: float = OPEN_TIMEOUT,
        records: TraceLog | None = None,
    ) -> None:
        """`records`: where the draft's records of its rounds go, which it sends while a trace is asked for."""
        self.busy = 0.0
        self._steps, self._records = steps, records
        if records is not None:
            records.drain = self.drain
        self._request, self._round, self._prefix_len = 0, 0, 0
        self._bridge = bridge
        self._answer_timeout, self._open_timeout = answer_timeout, open_timeout

    def open(self, opening: Opening) -> None:
        self._request, self._round, self._prefix_len = opening.request, 0, len(opening.tokens) - 1
        self._send(Call.DRAFTER_OPEN, pack(opening))

    def propose(self) -> Proposal:
        deadline = time.monotonic() + (self._answer_timeout if self._round else self._open_timeout)
        while True:
            words = self._answer(Call.PROPOSAL, deadline)
            try:
                proposal = read_proposal(words[1:])
            except ValueError as error:
                raise DrafterLost(str(error)) from None
            if (proposal.request, proposal.round) != (self._request, self._round):
                continue  # an answer that came too late
            if proposal.prefix_len != self._prefix_len:
                raise DrafterLost(f"the draft stands at {proposal.prefix_len}, the target at {self._prefix_len}")
            self.busy += words[0] * 1e-6
            return proposal

    def grow(self) -> None:
        pass  # it is growing already

    def observe(self, result: VerifyResult) -> None:
        self._round, self._prefix_len = result.round + 1, result.prefix_len + len(result.tokens)
        self._send(Call.OBSERVE, pack(result))

    def close(self) -> None:
        self._send(Call.DRAFTER_CLOSE)

    def measure(self, room: int) -> None:
        """Lets the draft begin to measure its expansions, in a context of `room` tokens."""
        self._send(Call.PACE, [room])

    def times(self) -> DraftTimes:
        """What has been measured since `measure`."""
        turn, expansion = self._answer(Call.TIME, time.monotonic() + self._open_timeout)
        return DraftTimes(turn * 1e-6, expansion * 1e-6)

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
            while self._records.lacks(round_):
                kind, words = self._bridge.recv(max(deadline - time.monotonic(), 0.0))
                if kind == Call.TRACE:
                    self._records.draft(json.loads(to_text(words)))
        except (ConnectionError, TimeoutError):
            return  # the line has no draft lane then

    def _send(self, call: Call, words: Sequence[int] = ()) -> None:
        try:
            self._bridge.send(call, words)
        except ConnectionError as error:
            raise DrafterLost(str(error)) from None

    def _answer(self, wanted: Call, deadline: float) -> Words:
        """The next message of that kind. Says why when the draft gives up this request."""
        while True:
            try:
                kind, words = self._bridge.recv(max(deadline - time.monotonic(), 0.0))
            except TimeoutError:
                raise DrafterLost("the draft group did not answer in time") from None
            except ConnectionError as error:
                raise DrafterLost(str(error)) from None
            if kind == Call.TRACE and self._records is not None:
                self._records.draft(json.loads(to_text(words)))
            if kind == wanted:
                return words
            if kind == Call.LOST and words[0] == self._request:
                raise DrafterLost(to_text(words[1:]))


class DraftService:
    """The life of the draft group's leader: it answers the target until that leaves or is gone.

    A result that the tree holds is answered as it arrives, in native code; the drafter then does the same once more,
    while the target is at work already. With an observer that is left to Python, which alone the observer sees.
    """

    def __init__(self, target: Channel, drafter: LeadingDrafter, observer: Observer | None = None) -> None:
        self._target = target
        self._drafter = drafter
        self._tell = observer or (lambda event, *about: None)
        self._replies = observer is None
        self._request = 0
        self._open = False  # the request; not once it has failed, and nothing more is done for it
        self._told = 0  # microseconds in forwards that the target knows of

    def run(self) -> None:
        """Serves until it is sent home; a failing draft model only ends the request, and a group out of step every
        request from then on. Raises RankLost when the target is gone without a word."""
        try:
            while True:
                kind, words, answered = self._next()
                if kind == Call.LEAVE:
                    return
                try:
                    self._serve(Call(kind), words, answered)
                except (RankLost, *FAILURES) as error:
                    self._open = False
                    self._tell_failure(str(error) or type(error).__name__)
        except ConnectionError as error:
            if not has_left(self._target):
                raise RankLost(str(error)) from None

    def _next(self) -> tuple[int, Words, bool]:
        """The next message, and whether it is answered."""
        reply = self._drafter.reply() if self._open and self._replies else None
        if reply is None:
            return *self._target.recv(), False
        spent = self._spent()
        kind, words, answered = self._target.recv_or_reply(reply, Call.OBSERVE, Call.PROPOSAL, spent)
        self._told += spent if answered else 0
        return kind, words, answered

    def _serve(self, call: Call, words: Words, answered: bool) -> None:
        """One message: first the answer, then whatever can be done ahead."""
        drafter = self._drafter
        match call:
            case Call.DRAFTER_OPEN:
                opening = read_opening(words)
                self._request, self._told = opening.request, int(1e6 * drafter.busy)
                self._tell("opening", opening)
                drafter.open(opening)
                self._tell("drafter opened")
                self._open = True
                self._round(answered=False)
            case Call.OBSERVE:
                if self._open:  # else the target has been told, or will read it in a moment
                    result = read_result(words)
                    self._tell("verified", None, result)
                    drafter.observe(result)
                    self._tell("observed", result)
                    self._round(answered)
            case Call.DRAFTER_CLOSE:
                self._open = False
                drafter.close()
            case Call.STEPS:
                drafter.draft_steps = words[0]
            case Call.PACE:
                times = draft_times(drafter, words[0])
                self._target.send(Call.TIME, [int(1e6 * times.turn), max(int(1e6 * times.expansion), 1)])
            case _:
                raise ValueError(f"a target does not send {call.name}")

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
