"""Client side of the connection to a server: the draft's leader or a worker."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

from swiftspec.distributed.remote.session_messages import (
    MAX_TOKENIZER_BYTES,
    AnswerTimes,
    ErrorCode,
    SessionStart,
    unpack_error,
    unpack_file_piece,
    unpack_timed,
)
from swiftspec.distributed.remote.sessions import ID_BYTES, SessionGone
from swiftspec.distributed.transport.codec import Frame, Words, words_to_bytes
from swiftspec.distributed.transport.opcodes import Opcode
from swiftspec.distributed.transport.request_state import RequestState, in_range
from swiftspec.distributed.transport.transport import Transport
from swiftspec.errors import UserError
from swiftspec.observe.rpc_latency import RpcLog, RpcRecord

TIMED_OPCODES = (Opcode.PROPOSAL, Opcode.RESULT, Opcode.REQUEST_OPENED, Opcode.TREE_DELTA)  # with microseconds
LATE_DRAIN_S = 1.0  # seconds after a deadline during which messages already received are still read
END_SESSION_TIMEOUT_S = 1.0  # seconds; longest wait for the end of a session


class RequestRefused(Exception):
    """The server has refused a message about the current request, or has failed to execute it."""


class ServerLink:
    """Connection of a client to a server, for one request at a time.

    `busy`: seconds of the server's forwards, as far as it has reported them.
    `rpc_log`: latency records of a worker's answers.
    `resumed`: whether the worker has resumed the session that was asked for; None before its answer.
    """

    def __init__(
        self, transport: Transport, state: RequestState, side: str, session: SessionStart | None = None
    ) -> None:
        """`state`: state of the client's request, by which late answers are recognized.

        `side`: "draft" or "target".
        `session`: session on a worker; None if the server is the draft's leader.
        """
        self.transport, self.state, self.session = transport, state, session
        self.busy, self.rpc_log = 0.0, RpcLog()
        self.resumed: bool | None = None
        self._side = side
        self._sent_at: dict[int, int] = {}  # Unix times in nanoseconds, by round; -1: request start

    def attach(self, transport: Transport) -> None:
        """Replaces the transport by another one."""
        self.transport.close()
        self.transport = transport

    def restart(self) -> None:
        """Discards the previous request. On a worker, opens the session again, or resumes it."""
        self.transport.restart()
        self._sent_at.clear()
        if self.session is not None:
            self.resumed = None
            self.transport.send(Opcode.SESSION_ATTACH, self.session.pack())

    def send(self, kind: Opcode, words: Sequence[int] = ()) -> None:
        if self.session is not None and kind in (Opcode.DRAFTER_OPEN, Opcode.VERIFIER_OPEN):
            self._sent_at[-1] = time.time_ns()
        elif self.session is not None and kind in (Opcode.OBSERVE, Opcode.VERIFY):
            self._sent_at[words[1]] = time.time_ns()
        self.transport.send(kind, words)

    def recv(self, deadline: float) -> Frame:
        """Returns opcode and words of the next answer; answers about earlier requests or rounds are included, except
        errors.

        Raises TimeoutError at `deadline`, a `time.monotonic` time. Reads the transport at least once, since an answer
        may have arrived before the deadline without being read. Raises ConnectionError if the server is lost,
        SessionGone if a worker does not have the session, RequestRefused if the server reports another error, and
        ValueError if it sends an invalid message.
        """
        while True:
            left = deadline - time.monotonic()
            kind, words = self.transport.recv(max(left, 0.0))
            times = None
            if kind == Opcode.TIMED_ANSWER:
                times, kind, words = unpack_timed(words)
            if kind in TIMED_OPCODES:
                return kind, self._count(kind, words, times)
            if kind == Opcode.ERROR:
                self._raise_unless_late(words)
            else:
                if kind == Opcode.SESSION_ATTACHED and self.session is not None:
                    self._set_session(self.session, words)
                return kind, words
            if left < -LATE_DRAIN_S:  # even if the server keeps sending other messages
                raise TimeoutError(f"no answer from {self.transport.peer}")

    def end_session(self) -> None:
        """Ends the session on a worker. Errors are ignored, since the worker ends idle sessions by itself."""
        if self.session is None or not self.session.session:
            return
        with suppress(ConnectionError, TimeoutError, ValueError, SessionGone, RequestRefused, UserError):
            self.restart()
            self.transport.send(Opcode.SESSION_CLOSE)
            deadline = time.monotonic() + END_SESSION_TIMEOUT_S
            while True:  # until the worker has closed the stream
                self.recv(deadline)
        self.session.session = ""
        self.transport.close()

    def _set_session(self, session: SessionStart, words: Words) -> None:
        name = words_to_bytes(words)
        if len(name) != ID_BYTES:
            raise ValueError(f"a session id of {len(words)} words is invalid")
        self.resumed, session.session = name.hex() == session.session, name.hex()

    def _raise_unless_late(self, words: Words) -> None:
        request, round_, code, reason = unpack_error(words)
        if request not in (0, self.state.request) or (code == ErrorCode.STALE and round_ < self.state.round):
            return
        if code == ErrorCode.SESSION_GONE:
            raise SessionGone(f"{self.transport.peer}: {reason}")
        raise RequestRefused(f"{self.transport.peer}: {reason}" if self.session is not None else reason)

    def _count(self, kind: int, words: Words, times: AnswerTimes | None) -> Words:
        """Counts the forwards of an answer, records its latency if it has times, and returns its remaining words."""
        if len(words) < 4:
            raise ValueError(f"an answer of {len(words)} words is too short")
        spent, _, round_ = words[:3]
        self.busy += 1e-6 * in_range(spent, 0, 2**31 - 1, "the microseconds of a round")
        if times is not None and self._sent_at:
            ended = round_ if kind == Opcode.RESULT else round_ - 1
            sent = self._sent_at.get(ended, max(self._sent_at.values()))
            cost = times.span, times.began, times.wall, times.queue, 1000 * spent
            session = "" if self.session is None else self.session.session
            self.rpc_log.add(RpcRecord(self._side, ended, sent, time.time_ns(), *cost), bytes.fromhex(session))
        return words[1:]


def read_tokenizer(transport: Transport, timeout: float) -> dict[str, bytes]:
    """Returns the tokenizer files of a target worker, by name. Raises ConnectionError if the worker is lost,
    TimeoutError after `timeout` seconds, and ValueError if it sends invalid files or more than MAX_TOKENIZER_BYTES."""
    deadline, files, name, size = time.monotonic() + timeout, dict[str, bytearray](), "", 0
    transport.send(Opcode.READ_TOKENIZER)
    while True:
        kind, words = transport.recv(max(deadline - time.monotonic(), 0.0))
        if kind == Opcode.ERROR:
            raise ValueError(unpack_error(words)[-1])
        if kind != Opcode.FILE_PIECE:
            raise ValueError(f"unexpected opcode {kind}")
        began, data = unpack_file_piece(words)
        if not began and not data:
            return {each: bytes(whole) for each, whole in files.items()}
        size += len(data)
        if size > MAX_TOKENIZER_BYTES:
            raise ValueError("its tokenizer is too large")
        name = began or name
        files.setdefault(name, bytearray()).extend(data)
