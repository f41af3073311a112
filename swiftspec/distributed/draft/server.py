"""Draft group server: the draft's leader answers each result of the target with a proposal (paper section 3.1)."""

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
    """Sends trace records of the draft's timeline to the target's leader.

    `enabled`: whether rounds are recorded, from the next request on.
    `native_replies`: whether results may be answered in native code. This shifts the times in trace records.
    `notify`: called with each event of the draft's loop.
    """

    def __init__(self, target: Channel, drafter: LocalDrafter, *, traced: bool) -> None:
        """`traced`: whether rounds are recorded from the start; their times are then exact, without native replies."""
        self._target = target
        self.enabled, self.native_replies = traced, not traced
        self.notify = ObserverToggle(lambda: self.enabled, DraftTrace(drafter, self._send))

    def _send(self, request: int, round_: int, lane: Record) -> None:
        if request != 0:  # request 0 is a measurement of step times
            self._target.send(Opcode.TRACE_RECORD, pack_record(request, round_, lane))


class DraftGroupServer:
    """Main loop of the draft group's leader.

    If the last token of a result is a node of the tree and no expansion is due before the next proposal, native code
    sends that proposal as soon as the result arrives. The drafter then applies the result in Python, while the target
    already verifies the proposal.
    """

    def __init__(
        self, target: Channel, drafter: LeaderDrafter, limits: ModelLimits, recording: DraftTraceSender, pause:
        CancelCheck,
        heartbeat: Heartbeat, *, stay_on_error: bool = True,
    ) -> None:  # fmt: skip
        """`target`: channel to the target's leader.

        `limits`: limits against which messages are validated.
        `pause`: cancellation check of the draft's runner during prefill.
        `heartbeat`: records when this rank is busy.
        `stay_on_error`: whether a broken draft group keeps running and answers every request with an error. If False,
        `run` raises RankLost, so that the supervisor restarts the rank.
        """
        self._state = RequestState(limits)
        self._target, self._heartbeat, self._stay_on_error = target, heartbeat, stay_on_error
        self._drafter = drafter
        self._trace = recording
        self._notify = recording.notify
        self._request = 0
        self._open = False  # whether a request is open and has not failed
        self._reported_us = 0  # microseconds of forwards already reported to the target
        self._commands = CommandStream(target)
        pause.cancelled = self._commands.request_ended

    def run(self) -> None:
        """Executes the target's commands until SHUTDOWN. A failure of the draft model ends only the current request.

        Raises RankLost if the target is gone without SHUTDOWN or sends an invalid message, and, unless `stay_on_error`,
        if the draft group is broken.
        """
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
                    raise RankLost(f"{self._target.peer} sent an invalid message: {error}") from None
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
        """Returns opcode and words of the next message, and whether native code has answered it already."""
        reply = self._drafter.fast_reply() if self._open and self._trace.native_replies else None
        if reply is None or self._commands.buffered:
            return *self._commands.recv(), False
        spent = self._unreported_us()
        kind, words, answered = self._target.recv_or_reply(reply, Opcode.OBSERVE, Opcode.PROPOSAL, spent)
        self._reported_us += spent if answered else 0
        return kind, words, answered

    def _decode(self, kind: int, words: Words, answered: bool) -> Callable[[], object]:
        """Returns a function that executes the command with opcode `kind`. Raises ValueError if the command is invalid.
        `answered`: whether native code has answered it already."""
        bounds = self._state.limits
        match kind:
            case Opcode.DRAFTER_OPEN:
                start = replace(
                    unpack_request_start(words), executor="", num_cached_tokens=None
                )  # the draft's leader chooses its own
                self._state.open(start)
                return partial(self._serve_opening, start)
            case Opcode.OBSERVE:
                if not self._open:  # the request has failed or ended
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
                room = in_range(
                    single_word(words, "context length"), 1, bounds.max_model_len, "the context of a measurement"
                )
                return partial(self._serve_measure, room)
            case _:
                raise ValueError(f"unexpected opcode {kind} from the target group")

    def _serve_opening(self, start: RequestStart) -> None:
        """Starts a request: prefills, sends the first proposal, and expands the tree ahead of the first result."""
        self._request, self._reported_us = start.request, int(1e6 * self._drafter.busy)
        self._notify("opening", start)
        self._drafter.open(start)
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
        """Makes the next proposal, sends it unless native code has done so (`answered`), and expands the tree ahead of
        the result."""
        proposal = self._drafter.propose()
        self._notify("proposed", proposal)
        if not answered:
            self._propose(proposal)
        self._drafter.grow()
        self._notify("grown")

    def _propose(self, proposal: Proposal) -> None:
        """Sends a proposal, and the microseconds that the draft has spent in forwards since the previous proposal."""
        spent = self._unreported_us()
        self._target.send(Opcode.PROPOSAL, [spent, *pack_message(proposal)])
        self._reported_us += spent

    def _unreported_us(self) -> int:
        return int(1e6 * self._drafter.busy) - self._reported_us

    def _send_error(self, reason: str) -> None:
        self._target.send(Opcode.ERROR, [self._request, *text_to_words(reason)])
