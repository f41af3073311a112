"""Front-end process: `python -m swiftspec.serve.frontend CONTROL_FD INCARNATION LISTENER_FD`.

The supervisor starts it with two inherited sockets. The listener accepts HTTP connections. Through the control socket
the supervisor sends the configuration and each socket that connects to rank 0 (engine link), and receives heartbeats.
`INCARNATION` is the number of earlier restarts.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import uvicorn
from starlette.types import ASGIApp

from swiftspec.distributed.launch.control_socket import HEARTBEAT_INTERVAL_S, SupervisorClient
from swiftspec.errors import UserError
from swiftspec.serve.app import create_app
from swiftspec.serve.link.engine_client import EngineClient
from swiftspec.serve.link.frame_socket import AsyncFrameSocket
from swiftspec.serve.link.frames import FrontendConfig
from swiftspec.serve.link.frontend_process import local_host_names
from swiftspec.serve.link.remote_engine_client import RemoteEngineClient
from swiftspec.serve.metrics.prometheus import PrometheusMetrics
from swiftspec.serve.metrics.tracing import RequestTracing
from swiftspec.serve.middleware.cors import CorsMiddleware
from swiftspec.serve.middleware.request_id import RequestIdMiddleware
from swiftspec.serve.middleware.request_timeout import MAX_HEAD_BYTES, RequestTimeoutProtocol
from swiftspec.serve.middleware.security import SecurityMiddleware
from swiftspec.text.codec import TextCodec, template_renderer

MAX_CONNECTIONS = 1024
IDLE_CONNECTION_TIMEOUT_S = 60
RESPONSE_GRACE_S = 2  # time at shutdown to finish sending responses


def main() -> None:
    """Runs the front end until rank 0 or the supervisor requests the shutdown."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 handles SIGINT and sends DrainFrame
    control, incarnation, listener = map(int, sys.argv[1:4])
    supervisor = SupervisorClient(socket.socket(fileno=control), incarnation, send_heartbeats=False)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve_frontend(supervisor, socket.socket(fileno=listener)))


async def serve_frontend(supervisor: SupervisorClient, listener: socket.socket) -> None:
    """Runs the HTTP server, the heartbeats and the connection to rank 0. When rank 0 or the supervisor requests the
    shutdown, drains the running requests, shuts rank 0 down and closes everything."""
    config = msgspec.msgpack.decode(supervisor.first_message, type=FrontendConfig)
    engine, tokenizer_loader = RemoteEngineClient(config), TokenizerLoader(config.chat_template)
    tracing = None if config.otlp_endpoint is None else RequestTracing(config.otlp_endpoint, config.model_names[0])
    app = build_app(engine, tokenizer_loader.get, config, tracing)
    server = NoSignalHandlerServer(
        uvicorn.Config(
            app,
            http=RequestTimeoutProtocol,
            ws="none",
            lifespan="off",
            log_level="warning",
            access_log=False,
            server_header=False,
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            limit_concurrency=MAX_CONNECTIONS,
            timeout_keep_alive=IDLE_CONNECTION_TIMEOUT_S,
            timeout_graceful_shutdown=RESPONSE_GRACE_S,
        )
    )
    connections = EngineConnections(supervisor, engine)
    heartbeat_task = asyncio.create_task(send_heartbeats(supervisor))
    connection_task = asyncio.create_task(connections.run())
    tokenizer_task = asyncio.create_task(tokenizer_loader.load(engine))
    server_task = asyncio.create_task(server.serve(sockets=[listener]))
    drain_task = asyncio.create_task(engine.drain_requested.wait())
    await asyncio.wait({connection_task, server_task, drain_task}, return_when=asyncio.FIRST_COMPLETED)
    await engine.drain()
    engine.shut_down_engine()
    engine.events.close()
    server.should_exit = True
    await server_task
    for task in (heartbeat_task, connection_task, tokenizer_task, drain_task):
        task.cancel()
    if tracing is not None:
        await asyncio.to_thread(tracing.close)
    await connections.close()


async def send_heartbeats(supervisor: SupervisorClient) -> None:
    """Reports readiness to the supervisor, then sends heartbeats, which show that the event loop is not blocked."""
    supervisor.set_ready()
    while True:
        await asyncio.sleep(HEARTBEAT_INTERVAL_S)
        supervisor.send_heartbeat()


class EngineConnections:
    """Connection to rank 0, replaced whenever rank 0 restarts: the supervisor then passes a new socket."""

    def __init__(self, supervisor: SupervisorClient, engine: RemoteEngineClient) -> None:
        self._supervisor, self._engine = supervisor, engine
        self._socket: AsyncFrameSocket | None = None

    async def run(self) -> None:
        """Receives frames from one connection after the other until the supervisor requests the shutdown."""
        while (link := await self._next_link()) is not None:
            self._socket = await AsyncFrameSocket.from_socket(link)
            await self._engine.serve_connection(self._socket)
            await self._socket.close()

    async def _next_link(self) -> socket.socket | None:
        loop, link_ready = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._supervisor.link_fd, link_ready.set)
        try:
            await link_ready.wait()
        finally:
            loop.remove_reader(self._supervisor.link_fd)
        return self._supervisor.next_link()

    async def close(self) -> None:
        """Flushes and closes the current connection."""
        if self._socket is not None:
            await self._socket.close()


def build_app(
    engine: EngineClient,
    codec: Callable[[], TextCodec | None],
    config: FrontendConfig,
    tracing: RequestTracing | None = None,
) -> ASGIApp:
    """Builds the front end's ASGI application: the endpoints behind the security, CORS and request-id middleware.

    `codec`: returns the target's tokenizer, or None while it loads.
    `tracing`: exports a span per request; None disables it.
    """
    metrics = PrometheusMetrics(engine, config.model_names[0], config.kv_block_size)
    on_finished = [] if tracing is None else [tracing.record]
    app = create_app(
        engine,
        codec,
        config.model_names,
        metrics=metrics,
        on_finished=on_finished,
    )
    allowed_hosts = None if config.api_keys else local_host_names(config.host)
    secured = SecurityMiddleware(
        app, config.api_keys, allowed_hosts, metrics.record_refusal, public_metrics=config.public_metrics
    )
    return RequestIdMiddleware(CorsMiddleware(secured, config.allowed_origins, metrics.record_refusal))


class TokenizerLoader:
    """Loader of the target's tokenizer, whose path rank 0 sends. `chat_template`: file that replaces its template."""

    def __init__(self, chat_template: str | None = None) -> None:
        self._codec: TextCodec | None = None
        self._chat_template = None if chat_template is None else Path(chat_template)

    def get(self) -> TextCodec | None:
        """Returns the tokenizer, or None while it loads."""
        return self._codec

    async def load(self, engine: RemoteEngineClient) -> None:
        """Loads the tokenizer in a thread, then notifies rank 0 that the front end accepts requests. A UserError
        is ignored here, since rank 0 loads the same tokenizer and reports the error."""
        folder = Path(await engine.target_folder)
        renderer = template_renderer(folder, self._chat_template, start=True)
        with contextlib.suppress(UserError):
            self._codec = await asyncio.to_thread(TextCodec, folder, renderer, self._chat_template)
            await engine.was_ready.wait()
            engine.announce_serving()


class NoSignalHandlerServer(uvicorn.Server):
    """uvicorn server without signal handlers: SIGTERM ends the process, and rank 0 handles the other signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves the signal handlers of the process unchanged."""
        yield


if __name__ == "__main__":
    main()
