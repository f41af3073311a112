"""Opcodes of the messages between ranks."""

from __future__ import annotations

from enum import IntEnum


class Opcode(IntEnum):
    """Opcode of a message between ranks.

    A rank sends READY to TRACE_RECORD (15 to 19) to the rank that leads it; all other opcodes are sent by the leading
    rank. At startup, READY is also sent by the leading rank, with a value of rank 0. A leader sends PREFILL_CONTINUE to
    its followers before each prefill chunk; any other opcode at that point means that it has aborted the request.
    """

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
