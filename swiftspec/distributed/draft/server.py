"""The draft's side of the bridge: its leader answers the target, a proposal for each result (paper section 3.1)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from swiftspec.config import MAX_TREE_NODES
from swiftspec.control.step_times import measure_draft_times
from swiftspec.distributed.draft.trace_codec import pack_record
from swiftspec.distributed.group.command_stream import CommandStream
from swiftspec.distributed.group.leader import LeaderDrafter, received_shutdown
from swiftspec.distributed.group.request_state import ModelLimits, RequestState, in_range
from swiftspec.distributed.launch.supervision import Heartbeat
from swiftspec.distributed.transport.channel import Channel
from swiftspec.distributed.transport.codec import (
    Words,
    pack_message,
    single_word,
    text_to_words,
    unpack_request_start,
    unpack_result,
)
from swiftspec.distributed.transport.opcodes import Opcode
from swiftspec.errors import RankLost, UserError
from swiftspec.messages import Proposal, RequestStart, VerifyResult
from swiftspec.observe.trace import DraftTrace, ObserverToggle
from swiftspec.observe.trace_format import Record
from swiftspec.runtime.cancellation import CancelCheck, Cancelled
from swiftspec.runtime.fallback_drafter import FAILURES
from swiftspec.runtime.local_drafter import LocalDrafter


class DraftTraceSender:
    """Whether the rounds of the draft's lane are on record, and how they get to the target: `on` holds from the next
    request on. `replies`: whether results may be answered before Python sees them, which moves what is on record."""

    def __init__(self, target: Channel, drafter: LocalDrafter, *, traced: bool) -> None:
        """`traced`: the times matter, and all of it is on record from the start."""
        self._target = target
        self.enabled, self.native_replies = traced, not traced
        self.notify = ObserverToggle(lambda: self.enabled, DraftTrace(drafter, self._send))

    def _send(self, request: int, round_: int, lane: Record) -> None:
        if request != 0:  # which is no request: the pace is measured under it
            self._target.send(Opcode.TRACE_RECORD, pack_record(request, round_, lane))


class DraftGroupServer:
    """The life of the draft group's leader: it answers the target until that leaves or is gone.

    A result that the tree holds is answered as it arrives, in native code; the drafter then does the same once more,
    while the target is at work already.
    """

    def __init__(
        self, target: Channel, drafter: LeaderDrafter, limits: ModelLimits, recording: DraftTraceSender, pause:
        CancelCheck,
        heartbeat: Heartbeat, *, stay_on_error: bool = True,
    ) -> None:  # fmt: skip
        """`pause`: what the draft's runner calls while it reads a prompt; `pulse`: when this rank works. `stays`: also
        when its group is out of step, to say so at every request; else it leaves, and is started again."""
        self._state = RequestState(limits)
        self._target, self._heartbeat, self._stay_on_error = target, heartbeat, stay_on_error
        self._drafter = drafter
        self._trace = recording
        self._notify = recording.notify
        self._request = 0
        self._open = False  # the request; not once it has failed, and nothing more is done for it
        self._reported_us = 0  # microseconds in forwards that the target knows of
        self._commands = CommandStream(target)
        pause.cancelled = self._commands.request_ended

    def run(self) -> None:
        """Serves until it is sent home; a failing draft model only ends the request, and a group out of step every
        request from then on, where it stays. Raises RankLost when the target is gone without a word, or says what it
        should not."""
        try:
            while True:
                self._heartbeat.mark_idle()
                kind, words, answered = self._next()
                self._heartbeat.mark_busy()
                if kind == Opcode.SHUTDOWN:
                    return
                try:
                    serve = self._decode(kind, words, answered)
                except ValueError as error:
                    raise RankLost(f"{self._target.peer} sent what is no message of ours: {error}") from None
                try:
                    serve()
                except Cancelled:
                    self._open = False
                except (RankLost, UserError, *FAILURES) as error:
                    if isinstance(error, RankLost) and not self._stay_on_error:
                        raise
                    self._open = False
                    self._send_error(str(error) or type(error).__name__)
        except ConnectionError as error:
            if not received_shutdown(self._target):
                raise RankLost(str(error)) from None

    def _next(self) -> tuple[int, Words, bool]:
        """The next message, and whether it is answered."""
        reply = self._drafter.fast_reply() if self._open and self._trace.native_replies else None
        if reply is None or self._commands.buffered:
            return *self._commands.recv(), False
        spent = self._unreported_us()
        kind, words, answered = self._target.recv_or_reply(reply, Opcode.OBSERVE, Opcode.PROPOSAL, spent)
        self._reported_us += spent if answered else 0
        return kind, words, answered

    def _decode(self, kind: int, words: Words, answered: bool) -> Callable[[], object]:
        """What a message asks for. Raises ValueError on what no target sends."""
        bounds = self._state.limits
        match kind:
            case Opcode.DRAFTER_OPEN:
                opening = replace(
                    unpack_request_start(words), executor="", num_cached_tokens=None
                )  # which are chosen here
                self._state.open(opening)
                return partial(self._serve_opening, opening)
            case Opcode.OBSERVE:
                if not self._open:  # the target has been told, or will read it in a moment
                    return lambda: None
                result = unpack_result(words)
                self._state.advance(result)
                return partial(self._serve_result, result, answered)
            case Opcode.DRAFTER_CLOSE:
                return self._serve_close
            case Opcode.SET_DRAFT_STEPS:
                steps = in_range(single_word(words, "number of steps"), 1, MAX_TREE_NODES, "steps")
                return partial(setattr, self._drafter, "draft_steps", steps)
            case Opcode.SET_TRACE:
                on = in_range(single_word(words, "switch"), 0, 1, "a switch")
                return partial(setattr, self._trace, "enabled", bool(on))
            case Opcode.MEASURE_STEP:
                room = in_range(single_word(words, "pace"), 1, bounds.max_model_len, "the room to measure in")
                return partial(self._serve_measure, room)
            case _:
                raise ValueError(f"a target does not send messages of kind {kind}")

    def _serve_opening(self, opening: RequestStart) -> None:
        """First the answer, then whatever can be done ahead."""
        self._request, self._reported_us = opening.request, int(1e6 * self._drafter.busy)
        self._notify("opening", opening)
        self._drafter.open(opening)
        self._notify("drafter opened")
        self._open = True
        self._round(answered=False)

    def _serve_result(self, result: VerifyResult, answered: bool) -> None:
        self._notify("verified", None, result)
        self._drafter.observe(result)
        self._notify("observed", result)
        self._round(answered)

    def _serve_close(self) -> None:
        self._open = False
        self._drafter.close()

    def _serve_measure(self, room: int) -> None:
        self._open = False
        times = measure_draft_times(self._drafter, room)
        self._target.send(Opcode.STEP_TIMES, [int(1e6 * times.overhead), max(int(1e6 * times.expansion), 1)])

    def _round(self, answered: bool) -> None:
        """The answer, unless it has been given, and the tree grown ahead."""
        proposal = self._drafter.propose()
        self._notify("proposed", proposal)
        if not answered:
            self._propose(proposal)
        self._drafter.grow()
        self._notify("grown")

    def _propose(self, proposal: Proposal) -> None:
        """Answers with a proposal, and with the microseconds in forwards since the answer before."""
        spent = self._unreported_us()
        self._target.send(Opcode.PROPOSAL, [spent, *pack_message(proposal)])
        self._reported_us += spent

    def _unreported_us(self) -> int:
        return int(1e6 * self._drafter.busy) - self._reported_us

    def _send_error(self, reason: str) -> None:
        self._target.send(Opcode.ERROR, [self._request, *text_to_words(reason)])
