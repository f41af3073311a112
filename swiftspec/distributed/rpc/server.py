"""gRPC server of a worker: its service, authentication, health checks, reflection and shutdown."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from swiftspec.distributed.rpc.endpoint import KEEPALIVE_OPTIONS, KEEPALIVE_TIME_MS, SIZE_OPTIONS, Endpoint, RpcSecurity
from swiftspec.distributed.rpc.service import WorkerService
from swiftspec.errors import UserError

EXTRA_CALLS = 16  # concurrent calls in addition to the sessions' streams, such as pings and health checks
SWEEP_INTERVAL_S = 5.0  # seconds between two checks for idle sessions
OPTIONS = (
    *KEEPALIVE_OPTIONS, *SIZE_OPTIONS, ("grpc.so_reuseport", 0), ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_TIME_MS // 2), ("grpc.http2.max_ping_strikes", 0),
)  # fmt: skip


class RpcServer:
    """gRPC server of a worker, which listens from its construction until `stop`. `port`: the port that it listens on,
    also if the endpoint's port is 0."""

    def __init__(
        self, service: WorkerService[Any], endpoint: Endpoint, security: RpcSecurity, max_sessions: int
    ) -> None:
        """Raises UserError if the server cannot listen at `endpoint`, or if other machines could connect without TLS
        and a token."""
        security.check_worker(endpoint)
        calls = 2 * max_sessions + EXTRA_CALLS
        guards: list[grpc.ServerInterceptor] = [] if security.token is None else [TokenInterceptor(security.token)]
        self._server = grpc.server(
            ThreadPoolExecutor(calls, "grpc"), interceptors=guards, options=OPTIONS, maximum_concurrent_rpcs=calls
        )
        self._service, self._health = service, health.HealthServicer()
        self._server.add_generic_rpc_handlers((service.handlers(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (service.name, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        self.port = _listen(self._server, endpoint, security)
        self._server.start()
        for name in ("", service.name):
            self._health.set(name, health_pb2.HealthCheckResponse.SERVING)  # type: ignore[attr-defined]

    def run(self, stop_queue: SimpleQueue[int], on_idle: Callable[[], None] = lambda: None) -> None:
        """Blocks until `stop_queue` receives an item; calls are served in other threads.

        Every SWEEP_INTERVAL_S, ends sessions that have been idle too long, and calls `on_idle` if no session uses the
        model.
        """
        while True:
            try:
                stop_queue.get(timeout=SWEEP_INTERVAL_S)
                return
            except Empty:
                self._service.sessions.sweep()
                self._service.run_if_idle(on_idle)

    def stop(self, grace: float = 0.0) -> None:
        """Refuses new calls and waits up to `grace` seconds for calls in progress, such as the stream of a request."""
        self._health.enter_graceful_shutdown()
        self._server.stop(grace).wait()


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
