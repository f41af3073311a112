"""gRPC server of a worker: the streams of its clients, authentication, health checks, reflection and shutdown."""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import Empty, Full, Queue, SimpleQueue
from threading import BoundedSemaphore, Thread
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from swiftspec.distributed.transport.codec import PROTOCOL_VERSION, Frame
from swiftspec.distributed.transport.grpc import swiftspec_pb2 as pb
from swiftspec.distributed.transport.grpc.endpoint import (
    KEEPALIVE_OPTIONS,
    KEEPALIVE_TIME_MS,
    SIZE_OPTIONS,
    STREAM_METHODS,
    Endpoint,
    RpcSecurity,
)
from swiftspec.distributed.transport.grpc.frames import pack_grpc_frame, unpack_grpc_frame
from swiftspec.distributed.transport.transport import Receiver
from swiftspec.errors import UserError

EXTRA_STREAMS = 16  # of clients that wait for a session, or whose connection was lost
EXTRA_CALLS = 16  # concurrent calls in addition to the streams, such as pings and health checks
FIRST_MESSAGE_TIMEOUT_S = 30.0  # streams without a message are cancelled, since each occupies a thread
SWEEP_INTERVAL_S = 5.0  # seconds between two calls of `sweep`
MAX_BUFFERED_REQUESTS = 16  # requests read ahead; beyond that, the client blocks
POLL_S = 1.0  # seconds between two checks whether the call has ended
OPTIONS = (
    *KEEPALIVE_OPTIONS, *SIZE_OPTIONS, ("grpc.so_reuseport", 0), ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_TIME_MS // 2), ("grpc.http2.max_ping_strikes", 0),
)  # fmt: skip
# receiver, whether the client has cancelled the stream -> the answers to the messages of one stream
Serve = Callable[[Receiver, Callable[[], bool]], Iterator[Frame]]


class RpcServer:
    """gRPC server of a worker, which listens from its construction until `stop`. `port`: the port that it listens on,
    also if the endpoint's port is 0."""

    def __init__(
        self, service: str, serve: Serve, model_info: str, endpoint: Endpoint, security: RpcSecurity, max_sessions: int
    ) -> None:
        """`service`: full name of the gRPC service. `model_info`: JSON, which Ping returns.

        Raises UserError if the server cannot listen at `endpoint`, or if other machines could connect without TLS and
        a token.
        """
        security.check_worker(endpoint)
        self._serve = serve
        self._ping_answer = pb.PingAnswer(protocol=PROTOCOL_VERSION, model_info=model_info).SerializeToString()
        streams = 2 * max_sessions + EXTRA_STREAMS
        self._free_streams = BoundedSemaphore(streams)
        self._silent_streams: dict[int, tuple[Any, float]] = {}  # context and start of those without a message
        calls = streams + EXTRA_CALLS
        guards: list[grpc.ServerInterceptor] = [] if security.token is None else [TokenInterceptor(security.token)]
        self._server = grpc.server(
            ThreadPoolExecutor(calls, "grpc"), interceptors=guards, options=OPTIONS, maximum_concurrent_rpcs=calls
        )
        methods = {
            STREAM_METHODS[service]: grpc.stream_stream_rpc_method_handler(self._stream),
            "Ping": grpc.unary_unary_rpc_method_handler(lambda data, context: self._ping_answer),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, methods),))
        self._health = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((service, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)
        self.port = _listen(self._server, endpoint, security)
        self._server.start()
        for name in ("", service):
            self._health.set(name, health_pb2.HealthCheckResponse.SERVING)  # type: ignore[attr-defined]

    def run(self, stop_queue: SimpleQueue[int], sweep: Callable[[], None]) -> None:
        """Blocks until `stop_queue` receives an item; calls are served in other threads. Calls `sweep` and
        `cancel_silent_streams` every SWEEP_INTERVAL_S."""
        while True:
            try:
                stop_queue.get(timeout=SWEEP_INTERVAL_S)
                return
            except Empty:
                sweep()
                self.cancel_silent_streams(time.monotonic())

    def cancel_silent_streams(self, now: float) -> None:
        """Cancels the streams whose client has sent no message within FIRST_MESSAGE_TIMEOUT_S. `now`: seconds of
        `time.monotonic`."""
        for context, since in [*self._silent_streams.values()]:
            if now - since > FIRST_MESSAGE_TIMEOUT_S:
                context.cancel()

    def stop(self, grace: float = 0.0) -> None:
        """Refuses new calls and waits up to `grace` seconds for calls in progress, such as the stream of a request."""
        self._health.enter_graceful_shutdown()
        self._server.stop(grace).wait()

    def _stream(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        if not self._free_streams.acquire(blocking=False):
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the worker serves its maximum number of streams")
        self._silent_streams[id(context)] = context, time.monotonic()
        try:
            receiver = GrpcReceiver(self._watched(requests, context), context)
            for kind, words in self._serve(receiver, lambda: not context.is_active()):
                yield pack_grpc_frame(kind, words)
        finally:
            self._silent_streams.pop(id(context), None)
            self._free_streams.release()

    def _watched(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        """Yields the messages of a stream, and notes that there was one."""
        for data in requests:
            self._silent_streams.pop(id(context), None)
            yield data


class GrpcReceiver:
    """The `Receiver` of a worker's end of a stream. Raises ConnectionError at the end of the stream, and ValueError on
    an invalid frame.

    From the first call of `recv` with a timeout on, a background thread reads the frames. Until then the calling thread
    reads them, which saves a switch of threads for each message.
    """

    peer = "the client"

    def __init__(self, requests: Iterator[bytes], context: Any) -> None:
        self._requests, self._context = requests, context
        self._read: Queue[bytes | None] | None = None  # filled by the background thread
        self._ended = False

    def recv(self, timeout: float | None = None) -> Frame:
        try:
            data = None if self._ended else self._next(timeout)
        except Empty:
            raise TimeoutError(f"no message from {self.peer} within {timeout:g} s") from None
        if data is None:
            self._ended = True
            raise ConnectionError(f"{self.peer} disconnected")
        return unpack_grpc_frame(data)

    def _next(self, timeout: float | None) -> bytes | None:
        """Returns the bytes of the next frame, or None at the end of the stream. Raises Empty after `timeout`."""
        if self._read is None:
            if timeout is None:
                with suppress(grpc.RpcError):  # the call was cancelled or the connection lost
                    return next(self._requests, None)
                return None
            self._read = Queue(MAX_BUFFERED_REQUESTS)
            Thread(target=self._run, args=(self._read,), name="requests", daemon=True).start()
        return self._read.get(timeout != 0.0, timeout)

    def _run(self, read: Queue[bytes | None]) -> None:
        with suppress(grpc.RpcError):
            for data in self._requests:
                self._put(read, data)
        self._put(read, None)

    def _put(self, read: Queue[bytes | None], data: bytes | None) -> None:
        while True:
            try:
                read.put(data, timeout=POLL_S)
                return
            except Full:
                if not self._context.is_active():
                    return


def _listen(server: Any, endpoint: Endpoint, security: RpcSecurity) -> int:
    """Binds the server to `endpoint` and returns the port. Raises UserError if that fails."""
    try:
        if security.cert is None or security.key is None:
            return server.add_insecure_port(str(endpoint))
        return server.add_secure_port(str(endpoint), grpc.ssl_server_credentials([(security.key, security.cert)]))
    except RuntimeError:
        what = "the address is in use or not of this machine, or the certificate is invalid"
        raise UserError(f"--listen {endpoint}: cannot listen: {what}") from None


class TokenInterceptor(grpc.ServerInterceptor):
    """Rejects calls without the bearer token."""

    def __init__(self, token: str) -> None:
        self._wanted = f"Bearer {token}".encode()
        self._refusal = grpc.stream_stream_rpc_method_handler(_refuse)

    def intercept_service(self, continuation: Callable[[Any], Any], handler_call_details: Any) -> Any:
        shown = dict(handler_call_details.invocation_metadata).get("authorization", "")
        text = shown if isinstance(shown, bytes) else shown.encode("utf-8", "replace")
        return continuation(handler_call_details) if hmac.compare_digest(text, self._wanted) else self._refusal


def _refuse(requests: Any, context: Any) -> Any:
    context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is missing or wrong: pass the worker's --token")
