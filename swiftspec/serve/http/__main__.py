"""The front end's process: `python -m swiftspec.serve.http CONTROL LIFE LISTENING`. It is kept: by the first of the two
open files it hears its keeper, who hands over its wires to rank 0. The second is the listening socket."""

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

from swiftspec.errors import UserError
from swiftspec.serve.http.app import create_app
from swiftspec.serve.http.engine_link import events
from swiftspec.serve.http.engine_link.address import names_of
from swiftspec.serve.http.engine_link.engine import Engine
from swiftspec.serve.http.engine_link.engine_client import RemoteEngine
from swiftspec.serve.http.engine_link.events import Events
from swiftspec.serve.http.engine_link.frame_socket import AsyncWire
from swiftspec.serve.http.engine_link.frames import Configure
from swiftspec.serve.http.grammar_compiler import Compiler
from swiftspec.serve.http.middleware.request_timeout import HEAD_BYTES, PatientProtocol
from swiftspec.serve.http.middleware.security import Guard
from swiftspec.serve.http.observe import prometheus
from swiftspec.serve.http.observe.prometheus import Metrics
from swiftspec.serve.http.observe.request_metrics import Watched
from swiftspec.serve.http.observe.tracing import Tracing
from swiftspec.serve.supervisor.control_protocol import EVERY
from swiftspec.serve.supervisor.supervisor_client import Kept
from swiftspec.serve.text.codec import TextCodec, may_have_template
from swiftspec.serve.text.template import Renderer

MOST_CONNECTIONS = 1024
KEEP_ALIVE = 60  # seconds that an idle connection stays open
GRACE = 2  # seconds for the last bytes of answers


def main() -> None:
    """Serves until rank 0 or the keeper says so."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 hears the user, and tells
    control, life, listening = map(int, sys.argv[1:4])
    kept = Kept(socket.socket(fileno=control), life, beats=False)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(kept, socket.socket(fileno=listening)))


async def serve(kept: Kept, listening: socket.socket) -> None:
    """The life of the front end."""
    limits = msgspec.msgpack.decode(kept.first, type=Configure)
    engine, tokenizer = RemoteEngine(limits), Tokenizer()
    tracing = None if limits.otlp_endpoint is None else Tracing(limits.otlp_endpoint, limits.model_name)
    app = application(engine, tokenizer.get, limits, engine.events, tracing)
    server = Server(
        uvicorn.Config(
            app, http=PatientProtocol, ws="none", lifespan="off", log_level="warning", access_log=False,
            server_header=False, h11_max_incomplete_event_size=HEAD_BYTES, limit_concurrency=MOST_CONNECTIONS,
            timeout_keep_alive=KEEP_ALIVE, timeout_graceful_shutdown=GRACE,
        )
    )  # fmt: skip
    wires = Wires(kept, engine)
    beating = asyncio.create_task(beat(kept))
    hearing = asyncio.create_task(wires.hear())
    reading = asyncio.create_task(tokenizer.read(engine))
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    draining = asyncio.create_task(engine.to_drain.wait())
    await asyncio.wait({hearing, serving, draining}, return_when=asyncio.FIRST_COMPLETED)
    await engine.drained()
    engine.leave()
    engine.events.close()
    server.should_exit = True
    await serving
    for task in (beating, hearing, reading, draining):
        task.cancel()
    if tracing is not None:
        await asyncio.to_thread(tracing.close)
    await wires.close()


async def beat(kept: Kept) -> None:
    """Tells the keeper that this loop turns."""
    kept.ready()
    while True:
        await asyncio.sleep(EVERY)
        kept.beat()


class Wires:
    """One wire to rank 0 after the other, whenever that or its keeper has made a new one."""

    def __init__(self, kept: Kept, engine: RemoteEngine) -> None:
        self._kept, self._engine = kept, engine
        self._wire: AsyncWire | None = None

    async def hear(self) -> None:
        """Until the keeper says to leave."""
        while (end := await self._next()) is not None:
            self._wire = await AsyncWire.over(end)
            await self._engine.serve_wire(self._wire)
            await self._wire.close()

    async def _next(self) -> socket.socket | None:
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._kept.arrived, arrived.set)
        try:
            await arrived.wait()
        finally:
            loop.remove_reader(self._kept.arrived)
        return self._kept.next_wire()

    async def close(self) -> None:
        """Sends what was said, and ends."""
        if self._wire is not None:
            await self._wire.close()


def application(
    engine: Engine, codec: Callable[[], TextCodec | None], limits: Configure, happened: Events,
    tracing: Tracing | None = None,
) -> ASGIApp:  # fmt: skip
    """The endpoints over an engine that is watched, and the guard before them."""
    metrics = Metrics(engine, limits.model_name)
    watched = Watched(engine, [metrics.count] if tracing is None else [metrics.count, tracing.record])
    app = create_app(watched, codec, [limits.model_name], compile=Compiler())
    app.include_router(prometheus.router(metrics))
    app.include_router(events.router(happened, codec))
    hosts = None if limits.api_keys else names_of(limits.host)
    return Guard(app, limits.api_keys, hosts, metrics.refuse)


class Tokenizer:
    """The target's, once rank 0 has found it."""

    def __init__(self) -> None:
        self._codec: TextCodec | None = None

    def get(self) -> TextCodec | None:
        """None while it is not read."""
        return self._codec

    async def read(self, engine: RemoteEngine) -> None:
        """Reads it beside the event loop, and says when all is ready. Of one that cannot be read rank 0 tells."""
        folder = Path(await engine.found)
        renderer = Renderer(folder)
        if may_have_template(folder):
            renderer.start()  # its imports take longer than the first chat may wait
        with contextlib.suppress(UserError):
            self._codec = await asyncio.to_thread(TextCodec, folder, renderer)
            await engine.ready.wait()
            engine.serving()


class Server(uvicorn.Server):
    """It leaves signals alone: SIGTERM ends the process, and rank 0 hears the others."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn has it."""
        yield


if __name__ == "__main__":
    main()
