"""Targets: workers with clients that send arbitrary messages, and the drafter and the verifier that use workers, with
workers that return arbitrary answers. They may refuse with one line; anything else is a fault."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

from swiftspec.builder.remote_roles import ping
from swiftspec.config import EngineConfig
from swiftspec.distributed.remote.client import DraftLink, RemoteDrafter, RemoteTreeDeltaLink
from swiftspec.distributed.remote.remote_verifier import RemoteVerifier
from swiftspec.distributed.remote.served_roles import ServedDrafter, ServedRole, ServedTreeDrafter, ServedVerifier
from swiftspec.distributed.remote.server_link import ServerLink, read_tokenizer
from swiftspec.distributed.remote.session_messages import (
    TIMES_WORDS,
    ModelInfo,
    SessionStart,
    unpack_error,
    unpack_timed,
)
from swiftspec.distributed.remote.sessions import WorkerSessions
from swiftspec.distributed.remote.worker import Worker
from swiftspec.distributed.transport.codec import (
    PROTOCOL_VERSION,
    Words,
    doubles_to_words,
    pack_message,
    unpack_tree_delta,
)
from swiftspec.distributed.transport.grpc import swiftspec_pb2 as pb
from swiftspec.distributed.transport.grpc.client import GrpcConnection
from swiftspec.distributed.transport.grpc.frames import unpack_grpc_frame
from swiftspec.distributed.transport.opcodes import Opcode
from swiftspec.distributed.transport.request_state import RequestState
from swiftspec.errors import DrafterLost, UserError
from swiftspec.messages import Proposal, RequestStart, VerifyResult
from swiftspec.params import SamplingParams
from swiftspec.runtime.cancellation import CancelCheck
from swiftspec.runtime.drafter import Drafter
from swiftspec.runtime.replica_drafter import ReplicaDrafter
from swiftspec.tree.replica import TreeReplica
from swiftspec.tree.tree import DraftTree
from tests.support.fuzz import Target
from tests.support.fuzz.message_words import (
    BODY,
    BOUNDS,
    EDGES,
    JUNK_TEXT,
    KIND,
    LINES,
    OPENED,
    OPENED_TARGET,
    PROPOSAL_WORDS,
    RANDOM,
    RESULT_WORDS,
    TARGET_MESSAGE,
    TEXT,
    Message,
)
from tests.support.fuzz.roles import FakeChannel, FakeRole, LookaheadRole, assert_valid_tokens
from tests.support.proposals import draft_proposal

INFO = ModelInfo("00", "11", "fake", BOUNDS.vocab_size, BOUNDS.max_model_len, (2,), "float32")
SHAPE = EngineConfig(mode="serial", verify_batch=BOUNDS.max_nodes, draft_steps=3)
AHEAD = EngineConfig(mode="async", verify_batch=BOUNDS.max_nodes, draft_steps=1)
FREE = EngineConfig(mode="async", verify_batch=BOUNDS.max_nodes)


class Role(FakeRole):
    def open(self, start: RequestStart) -> int:  # type: ignore[override]
        super().open(start)
        return 0

    def submit(self, submitted: Proposal) -> Role:
        self._asked = submitted
        return self

    def wait(self) -> Any:
        return self.verify(self._asked)


def serve_messages(make: Callable[[EngineConfig, tuple[int, ...]], ServedRole], messages: Sequence[Message]) -> str:
    """The stream of one client, whose messages are answered or refused."""
    worker, outcome = Worker("target", INFO, WorkerSessions(make, 2, 60.0)), "refused"
    for kind, words in worker.serve(FakeChannel(messages)):
        assert all(-(2**31) <= word < 2**31 for word in words)
        inner, body = unpack_timed(words)[1:] if kind == Opcode.TIMED_ANSWER else (kind, words)
        if inner == Opcode.ERROR:
            reason = unpack_error(body)[-1]
            assert reason.isprintable() and 0 < len(reason) < 600
            outcome = "refused"
        elif inner != Opcode.SESSION_ATTACHED:
            outcome = "taken"
        if inner == Opcode.TREE_DELTA:
            unpack_tree_delta(body[1:])
    return outcome


def serve_verifier(messages: Sequence[Message]) -> str:
    def make(shape: EngineConfig, masked: tuple[int, ...]) -> ServedRole:
        role: Any = Role()
        return ServedVerifier(role, BOUNDS, CancelCheck(), shape)

    return serve_messages(make, messages)


def serve_drafter(messages: Sequence[Message]) -> str:
    def make(shape: EngineConfig, masked: tuple[int, ...]) -> ServedRole:
        role: Any = FakeRole()
        return ServedDrafter(role, BOUNDS, CancelCheck(), shape)

    return serve_messages(make, messages)


def serve_tree_drafter(messages: Sequence[Message]) -> str:
    """A lookahead draft, with fixed d or expanding until the next message."""

    def make(shape: EngineConfig, masked: tuple[int, ...]) -> ServedRole:
        role: Any = LookaheadRole()
        if shape.mode == "serial" or shape.proposal == "sample":
            return ServedDrafter(role, BOUNDS, CancelCheck(), shape)
        return ServedTreeDrafter(role, role, BOUNDS, CancelCheck(), shape)

    return serve_messages(make, messages)


def read_frame(data: bytes) -> str:
    """Arbitrary bytes from a client or a worker."""
    try:
        kind, words = unpack_grpc_frame(data)
    except ValueError as error:
        assert "\n" not in str(error) and len(str(error)) < 200
        return "refused"
    assert -(2**31) <= kind < 2**31 and all(-(2**31) <= word < 2**31 for word in words)
    return "taken"


class Answering:
    """A channel to a worker that returns arbitrary bytes for a ping."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer

    def unary_unary(self, method: str) -> Any:
        return lambda *about, **how: self._answer


def read_ping(answer: bytes) -> str:
    connection: GrpcConnection = GrpcConnection.__new__(GrpcConnection)
    connection.peer, connection._service, connection._metadata = "--a-url 127.0.0.1:1", "swiftspec.v1.A", ()
    connection._channel = Answering(answer)
    try:
        info = ping(connection, 1.0)
    except UserError as error:
        assert "\n" not in str(error) and len(str(error)) < 300
        return "refused"
    assert info.vocab_size >= 0 and isinstance(info.name, str)
    return "taken"


def read_files(messages: Sequence[Message]) -> str:
    try:
        files = read_tokenizer(FakeChannel(messages), 1.0)
    except (ValueError, ConnectionError):
        return "refused"
    assert all(isinstance(name, str) and isinstance(data, bytes) for name, data in files.items())
    return "taken"


def draft_link(messages: Sequence[Message], shape: EngineConfig) -> DraftLink:
    session = SessionStart(INFO.identity, shape)
    return DraftLink(ServerLink(FakeChannel(messages), RequestState(BOUNDS), "draft", session))


def run_remote_drafter(messages: Sequence[Message]) -> str:
    return run_drafter(RemoteDrafter(draft_link(messages, SHAPE), 3))


def run_replica_drafter(messages: Sequence[Message]) -> str:
    link = RemoteTreeDeltaLink(draft_link(messages, AHEAD))
    return run_drafter(ReplicaDrafter(link, TreeReplica(DraftTree(40, 20), BOUNDS.vocab_size), AHEAD))


def run_drafter(drafter: Drafter) -> str:
    try:
        drafter.open(RequestStart(1, TEXT, SamplingParams(), len(TEXT)))
        found = drafter.propose()
    except DrafterLost as lost:
        assert "\n" not in str(lost) and len(str(lost)) < 600
        return "refused"
    assert_valid_tokens(found.tokens, BOUNDS.max_nodes)
    assert found.tokens[0] == TEXT[-1] and found.prefix_len == 2
    return "taken"


def run_remote_verifier(messages: Sequence[Message]) -> str:
    """A worker that answers the request start, and then arbitrarily."""
    opened = (int(Opcode.REQUEST_OPENED), [0, 1, 0, 2, 0])
    session = SessionStart(INFO.identity, SHAPE)
    verifier = RemoteVerifier(FakeChannel([opened, *messages]), session, BOUNDS, 0.1)
    verifier.open(RequestStart(1, TEXT, SamplingParams(), len(TEXT)))
    submitted = draft_proposal(1, 0, 2, (TEXT[-1], 5, 6), (-1, 0, 1))
    try:
        result = verifier.submit(submitted).wait()
    except UserError as error:
        assert "\n" not in str(error) and len(str(error)) < 600
        return "refused"
    assert_valid_tokens(result.tokens)
    assert tuple(submitted.tokens[node] for node in result.path[1:]) == result.tokens[:-1]
    return "taken"


def attached(shape: EngineConfig) -> Message:
    return int(Opcode.SESSION_ATTACH), SessionStart(INFO.identity, shape).pack()


ANY_ATTACH = st.tuples(st.just(int(Opcode.SESSION_ATTACH)), LINES)
PROPOSED = st.tuples(st.just(int(Opcode.VERIFY)), PROPOSAL_WORDS)
OBSERVED = st.tuples(st.just(int(Opcode.OBSERVE)), RESULT_WORDS)


def stream(shapes: Sequence[EngineConfig], *valid: st.SearchStrategy[Message]) -> st.SearchStrategy[list[Message]]:
    """Messages of one stream, most of which begin with a session."""
    begin = st.sampled_from([[attached(shape)] for shape in shapes]) | st.lists(ANY_ATTACH, max_size=1)
    more = st.lists(st.one_of(*valid, TARGET_MESSAGE, ANY_ATTACH), max_size=4)
    return st.builds(lambda first, opened, rest: [*first, opened, *rest], begin, valid[0], more)


SMALL = st.integers(-1, 5)
# a node, most often a child of the root that fits
NODES = st.tuples(st.just(0) | SMALL, st.integers(0, 5) | EDGES, st.sampled_from([-0.5, -1.5]) | st.floats())


def delta_words(place: tuple[int, int, int], nodes: Sequence[tuple[int, int, float]]) -> Message:
    parents, tokens, weights = zip(*nodes) if nodes else ((), (), ())
    words = [0, 1, place[0], 2, place[1], place[2], *parents, *tokens, *doubles_to_words(weights)]
    return int(Opcode.TREE_DELTA), words[: len(words) - (place[2] == 5)]


@st.composite
def accepted(draw: st.DrawFn) -> Message:
    """A result that mostly fits the proposal, with damaged log-probabilities."""
    path = draw(st.sampled_from([(0,), (0, 1), (0, 1, 2)]) | st.lists(st.integers(-1, 3), min_size=1).map(tuple))
    tokens = draw(st.sampled_from([(7,), (5, 7), (5, 6, 7)]) | st.lists(st.integers(-1, 40), min_size=1).map(tuple))
    base = pack_message(VerifyResult(1, draw(st.sampled_from([0, 0, 1])), 2, path, tokens))
    return int(Opcode.RESULT), [draw(st.just(0) | EDGES), *base, *draw(st.just([0, -1, 0, -1, 0]) | RANDOM)]


def answers(valid: st.SearchStrategy[Message]) -> st.SearchStrategy[list[Message]]:
    """Answers of a worker, some of them in an envelope with times."""
    times = st.lists(EDGES, min_size=TIMES_WORDS, max_size=TIMES_WORDS)
    timed = st.builds(lambda cost, each: (int(Opcode.TIMED_ANSWER), [*cost, each[0], *each[1]]), times, valid)
    return st.lists(valid | valid | timed | st.tuples(KIND, BODY), max_size=4)


def with_cost(kind: Opcode, words: st.SearchStrategy[Words]) -> st.SearchStrategy[Message]:
    return st.builds(lambda cost, body: (int(kind), [cost, *body]), st.just(0) | EDGES, words)


def target(name: str, strategy: st.SearchStrategy[Any], run: Any) -> Target:
    return Target(name, strategy, lambda value, folder: run(value))


DELTA = st.builds(delta_words, st.just((0, 1, 1)) | st.tuples(SMALL, SMALL, SMALL), st.lists(NODES, max_size=4))
FILE_PIECE = st.tuples(
    st.just(int(Opcode.FILE_PIECE)),
    st.sampled_from([[1, 2, 0x636261], [0, 0], [0, 3, 0x636261], [9, 9, 1]]) | RANDOM,
)
PING = st.builds(
    lambda protocol, text: pb.PingAnswer(protocol=protocol, model_info=text).SerializeToString(),
    st.sampled_from([PROTOCOL_VERSION, PROTOCOL_VERSION, 2]), st.just(INFO.to_json()) | JUNK_TEXT,
)  # fmt: skip
FRAME = st.builds(
    lambda kind, words: pb.Frame(opcode=kind, words=words).SerializeToString(), EDGES, st.binary(max_size=20)
)
TARGETS = (
    target("Worker, verifier", stream([SHAPE], OPENED_TARGET, PROPOSED), serve_verifier),
    target("Worker, drafter", stream([SHAPE], OPENED, OBSERVED), serve_drafter),
    target("Worker, tree drafter", stream([AHEAD, FREE], OPENED, OBSERVED), serve_tree_drafter),
    target("frames, any bytes", FRAME | st.binary(max_size=60), read_frame),
    target("ping", PING | st.binary(max_size=60), read_ping),
    target("tokenizer files", st.lists(FILE_PIECE | st.tuples(KIND, RANDOM), max_size=4), read_files),
    target("RemoteDrafter of a worker", answers(with_cost(Opcode.PROPOSAL, PROPOSAL_WORDS)), run_remote_drafter),
    target("RemoteTreeDeltaLink", answers(DELTA), run_replica_drafter),
    target("RemoteVerifier", answers(accepted()), run_remote_verifier),
)
