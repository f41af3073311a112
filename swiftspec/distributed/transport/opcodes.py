"""Opcodes of the messages between ranks, and between workers and their clients."""

from __future__ import annotations

from enum import IntEnum


class Opcode(IntEnum):
    """Opcode of a message.

    A leader sends its followers the calls of its roles. A client (the target's leader, or the client of a worker) sends
    request starts, proposals and results, and the server (the draft's leader, or a worker) answers. READY is sent in
    both directions at startup. A leader sends PREFILL_CONTINUE to its followers before each prefill chunk; any other
    opcode at that point means that it has aborted the request.
    """

    VERIFIER_OPEN = 1  # request start
    VERIFY = 2  # proposal
    VERIFIER_CLOSE = 3
    DRAFTER_OPEN = 4  # request start
    PROPOSE = 5
    EXPAND = 6
    OBSERVE = 7  # result
    DRAFTER_CLOSE = 8
    SET_DRAFT_STEPS = 9
    MEASURE_STEP = 10
    POPULATION_OPEN = 11
    POPULATION_ROUND = 12
    POPULATION_CLOSE = 13
    SHUTDOWN = 14
    READY = 15
    PROPOSAL = 16  # answer to a request start or a result: microseconds of forwards, then the proposal
    STEP_TIMES = 17  # answer to MEASURE_STEP
    ERROR = 18  # answer to a message that has failed, see remote/session_messages.py
    TRACE_RECORD = 19
    PREFILL_CONTINUE = 20
    SET_TRACE = 21
    SESSION_OPEN = 22
    SESSION_SELECT = 23
    SESSION_CLOSE = 24
    REQUEST_OPENED = 25  # answer of a verifier to a request start, see ServedVerifier
    RESULT = 26  # answer to a proposal: microseconds of forwards, then the result
    TREE_DELTA = 27  # microseconds of forwards, then nodes that expansions have added
    SESSION_ATTACH = 28  # opens a session on a worker, or resumes it on another connection
    SESSION_ATTACHED = 29  # answer to SESSION_ATTACH: id of the session
    TIMED_ANSWER = 30  # answer of a worker: times, then opcode and words of the answer
    READ_TOKENIZER = 31
    FILE_PIECE = 32  # answer to READ_TOKENIZER
    REQUEST_SELECT = 33  # of concurrent requests: batch index of the next call, and which calls suspend a request
    REQUEST_RESUME = 34  # as REQUEST_SELECT; continues the call of that request
    CALLS_RUN = 35  # batch indices of the requests whose calls run as one
    CHANNEL_SELECT = 36  # batch index of the request that the following messages are about, see transport/channels.py
