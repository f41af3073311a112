"""The engine behind the wire, as the HTTP side sees it: one request at a time on rank 0, the others in a queue here."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import suppress

from swiftspec.serve.http import frames
from swiftspec.serve.http.engine import Ask, Broken, Refused, State, Unusable
from swiftspec.serve.http.frames import Chunk, Configure, Done, Failed, FromEngine, Prompt, Ready
from swiftspec.serve.http.wire import AsyncWire

SOON = 1.0  # seconds after which a client may try again where the queue is full
LOADING = 5.0  # the same while the models load
MOST_BEHIND = 200_000  # frames that a client may be behind; each is a few hundred bytes
GONE = "rank 0 is gone"


class Ticket:
    """A request that waits or runs. What rank 0 says of it comes to `frames`; an exception there ends it."""

    def __init__(self, number: int, ask: Ask) -> None:
        self.number, self.ask = number, ask
        self.started = False  # rank 0 knows of it
        self.turn = asyncio.get_running_loop().create_future()
        self.frames: asyncio.Queue[FromEngine | Exception] = asyncio.Queue()

    def end(self, error: Exception) -> None:
        """Ends it with an error, wherever it stands."""
        if not self.turn.done():
            self.turn.set_exception(error)
        self.frames.put_nowait(error)


class RemoteEngine:
    """What `engine.Engine` asks for. `serve_wire` must run beside it, for one wire to rank 0 after the other."""

    def __init__(self, limits: Configure) -> None:
        self._limits = limits
        self._wire: AsyncWire | None = None  # the present one, or the last
        self._phase, self._step = "loading", ""
        self._numbers = itertools.count(1)
        self._waiting: deque[Ticket] = deque()
        self._running: Ticket | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self.about: Ready | None = None
        self.to_drain = asyncio.Event()  # rank 0 wants to leave
        self.ready = asyncio.Event()  # it takes requests, or never will
        self.found: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # the target's folder

    @property
    def state(self) -> State:
        return State(self._phase, self._step, int(self._running is not None), len(self._waiting))

    async def answer(self, ask: Ask) -> AsyncGenerator[Prompt | Chunk | Done, bool | None]:
        """As `engine.Engine.answer` says."""
        ticket = Ticket(next(self._numbers), ask)
        self._admit(ticket)
        try:
            try:
                async with asyncio.timeout(self._limits.queue_timeout):
                    await ticket.turn
            except TimeoutError:
                waited = f"waited {self._limits.queue_timeout:g} s (--queue-timeout) for other requests to end"
                raise Refused(f"{waited}: try again later", 429, SOON) from None
            self._send(frames.Start(ticket.number, ask.prompt, ask.sampling))
            ticket.started = True
            async for frame in self._frames(ticket):
                if (yield frame):
                    self._send(frames.Cancel(ticket.number))
        finally:
            self._leave(ticket)

    async def _frames(self, ticket: Ticket) -> AsyncGenerator[Prompt | Chunk | Done]:
        limit = self._limits.request_timeout
        ends = None if limit is None else asyncio.get_running_loop().time() + limit
        while True:
            try:
                frame = await _before(ends, ticket.frames)
            except TimeoutError:
                raise Broken(f"the request took longer than {limit:g} s", "timeout") from None
            if isinstance(frame, Exception):
                raise frame
            if isinstance(frame, Failed):
                raise Unusable(frame.message) if frame.user else Broken(frame.message, "engine_error")
            assert isinstance(frame, Prompt | Chunk | Done)
            yield frame
            if isinstance(frame, Done):
                return

    def _admit(self, ticket: Ticket) -> None:
        """Puts it at the end of the queue. Raises Refused where it cannot be."""
        if self._phase == "loading":
            raise Refused(f"the model is being loaded ({self._step or 'starting'})", 503, LOADING)
        if self._phase != "ready":
            raise Refused(f"the server is {self._phase}", 503, LOADING if self._phase == "draining" else None)
        if ticket.ask.key is not None:
            self._replace(ticket.ask.key)
        if self._running is not None and len(self._waiting) >= self._limits.max_queue:
            raise Refused(f"the queue is full ({len(self._waiting)} requests wait): try again later", 429, SOON)
        self._waiting.append(ticket)
        self._next()

    def _replace(self, key: str) -> None:
        """A newer request takes the place of those with the same key."""
        for older in (*self._waiting, *([self._running] if self._running else [])):
            if older.ask.key == key:
                older.end(Broken("a newer request with the same key has replaced this one", "replaced"))
        self._waiting = deque(ticket for ticket in self._waiting if not ticket.turn.done())

    def _next(self) -> None:
        """Gives the turn to whoever has waited longest."""
        while self._running is None and self._waiting:
            ticket = self._waiting.popleft()
            if not ticket.turn.done():
                self._running = ticket
                self._idle.clear()
                ticket.turn.set_result(None)

    def _leave(self, ticket: Ticket) -> None:
        """Nobody reads this request any more. Where it runs, the next begins once rank 0 has answered the `Cancel`."""
        with suppress(ValueError):
            self._waiting.remove(ticket)
        if self._running is ticket and ticket.started:
            self._send(frames.Cancel(ticket.number))
        else:
            self._ended(ticket.number)

    def _ended(self, number: int) -> None:
        if self._running is not None and self._running.number == number:
            self._running = None
            self._idle.set()
            self._next()

    async def serve_wire(self, wire: AsyncWire) -> None:
        """Hears what rank 0 says on this wire, until it ends."""
        self._wire = wire
        while (frame := await wire.receive()) is not None:
            self._take(frame)
        self._phase, self._step = "recovering", GONE
        for ticket in (*self._waiting, *([self._running] if self._running else [])):
            ticket.end(Broken(GONE, "engine_error"))
        self._waiting.clear()
        self._running = None
        self._idle.set()

    def _take(self, frame: FromEngine) -> None:
        match frame:
            case frames.Loading(step=step):
                self._step = step
            case frames.Found(target=target) if not self.found.done():
                self.found.set_result(target)
            case Ready():
                self.about, self._phase, self._step = frame, "ready", ""
                self.ready.set()
            case frames.Drain():
                self.to_drain.set()
            case frames.Lost(message=message):
                self._phase, self._step = "dead", message
            case Prompt() | Chunk() | Done() | Failed():
                self._hand(frame)
            case _:
                pass

    def _hand(self, frame: Prompt | Chunk | Done | Failed) -> None:
        ticket = self._running
        if ticket is not None and ticket.number == frame.request:
            ticket.frames.put_nowait(frame)
            if ticket.frames.qsize() > MOST_BEHIND:
                ticket.end(Broken("the client reads too slowly", "timeout"))
        if isinstance(frame, Done | Failed):
            self._ended(frame.request)

    async def drained(self) -> None:
        """Waits for the request that runs, at most `drain_timeout`, refusing those that wait; then nothing runs."""
        self._phase = "draining" if self._phase != "dead" else "dead"
        for ticket in self._waiting:
            ticket.end(Refused("the server is draining", 503, LOADING))
        with suppress(TimeoutError):
            async with asyncio.timeout(self._limits.drain_timeout):
                await self._idle.wait()
        if self._running is not None:
            self._running.end(Broken("the server is being stopped", "engine_error"))

    def _send(self, frame: frames.Frame) -> None:
        if self._wire is not None:
            self._wire.send(frame)

    def serving(self) -> None:
        """Tells rank 0 that clients may come."""
        self._send(frames.Serving())

    def leave(self) -> None:
        """Sends rank 0 home."""
        self._send(frames.Leave())


async def _before(ends: float | None, queue: asyncio.Queue[FromEngine | Exception]) -> FromEngine | Exception:
    """The next of a queue. Raises TimeoutError at that time of the loop's clock."""
    if not queue.empty():
        return queue.get_nowait()
    async with asyncio.timeout_at(ends):
        return await queue.get()
