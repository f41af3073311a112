"""A scripted rank 0 in front of the front end's engine."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from swiftspec.serve.http.engine_link import frames
from swiftspec.serve.http.engine_link.engine import Ask
from swiftspec.serve.http.engine_link.engine_client import RemoteEngine
from swiftspec.serve.http.engine_link.frame_socket import AsyncWire, Frames, packed
from swiftspec.serve.http.engine_link.frames import Configure, ToEngine

READY = frames.Ready("m", None, 100, 50, [1], {}, {"mode": "ar"}, 1.0)


class Rank0:
    """The other end: what the front end has sent, and frames for it."""

    def __init__(self, end: socket.socket) -> None:
        self._end, self._frames = end, Frames(ToEngine)
        self._in: list[Any] = []

    async def next(self) -> ToEngine:
        while not self._in:
            self._in += self._frames.push(await asyncio.get_running_loop().sock_recv(self._end, 1 << 16))
        return self._in.pop(0)

    def say(self, *told: Any) -> None:
        for frame in told:
            self._end.sendall(packed(frame))

    def end(self, request: int) -> None:
        self.say(frames.Done(request, {}, {}, {}))

    def hang_up(self) -> None:
        self._end.close()


Scene = Callable[[RemoteEngine, Rank0], Awaitable[None]]


class Stage:
    """An engine, and the rank 0 that it hears; `anew` puts another one in the place of one that has gone."""

    def __init__(self, **limits: Any) -> None:
        values: dict[str, Any] = {
            "model_name": "m", "api_keys": [], "max_queue": 2, "queue_timeout": 60.0, "request_timeout": None,
            "drain_timeout": 60.0,
        }  # fmt: skip
        self.engine = RemoteEngine(Configure(**(values | limits)))
        self.rank0: Rank0

    async def anew(self, *said: Any) -> Rank0:
        """A new rank 0, which says this and was heard."""
        here, there = socket.socketpair()
        there.setblocking(False)
        self._hearing = asyncio.create_task(self.engine.serve_wire(await AsyncWire.over(here)))
        self.rank0 = Rank0(there)
        self.rank0.say(*said, frames.Loading("heard"))
        await self.until(lambda: self.engine.state.step == "heard")
        return self.rank0

    async def lose(self, *said: Any) -> None:
        """Rank 0 goes."""
        self.rank0.say(*said)
        self.rank0.hang_up()
        await self._hearing

    async def until(self, true: Callable[[], bool]) -> None:
        while not true():
            await asyncio.sleep(0)


def play(scene: Scene, ready: bool = True, **limits: Any) -> None:
    """Runs a scene with an engine in front of a scripted rank 0, which goes in the end."""

    async def on_stage(stage: Stage) -> None:
        await scene(stage.engine, stage.rank0)
        await stage.lose()

    act(on_stage, *([READY] if ready else []), **limits)


def act(scene: Callable[[Stage], Awaitable[None]], *said: Any, **limits: Any) -> None:
    """Runs a scene with a first rank 0 that has said this, and sees that nothing is left."""

    async def whole() -> None:
        stage = Stage(**limits)
        await stage.anew(*said)
        await asyncio.wait_for(scene(stage), 20)
        assert (stage.engine.state.running, stage.engine.state.waiting) == (0, 0)

    asyncio.run(whole())


async def collect(answer: AsyncGenerator[Any]) -> list[Any]:
    async with aclosing(answer):
        return [frame async for frame in answer]


def begin(engine: RemoteEngine, *prompt: int, key: str | None = None) -> asyncio.Task[list[Any]]:
    return asyncio.create_task(collect(engine.answer(Ask(list(prompt), {}, key))))
