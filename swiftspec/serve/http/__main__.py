"""The front end's process: `python -m swiftspec.serve.http WIRE LISTENING`, two open files that rank 0 hands over."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys

import uvicorn

from swiftspec.serve.http.app import create_app
from swiftspec.serve.http.frames import Configure
from swiftspec.serve.http.protocol import HEAD_BYTES, PatientProtocol
from swiftspec.serve.http.remote import RemoteEngine
from swiftspec.serve.http.wire import AsyncWire

MOST_CONNECTIONS = 1024
KEEP_ALIVE = 60  # seconds that an idle connection stays open


def main() -> None:
    """Serves until rank 0 says so, or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 hears the user, and tells
    wire, listening = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    asyncio.run(serve(wire, listening))


async def serve(end: socket.socket, listening: socket.socket) -> None:
    """The life of the front end."""
    wire = await AsyncWire.over(end)
    limits = await wire.receive()
    if not isinstance(limits, Configure):
        return
    engine = RemoteEngine(wire, limits)
    app = create_app(engine, limits)
    config = uvicorn.Config(
        app, http=PatientProtocol, ws="none", lifespan="off", log_level="warning", access_log=False,
        server_header=False, h11_max_incomplete_event_size=HEAD_BYTES, limit_concurrency=MOST_CONNECTIONS, timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=1,
    )  # fmt: skip
    server = Server(config)
    hearing = asyncio.create_task(engine.run())
    reading = asyncio.create_task(read_tokenizer(engine, app))
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    draining = asyncio.create_task(engine.to_drain.wait())
    await asyncio.wait({hearing, serving, draining}, return_when=asyncio.FIRST_COMPLETED)
    if not hearing.done():
        await engine.drained()
        engine.leave()
    server.should_exit = True
    await serving
    for task in (hearing, reading, draining):
        task.cancel()
    await wire.close()


class Server(uvicorn.Server):
    """It leaves signals to the process: SIGTERM ends it, SIGINT does nothing."""

    @contextlib.contextmanager
    def capture_signals(self):  # noqa: ANN201
        yield


if __name__ == "__main__":
    main()
