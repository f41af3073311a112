"""gRPC services of a worker, for any number of concurrent sessions.

Requests are parsed here and not by gRPC, so that an invalid message is refused with a status and one line like any
other error. If a request equals the previous request of its session byte by byte, it gets the same answer and is not
executed again, because a client that has lost its connection cannot know whether the worker has executed the request.
"""

from __future__ import annotations

import secrets
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import grpc
from google.protobuf.message import Message

from swiftspec import __version__, file_io
from swiftspec.distributed.rpc import swiftspec_pb2 as pb
from swiftspec.distributed.rpc.draft_session import DraftSession
from swiftspec.distributed.rpc.protobuf_codec import (
    PROTOCOL_VERSION,
    ModelIdentity,
    delta_to_proto,
    parse_message,
    proposal_from_proto,
    proposal_to_proto,
    request_start_from_proto,
    result_from_proto,
    result_to_proto,
)
from swiftspec.distributed.rpc.request_reader import RequestReader
from swiftspec.distributed.rpc.sessions import FairLock, W, WorkerSession, WorkerSessions
from swiftspec.distributed.rpc.status import StaleRound, status_of
from swiftspec.distributed.rpc.tree_delta_queue import TimedDelta, TreeDeltaQueue
from swiftspec.distributed.rpc.tree_stream_session import TreeStreamSession
from swiftspec.distributed.rpc.verify_session import VerifySession
from swiftspec.messages import Proposal, VerifyResult
from swiftspec.model.fingerprint import LARGEST

DRAFT_SERVICE, TARGET_SERVICE = "swiftspec.v1.DraftService", "swiftspec.v1.TargetService"
FILE_CHUNK_BYTES = 1 << 20  # bytes of a tokenizer file per message
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Description of a worker's model, which Ping returns to clients."""

    identity: ModelIdentity
    name: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    dtype: str

    def to_message(self) -> pb.PingAnswer:
        return pb.PingAnswer(
            protocol=PROTOCOL_VERSION, version=__version__, name=self.name, model=self.identity.model,
            tokenizer=self.identity.tokenizer, vocab_size=self.vocab_size, max_model_len=self.max_model_len,
            eos_token_ids=self.eos_token_ids, dtype=self.dtype,
        )  # fmt: skip


class WorkerService(Generic[W]):
    """Common base of the draft worker's and the target worker's service."""

    name: str  # name of the gRPC service
    unary_method: str  # name of the unary method that executes one round

    def __init__(self, model_info: ModelInfo, sessions: WorkerSessions[W]) -> None:
        self.sessions = sessions
        self._model_info, self._lock = model_info, FairLock()

    def handlers(self) -> Any:
        """Returns the handlers to register at a gRPC server."""
        return grpc.method_handlers_generic_handler(self.name, self._methods())

    def run_if_idle(self, act: Callable[[], None]) -> None:
        """Calls `act` with the model lock held, or does nothing if a session holds the lock."""
        if self._lock.try_acquire():
            try:
                act()
            finally:
                self._lock.release()

    def _methods(self) -> dict[str, Any]:
        once, stream = grpc.unary_unary_rpc_method_handler, grpc.stream_stream_rpc_method_handler
        behaviours = {self.unary_method: self._once, "EndSession": self._end, "Ping": self._ping}
        methods = {name: once(each, response_serializer=_serialized) for name, each in behaviours.items()}
        return {**methods, "Stream": stream(self._stream, response_serializer=_serialized)}

    def _ping(self, data: bytes, context: Any) -> Message:
        return self._model_info.to_message()

    def _end(self, data: bytes, context: Any) -> Message:
        with errors_to_status(context):
            self.sessions.end(parse_message(pb.EndSessionRequest, data).session)
        return pb.EndSessionAnswer()

    def _once(self, data: bytes, context: Any) -> Message:
        with errors_to_status(context):
            return self._answer(data, *self._read(data, lambda: not context.is_active()))

    def _stream(self, requests: Iterator[bytes], context: Any) -> Iterator[Message]:
        for data in requests:
            with errors_to_status(context):
                session, act = self._read(data, lambda: not context.is_active())
            yield from self._answers(data, session, act, requests, context)

    def _answers(
        self, data: bytes, session: WorkerSession[W], act: Callable[[], Any], requests: Iterator[bytes], context: Any
    ) -> Iterator[Message]:
        """Yields the answer, and then does the session's work that the answer does not depend on."""
        with errors_to_status(context):
            answer = self._answer(data, session, act)
        yield answer
        with errors_to_status(context), self.sessions.in_use(session), self._lock:
            self._afterwards(session.state)

    def _answer(self, data: bytes, session: WorkerSession[W], act: Callable[[], Any]) -> Any:
        with self.sessions.in_use(session):
            if session.last_answer is None or session.last_answer[0] != data:
                answer, telemetry = self._timed(session, act)
                answer.session = session.id
                answer.telemetry.CopyFrom(telemetry)
                session.last_answer = data, answer
            return session.last_answer[1]

    def _timed(self, session: WorkerSession[W], act: Callable[[], T]) -> tuple[T, pb.Telemetry]:
        """Calls `act` with the model lock held. Returns its result and the telemetry of the call."""
        began, came = time.time_ns(), time.perf_counter_ns()
        with self._lock:
            queue = time.perf_counter_ns() - came
            made = act()
        busy, session.busy = session.busy, session.state.busy
        model = int(1e9 * (session.busy - busy))
        wall = time.perf_counter_ns() - came
        return made, pb.Telemetry(span=secrets.randbits(64), began=began, wall=wall, queue=queue, model=model)

    @abstractmethod
    def _read(self, data: bytes, cancelled: Callable[[], bool]) -> tuple[WorkerSession[W], Callable[[], Any]]:
        """Parses a request. Returns its session and the function that computes the answer. Raises errors that
        `status_of` converts."""

    @abstractmethod
    def _afterwards(self, work: W) -> None:
        """Does the work of a session that its last answer did not depend on. `work`: state of the session."""


class DraftWorkerService(WorkerService[DraftSession | TreeStreamSession]):
    """Service of a draft worker."""

    name, unary_method = DRAFT_SERVICE, "GenerateDrafts"

    def _once(self, data: bytes, context: Any) -> Message:
        with errors_to_status(context):
            session, act = self._read(data, lambda: not context.is_active())
            if isinstance(session.state, TreeStreamSession):
                raise ValueError("GenerateDrafts does not support mode async; call Stream, or use mode serial")
            return self._answer(data, session, act)

    def _answers(
        self, data: bytes, session: WorkerSession[Any], act: Callable[[], Any], requests: Iterator[bytes], context: Any
    ) -> Iterator[Message]:
        if isinstance(session.state, TreeStreamSession):
            return self._growth(session, act, requests, context)
        return super()._answers(data, session, act, requests, context)

    def _growth(
        self, session: WorkerSession[Any], act: Callable[[], bool], requests: Iterator[bytes], context: Any
    ) -> Iterator[Message]:
        """Yields the tree deltas that follow a request start and each result, until the client ends the stream.

        A background thread expands the tree without waiting for messages to be sent. Deltas that accumulate meanwhile
        can be merged into one message. `act`: function that executes the first request.
        """
        with closing(TreeDeltaQueue(lambda: self._grow(session, act, requests, context))) as grown:
            while True:
                with errors_to_status(context):
                    together = grown.take(join=lambda: session.state.free)
                if not together:
                    return
                for delta, telemetry in together:
                    yield pb.DraftAnswer(session=session.id, telemetry=telemetry, delta=delta_to_proto(delta))

    def _grow(
        self, session: WorkerSession[Any], act: Callable[[], bool], requests: Iterator[bytes], context: Any
    ) -> Iterator[TimedDelta]:
        """Executes the requests of a stream, expands the tree between them and yields its deltas. Raises errors that
        `status_of` converts."""
        work, coming, start = session.state, RequestReader(requests, context), None
        while not coming.ended:
            with self.sessions.in_use(session):
                if start not in (None, work.openings):
                    raise StaleRound("the request has already ended: its session has opened another one")
                more, telemetry = self._timed(session, act)
                start, grown = work.openings, work.take()
            for delta in grown:
                yield delta, telemetry
                telemetry = None
            data, act = coming.next(wait=not more), work.grow
            if data is not None:
                whose, act = self._read(data, lambda: not context.is_active())
                if whose is not session:
                    raise ValueError("all requests of a stream must belong to one session")

    def _read(self, data: bytes, cancelled: Callable[[], bool]) -> tuple[WorkerSession[Any], Callable[[], Any]]:
        request = parse_message(pb.DraftRequest, data)
        if request.HasField("opening"):
            start, shape = request_start_from_proto(request.opening, self._model_info.identity)
            session: WorkerSession[Any] = self.sessions.open(request.session, shape)
            act = partial(session.state.open, start, cancelled)
        elif request.HasField("result"):
            session = self.sessions.find(request.session)
            act = partial(session.state.observe, result_from_proto(request.result))
        else:
            raise ValueError("the request contains neither a request start nor a result")
        if isinstance(session.state, TreeStreamSession):
            return session, act
        return session, partial(self._propose, session.state, request.draft_steps, act)

    def _propose(self, work: DraftSession, steps: int, act: Callable[[], Proposal]) -> pb.DraftAnswer:
        work.set_steps(steps)
        return pb.DraftAnswer(proposal=proposal_to_proto(act()))

    def _afterwards(self, work: DraftSession | TreeStreamSession) -> None:
        work.grow()


class TargetWorkerService(WorkerService[VerifySession]):
    """Service of a target worker."""

    name, unary_method = TARGET_SERVICE, "VerifyDrafts"

    def __init__(self, about: ModelInfo, sessions: WorkerSessions[VerifySession], tokenizer: tuple[Path, ...]) -> None:
        """`tokenizer`: paths of the tokenizer files, which clients can read."""
        super().__init__(about, sessions)
        self._files = tokenizer

    def _methods(self) -> dict[str, Any]:
        read = grpc.unary_stream_rpc_method_handler(self._read_tokenizer, response_serializer=_serialized)
        return {**super()._methods(), "ReadTokenizer": read}

    def _read_tokenizer(self, data: bytes, context: Any) -> Iterator[Message]:
        for file in self._files:
            with errors_to_status(context):
                whole = file_io.read_bytes(file, max_bytes=LARGEST)
            yield pb.FilePiece(name=file.name, data=whole[:FILE_CHUNK_BYTES])
            for start in range(FILE_CHUNK_BYTES, len(whole), FILE_CHUNK_BYTES):
                yield pb.FilePiece(data=whole[start : start + FILE_CHUNK_BYTES])

    def _read(
        self, data: bytes, cancelled: Callable[[], bool]
    ) -> tuple[WorkerSession[VerifySession], Callable[[], Any]]:
        request = parse_message(pb.VerifyRequest, data)
        if request.HasField("opening"):
            start, shape = request_start_from_proto(request.opening, self._model_info.identity)
            session = self.sessions.open(request.session, shape)
            return session, lambda: _opened(session.state.open(start, cancelled))
        if request.HasField("proposal"):
            session, proposal = self.sessions.find(request.session), proposal_from_proto(request.proposal)
            return session, lambda: _verified(session.state.verify(proposal))
        raise ValueError("the request contains neither a request start nor a proposal")

    def _afterwards(self, work: VerifySession) -> None:
        work.settle()


def _opened(kept: int) -> pb.VerifyAnswer:
    return pb.VerifyAnswer(opened=pb.Opened(kept=kept))


def _verified(result: VerifyResult) -> pb.VerifyAnswer:
    return pb.VerifyAnswer(result=result_to_proto(result))


@contextmanager
def errors_to_status(context: Any) -> Iterator[None]:
    """Context manager for the work of a gRPC call: if an error occurs that the client has to handle, ends the call with
    the status of that error.

    Other exceptions are internal errors, which gRPC logs.
    """
    try:
        yield
    except Exception as error:
        told = status_of(error)
        if told is None:
            raise
        context.abort(*told)


def _serialized(message: Message) -> bytes:
    return message.SerializeToString()
