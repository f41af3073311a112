"""An engine client of the front end, connected to a scripted rank 0."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from swiftspec.params import SamplingParams
from swiftspec.serve.link import frames
from swiftspec.serve.link.engine_client import EngineRequest
from swiftspec.serve.link.frame_socket import AsyncFrameSocket, FrameDecoder, encode_frame
from swiftspec.serve.link.frames import FrontendConfig, ToEngine
from swiftspec.serve.link.remote_engine_client import RemoteEngineClient

READY = frames.EngineInfo("m", None, 100, 50, [1], {}, {"mode": "ar"}, 1.0)


class Rank0:
    """Rank 0's end of the engine link."""

    def __init__(self, end: socket.socket) -> None:
        self._end, self._frames = end, FrameDecoder(ToEngine)
        self._in: list[Any] = []

    async def next(self) -> ToEngine:
        while not self._in:
            self._in += self._frames.push(await asyncio.get_running_loop().sock_recv(self._end, 1 << 16))
        return self._in.pop(0)

    def send(self, *sent: frames.Frame) -> None:
        for frame in sent:
            self._end.sendall(encode_frame(frame))

    def finish(self, request: int) -> None:
        self.send(frames.DoneFrame(request, {}, {}, {}))

    def close(self) -> None:
        self._end.close()


Scenario = Callable[[RemoteEngineClient, Rank0], Awaitable[None]]


class Link:
    """An engine client and the rank 0 that it is connected to."""

    def __init__(self, **limits: Any) -> None:
        values: dict[str, Any] = {
            "model_names": ["m"], "api_keys": [], "max_queue": 2, "queue_timeout": 60.0, "request_timeout": None,
            "drain_timeout": 60.0,
        }  # fmt: skip
        self.engine = RemoteEngineClient(FrontendConfig(**(values | limits)))
        self.rank0: Rank0

    async def restart_rank0(self, *sent: frames.Frame) -> Rank0:
        """Connects a new rank 0 that sends these frames, and waits until they are received."""
        near, far = socket.socketpair()
        far.setblocking(False)
        self._serving = asyncio.create_task(self.engine.serve_connection(await AsyncFrameSocket.from_socket(near)))
        self.rank0 = Rank0(far)
        self.rank0.send(*sent, frames.LoadingFrame("received"))
        await self.until(lambda: self.engine.state.detail == "received")
        return self.rank0

    async def lose_rank0(self, *sent: frames.Frame) -> None:
        """Rank 0 sends these frames and exits."""
        self.rank0.send(*sent)
        self.rank0.close()
        await self._serving

    async def until(self, true: Callable[[], bool]) -> None:
        while not true():
            await asyncio.sleep(0)


def run_with_rank0(scene: Scenario, ready: bool = True, **limits: Any) -> None:
    """Runs a scenario with an engine client and a scripted rank 0, which exits at the end."""

    async def run_scene(link: Link) -> None:
        await scene(link.engine, link.rank0)
        await link.lose_rank0()

    run_link(run_scene, *([READY] if ready else []), **limits)


def run_link(scene: Callable[[Link], Awaitable[None]], *first_frames: Any, **limits: Any) -> None:
    """Runs a scenario with a first rank 0 that has sent these frames, and checks that no request is left."""

    async def run() -> None:
        link = Link(**limits)
        await link.restart_rank0(*first_frames)
        await asyncio.wait_for(scene(link), 20)
        assert (link.engine.state.running, link.engine.state.waiting) == (0, 0)

    asyncio.run(run())


async def collect(answer: AsyncGenerator[Any]) -> list[Any]:
    async with aclosing(answer):
        return [frame async for _, frame in answer]


def start_request(engine: RemoteEngineClient, *prompt: int, key: str | None = None) -> asyncio.Task[list[Any]]:
    return asyncio.create_task(collect(engine.stream_frames(EngineRequest(list(prompt), SamplingParams(), key))))


def start_group(engine: RemoteEngineClient, *prompts: int, key: str | None = None) -> asyncio.Task[list[Any]]:
    """Starts requests of one caller, each with a prompt of one token."""
    return asyncio.create_task(
        collect(engine.stream_frames(*(EngineRequest([one], SamplingParams(), key) for one in prompts)))
    )
