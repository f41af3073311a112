"""The gRPC server of a worker: its service, who may call it, health and reflection, and how it ends."""

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

EXTRA_CALLS = 16  # calls at once beside one stream for each session: pings, health, clients that come back
SWEEP_INTERVAL_S = 5.0  # seconds between two looks at sessions that rest
OPTIONS = (
    *KEEPALIVE_OPTIONS, *SIZE_OPTIONS, ("grpc.so_reuseport", 0), ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_TIME_MS // 2), ("grpc.http2.max_ping_strikes", 0),
)  # fmt: skip


class RpcServer:
    """Listens from the start to `stop`. `port`: the one it has."""

    def __init__(
        self, service: WorkerService[Any], endpoint: Endpoint, security: RpcSecurity, max_sessions: int
    ) -> None:
        """Raises UserError where nothing can listen at `endpoint`, or it would be open to other machines unguarded."""
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
        """Serves until something is put there. Sessions that rest too long end meanwhile, and now and then there is a
        `look` while nobody is at work on the model."""
        while True:
            try:
                stop_queue.get(timeout=SWEEP_INTERVAL_S)
                return
            except Empty:
                self._service.sessions.sweep()
                self._service.run_if_idle(on_idle)

    def stop(self, grace: float = 0.0) -> None:
        """Takes no more calls, and waits so many seconds for those under way: a request of a client's is one."""
        self._health.enter_graceful_shutdown()
        self._server.stop(grace).wait()


def _listen(server: Any, endpoint: Endpoint, security: RpcSecurity) -> int:
    """Has a server listen there. Returns the port. Raises UserError where it cannot."""
    try:
        if security.cert is None or security.key is None:
            return server.add_insecure_port(str(endpoint))
        return server.add_secure_port(str(endpoint), grpc.ssl_server_credentials([(security.key, security.cert)]))
    except RuntimeError:
        what = "is the address taken, or not of this machine, or the certificate none?"
        raise UserError(f"--listen {endpoint}: nothing can listen there: {what}") from None


class TokenInterceptor(grpc.ServerInterceptor):
    """Lets nobody through without the token."""

    def __init__(self, token: str) -> None:
        self._wanted = f"Bearer {token}".encode()
        self._refusal = grpc.stream_stream_rpc_method_handler(_refuse)

    def intercept_service(self, continuation: Callable[[Any], Any], handler_call_details: Any) -> Any:
        shown = dict(handler_call_details.invocation_metadata).get("authorization", "")
        text = shown if isinstance(shown, bytes) else shown.encode("utf-8", "replace")
        return continuation(handler_call_details) if hmac.compare_digest(text, self._wanted) else self._refusal


def _refuse(requests: Any, context: Any) -> Any:
    context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is missing or wrong: give the worker's --token")
