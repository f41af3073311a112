"""Targets: the services of workers, with clients that send arbitrary messages, and the drafter and the verifier that
use workers, with workers that return arbitrary responses. They may refuse with one line; anything else is a fault."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import grpc
from google.protobuf.message import Message
from hypothesis import strategies as st

from swiftspec.config import EngineConfig
from swiftspec.distributed.rpc import swiftspec_pb2 as pb
from swiftspec.distributed.rpc.connection import WorkerConnection
from swiftspec.distributed.rpc.draft_session import DraftSession
from swiftspec.distributed.rpc.draft_stream import DraftStream
from swiftspec.distributed.rpc.drafter import GrpcDrafter, GrpcTreeDeltaLink
from swiftspec.distributed.rpc.protobuf_codec import (
    ModelIdentity,
    delta_from_proto,
    proposal_to_proto,
    request_start_to_proto,
    result_to_proto,
)
from swiftspec.distributed.rpc.service import (
    TARGET_SERVICE,
    DraftWorkerService,
    ModelInfo,
    TargetWorkerService,
    WorkerService,
)
from swiftspec.distributed.rpc.sessions import WorkerSessions
from swiftspec.distributed.rpc.status import WorkerRefused
from swiftspec.distributed.rpc.tree_stream_session import TreeStreamSession
from swiftspec.distributed.rpc.verifier import GrpcVerifier
from swiftspec.distributed.rpc.verify_session import VerifySession
from swiftspec.distributed.transport.codec import unpack_proposal, unpack_result
from swiftspec.errors import DrafterLost, UserError
from swiftspec.messages import Proposal, RequestStart
from swiftspec.params import SamplingParams
from swiftspec.runtime.cancellation import CancelCheck
from swiftspec.runtime.drafter import Drafter
from swiftspec.runtime.replica_drafter import ReplicaDrafter
from swiftspec.tree.replica import TreeReplica
from swiftspec.tree.tree import DraftTree
from tests.support.fuzz import Target
from tests.support.fuzz.message_words import BOUNDS, EDGES, PROPOSAL_WORDS, REQUEST_STARTS, RESULT_WORDS, TEXT, proposal
from tests.support.fuzz.roles import FakeRole, LookaheadRole, assert_valid_tokens
from tests.support.proposals import draft_proposal

OWN = ModelIdentity(b"model", b"tokenizer")
ABOUT = ModelInfo(OWN, "fake", BOUNDS.vocab_size, BOUNDS.max_model_len, (2,), "float32")
SHAPE = EngineConfig(mode="serial", verify_batch=BOUNDS.max_nodes, draft_steps=3)
AHEAD = EngineConfig(mode="async", verify_batch=BOUNDS.max_nodes, draft_steps=1)
DamagedMessage = tuple[Message, list[tuple[int, int]]]  # a message, and bytes of it to overwrite


class Aborted(Exception):
    """A call has ended with a status."""


class Context:
    """The context of a call."""

    def is_active(self) -> bool:
        return True

    def abort(self, code: grpc.StatusCode, details: str) -> None:
        assert code != grpc.StatusCode.OK and details.isprintable() and 0 < len(details) < 600
        raise Aborted


class Role(FakeRole):
    def submit(self, submitted: Proposal) -> Role:
        self._asked = submitted
        return self

    def wait(self) -> Any:
        return self.verify(self._asked)


def ask(service: WorkerService[Any], sent: Sequence[DamagedMessage]) -> str:
    """The calls of one client, in its session once it has one."""
    session, outcome = b"", "refused"
    for message, damage in sent:
        message.session = session  # type: ignore[attr-defined]
        data = bytearray(message.SerializeToString())
        for at, byte in damage if data else ():
            data[at % len(data)] = byte
        try:
            session, outcome = service._once(bytes(data), Context()).session, "taken"  # type: ignore[attr-defined]
        except Aborted:
            outcome = "refused"
    return outcome


def ask_target(sent: Sequence[DamagedMessage]) -> str:
    role: Any = Role()
    return ask(
        TargetWorkerService(
            ABOUT, WorkerSessions(lambda s: VerifySession(role, s, BOUNDS, CancelCheck()), 2, 60.0), ()
        ),
        sent,
    )


def ask_draft(sent: Sequence[DamagedMessage]) -> str:
    role: Any = Role()
    return ask(
        DraftWorkerService(ABOUT, WorkerSessions(lambda s: DraftSession(role, s, BOUNDS, CancelCheck()), 2, 60.0)),
        sent,
    )


def ask_stream(service: WorkerService[Any], shape: EngineConfig, sent: Sequence[DamagedMessage]) -> str:
    """Like `ask`, in a stream."""
    session, requests = service.sessions.open(b"", shape).id, list[bytes]()
    for message, damage in sent:
        message.session = session  # type: ignore[attr-defined]
        data = bytearray(message.SerializeToString())
        for at, byte in damage:
            data[at % len(data)] = byte
        requests.append(bytes(data))
    count = 0
    try:
        for answer in service._stream(iter(requests), Context()):
            count += 1
            if isinstance(answer, pb.DraftAnswer) and answer.HasField("delta"):
                delta_from_proto(answer.delta)
    except Aborted:
        return "refused"
    return "taken" if count else "refused"


def stream_target(sent: Sequence[DamagedMessage]) -> str:
    role: Any = Role()
    service = TargetWorkerService(
        ABOUT, WorkerSessions(lambda s: VerifySession(role, s, BOUNDS, CancelCheck()), 2, 60.0), ()
    )
    return ask_stream(service, SHAPE, sent)


def stream_draft(sent: tuple[EngineConfig, Sequence[DamagedMessage]]) -> str:
    """A lookahead draft, with fixed d or expanding until the next message."""
    shape, messages = sent

    def stream_session(shape: EngineConfig) -> TreeStreamSession:
        role: Any = LookaheadRole()
        return TreeStreamSession(role, role, shape, BOUNDS, CancelCheck())

    for message, _ in messages:
        if message.HasField("opening"):  # type: ignore[attr-defined]
            start = request_start_to_proto(RequestStart(1, TEXT, SamplingParams(), 3), shape, OWN)
            message.opening.shape.CopyFrom(start.shape)  # type: ignore[attr-defined]
    return ask_stream(DraftWorkerService(ABOUT, WorkerSessions(stream_session, 2, 60.0)), shape, messages)


def ask_bytes(sent: tuple[str, bytes]) -> str:
    """Arbitrary bytes, for any method."""
    method, data = sent
    role: Any = Role()
    service = TargetWorkerService(
        ABOUT, WorkerSessions(lambda s: VerifySession(role, s, BOUNDS, CancelCheck()), 2, 60.0), ()
    )
    try:
        getattr(service, method)(data, Context())
    except Aborted:
        return "refused"
    return "taken"


class Pieces:
    """A channel to a worker that returns arbitrary bytes for a ping or for its tokenizer files."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces

    def unary_stream(self, method: str) -> Any:
        return lambda *about: iter(self._pieces)

    def unary_unary(self, method: str) -> Any:
        return lambda *about, **how: b"".join(self._pieces)


def read_worker_files(pieces: Sequence[bytes]) -> str:
    link: WorkerConnection[Any] = WorkerConnection.__new__(WorkerConnection)
    link.peer, link._service, link._metadata, link._channel = "--a-url 127.0.0.1:1", TARGET_SERVICE, (), Pieces(pieces)
    try:
        for name, data in link.read_tokenizer(1.0):
            assert isinstance(name, str) and isinstance(data, bytes)
    except WorkerRefused:
        return read_ping(link)
    read_ping(link)
    return "taken"


def read_ping(link: WorkerConnection[Any]) -> str:
    with suppress(UserError):
        link.ping(1.0)
        return "taken"
    return "refused"


class FakeLink:
    """A link whose streams deliver the given messages, then nothing."""

    peer = "--a-url 127.0.0.1:1"

    def __init__(self, responses: Sequence[Message]) -> None:
        self._says = iter(responses)

    def stream(self) -> FakeLink:
        return self

    def send(self, message: Message) -> None:
        message.SerializeToString()

    def recv(self, timeout: float) -> Message:
        try:
            return next(self._says)
        except StopIteration:
            raise TimeoutError from None

    def close(self) -> None: ...

    cancel = close


def run_remote_drafter(responses: Sequence[pb.DraftAnswer]) -> str:
    return run_drafter(lambda: GrpcDrafter(draft_stream(responses, SHAPE)))


def run_replica_drafter(responses: Sequence[pb.DraftAnswer]) -> str:
    stream = draft_stream(responses, AHEAD)
    return run_drafter(
        lambda: ReplicaDrafter(GrpcTreeDeltaLink(stream), TreeReplica(DraftTree(40, 20), BOUNDS.vocab_size), AHEAD)
    )


def draft_stream(responses: Sequence[pb.DraftAnswer], shape: EngineConfig) -> DraftStream:
    stream = DraftStream(FakeLink(responses), shape, BOUNDS, 0.0)  # type: ignore[arg-type]
    stream.attach(OWN)
    return stream


def run_drafter(make: Callable[[], Drafter]) -> str:
    try:
        drafter = make()
        drafter.open(RequestStart(1, TEXT, SamplingParams(), len(TEXT)))
        found = drafter.propose()
    except DrafterLost as lost:
        assert "\n" not in str(lost) and len(str(lost)) < 600
        return "refused"
    assert_valid_tokens(found.tokens, BOUNDS.max_nodes)
    assert found.tokens[0] == TEXT[-1] and found.prefix_len == 2
    return "taken"


def run_remote_verifier(responses: Sequence[pb.VerifyAnswer]) -> str:
    verifier = GrpcVerifier(FakeLink([pb.VerifyAnswer(), *responses]), OWN, SHAPE, BOUNDS, 0.0)  # type: ignore[arg-type]
    verifier.open(RequestStart(1, TEXT, SamplingParams(), len(TEXT)))
    submitted = draft_proposal(1, 0, 2, (TEXT[-1], 5, 6), (-1, 0, 1))
    result = verifier.submit(submitted).wait()
    assert_valid_tokens(result.tokens)
    assert tuple(submitted.tokens[node] for node in result.path[1:]) == result.tokens[:-1]
    return "taken"


def read_or_none(reader: Any, to_message: Any, words: list[int]) -> Any:
    """Converts words of ranks to a message of workers, if they are valid."""
    try:
        return to_message(reader(words))
    except (ValueError, OverflowError):
        return None


DAMAGE = st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=3)
OPENED = REQUEST_STARTS.map(lambda start: request_start_to_proto(start, SHAPE, OWN))
PROPOSED = (
    proposal().map(proposal_to_proto)
    | PROPOSAL_WORDS.map(lambda w: read_or_none(unpack_proposal, proposal_to_proto, w))
).filter(lambda message: message is not None)
SMALL = st.integers(-1, 5)
NODES = st.tuples(SMALL, SMALL | EDGES.map(lambda n: n % 2**31), st.floats() | st.sampled_from([-0.5, -1.5]))


def delta_response(place: tuple[int, int, int], nodes: list[tuple[int, int, float]]) -> pb.DraftAnswer:
    parents, tokens, weights = zip(*nodes) if nodes else ((), (), ())
    round_, expansions, first = place
    delta = pb.TreeDelta(request=1, round=round_, expansions=expansions, first=first, parents=parents, tokens=tokens)
    delta.weights.extend(weights[: len(nodes) - (first == 5)])
    return pb.DraftAnswer(delta=delta)


DELTA = st.builds(delta_response, st.just((0, 1, 1)) | st.tuples(SMALL, SMALL, SMALL), st.lists(NODES, max_size=4))
ENDED = RESULT_WORDS.map(lambda w: read_or_none(unpack_result, result_to_proto, w)).filter(
    lambda message: message is not None
)
DRAFT_STEPS = st.just(0) | EDGES
TO_TARGET = st.builds(lambda m: pb.VerifyRequest(opening=m), OPENED) | st.builds(
    lambda m: pb.VerifyRequest(proposal=m), PROPOSED
)
TO_DRAFT = st.builds(
    lambda m, steps: pb.DraftRequest(opening=m, draft_steps=steps % 2**31), OPENED, DRAFT_STEPS
) | st.builds(lambda m: pb.DraftRequest(result=m), ENDED)


def calls(messages: st.SearchStrategy[Any]) -> st.SearchStrategy[list[DamagedMessage]]:
    whole = st.tuples(messages, st.just([]))
    return st.lists(whole | whole | st.tuples(messages, DAMAGE), min_size=1, max_size=4)


FROM_DRAFT = st.lists(PROPOSED.map(lambda m: pb.DraftAnswer(proposal=m)), max_size=3)
DELTAS = st.lists(DELTA | st.just(pb.DraftAnswer()), max_size=4)
PATHS = st.lists(st.integers(-1, 3), min_size=1, max_size=3)
ACCEPTED_RESULT = st.builds(
    lambda path, tokens: pb.VerifyResult(request=1, prefix_len=2, path=path, tokens=tokens),
    PATHS | st.sampled_from([[0], [0, 1], [0, 1, 2]]),
    st.lists(st.integers(-1, 40), min_size=1, max_size=3) | st.sampled_from([[7], [5, 7], [5, 6, 7]]),
)
FROM_TARGET = (ACCEPTED_RESULT | ENDED).map(lambda m: [pb.VerifyAnswer(result=m)])


def target(name: str, strategy: st.SearchStrategy[Any], run: Any) -> Target:
    return Target(name, strategy, lambda value, folder: run(value))


METHOD = st.sampled_from(["_once", "_end", "_ping"])
PIECES = st.lists(
    st.binary(max_size=40)
    | st.builds(lambda name, data: pb.FilePiece(name=name, data=data).SerializeToString(), st.text(max_size=5),
                st.binary(max_size=20)),
    max_size=4,
)  # fmt: skip
SHAPES = st.sampled_from([AHEAD, EngineConfig(mode="async", verify_batch=BOUNDS.max_nodes)])
TARGETS = (
    target("TargetService", calls(TO_TARGET), ask_target),
    target("TargetService.Stream", calls(TO_TARGET), stream_target),
    target("DraftService.Stream, growth", st.tuples(SHAPES, calls(TO_DRAFT)), stream_draft),
    target("services, any bytes", st.tuples(METHOD, st.binary(max_size=200)), ask_bytes),
    target("Link", PIECES, read_worker_files),
    target("DraftService of a worker", calls(TO_DRAFT), ask_draft),
    target("GrpcDrafter", FROM_DRAFT, run_remote_drafter),
    target("GrpcTreeDeltaLink", DELTAS, run_replica_drafter),
    target("GrpcVerifier", FROM_TARGET, run_remote_verifier),
)
