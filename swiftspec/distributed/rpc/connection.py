"""Connection of a client to one worker over gRPC."""

from __future__ import annotations

import time
from collections.abc import Iterator
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Generic, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from swiftspec.distributed.rpc import swiftspec_pb2 as pb
from swiftspec.distributed.rpc.endpoint import KEEPALIVE_OPTIONS, SIZE_OPTIONS, Endpoint, RpcSecurity
from swiftspec.distributed.rpc.protobuf_codec import PROTOCOL_VERSION, parse_message
from swiftspec.distributed.rpc.status import WorkerLost, WorkerRefused, error_from_rpc
from swiftspec.observe.rpc_latency import RpcRecord

A = TypeVar("A", bound=Message)
OPTIONS = (
    *KEEPALIVE_OPTIONS, *SIZE_OPTIONS, ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100), ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000), ("grpc.enable_http_proxy", 0),
)  # fmt: skip
MAX_TOKENIZER_BYTES = 512 << 20  # bytes; larger tokenizers are rejected
END_SESSION_TIMEOUT_S = 1.0  # seconds; timeout of an EndSession call
MAX_BUFFERED_ANSWERS = 1024  # received answers that wait for `recv`; beyond that, the worker blocks
POLL_S = 0.05  # seconds between two polls of a full buffer


class WorkerConnection(Generic[A]):
    """Channel to one service of a worker. gRPC reconnects by itself; calls in progress then raise WorkerLost.

    `answers`: message type of the service's stream.
    `peer`: name of the worker in messages to the user.
    """

    def __init__(self, url: str, flag: str, service: str, answers: type[A], security: RpcSecurity) -> None:
        """`flag`: command-line flag that the URL comes from.

        `service`: full name of the gRPC service.
        Raises UserError if the URL is invalid, or requires a token that `security` lacks.
        """
        endpoint = Endpoint.parse(url, flag)
        self.peer = f"{flag} {endpoint}"
        self._service, self._answers, self._metadata = service, answers, security.metadata
        security.check_client(endpoint, flag)
        if endpoint.is_loopback and security.ca is None:
            self._channel: Any = grpc.insecure_channel(str(endpoint), OPTIONS)
        else:
            self._channel = grpc.secure_channel(str(endpoint), grpc.ssl_channel_credentials(security.ca), OPTIONS)

    def ping(self, timeout: float) -> pb.PingAnswer:
        """Returns the worker's model info. Raises WorkerLost if the worker does not answer within `timeout` seconds,
        and WorkerRefused if it has another protocol version or refuses the call."""
        try:
            answer = parse_message(
                pb.PingAnswer, self._call("Ping")(b"", timeout, self._metadata, wait_for_ready=False)
            )
        except grpc.RpcError as error:
            raise _lost(error_from_rpc(error, self.peer)) from None
        except ValueError as error:
            raise WorkerRefused(f"{self.peer}: {error}") from None
        if answer.protocol != PROTOCOL_VERSION:
            raise WorkerRefused(
                f"{self.peer} uses protocol version {answer.protocol}, not {PROTOCOL_VERSION}:"
                " install the same SwiftSpec on both sides"
            )
        return answer

    def stream(self) -> MessageStream[A]:
        """Opens a stream of messages to and from the worker."""
        return MessageStream(
            self._channel.stream_stream(f"/{self._service}/Stream"), self._metadata, self._answers, self.peer
        )

    def end_session(self, session: bytes) -> None:
        """Ends a session. Errors are ignored, since the worker ends idle sessions by itself."""
        message = pb.EndSessionRequest(session=session).SerializeToString()
        try:
            self._call("EndSession")(message, END_SESSION_TIMEOUT_S, self._metadata)
        except grpc.RpcError:
            return

    def read_tokenizer(self, timeout: float) -> Iterator[tuple[str, bytes]]:
        """Yields name and content of each tokenizer file. Raises WorkerLost if the connection is lost or `timeout`
        seconds have passed, and WorkerRefused if the files exceed MAX_TOKENIZER_BYTES."""
        read, name, data, size = self._channel.unary_stream(f"/{self._service}/ReadTokenizer"), "", b"", 0
        try:
            for piece in read(b"", timeout, self._metadata):
                message = parse_message(pb.FilePiece, piece)
                size += len(message.data)
                if size > MAX_TOKENIZER_BYTES:
                    raise ValueError("its tokenizer is too large")
                if message.name and name:
                    yield name, data
                data = message.data if message.name else data + message.data
                name = message.name or name
        except grpc.RpcError as error:
            raise _lost(error_from_rpc(error, self.peer)) from None
        except ValueError as error:
            raise WorkerRefused(f"{self.peer}: {error}") from None
        if name:
            yield name, data

    def close(self) -> None:
        self._channel.close()

    def _call(self, method: str) -> Any:
        return self._channel.unary_unary(f"/{self._service}/{method}")


class MessageStream(Generic[A]):
    """Bidirectional stream of ordered messages for one request.

    A background thread receives the answers, so that `recv` can have any timeout.
    """

    def __init__(self, method: Any, metadata: Any, answers: type[A], peer: str) -> None:
        self._answers, self._peer = answers, peer
        self._out: SimpleQueue[bytes | None] = SimpleQueue()
        self._in: SimpleQueue[bytes | Exception] = SimpleQueue()
        self._call = method(iter(self._out.get, None), metadata=metadata)
        self._error: Exception | None = None
        Thread(target=self._read, name="answers", daemon=True).start()

    def send(self, message: Message) -> None:
        self._out.put(message.SerializeToString())

    def recv(self, timeout: float) -> A:
        """Returns the next answer. Raises TimeoutError if it does not arrive within `timeout` seconds; the call can
        then be repeated.

        Once the stream has ended, every call raises the reason: WorkerLost, WorkerRefused or SessionGone.
        """
        if self._error is not None:
            raise self._error
        try:
            came = self._in.get(timeout=max(timeout, 0.0)) if timeout > 0 else self._in.get_nowait()
        except Empty:
            raise TimeoutError(f"{self._peer} did not answer in time") from None
        if isinstance(came, Exception):
            self._error = came
            raise came
        try:
            return self._answers.FromString(came)
        except DecodeError:
            self._error = WorkerLost(f"{self._peer} sent an invalid message")
            self.cancel()
            raise self._error from None

    def close(self) -> None:
        """Half-closes the stream: this client sends no further messages, and the worker ends the stream after its last
        answer."""
        self._out.put(None)

    def cancel(self) -> None:
        """Cancels the request in progress."""
        self._out.put(None)
        self._call.cancel()

    def _read(self) -> None:
        try:
            for answer in self._call:
                while self._in.qsize() >= MAX_BUFFERED_ANSWERS and self._call.is_active():
                    time.sleep(POLL_S)
                self._in.put(answer)
            self._in.put(WorkerLost(f"{self._peer} disconnected: it closed the stream"))
        except grpc.RpcError as error:
            self._in.put(_lost(error_from_rpc(error, self._peer)))


def rpc_record(side: str, round_: int, asked: int, cost: pb.Telemetry) -> RpcRecord:
    """Returns the latency record of an RPC whose answer has just arrived.

    `side`: "draft" or "target".
    `asked`: time at which the request was sent, in nanoseconds since the Unix epoch.
    `cost`: telemetry that the worker has sent with the answer.
    """
    return RpcRecord(side, round_, asked, time.time_ns(), cost.span, cost.began, cost.wall, cost.queue, cost.model)


def _lost(error: Exception) -> Exception:
    """Returns WorkerLost for a TimeoutError (an expired gRPC deadline), and all other errors unchanged."""
    return WorkerLost(str(error)) if isinstance(error, TimeoutError) else error
