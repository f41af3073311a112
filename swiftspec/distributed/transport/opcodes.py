"""The kinds of messages between ranks."""

from __future__ import annotations

from enum import IntEnum


class Opcode(IntEnum):
    """The kinds of messages. Those after LEAVE are answers; READY also carries rank 0's word at the start. GO_ON comes
    before each chunk of a prompt; any other message there means that the leader has given the opening up."""

    VERIFIER_OPEN = 1
    VERIFY = 2
    VERIFIER_CLOSE = 3
    DRAFTER_OPEN = 4
    PROPOSE = 5
    EXPAND = 6
    OBSERVE = 7
    DRAFTER_CLOSE = 8
    SET_DRAFT_STEPS = 9
    MEASURE_STEP = 10
    POPULATION_OPEN = 11
    POPULATION_ROUND = 12
    POPULATION_CLOSE = 13
    SHUTDOWN = 14
    READY = 15
    PROPOSAL = 16
    STEP_TIMES = 17
    ERROR = 18
    TRACE_RECORD = 19
    PREFILL_CONTINUE = 20
    SET_TRACE = 21
    SESSION_OPEN = 22
    SESSION_SELECT = 23
    SESSION_CLOSE = 24
