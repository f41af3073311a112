"""The draft's side of the bridge: its leader answers the target, a proposal for each result (paper section 3.1)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from swiftspec.config import MAX_TREE
from swiftspec.control.step_times import draft_times
from swiftspec.distributed.draft.trace_codec import pack_record
from swiftspec.distributed.group.command_stream import Orders
from swiftspec.distributed.group.leader import LeadingDrafter, has_left
from swiftspec.distributed.group.request_state import Bounds, Standing, in_range
from swiftspec.distributed.launch.supervision import Pulse
from swiftspec.distributed.transport.channel import Channel
from swiftspec.distributed.transport.codec import Words, one_word, pack, read_opening, read_result, to_words
from swiftspec.distributed.transport.opcodes import Call
from swiftspec.errors import RankLost, UserError
from swiftspec.messages import Opening, Proposal, VerifyResult
from swiftspec.observe.trace import DraftTrace, Switch
from swiftspec.observe.trace_format import Record
from swiftspec.runtime.cancellation import Cancelled, Pause
from swiftspec.runtime.fallback_drafter import FAILURES
from swiftspec.runtime.local_drafter import LocalDrafter


class Recording:
    """Whether the rounds of the draft's lane are on record, and how they get to the target: `on` holds from the next
    request on. `replies`: whether results may be answered before Python sees them, which moves what is on record."""

    def __init__(self, target: Channel, drafter: LocalDrafter, *, traced: bool) -> None:
        """`traced`: the times matter, and all of it is on record from the start."""
        self._target = target
        self.on, self.replies = traced, not traced
        self.tell = Switch(lambda: self.on, DraftTrace(drafter, self._send))

    def _send(self, request: int, round_: int, lane: Record) -> None:
        if request != 0:  # which is no request: the pace is measured under it
            self._target.send(Call.TRACE, pack_record(request, round_, lane))


class DraftService:
    """The life of the draft group's leader: it answers the target until that leaves or is gone.

    A result that the tree holds is answered as it arrives, in native code; the drafter then does the same once more,
    while the target is at work already.
    """

    def __init__(
        self, target: Channel, drafter: LeadingDrafter, bounds: Bounds, recording: Recording, pause: Pause,
        pulse: Pulse, *, stays: bool = True,
    ) -> None:  # fmt: skip
        """`pause`: what the draft's runner calls while it reads a prompt; `pulse`: when this rank works. `stays`: also
        when its group is out of step, to say so at every request; else it leaves, and is started again."""
        self._standing = Standing(bounds)
        self._target, self._pulse, self._stays = target, pulse, stays
        self._drafter = drafter
        self._recording = recording
        self._tell = recording.tell
        self._request = 0
        self._open = False  # the request; not once it has failed, and nothing more is done for it
        self._told = 0  # microseconds in forwards that the target knows of
        self._orders = Orders(target)
        pause.cancelled = self._orders.over

    def run(self) -> None:
        """Serves until it is sent home; a failing draft model only ends the request, and a group out of step every
        request from then on, where it stays. Raises RankLost when the target is gone without a word, or says what it
        should not."""
        try:
            while True:
                self._pulse.rest()
                kind, words, answered = self._next()
                self._pulse.work()
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
                    if isinstance(error, RankLost) and not self._stays:
                        raise
                    self._open = False
                    self._tell_failure(str(error) or type(error).__name__)
        except ConnectionError as error:
            if not has_left(self._target):
                raise RankLost(str(error)) from None

    def _next(self) -> tuple[int, Words, bool]:
        """The next message, and whether it is answered."""
        reply = self._drafter.reply() if self._open and self._recording.replies else None
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
            case Call.WATCH:
                on = in_range(one_word(words, "switch"), 0, 1, "a switch")
                return partial(setattr, self._recording, "on", bool(on))
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
