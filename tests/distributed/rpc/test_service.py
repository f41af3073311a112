"""Responses of workers to messages that are valid, late, duplicate, wrong or missing."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from hypothesis import given

from swiftspec.config import EngineConfig
from swiftspec.distributed.rpc import swiftspec_pb2 as pb
from swiftspec.distributed.rpc.connection import WorkerConnection
from swiftspec.distributed.rpc.endpoint import MAX_MESSAGE_BYTES, Endpoint, RpcSecurity
from swiftspec.distributed.rpc.protobuf_codec import (
    ModelIdentity,
    delta_from_proto,
    proposal_from_proto,
    proposal_to_proto,
    request_start_from_proto,
    request_start_to_proto,
    result_to_proto,
)
from swiftspec.distributed.rpc.service import DRAFT_SERVICE, TARGET_SERVICE
from swiftspec.distributed.rpc.sessions import FairLock, WorkerSessions
from swiftspec.distributed.rpc.status import SessionGone, WorkerFull, WorkerLost, WorkerRefused
from swiftspec.errors import UserError
from swiftspec.messages import Proposal, RequestStart, VerifyResult
from swiftspec.params import SamplingParams
from tests.support.proposals import draft_proposal, proposals
from tests.support.tiny_checkpoints import make_checkpoint
from tests.support.workers import TOKENIZER, StartedWorker, started

TEXT = (5, 17, 3)
GREEDY = SamplingParams(temperature=0)
SHAPE = EngineConfig(mode="serial", draft_steps=2)
Code = grpc.StatusCode


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartedWorker]:
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path, vocab=64)
    with started("target", path) as worker:
        yield worker


class Client:
    """Calls a target worker without the checks of the real client."""

    def __init__(self, worker: StartedWorker) -> None:
        self._channel = grpc.insecure_channel(f"127.0.0.1:{worker.port}")
        link = WorkerConnection(
            f"127.0.0.1:{worker.port}", "--target-url", TARGET_SERVICE, pb.VerifyAnswer, RpcSecurity()
        )
        about = link.ping(10)
        self.own = ModelIdentity(about.model, about.tokenizer)

    def raw(self, data: bytes) -> pb.VerifyAnswer:
        return pb.VerifyAnswer.FromString(
            self._channel.unary_unary(f"/{TARGET_SERVICE}/VerifyDrafts")(data, timeout=20)
        )

    def ask(self, **fields: Any) -> pb.VerifyAnswer:
        return self.raw(pb.VerifyRequest(**fields).SerializeToString())

    def start(self, shape: EngineConfig = SHAPE) -> pb.Opening:
        return request_start_to_proto(RequestStart(1, TEXT, GREEDY, len(TEXT)), shape, self.own)

    def refused(self, code: grpc.StatusCode, call: Callable[[], object]) -> str:
        with pytest.raises(grpc.RpcError) as caught:
            call()
        error: Any = caught.value
        assert error.code() == code, error.details()
        assert error.details() and "\n" not in error.details() and len(error.details()) < 400
        return error.details()


@pytest.fixture
def client(target: StartedWorker) -> Client:
    return Client(target)


def test_a_round_is_applied_once(client: Client) -> None:
    opened = client.ask(opening=client.start())
    assert len(opened.session) == 16 and opened.opened.kept == 0 and opened.telemetry.model > 0
    ask = {"session": opened.session, "proposal": proposal_to_proto(Proposal.root_only(1, 0, 2, TEXT[-1]))}
    first, duplicated = client.ask(**ask), client.ask(**ask)
    assert first == duplicated and len(first.result.tokens) == 1
    token = first.result.tokens[0]
    other = proposal_to_proto(draft_proposal(1, 0, 2, (TEXT[-1], 9), (-1, 0)))
    assert "already ended" in client.refused(
        Code.FAILED_PRECONDITION, lambda: client.ask(session=opened.session, proposal=other)
    )
    after = client.ask(session=opened.session, proposal=proposal_to_proto(Proposal.root_only(1, 1, 3, token)))
    assert after.result.prefix_len == 3, "what was refused has changed nothing"
    assert "already ended" in client.refused(Code.FAILED_PRECONDITION, lambda: client.ask(**ask))


def test_deltas_go_to_the_stream_that_opened_last(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, vocab=64)
    with started("draft", tmp_path) as worker:
        link = WorkerConnection(f"127.0.0.1:{worker.port}", "--draft-url", DRAFT_SERVICE, pb.DraftAnswer, RpcSecurity())
        about = link.ping(10)
        own = ModelIdentity(about.model, about.tokenizer)
        ahead = request_start_to_proto(RequestStart(1, TEXT, GREEDY, len(TEXT)), EngineConfig(mode="async"), own)
        first, second = link.stream(), link.stream()
        first.send(pb.DraftRequest(opening=ahead))
        grown = first.recv(20)
        assert delta_from_proto(grown.delta).parents.tolist()[0] == 0 and grown.telemetry.model > 0
        second.send(pb.DraftRequest(session=grown.session, opening=ahead))
        both = [list(delta.tokens) for delta in (grown.delta, second.recv(20).delta)]
        least = min(map(len, both))  # the deltas so far are sent together
        assert both[0][:least] == both[1][:least]
        result = result_to_proto(VerifyResult(1, 0, 2, (0, 1), (grown.delta.tokens[0], 9)), for_client=False)
        first.send(pb.DraftRequest(session=grown.session, result=result))
        with pytest.raises(WorkerRefused, match="has opened another"):
            while True:
                first.recv(20)
        second.send(pb.DraftRequest(session=grown.session, result=result))
        while (received := second.recv(20).delta).round == 0:
            pass
        assert received.round == 1
        second.send(pb.DraftRequest(session=bytes(16), result=result))
        with pytest.raises(SessionGone):
            while True:
                second.recv(20)
        call = grpc.insecure_channel(f"127.0.0.1:{worker.port}").unary_unary(f"/{DRAFT_SERVICE}/GenerateDrafts")
        with pytest.raises(grpc.RpcError, match="GenerateDrafts does not support mode async"):
            call(pb.DraftRequest(opening=ahead).SerializeToString(), timeout=20)


def test_invalid_messages_are_refused_in_one_line(client: Client) -> None:
    session = client.ask(opening=client.start()).session
    good = proposal_to_proto(draft_proposal(1, 0, 2, (TEXT[-1], 9, 8), (-1, 0, 1)))

    def asked(change: Callable[[Any], object], what: Any = good, name: str = "proposal") -> Callable[[], object]:
        message = type(what).FromString(what.SerializeToString())
        change(message)
        return lambda: client.ask(session=session, **{name: message})

    wrong = [
        lambda m: m.ClearField("tokens"), lambda m: m.parents.append(0), lambda m: m.tokens.__setitem__(1, 64),
        lambda m: m.tokens.__setitem__(0, 4), lambda m: m.parents.__setitem__(1, 1),
        lambda m: m.tokens.__setitem__(1, -1), lambda m: setattr(m, "prefix_len", 3),
        lambda m: setattr(m, "request", 2),
        lambda m: m.weights.append(-1), lambda m: m.weights.__setitem__(1, 0.5), lambda m: m.sources.append(1),
        lambda m: m.sources.__setitem__(1, 99),
        lambda m: (m.tokens.extend(range(20)), m.parents.extend([0] * 20), m.weights.extend([-1] * 20),
                   m.sources.extend([1] * 20)),
        lambda m: m.drawn.tokens.append(3), lambda m: m.parents.__setitem__(0, 0),
    ]  # fmt: skip
    for change in wrong:
        client.refused(Code.INVALID_ARGUMENT, asked(change))
    client.refused(Code.INVALID_ARGUMENT, lambda: client.raw(b"\xff no message"))
    client.refused(Code.INVALID_ARGUMENT, lambda: client.ask(session=session))
    client.refused(Code.NOT_FOUND, lambda: client.ask(session=bytes(16), proposal=good))
    client.refused(Code.RESOURCE_EXHAUSTED, lambda: client.raw(bytes(MAX_MESSAGE_BYTES + 1)))
    assert len(client.ask(session=session, proposal=good).result.tokens) >= 1, "the session is as it was"


def test_a_request_for_another_model_is_refused(client: Client) -> None:
    def asked(**changes: Any) -> Callable[[], object]:
        message = client.start()
        for name, value in changes.items():
            setattr(message, name, value)
        return lambda: client.ask(opening=message)

    assert "version 3" in client.refused(Code.FAILED_PRECONDITION, asked(protocol=1))
    assert "tokenizers" in client.refused(Code.FAILED_PRECONDITION, asked(tokenizer=b"other"))
    assert "model has changed" in client.refused(Code.FAILED_PRECONDITION, asked(model=b"other"))
    client.refused(Code.INVALID_ARGUMENT, asked(prompt_len=4))
    large = client.start(EngineConfig(mode="serial", verify_batch=17))
    details = client.refused(Code.FAILED_PRECONDITION, lambda: client.ask(opening=large))
    assert "this worker's limit of 16" in details
    bad = client.start()
    bad.sampling.temperature = float("nan")
    client.refused(Code.INVALID_ARGUMENT, lambda: client.ask(opening=bad))


def test_clients_without_credentials_are_refused(target: StartedWorker) -> None:
    guarded = RpcSecurity(token="secret")
    with started("target", target.model, security=guarded) as worker:
        for security in (RpcSecurity(), RpcSecurity(token="other")):
            with pytest.raises(WorkerRefused, match="token is missing or wrong"):
                WorkerConnection(
                    f"127.0.0.1:{worker.port}", "--target-url", TARGET_SERVICE, pb.VerifyAnswer, security
                ).ping(10)
        link = WorkerConnection(f"127.0.0.1:{worker.port}", "--target-url", TARGET_SERVICE, pb.VerifyAnswer, guarded)
        assert link.ping(10).tokenizer == TOKENIZER
        stream = WorkerConnection(
            f"127.0.0.1:{worker.port}", "--target-url", TARGET_SERVICE, pb.VerifyAnswer, RpcSecurity()
        ).stream()
        with pytest.raises(WorkerRefused):
            stream.recv(10)
    for bare in (RpcSecurity(), RpcSecurity(token="secret"), RpcSecurity(cert=b"", key=b"")):
        with pytest.raises(UserError, match="open to other machines"):
            bare.check_worker(Endpoint("0.0.0.0", 7070))
    with pytest.raises(UserError, match="another machine"):
        RpcSecurity().check_client(Endpoint("example.com", 7070), "--target-url")
    for text in ("7070", "host", ":7070", "host:x", "host:70000", "http://host:1"):
        with pytest.raises(UserError, match="HOST:PORT"):
            Endpoint.parse(text, "--listen")


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

        def ping(security: RpcSecurity, host: str = "127.0.0.1") -> pb.PingAnswer:
            return WorkerConnection(
                f"{host}:{worker.port}", "--target-url", TARGET_SERVICE, pb.VerifyAnswer, security
            ).ping(10)

        assert ping(RpcSecurity("secret", ca=cert.read_bytes())).vocab_size == 64
        with pytest.raises(WorkerLost):
            ping(RpcSecurity("secret"))  # without TLS
        with pytest.raises(WorkerRefused, match="token"):
            ping(RpcSecurity("other", ca=cert.read_bytes()))
        with pytest.raises(WorkerRefused, match=r"not trusted.*--tls-ca"):
            ping(RpcSecurity("secret", ca=other.read_bytes()))
        with pytest.raises(WorkerRefused, match="for another host"):
            ping(RpcSecurity("secret", ca=cert.read_bytes()), "localhost")


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
        assert {*methods} == {"VerifyDrafts", "Stream", "EndSession", "Ping", "ReadTokenizer"}
        answer = GetMessageClass(methods["Ping"].output_type)
        reply: Any = channel.unary_unary(f"/{TARGET_SERVICE}/Ping", response_deserializer=answer.FromString)(
            b"", timeout=10
        )
        assert reply.vocab_size == 64 and reply.tokenizer == TOKENIZER
        bare.close()


def test_a_worker_of_the_other_kind_is_refused(target: StartedWorker) -> None:
    with pytest.raises(WorkerRefused, match="the other kind of worker"):
        WorkerConnection(f"127.0.0.1:{target.port}", "--draft-url", DRAFT_SERVICE, pb.DraftAnswer, RpcSecurity()).ping(
            10
        )


def test_an_idle_worker_checks_its_group(target: StartedWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swiftspec.distributed.rpc.server.SWEEP_INTERVAL_S", 0.01)
    over: SimpleQueue[int] = SimpleQueue()
    target.server.run(over, lambda: over.put(0))  # ends because of the error that it received


def test_messages_carry_every_field() -> None:
    names = [field.name for field in fields(SamplingParams)]
    assert [field.name for field in pb.Sampling.DESCRIPTOR.fields] == names
    sampling = SamplingParams(
        temperature=0.5, top_k=3, logit_bias={4: -1.5}, seed=2**64 - 1, max_tokens=9, stop=("a", "b"), logprobs=0,
        stop_token_ids=(1, 2), grammar="g", negative_prompt_ids=(3,), verify_batch=2,
    )  # fmt: skip
    shape = EngineConfig(mode="async", draft_steps=5, calibration=0.3, catch_up=False)
    own, start = ModelIdentity(b"m", b"t"), RequestStart(3, TEXT, sampling, 2)
    assert request_start_from_proto(request_start_to_proto(start, shape, own), own) == (start, shape)


@given(proposals())
def test_a_proposal_is_unchanged(proposal: Proposal) -> None:
    assert proposal_from_proto(proposal_to_proto(proposal)) == proposal


class Work:
    busy = 0.0

    def __init__(self, shape: EngineConfig) -> None:
        self.shape = shape


def test_idle_sessions_are_evicted() -> None:
    now = [0.0]
    sessions = WorkerSessions(Work, max_sessions=2, idle_timeout_s=10.0, clock=lambda: now[0])
    first, second = (sessions.open(b"", SHAPE) for _ in range(2))
    assert sessions.open(first.id, SHAPE) is first
    now[0] = 1.0
    with sessions.in_use(first):
        pass
    third = sessions.open(b"", SHAPE)
    with pytest.raises(SessionGone):
        sessions.find(second.id)
    with sessions.in_use(first), sessions.in_use(third), pytest.raises(WorkerFull, match="--max-sessions"):
        sessions.open(b"", SHAPE)
    now[0] = 11.5
    sessions.sweep()
    assert len(sessions) == 0
    with pytest.raises(SessionGone), sessions.in_use(first):
        pass


def test_a_session_that_is_about_to_become_idle_is_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has responded and is finishing its round when another one is opened."""
    monkeypatch.setattr("swiftspec.distributed.rpc.sessions.IDLE_GRACE_S", 60.0)
    sessions, opened = WorkerSessions(Work, max_sessions=1, idle_timeout_s=10.0), SimpleQueue[Any]()
    first = sessions.open(b"", SHAPE)
    with sessions.in_use(first):
        other = threading.Thread(target=lambda: opened.put(sessions.open(b"", SHAPE)))
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
