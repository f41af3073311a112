"""Worker: one loaded model, and a server for each stream of its clients.

If a message equals the previous message of its session, it gets the same answers and is not executed again, because a
client that has lost its connection cannot know whether the worker has executed the message.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from swiftspec.distributed.remote.answer_queue import AnswerQueue
from swiftspec.distributed.remote.served_roles import Execute, ServedRole
from swiftspec.distributed.remote.server import SessionServer
from swiftspec.distributed.remote.session_messages import (
    Answer,
    AnswerTimes,
    ErrorCode,
    ModelInfo,
    SessionStart,
    pack_files,
)
from swiftspec.distributed.remote.sessions import FairLock, SessionGone, WorkerFull, WorkerSession, WorkerSessions
from swiftspec.distributed.transport.codec import Frame, Words, bytes_to_words
from swiftspec.distributed.transport.opcodes import Opcode
from swiftspec.distributed.transport.transport import Receiver
from swiftspec.errors import UserError
from swiftspec.runtime.cancellation import Cancelled
from swiftspec.runtime.current_device import set_current_device
from swiftspec.runtime.fallback_drafter import FAILURES

CPU = torch.device("cpu")
REPORTED_ERRORS = (SessionGone, WorkerFull, Cancelled, UserError, ValueError, *FAILURES)  # others are internal errors


class Worker:
    """A loaded model and the sessions on it, for any number of concurrent clients. `side`: the model that it serves."""

    def __init__(
        self,
        side: Literal["target", "draft"],
        model_info: ModelInfo,
        sessions: WorkerSessions[ServedRole],
        files: tuple[Path, ...] = (),
        device: torch.device = CPU,
        on_error: Callable[[Exception], object] = lambda error: None,
    ) -> None:
        """`files`: paths of the tokenizer files, which clients can read. `device`: device of the model. `on_error`:
        called with each error before it is answered or raised."""
        self.side, self.model_info, self.sessions, self.files, self.device = side, model_info, sessions, files, device
        self.on_error = on_error
        self.lock = FairLock()  # held during each use of the model

    def serve(self, receiver: Receiver, cancelled: Callable[[], bool] | None = None) -> Iterator[Frame]:
        """Yields the answers to the messages of one stream, until the client ends it or is lost. `cancelled`: returns
        whether the client has cancelled the stream; None: a prefill polls `receiver` for the end of the request."""
        server = WorkerServer(self, receiver, cancelled)
        answers = server.answers()
        with suppress(ConnectionError):
            for answer in answers:
                yield answer.frame()
                if server.role is not None and server.role.streams_deltas:
                    break
            else:
                return
            with closing(AnswerQueue(answers)) as queue:
                while ready := queue.take():
                    yield from (answer.frame() for answer in ready)

    def sweep(self, on_idle: Callable[[], None] = lambda: None) -> None:
        """Ends sessions that have been idle too long, and calls `on_idle` if no session uses the model. To be called
        periodically."""
        self.sessions.sweep()
        self.run_if_idle(on_idle)

    def run_if_idle(self, act: Callable[[], None]) -> None:
        """Calls `act` with the model lock held, or does nothing if a session holds the lock."""
        if self.lock.try_acquire():
            try:
                act()
            finally:
                self.lock.release()


class WorkerServer(SessionServer):
    """Server of one stream to a worker, for one request. Its session outlives it."""

    def __init__(self, worker: Worker, receiver: Receiver, cancelled: Callable[[], bool] | None) -> None:
        """`cancelled`: see `Worker.serve`."""
        super().__init__(receiver)
        self._worker, self._cancelled = worker, cancelled or self._commands.request_ended
        self._session: WorkerSession[ServedRole] | None = None

    def _execute(self, frame: Frame | None) -> Iterable[Answer]:
        set_current_device(self._worker.device)  # for each message, since a stream passes from thread to thread
        if frame is None:
            return self._execute_in_session(None)
        kind, words = frame
        match kind:
            case Opcode.SESSION_ATTACH:
                return self._attach(words)
            case Opcode.SESSION_CLOSE:
                self._ended = True
                self._worker.sessions.end("" if self._session is None else self._session.id)
                return ()
            case Opcode.READ_TOKENIZER:
                return pack_files(self._worker.files)
            case _:
                self._ended = kind in (Opcode.DRAFTER_CLOSE, Opcode.VERIFIER_CLOSE)
                return self._execute_in_session(frame)

    def _attach(self, words: Words) -> list[Answer]:
        """Opens a session, or resumes it on this stream: another stream of the session is refused from then on."""
        start = SessionStart.unpack(words, self._worker.model_info.identity)
        sessions = self._worker.sessions
        session = sessions.open(start.session, start.shape, start.masked_tokens)
        try:
            self._take_over(session)
        except SessionGone:  # another client has evicted it
            session = sessions.open("", start.shape, start.masked_tokens)
            self._take_over(session)
        return [Answer(Opcode.SESSION_ATTACHED, bytes_to_words(bytes.fromhex(session.id)))]

    def _take_over(self, session: WorkerSession[ServedRole]) -> None:
        with self._worker.sessions.in_use(session):
            session.stream, session.role.cancel_check.cancelled = self, self._cancelled
        self._session, self.role = session, session.role

    def _execute_in_session(self, frame: Frame | None) -> list[Answer]:
        session = self._session
        if session is None:
            raise ValueError("the client has not opened a session")
        with self._worker.sessions.in_use(session):
            if session.stream is not self:
                raise SessionGone("the request has already ended: its session has opened another one")
            if frame is None:
                return self._timed(session.role.work_ahead)
            if session.last_answer is not None and session.last_answer[0] == frame:
                return session.last_answer[1]
            answers = self._timed(session.role.decode(*frame))
            if answers and not session.role.streams_deltas:
                session.last_answer = frame, answers
            return answers

    def _timed(self, execute: Execute) -> list[Answer]:
        """Executes with the model lock held. Returns the answers, of which the first one contains the times."""
        began, start = time.time_ns(), time.perf_counter_ns()
        with self._worker.lock:
            queue = time.perf_counter_ns() - start
            answers = execute()
        if not answers:
            return []
        times = AnswerTimes(secrets.randbits(64), began, time.perf_counter_ns() - start, queue)
        return [replace(answers[0], times=times), *answers[1:]]

    def _on_error(self, error: Exception, frame: Frame | None) -> Iterable[Answer]:
        self._worker.on_error(error)
        if not isinstance(error, REPORTED_ERRORS):
            raise error
        code = ErrorCode.FAILED
        if isinstance(error, SessionGone):
            code, self._session, self.role = ErrorCode.SESSION_GONE, None, None
        return self._error_answer(error, frame, code)
