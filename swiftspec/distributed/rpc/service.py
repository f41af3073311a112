"""What a worker answers: the methods of its service, for any number of sessions at once.

Bytes become messages here and not before, so that what is none is refused in a line like everything else. A request
that comes again, word for word, gets the same answer: a client whose connection broke cannot know whether it was heard.
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
from swiftspec.distributed.rpc.draft_session import Drafting
from swiftspec.distributed.rpc.protobuf_codec import (
    PROTOCOL,
    Identity,
    delta_to,
    parsed,
    proposal_to,
    read_opening,
    read_proposal,
    read_result,
    result_to,
)
from swiftspec.distributed.rpc.request_reader import Coming
from swiftspec.distributed.rpc.sessions import Session, Sessions, Turns, W
from swiftspec.distributed.rpc.status import Stale, status_of
from swiftspec.distributed.rpc.tree_delta_queue import Grown, Telling
from swiftspec.distributed.rpc.tree_stream_session import Feeding
from swiftspec.distributed.rpc.verify_session import Verifying
from swiftspec.messages import Proposal, VerifyResult
from swiftspec.model.fingerprint import LARGEST

DRAFT, TARGET = "swiftspec.v1.DraftService", "swiftspec.v1.TargetService"
PIECE = 1 << 20  # bytes of a file in one message
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class About:
    """What a worker says of itself."""

    identity: Identity
    name: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    dtype: str

    def to_message(self) -> pb.PingAnswer:
        return pb.PingAnswer(
            protocol=PROTOCOL, version=__version__, name=self.name, model=self.identity.model,
            tokenizer=self.identity.tokenizer, vocab_size=self.vocab_size, max_model_len=self.max_model_len,
            eos_token_ids=self.eos_token_ids, dtype=self.dtype,
        )  # fmt: skip


class Service(Generic[W]):
    """What both kinds of workers have in common."""

    name: str  # of the service
    once: str  # its method for one round

    def __init__(self, about: About, sessions: Sessions[W]) -> None:
        self.sessions = sessions
        self._about, self._turns = about, Turns()

    def handlers(self) -> Any:
        """What a gRPC server takes."""
        return grpc.method_handlers_generic_handler(self.name, self._methods())

    def between(self, act: Callable[[], None]) -> None:
        """Does that in a turn of its own, unless somebody is at work on the model."""
        if self._turns.offered():
            try:
                act()
            finally:
                self._turns.end()

    def _methods(self) -> dict[str, Any]:
        once, stream = grpc.unary_unary_rpc_method_handler, grpc.stream_stream_rpc_method_handler
        behaviours = {self.once: self._once, "EndSession": self._end, "Ping": self._ping}
        methods = {name: once(each, response_serializer=_serialized) for name, each in behaviours.items()}
        return {**methods, "Stream": stream(self._stream, response_serializer=_serialized)}

    def _ping(self, data: bytes, context: Any) -> Message:
        return self._about.to_message()

    def _end(self, data: bytes, context: Any) -> Message:
        with refusing(context):
            self.sessions.end(parsed(pb.EndSessionRequest, data).session)
        return pb.EndSessionAnswer()

    def _once(self, data: bytes, context: Any) -> Message:
        with refusing(context):
            return self._answer(data, *self._read(data, lambda: not context.is_active()))

    def _stream(self, requests: Iterator[bytes], context: Any) -> Iterator[Message]:
        for data in requests:
            with refusing(context):
                session, act = self._read(data, lambda: not context.is_active())
            yield from self._answers(data, session, act, requests, context)

    def _answers(
        self, data: bytes, session: Session[W], act: Callable[[], Any], requests: Iterator[bytes], context: Any
    ) -> Iterator[Message]:
        """What need not be done before an answer is done after it, while it is on its way."""
        with refusing(context):
            answer = self._answer(data, session, act)
        yield answer
        with refusing(context), self.sessions.at_work(session), self._turns:
            self._afterwards(session.work)

    def _answer(self, data: bytes, session: Session[W], act: Callable[[], Any]) -> Any:
        with self.sessions.at_work(session):
            if session.last is None or session.last[0] != data:
                answer, telemetry = self._timed(session, act)
                answer.session = session.id
                answer.telemetry.CopyFrom(telemetry)
                session.last = data, answer
            return session.last[1]

    def _timed(self, session: Session[W], act: Callable[[], T]) -> tuple[T, pb.Telemetry]:
        """Does that in its turn at the model. What it made, and what that took from now on."""
        began, came = time.time_ns(), time.perf_counter_ns()
        with self._turns:
            queue = time.perf_counter_ns() - came
            made = act()
        busy, session.busy = session.busy, session.work.busy
        model = int(1e9 * (session.busy - busy))
        wall = time.perf_counter_ns() - came
        return made, pb.Telemetry(span=secrets.randbits(64), began=began, wall=wall, queue=queue, model=model)

    @abstractmethod
    def _read(self, data: bytes, cancelled: Callable[[], bool]) -> tuple[Session[W], Callable[[], Any]]:
        """Whose request it is, and what makes its answer. Raises whatever `status_of` knows."""

    @abstractmethod
    def _afterwards(self, work: W) -> None:
        """What a session does once its answer is out."""


class DraftService(Service[Drafting | Feeding]):
    """A draft model's."""

    name, once = DRAFT, "GenerateDrafts"

    def _once(self, data: bytes, context: Any) -> Message:
        with refusing(context):
            session, act = self._read(data, lambda: not context.is_active())
            if isinstance(session.work, Feeding):
                raise ValueError("a draft that grows ahead tells of it in a stream: ask for one, or for mode serial")
            return self._answer(data, session, act)

    def _answers(
        self, data: bytes, session: Session[Any], act: Callable[[], Any], requests: Iterator[bytes], context: Any
    ) -> Iterator[Message]:
        if isinstance(session.work, Feeding):
            return self._growth(session, act, requests, context)
        return super()._answers(data, session, act, requests, context)

    def _growth(
        self, session: Session[Any], act: Callable[[], bool], requests: Iterator[bytes], context: Any
    ) -> Iterator[Message]:
        """What the tree grows on an opening and on each result, and for as long as no other one is there. A thread
        grows it, which need not wait until a message is out; what has come by then goes as one."""
        with closing(Grown(lambda: self._grow(session, act, requests, context))) as grown:
            while True:
                with refusing(context):
                    together = grown.take(join=lambda: session.work.free)
                if not together:
                    return
                for delta, telemetry in together:
                    yield pb.DraftAnswer(session=session.id, telemetry=telemetry, delta=delta_to(delta))

    def _grow(
        self, session: Session[Any], act: Callable[[], bool], requests: Iterator[bytes], context: Any
    ) -> Iterator[Telling]:
        """Raises whatever `status_of` knows."""
        work, coming, opening = session.work, Coming(requests, context), None
        while not coming.ended:
            with self.sessions.at_work(session):
                if opening not in (None, work.openings):
                    raise Stale("the request is over: the session has begun another one")
                more, telemetry = self._timed(session, act)
                opening, grown = work.openings, work.take()
            for delta in grown:
                yield delta, telemetry
                telemetry = None
            data, act = coming.next(wait=not more), work.grow
            if data is not None:
                whose, act = self._read(data, lambda: not context.is_active())
                if whose is not session:
                    raise ValueError("a stream has the requests of one session")

    def _read(self, data: bytes, cancelled: Callable[[], bool]) -> tuple[Session[Any], Callable[[], Any]]:
        request = parsed(pb.DraftRequest, data)
        if request.HasField("opening"):
            opening, shape = read_opening(request.opening, self._about.identity)
            session: Session[Any] = self.sessions.open(request.session, shape)
            act = partial(session.work.open, opening, cancelled)
        elif request.HasField("result"):
            session = self.sessions.find(request.session)
            act = partial(session.work.observe, read_result(request.result))
        else:
            raise ValueError("a request with neither an opening nor a result")
        if isinstance(session.work, Feeding):
            return session, act
        return session, partial(self._propose, session.work, request.draft_steps, act)

    def _propose(self, work: Drafting, steps: int, act: Callable[[], Proposal]) -> pb.DraftAnswer:
        work.set_steps(steps)
        return pb.DraftAnswer(proposal=proposal_to(act()))

    def _afterwards(self, work: Drafting | Feeding) -> None:
        work.grow()


class TargetService(Service[Verifying]):
    """A target model's."""

    name, once = TARGET, "VerifyDrafts"

    def __init__(self, about: About, sessions: Sessions[Verifying], tokenizer: tuple[Path, ...]) -> None:
        """`tokenizer`: the files that a client needs in order to speak of tokens."""
        super().__init__(about, sessions)
        self._files = tokenizer

    def _methods(self) -> dict[str, Any]:
        read = grpc.unary_stream_rpc_method_handler(self._read_tokenizer, response_serializer=_serialized)
        return {**super()._methods(), "ReadTokenizer": read}

    def _read_tokenizer(self, data: bytes, context: Any) -> Iterator[Message]:
        for file in self._files:
            with refusing(context):
                whole = file_io.read_bytes(file, most=LARGEST)
            yield pb.FilePiece(name=file.name, data=whole[:PIECE])
            for start in range(PIECE, len(whole), PIECE):
                yield pb.FilePiece(data=whole[start : start + PIECE])

    def _read(self, data: bytes, cancelled: Callable[[], bool]) -> tuple[Session[Verifying], Callable[[], Any]]:
        request = parsed(pb.VerifyRequest, data)
        if request.HasField("opening"):
            opening, shape = read_opening(request.opening, self._about.identity)
            session = self.sessions.open(request.session, shape)
            return session, lambda: _opened(session.work.open(opening, cancelled))
        if request.HasField("proposal"):
            session, proposal = self.sessions.find(request.session), read_proposal(request.proposal)
            return session, lambda: _verified(session.work.verify(proposal))
        raise ValueError("a request with neither an opening nor a proposal")

    def _afterwards(self, work: Verifying) -> None:
        work.settle()


def _opened(kept: int) -> pb.VerifyAnswer:
    return pb.VerifyAnswer(opened=pb.Opened(kept=kept))


def _verified(result: VerifyResult) -> pb.VerifyAnswer:
    return pb.VerifyAnswer(result=result_to(result))


@contextmanager
def refusing(context: Any) -> Iterator[None]:
    """Around work on a call: what a client can mend, or must know, becomes the call's status. Anything else is a fault
    of ours, which gRPC logs."""
    try:
        yield
    except Exception as error:
        told = status_of(error)
        if told is None:
            raise
        context.abort(*told)


def _serialized(message: Message) -> bytes:
    return message.SerializeToString()
