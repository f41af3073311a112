"""Roles of a server: execute the messages about a client's requests on a drafter or a verifier, and return the answers.

A message is validated against the state of the request before it is executed. An error ends the current request, which
the client may open again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from swiftspec.config import MAX_TREE_NODES, EngineConfig
from swiftspec.control.step_times import measure_draft_times
from swiftspec.distributed.remote.session_messages import Answer
from swiftspec.distributed.remote.trace_codec import pack_record
from swiftspec.distributed.transport.codec import (
    Words,
    pack_message,
    pack_scored_result,
    single_word,
    unpack_proposal,
    unpack_request_start,
    unpack_result,
)
from swiftspec.distributed.transport.opcodes import Opcode
from swiftspec.distributed.transport.request_state import ModelLimits, RequestState, in_range
from swiftspec.distributed.transport.transport import Transport
from swiftspec.errors import UserError
from swiftspec.messages import Proposal, RequestStart, VerifyResult
from swiftspec.observe.trace import DraftTrace, ObserverToggle
from swiftspec.observe.trace_format import Record
from swiftspec.runtime.cancellation import CancelCheck
from swiftspec.runtime.local_drafter import LocalDrafter
from swiftspec.runtime.lookahead_drafter import LookaheadDrafter
from swiftspec.runtime.tree_delta_sender import AdjustableDrafter, TreeDeltaSender
from swiftspec.runtime.verifier import Verifier
from swiftspec.sampling.grammar import check_untrusted_grammar
from swiftspec.tree.replica import TreeDelta

Execute = Callable[[], list[Answer]]  # executes a message and returns the answers


def streams_tree_deltas(shape: EngineConfig) -> bool:
    """Returns whether a draft worker sends tree deltas instead of proposals in a session with the config `shape`."""
    return shape.mode == "async" and shape.proposal != "sample"


class DraftTraceSender:
    """Sends trace records of the draft's timeline to the target's leader.

    `enabled`: whether rounds are recorded, from the next request on.
    `native_replies`: whether results may be answered in native code. This shifts the times in trace records.
    `notify`: called with each event of the draft's loop.
    """

    def __init__(self, target: Transport, drafter: LocalDrafter, *, traced: bool) -> None:
        """`traced`: whether rounds are recorded from the start; their times are then exact, without native replies."""
        self._target = target
        self.enabled, self.native_replies = traced, not traced
        self.notify = ObserverToggle(lambda: self.enabled, DraftTrace(drafter, self._send))

    def _send(self, request: int, round_: int, lane: Record) -> None:
        if request != 0:  # request 0 is a measurement of step times
            self._target.send(Opcode.TRACE_RECORD, pack_record(request, round_, lane))


class ServedRole(ABC):
    """A drafter or verifier, and the state of its client's request.

    `state`: state of the request.
    `cancel_check`: cancellation check of the role's runner during prefill.
    `shape`: config of the rounds; None on the draft's leader, whose client has checked it.
    `work_due`: whether `work_ahead` has work that the last answer did not depend on.
    `streams_deltas`: whether the answers are tree deltas.
    """

    streams_deltas = False

    def __init__(
        self, role: Any, state: RequestState, cancel_check: CancelCheck, shape: EngineConfig | None = None
    ) -> None:
        self.state, self.cancel_check, self.shape = state, cancel_check, shape
        self.work_due = False
        self._role = role
        self._reported_us = 0  # microseconds of forwards that the client knows
        self._checked_grammar: str | None = None  # the last one that passed the check

    @abstractmethod
    def decode(self, kind: int, words: Words, *, answered: bool = False) -> Execute:
        """Returns the function that executes a message. Raises ValueError if the message is invalid. `answered`:
        whether native code has answered it already."""

    @abstractmethod
    def work_ahead(self) -> list[Answer]:
        """Executes the work that is due, and returns the answers that it produces."""

    @property
    def unreported_us(self) -> int:
        """Microseconds of forwards since those that the client knows."""
        return int(1e6 * self._role.busy) - self._reported_us

    def report_us(self, spent: int) -> int:
        """Counts `spent` microseconds as known to the client, and returns them."""
        self._reported_us += spent
        return spent

    def _start(self, words: Words) -> RequestStart:
        """Returns the request start in `words`, with which the state has been opened."""
        start = unpack_request_start(words)
        if self.shape is not None:
            try:
                self.shape.check_request(start.sampling)
            except UserError as error:
                raise ValueError(str(error)) from None
            self._check_grammar(start.sampling.grammar)
        start = replace(start, executor="", num_cached_tokens=None)  # the leader of this role's group chooses its own
        self.state.open(start)
        return start

    def _check_grammar(self, grammar: str | None) -> None:
        """Raises ValueError if the grammar of a client is invalid or would exceed the limits of this process."""
        if grammar is not None and grammar != self._checked_grammar:
            check_untrusted_grammar(grammar)
            self._checked_grammar = grammar

    def _finish_work(self) -> None:
        """Executes or discards the work that is due, before a request starts or ends."""
        self.work_due = False

    def _report_from_now(self) -> None:
        """Excludes the forwards so far, such as those of a measurement, from the next answer."""
        self._reported_us = int(1e6 * self._role.busy)

    def _close(self) -> list[Answer]:
        self._finish_work()
        self.state.is_open = False
        self._role.close()
        return []


class ServedDrafter(ServedRole):
    """A drafter that answers a request start and each result with a proposal, and then expands its tree ahead of the
    next result."""

    def __init__(
        self,
        drafter: AdjustableDrafter,
        limits: ModelLimits,
        cancel_check: CancelCheck,
        shape: EngineConfig | None = None,
        recording: DraftTraceSender | None = None,
    ) -> None:
        super().__init__(drafter, RequestState(limits), cancel_check, shape)
        self._drafter, self._recording = drafter, recording
        self._notify = (lambda *event: None) if recording is None else recording.notify

    def decode(self, kind: int, words: Words, *, answered: bool = False) -> Execute:
        match kind:
            case Opcode.DRAFTER_OPEN:
                return partial(self._open, self._start(words))
            case Opcode.OBSERVE:
                result = unpack_result(words)
                if not self.state.is_open:  # the request has failed or ended
                    return list
                self.state.advance(result)
                return partial(self._observe, result, answered)
            case Opcode.DRAFTER_CLOSE:
                return self._close
            case Opcode.SET_DRAFT_STEPS:
                most = MAX_TREE_NODES if self.shape is None else self.shape.max_draft_steps
                return partial(self._set_steps, in_range(single_word(words, "number of steps"), 1, most, "draft_steps"))
            case Opcode.SET_TRACE if self._recording is not None:
                on = in_range(single_word(words, "switch"), 0, 1, "a switch")
                return partial(self._set_trace, self._recording, bool(on))
            case Opcode.MEASURE_STEP:
                most = self.state.limits.max_model_len
                room = in_range(single_word(words, "context length"), 1, most, "the context of a measurement")
                return partial(self._measure, room)
            case _:
                raise ValueError(f"unexpected opcode {kind} for a drafter")

    def work_ahead(self) -> list[Answer]:
        self.work_due = False
        with self.state.close_on_error():
            self._drafter.grow()
        self._notify("grown")
        return []

    def _open(self, start: RequestStart) -> list[Answer]:
        self._finish_work()
        self._report_from_now()
        self._notify("opening", start)
        with self.state.close_on_error():
            self._drafter.open(start)
            self._notify("drafter opened")
            return self._propose(answered=False)

    def _observe(self, result: VerifyResult, answered: bool) -> list[Answer]:
        if self.work_due:
            self.work_ahead()
        self._notify("verified", None, result)
        with self.state.close_on_error():
            self._drafter.observe(result)
            self._notify("observed", result)
            return self._propose(answered)

    def _propose(self, answered: bool) -> list[Answer]:
        proposal = self._drafter.propose()
        self._notify("proposed", proposal)
        self.work_due = True
        return [] if answered else [self._answer(proposal)]

    def _answer(self, proposal: Proposal) -> Answer:
        return Answer(Opcode.PROPOSAL, pack_message(proposal), self.report_us(self.unreported_us))

    def _set_steps(self, steps: int) -> list[Answer]:
        if self._drafter.draft_steps != steps:
            self._drafter.draft_steps = steps
        return []

    def _set_trace(self, recording: DraftTraceSender, on: bool) -> list[Answer]:
        recording.enabled = on
        return []

    def _measure(self, room: int) -> list[Answer]:
        self.state.is_open = self.work_due = False
        times = measure_draft_times(self._drafter, room)
        return [Answer(Opcode.STEP_TIMES, [int(1e6 * times.overhead), max(int(1e6 * times.expansion), 1)])]


class ServedTreeDrafter(ServedDrafter):
    """A lookahead drafter that expands its tree asynchronously and answers with tree deltas (see tree/replica.py)."""

    streams_deltas = True

    def __init__(
        self,
        drafter: LookaheadDrafter,
        led: AdjustableDrafter,
        limits: ModelLimits,
        cancel_check: CancelCheck,
        shape: EngineConfig,
    ) -> None:
        """`led`: `drafter` as its group's leader runs it, on all ranks of the group."""
        super().__init__(led, limits, cancel_check, shape)
        self._deltas: list[TreeDelta] = []
        self._sender = TreeDeltaSender(drafter, lambda delta: self._deltas.append(delta), shape, led)

    def work_ahead(self) -> list[Answer]:
        """Expands the tree once if d is adaptive, otherwise d times."""
        self.work_due = False
        with self.state.close_on_error():
            self.work_due = self._sender.grow()
        return self._take()

    def _open(self, start: RequestStart) -> list[Answer]:
        self._finish_work()
        self._report_from_now()
        self._deltas = []
        with self.state.close_on_error():
            self._sender.open(start)
        self.work_due = True
        return self._take()

    def _observe(self, result: VerifyResult, answered: bool) -> list[Answer]:
        self.work_due = False
        with self.state.close_on_error():
            self._sender.observe(result)
        self.work_due = True
        return self._take()

    def _take(self) -> list[Answer]:
        """Returns the tree deltas since the previous call; the first one reports the forwards."""
        deltas, self._deltas = self._deltas, []
        spent = self.report_us(self.unreported_us) if deltas else 0
        costs = [spent, *[0] * len(deltas)]
        merge = self._sender.free  # with adaptive d, all deltas of a round may be sent as one
        return [Answer(Opcode.TREE_DELTA, delta, cost, mergeable=merge) for delta, cost in zip(deltas, costs)]


class ServedVerifier(ServedRole):
    """A verifier that answers each proposal with a result, and then commits the accepted path."""

    def __init__(self, verifier: Verifier, limits: ModelLimits, cancel_check: CancelCheck, shape: EngineConfig) -> None:
        super().__init__(verifier, RequestState(limits, shape.verify == "reject"), cancel_check, shape)
        self._verifier = verifier

    def decode(self, kind: int, words: Words, *, answered: bool = False) -> Execute:
        match kind:
            case Opcode.VERIFIER_OPEN:
                return partial(self._open, self._start(words))
            case Opcode.VERIFY:
                proposal = unpack_proposal(words)
                self.state.check_proposal(proposal)
                return partial(self._verify, proposal)
            case Opcode.VERIFIER_CLOSE:
                return self._close
            case _:
                raise ValueError(f"unexpected opcode {kind} for a verifier")

    def work_ahead(self) -> list[Answer]:
        self._finish_work()
        return []

    def _finish_work(self) -> None:
        if self.work_due:
            self.work_due = False
            self._verifier.settle()

    def _open(self, start: RequestStart) -> list[Answer]:
        self._finish_work()
        self._report_from_now()
        with self.state.close_on_error():
            cached = self._verifier.open(start)
        place = self.state.request, self.state.round, self.state.prefix_len
        return [Answer(Opcode.REQUEST_OPENED, [*place, cached], self.report_us(self.unreported_us))]

    def _verify(self, proposal: Proposal) -> list[Answer]:
        self._finish_work()
        with self.state.close_on_error():
            result = self._verifier.submit(proposal).wait()
        self.state.advance(result)
        self.work_due = True
        return [Answer(Opcode.RESULT, pack_scored_result(result), self.report_us(self.unreported_us))]
