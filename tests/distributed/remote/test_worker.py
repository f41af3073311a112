"""Answers of workers to messages that are valid, late, duplicate, wrong or missing."""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from swiftspec.builder.remote_roles import ping
from swiftspec.config import EngineConfig
from swiftspec.distributed.remote import session_messages
from swiftspec.distributed.remote.session_messages import ModelInfo, unpack_error
from swiftspec.distributed.remote.sessions import FairLock, SessionGone, WorkerFull, WorkerSessions
from swiftspec.distributed.transport.codec import (
    Frame,
    pack_message,
    text_to_words,
    unpack_scored_result,
    unpack_tree_delta,
)
from swiftspec.distributed.transport.grpc.client import GrpcConnection
from swiftspec.distributed.transport.grpc.endpoint import (
    DRAFT_SERVICE,
    MAX_MESSAGE_BYTES,
    TARGET_SERVICE,
    Endpoint,
    RpcSecurity,
)
from swiftspec.distributed.transport.grpc.frames import pack_grpc_frame
from swiftspec.distributed.transport.grpc.server import EXTRA_STREAMS, FIRST_MESSAGE_TIMEOUT_S, RpcServer
from swiftspec.distributed.transport.opcodes import Opcode
from swiftspec.distributed.transport.transport import Receiver
from swiftspec.errors import UserError
from swiftspec.messages import Proposal, RequestStart, VerifyResult
from swiftspec.params import SamplingParams
from tests.support.proposals import draft_proposal
from tests.support.tiny_checkpoints import make_checkpoint
from tests.support.workers import TOKENIZER, RawClient, StartedWorker, started

TEXT = (5, 17, 3)
GREEDY = SamplingParams(temperature=0)
SHAPE = EngineConfig(mode="serial", draft_steps=2)
START = pack_message(RequestStart(1, TEXT, GREEDY, len(TEXT)))
ROOT = pack_message(Proposal.root_only(1, 0, 2, TEXT[-1]))
Code = grpc.StatusCode


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartedWorker]:
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path, vocab=64)
    with started("target", path) as worker:
        yield worker


@pytest.fixture
def client(target: StartedWorker) -> Iterator[RawClient]:
    """With an open request."""
    client = RawClient(target, SHAPE)
    client.attach()
    kind, words = client.ask(Opcode.VERIFIER_OPEN, START)
    assert kind == Opcode.REQUEST_OPENED and words[1:] == [1, 0, 2, 0] and words[0] > 0
    yield client
    client.close()


def test_a_round_is_applied_once(target: StartedWorker, client: RawClient) -> None:
    """The repetition may come on another stream, after the connection was lost."""
    kind, words = client.ask(Opcode.VERIFY, ROOT)
    assert kind == Opcode.RESULT and client.ask(Opcode.VERIFY, ROOT) == (kind, words)
    again = RawClient(target, SHAPE, client.session.session)
    assert again.attach() == client.session.session
    assert again.ask(Opcode.VERIFY, ROOT) == (kind, words)
    (token,) = unpack_scored_result(words[1:]).tokens
    other = pack_message(draft_proposal(1, 0, 2, (TEXT[-1], 9), (-1, 0)))
    assert "already ended" in again.refused(Opcode.VERIFY, other)
    kind, words = again.ask(Opcode.VERIFY, pack_message(Proposal.root_only(1, 1, 3, token)))
    assert unpack_scored_result(words[1:]).prefix_len == 3, "what was refused has changed nothing"
    assert "already ended" in again.refused(Opcode.VERIFY, ROOT)
    again.close()


def test_deltas_go_to_the_stream_that_attached_last(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, vocab=64)
    with started("draft", tmp_path) as worker:
        first = RawClient(worker, EngineConfig(mode="async"))
        session = first.attach()
        deltas = [unpack_tree_delta(first.ask(Opcode.DRAFTER_OPEN, START)[1][1:])]
        assert deltas[0].parents.tolist()[0] == 0 and deltas[0].prefix_len == 2
        second = RawClient(worker, EngineConfig(mode="async"), session)
        assert second.attach() == session
        second.transport.send(Opcode.DRAFTER_OPEN, START)
        while (received := unpack_tree_delta(second.recv()[1][1:])).first != 1:
            pass  # of the first stream's request
        both = [list(delta.tokens) for delta in (deltas[0], received)]
        least = min(map(len, both))  # the deltas so far are sent together
        assert both[0][:least] == both[1][:least]
        result = pack_message(VerifyResult(1, 0, 2, (0, 1), (int(deltas[0].tokens[0]), 9)))
        first.transport.send(Opcode.OBSERVE, result)
        while (answer := first.recv())[0] != Opcode.ERROR:
            pass
        assert "has opened another" in unpack_error(answer[1])[-1]
        second.transport.send(Opcode.OBSERVE, result)
        while (received := unpack_tree_delta(second.recv()[1][1:])).round == 0:
            pass
        assert (received.round, received.prefix_len) == (1, 4)
        first.close()
        second.close()


def test_invalid_messages_are_refused_in_one_line(client: RawClient) -> None:
    good = pack_message(draft_proposal(1, 0, 2, (TEXT[-1], 9, 8), (-1, 0, 1)))
    wrong = [
        good[:3], good[:-1], [*good, 0], [*good[:5], 64, *good[6:]], [*good[:4], 4, *good[5:]], [*good[:8], 1, good[9]],
        [*good[:5], -1, *good[6:]], [*good[:2], 3, *good[3:]], [2, *good[1:]], [*good[:7], 0, *good[8:]], [],
        pack_message(draft_proposal(1, 0, 2, (TEXT[-1], *range(20)), (-1, *[0] * 20))), [*good, 3, 0],
    ]  # fmt: skip
    for words in wrong:
        client.refused(Opcode.VERIFY, words)
    client.refused(Opcode.OBSERVE, good)
    client.refused(99)
    client.refused(Opcode.SESSION_ATTACH, text_to_words("no JSON"))
    client.refused(Opcode.VERIFIER_OPEN, START[:5])
    assert client.ask(Opcode.VERIFY, good)[0] == Opcode.RESULT, "the session is as it was"


def test_messages_that_are_no_frames_or_too_large_are_refused(target: StartedWorker, client: RawClient) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{target.port}") as channel:
        call: Any = channel.stream_stream(f"/{TARGET_SERVICE}/VerifyDrafts")
        assert b"not a valid frame" in next(call(iter([b"\xff no message"]), timeout=20))
        with pytest.raises(grpc.RpcError) as caught:
            next(call(iter([bytes(MAX_MESSAGE_BYTES + 1)]), timeout=20))
        assert caught.value.code() == Code.RESOURCE_EXHAUSTED  # type: ignore[attr-defined]


def test_a_message_without_a_session_is_refused(target: StartedWorker) -> None:
    client = RawClient(target, SHAPE)
    assert "has not opened a session" in client.refused(Opcode.VERIFY, ROOT)
    client.session.session = "00" * 16
    assert client.attach() != "00" * 16, "an unknown session is replaced by another one"
    assert "no request is open" in client.refused(Opcode.VERIFY, ROOT)
    client.close()


def test_a_session_for_another_model_is_refused(target: StartedWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    client = RawClient(target, SHAPE)
    session, identity = client.session, client.session.identity
    for name, reason in (("tokenizer", "the tokenizers differ"), ("model", "model has changed")):
        session.identity = replace(identity, **{name: "other"})
        assert reason in client.refused(Opcode.SESSION_ATTACH, session.pack())
    session.identity = identity
    session.shape = EngineConfig(mode="serial", verify_batch=17)
    assert "this worker's limit of 16" in client.refused(Opcode.SESSION_ATTACH, session.pack())
    session.shape = SHAPE
    monkeypatch.setattr(session_messages, "PROTOCOL_VERSION", 1)
    words = session.pack()
    monkeypatch.undo()
    reason = client.refused(Opcode.SESSION_ATTACH, words)
    assert reason == (
        "the worker uses protocol version 8, the client version 1: install the same SwiftSpec version on both"
    )
    client.close()


def test_clients_without_credentials_are_refused(target: StartedWorker) -> None:
    guarded = RpcSecurity(token="secret")
    with started("target", target.model, security=guarded) as worker:

        def connection(security: RpcSecurity) -> GrpcConnection:
            return GrpcConnection(f"127.0.0.1:{worker.port}", "--target-url", TARGET_SERVICE, security)

        for security in (RpcSecurity(), RpcSecurity(token="other")):
            with pytest.raises(UserError, match="token is missing or wrong"):
                connection(security).ping(10)
        assert ping(connection(guarded), 10).tokenizer == TOKENIZER.hex()
        transport = connection(RpcSecurity()).transport()
        transport.send(Opcode.READ_TOKENIZER)
        with pytest.raises(UserError, match="token is missing or wrong"):
            transport.recv(10)
    for bare in (RpcSecurity(), RpcSecurity(token="secret"), RpcSecurity(cert=b"", key=b"")):
        with pytest.raises(UserError, match="open to other machines"):
            bare.check_worker(Endpoint("0.0.0.0", 7070))
    with pytest.raises(UserError, match="another machine"):
        RpcSecurity().check_client(Endpoint("example.com", 7070), "--target-url")
    for text in ("7070", "host", ":7070", "host:x", "host:70000", "http://host:1"):
        with pytest.raises(UserError, match="HOST:PORT"):
            Endpoint.parse(text, "--listen")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes the certificate")
def test_a_worker_over_tls(target: StartedWorker, tmp_path: Path) -> None:
    made = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=worker"
    for name in ("own", "other"):
        files = ["-keyout", str(tmp_path / f"{name}.key"), "-out", str(tmp_path / f"{name}.pem")]
        command = [*made.split(), "-addext", "subjectAltName=IP:127.0.0.1", *files]
        subprocess.run(command, check=True, capture_output=True)
    cert, other = tmp_path / "own.pem", tmp_path / "other.pem"
    guarded = RpcSecurity("secret", cert.read_bytes(), (tmp_path / "own.key").read_bytes())
    guarded.check_worker(Endpoint("0.0.0.0", 7070))
    with started("target", target.model, security=guarded) as worker:

        def call(security: RpcSecurity, host: str = "127.0.0.1") -> ModelInfo:
            return ping(GrpcConnection(f"{host}:{worker.port}", "--target-url", TARGET_SERVICE, security), 10)

        assert call(RpcSecurity("secret", ca=cert.read_bytes())).vocab_size == 64
        with pytest.raises(ConnectionError):
            call(RpcSecurity("secret"))  # without TLS
        with pytest.raises(UserError, match="token"):
            call(RpcSecurity("other", ca=cert.read_bytes()))
        with pytest.raises(UserError, match=r"not trusted.*--tls-ca"):
            call(RpcSecurity("secret", ca=other.read_bytes()))
        with pytest.raises(UserError, match="for another host"):
            call(RpcSecurity("secret", ca=cert.read_bytes()), "localhost")


HEALTH: Any = health_pb2  # its names are generated on import


def test_health_is_served_until_a_worker_drains(target: StartedWorker) -> None:
    """With the client of the standard service: of the worker, of each service, and of an unknown one."""
    worker = StartedWorker("target", target.model).start()
    channel = grpc.insecure_channel(f"127.0.0.1:{worker.port}")
    health: Any = health_pb2_grpc.HealthStub(channel)
    serving = HEALTH.HealthCheckResponse.SERVING
    for name in ("", TARGET_SERVICE):
        assert health.Check(HEALTH.HealthCheckRequest(service=name), timeout=10).status == serving
    with pytest.raises(grpc.RpcError) as caught:
        health.Check(HEALTH.HealthCheckRequest(service=DRAFT_SERVICE), timeout=10)
    assert caught.value.code() == Code.NOT_FOUND  # type: ignore[attr-defined]
    watched: Any = health.Watch(HEALTH.HealthCheckRequest(service=TARGET_SERVICE), timeout=20)
    assert next(watched).status == serving
    threading.Thread(target=worker.server.stop, args=(5.0,)).start()
    assert next(watched).status == HEALTH.HealthCheckResponse.NOT_SERVING
    watched.cancel()
    channel.close()


class TokenCredentials(grpc.UnaryUnaryClientInterceptor, grpc.StreamStreamClientInterceptor):
    """A client that sends the token with each call."""

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return continuation(client_call_details._replace(metadata=RpcSecurity("secret").metadata), request)

    def intercept_stream_stream(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        return self.intercept_unary_unary(continuation, client_call_details, request_iterator)


def test_reflection_lists_the_services_for_clients_with_the_token(target: StartedWorker) -> None:
    """With the client of the standard service, which makes a call from the descriptors that it has read."""
    with started("target", target.model, security=RpcSecurity("secret")) as worker:
        bare = grpc.insecure_channel(f"127.0.0.1:{worker.port}")
        health: Any = health_pb2_grpc.HealthStub(bare)
        with pytest.raises(grpc.RpcError, match="the token is missing or wrong"):
            list(ProtoReflectionDescriptorDatabase(bare).get_services())
        with pytest.raises(grpc.RpcError, match="the token is missing or wrong"):
            health.Check(HEALTH.HealthCheckRequest(), timeout=10)
        channel = grpc.intercept_channel(bare, TokenCredentials())
        read = ProtoReflectionDescriptorDatabase(channel)
        assert {TARGET_SERVICE, "grpc.health.v1.Health"} < {*read.get_services()}
        methods = DescriptorPool(read).FindServiceByName(TARGET_SERVICE).methods_by_name
        assert {*methods} == {"VerifyDrafts", "Ping"}
        answer = GetMessageClass(methods["Ping"].output_type)
        reply: Any = channel.unary_unary(f"/{TARGET_SERVICE}/Ping", response_deserializer=answer.FromString)(
            b"", timeout=10
        )
        assert ModelInfo.from_json(reply.model_info).vocab_size == 64
        bare.close()


def test_a_worker_of_the_other_kind_is_refused(target: StartedWorker) -> None:
    with pytest.raises(UserError, match="the other kind of worker"):
        GrpcConnection(f"127.0.0.1:{target.port}", "--draft-url", DRAFT_SERVICE, RpcSecurity()).ping(10)


def test_an_idle_worker_checks_its_group(target: StartedWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swiftspec.distributed.transport.grpc.server.SWEEP_INTERVAL_S", 0.01)
    over: SimpleQueue[int] = SimpleQueue()
    target.server.run(over, lambda: target.worker.sweep(lambda: over.put(0)))  # ends because of what it received


def session_role(shape: EngineConfig, masked: tuple[int, ...]) -> Any:
    return SimpleNamespace(shape=shape)


def test_idle_sessions_are_evicted() -> None:
    now = [0.0]
    sessions = WorkerSessions(session_role, max_sessions=2, idle_timeout_s=10.0, clock=lambda: now[0])
    first, second = (sessions.open("", SHAPE) for _ in range(2))
    assert sessions.open(first.id, SHAPE) is first
    now[0] = 1.0
    with sessions.in_use(first):
        pass
    third = sessions.open("", SHAPE)
    with pytest.raises(SessionGone):
        sessions.find(second.id)
    with sessions.in_use(first), sessions.in_use(third), pytest.raises(WorkerFull, match="--max-sessions"):
        sessions.open("", SHAPE)
    now[0] = 11.5
    sessions.sweep()
    assert len(sessions) == 0
    with pytest.raises(SessionGone), sessions.in_use(first):
        pass


def test_a_session_that_is_about_to_become_idle_is_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has responded and is finishing its round when another one is opened."""
    monkeypatch.setattr("swiftspec.distributed.remote.sessions.IDLE_GRACE_S", 60.0)
    sessions, opened = WorkerSessions(session_role, max_sessions=1, idle_timeout_s=10.0), SimpleQueue[Any]()
    first = sessions.open("", SHAPE)
    with sessions.in_use(first):
        other = threading.Thread(target=lambda: opened.put(sessions.open("", SHAPE)))
        other.start()
        other.join(0.05)
        assert opened.empty()
    other.join()
    assert opened.get() is not first and first.ended


def test_the_lock_is_fair() -> None:
    turns, order, threads = FairLock(), list[int](), list[threading.Thread]()

    def work(number: int) -> None:
        with turns:
            order.append(number)

    with turns:
        assert not turns.try_acquire()
        for number in range(5):
            threads.append(threading.Thread(target=work, args=(number,)))
            threads[-1].start()
            while len(turns._waiting) <= number:
                pass
    for thread in threads:
        thread.join(10)
    assert order == [0, 1, 2, 3, 4]
    assert turns.try_acquire() and not turns.try_acquire()
    turns.release()
    assert turns.try_acquire()


def test_streams_that_send_nothing_do_not_lock_others_out() -> None:
    began: SimpleQueue[None] = SimpleQueue()

    def serve(receiver: Receiver, cancelled: Callable[[], bool]) -> Iterator[Frame]:
        began.put(None)
        with suppress(ConnectionError):
            yield receiver.recv()

    server = RpcServer(TARGET_SERVICE, serve, "{}", Endpoint("127.0.0.1", 0), RpcSecurity(), 2)
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        call: Any = channel.stream_stream(f"/{TARGET_SERVICE}/VerifyDrafts")
        end_of_messages = threading.Event()

        def no_messages() -> Iterator[bytes]:
            end_of_messages.wait()
            yield from ()

        silent = [call(no_messages(), timeout=60) for _ in range(2 * 2 + EXTRA_STREAMS)]
        for _ in silent:
            began.get(timeout=60)
        message = pack_grpc_frame(Opcode.VERIFY, [1])
        assert call(iter([message]), timeout=60).code() == Code.RESOURCE_EXHAUSTED
        ping: Any = channel.unary_unary(f"/{TARGET_SERVICE}/Ping")
        assert ping(b"", timeout=60)
        server.cancel_silent_streams(time.monotonic() + FIRST_MESSAGE_TIMEOUT_S + 1)
        assert {each.code() for each in silent} == {Code.CANCELLED}
        assert next(call(iter([message]), timeout=60))
        end_of_messages.set()
    server.stop()


@pytest.mark.slow
def test_a_grammar_that_overflows_the_stack_is_refused(target: StartedWorker) -> None:
    chain = "\n".join(f"r{number}: r{number + 1}" for number in range(6000))
    start = RequestStart(1, TEXT, replace(GREEDY, grammar=f'start: r0\n{chain}\nr6000: "x"'), len(TEXT))
    client = RawClient(target, SHAPE)
    client.attach()
    assert "nesting" in client.refused(Opcode.VERIFIER_OPEN, pack_message(start))
    client.close()
