"""Client side of a gRPC stream to a worker."""

from __future__ import annotations

import time
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from swiftspec.distributed.transport.codec import PROTOCOL_VERSION, Frame, Words
from swiftspec.distributed.transport.grpc import swiftspec_pb2 as pb
from swiftspec.distributed.transport.grpc.endpoint import (
    KEEPALIVE_OPTIONS,
    SIZE_OPTIONS,
    STREAM_METHODS,
    Endpoint,
    RpcSecurity,
)
from swiftspec.distributed.transport.grpc.frames import pack_grpc_frame, unpack_grpc_frame
from swiftspec.errors import UserError
from swiftspec.file_io import one_line

OPTIONS = (
    *KEEPALIVE_OPTIONS, *SIZE_OPTIONS, ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100), ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000), ("grpc.enable_http_proxy", 0),
)  # fmt: skip
MAX_BUFFERED_ANSWERS = 1024  # received answers that wait for `recv`; beyond that, the worker blocks
POLL_S = 0.05  # seconds between two polls of a full buffer
NO_TIMEOUT_S = 1e9  # seconds; in effect without limit
CERTIFICATE_ERRORS = {  # part of gRPC's message on a rejected certificate, and the message of this module
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not trusted: pass it, or its CA certificate, with --tls-ca",
    "Hostname Verification Check failed": "its certificate is for another host: use a name or address that it lists",
}
Code = grpc.StatusCode
CONNECTION_LOST_CODES = (
    Code.UNAVAILABLE,
    Code.CANCELLED,
    Code.INTERNAL,
    Code.UNKNOWN,
    Code.DEADLINE_EXCEEDED,
)  # the statuses of a lost connection


class GrpcConnection:
    """Connection to one service of a worker. gRPC reconnects by itself; streams in progress then raise ConnectionError.

    `peer`: name of the worker in messages to the user.
    """

    def __init__(self, url: str, flag: str, service: str, security: RpcSecurity) -> None:
        """`flag`: command-line flag that the URL comes from.

        `service`: full name of the gRPC service.
        Raises UserError if the URL is invalid, or requires a token that `security` lacks.
        """
        endpoint = Endpoint.parse(url, flag)
        self.peer = f"{flag} {endpoint}"
        self._service, self._metadata = service, security.metadata
        security.check_client(endpoint, flag)
        if endpoint.is_loopback and security.ca is None:
            self._channel: Any = grpc.insecure_channel(str(endpoint), OPTIONS)
        else:
            self._channel = grpc.secure_channel(str(endpoint), grpc.ssl_channel_credentials(security.ca), OPTIONS)

    def ping(self, timeout: float) -> str:
        """Returns the worker's model info as JSON. Raises ConnectionError if the worker does not answer within
        `timeout` seconds, and UserError if it has another protocol version or refuses the call."""
        call = self._channel.unary_unary(f"/{self._service}/Ping")
        try:
            answer = pb.PingAnswer.FromString(call(b"", timeout, self._metadata, wait_for_ready=False))
        except grpc.RpcError as error:
            raise error_from_rpc(error, self.peer) from None
        except DecodeError:
            raise UserError(f"{self.peer} sent an invalid response to a ping: it is another program") from None
        if answer.protocol != PROTOCOL_VERSION:
            raise UserError(
                f"{self.peer} uses protocol version {answer.protocol}, not {PROTOCOL_VERSION}:"
                " install the same SwiftSpec on both sides"
            )
        return answer.model_info

    def transport(self) -> GrpcTransport:
        """Returns a transport to the worker, which opens its stream with its first message."""
        method = self._channel.stream_stream(f"/{self._service}/{STREAM_METHODS[self._service]}")
        return GrpcTransport(method, self._metadata, self.peer)

    def close(self) -> None:
        self._channel.close()


class GrpcTransport:
    """A `Transport` over a stream of frames, one stream per request. Once a stream has ended, every call raises the
    reason until `restart`: ConnectionError if the worker is lost, and UserError if it has refused the call."""

    def __init__(self, method: Any, metadata: Any, peer: str) -> None:
        self.peer = peer
        self._method, self._metadata = method, metadata
        self._stream: _FrameStream | None = None

    def send(self, kind: int, words: Sequence[int] = ()) -> None:
        if self._stream is None:
            self._stream = _FrameStream(self._method, self._metadata, self.peer)
        self._stream.send(pack_grpc_frame(kind, words))

    def recv(self, timeout: float | None = None) -> Frame:
        if self._stream is None:
            raise ConnectionError(f"{self.peer} disconnected: no message was sent")
        return self._stream.recv(NO_TIMEOUT_S if timeout is None else timeout)

    def recv_or_reply(self, reply: Any, asks: int, answers: int, note: int) -> tuple[int, Words, bool]:
        """Receives like `recv`, without a timeout. Never replies in native code, so the last value is False."""
        return *self.recv(), False

    def restart(self) -> None:
        if self._stream is not None:
            self._stream.cancel()
            self._stream = None

    def close(self) -> None:
        self.restart()


class _FrameStream:
    """One bidirectional stream. A background thread receives the answers, so that `recv` can have any timeout."""

    def __init__(self, method: Any, metadata: Any, peer: str) -> None:
        self._peer = peer
        self._out: SimpleQueue[bytes | None] = SimpleQueue()
        self._in: SimpleQueue[bytes | Exception] = SimpleQueue()
        self._call = method(iter(self._out.get, None), metadata=metadata)
        self._error: Exception | None = None
        Thread(target=self._read, name="answers", daemon=True).start()

    def send(self, data: bytes) -> None:
        if self._error is not None:
            raise self._error
        self._out.put(data)

    def recv(self, timeout: float) -> Frame:
        if self._error is not None:
            raise self._error
        try:
            data = self._in.get(timeout=timeout) if timeout > 0 else self._in.get_nowait()
        except Empty:
            raise TimeoutError(f"no message from {self._peer} within {timeout:g} s") from None
        if isinstance(data, Exception):
            self._error = data
            raise data
        try:
            return unpack_grpc_frame(data)
        except ValueError:
            self._error = ConnectionError(f"{self._peer} sent an invalid message")
            self.cancel()
            raise self._error from None

    def cancel(self) -> None:
        self._out.put(None)
        self._call.cancel()

    def _read(self) -> None:
        try:
            for answer in self._call:
                while self._in.qsize() >= MAX_BUFFERED_ANSWERS and self._call.is_active():
                    time.sleep(POLL_S)
                self._in.put(answer)
            self._in.put(ConnectionError(f"{self._peer} disconnected: it closed the stream"))
        except grpc.RpcError as error:
            self._in.put(error_from_rpc(error, self._peer))


def error_from_rpc(error: Any, peer: str) -> Exception:
    """Returns the exception to raise for `error`, the `grpc.RpcError` of a failed call: ConnectionError if the
    connection is lost, and UserError if the worker has refused the call. `peer`: name of the worker in the message."""
    code, details = error.code(), one_line(Exception(error.details() or error.code().name))
    if (why := next((text for sign, text in CERTIFICATE_ERRORS.items() if sign in details), None)) is not None:
        return UserError(f"{peer}: {why}")
    if code in CONNECTION_LOST_CODES:
        return ConnectionError(f"{peer} is unavailable: {details}")
    if code == Code.UNIMPLEMENTED:
        return UserError(f"{peer} does not provide this service: it is the other kind of worker, or another program")
    return UserError(f"{peer}: {details}")
