"""Client of the engine in rank 0, over the engine link."""

from __future__ import annotations

import asyncio

from msgspec import structs

from swiftspec.serve.link import frames
from swiftspec.serve.link.engine_client import RequestFrame
from swiftspec.serve.link.frame_socket import AsyncFrameSocket
from swiftspec.serve.link.frames import EngineInfo, FailedFrame, FromEngine, FrontendConfig
from swiftspec.serve.link.request_queue import RequestQueue

ENGINE_GONE = "rank 0 has exited"


class RemoteEngineClient(RequestQueue):
    """Implementation of `EngineClient` over the engine link. After each restart of rank 0 `serve_connection` gets a new
    connection. A request that was running is then repeated once, if its caller has not received a frame.

    `drain_requested`: set when rank 0 sends `DrainFrame`.
    `was_ready`: set when rank 0 is ready for the first time.
    `target_folder`: result of the target's path, once rank 0 has sent it.
    """

    def __init__(self, config: FrontendConfig) -> None:
        super().__init__(config.max_queue, config.queue_timeout, config.request_timeout)
        self._drain_timeout_s = config.drain_timeout
        self._socket: AsyncFrameSocket | None = None
        self._announced = False
        self.drain_requested = asyncio.Event()
        self.was_ready = asyncio.Event()
        self.target_folder: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def _send(self, frame: frames.ToEngine) -> None:
        if self._socket is not None:
            self._socket.send(frame)

    async def serve_connection(self, connection: AsyncFrameSocket) -> None:
        """Receives frames over one connection until rank 0 exits or is lost, then closes the connection."""
        self._socket = connection
        try:
            while (frame := await connection.receive()) is not None and not isinstance(frame, frames.EngineLostFrame):
                if isinstance(frame, RequestFrame | FailedFrame):
                    self._deliver(frame)
                else:
                    self._on_status(frame)
        finally:
            self._socket = None
        phases = {"loading": "loading", **dict.fromkeys(("ready", "recovering", "unavailable"), "recovering")}
        self._on_engine_lost(phases.get(self._phase, "dead"), ENGINE_GONE if frame is None else frame.message)
        self._ranks = [structs.replace(one, state="lost") if one.rank == 0 else one for one in self._ranks]
        await connection.close()

    def _on_status(self, frame: FromEngine) -> None:
        """Handles a frame that does not belong to a request."""
        match frame:
            case frames.LoadingFrame(detail=detail):
                self._detail = detail
            case frames.ModelPathFrame(target=target) if not self.target_folder.done():
                self.target_folder.set_result(target)
            case EngineInfo():
                self.was_ready.set()
                if self._announced:
                    self._send(frames.ServingFrame())
                self._on_ready(frame)
            case frames.TargetStateFrame(lost=lost):
                self._on_target_state(lost)
            case frames.RankStatesFrame(ranks=ranks):
                self._ranks = ranks
            case frames.DrainFrame():
                self._phase = "draining"
                self.drain_requested.set()
            case frames.TraceEventsFrame(events=events):
                self.events.put(*events)
            case _:
                pass

    async def drain(self) -> None:
        """Rejects new and waiting requests, waits up to `drain_timeout` seconds for the running ones, then fails those
        that remain."""
        await self._drain("dead" if self._socket is None else "draining", self._drain_timeout_s)

    def announce_serving(self) -> None:
        """Sends `ServingFrame` to rank 0 now and after each of its restarts."""
        self._announced = True
        self._send(frames.ServingFrame())

    def shut_down_engine(self) -> None:
        """Sends `ShutdownFrame` to rank 0, which shuts down all ranks."""
        self._send(frames.ShutdownFrame())
