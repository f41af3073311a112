"""The engine behind the wire, as the HTTP side sees it: as many requests on rank 0 as it takes, others in a queue."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import TypeVar

from msgspec import structs

from swiftspec.serve.http.engine_link import frames
from swiftspec.serve.http.engine_link.engine import Ask, Broken, Refused, State, Unusable
from swiftspec.serve.http.engine_link.events import Events
from swiftspec.serve.http.engine_link.frame_socket import AsyncWire
from swiftspec.serve.http.engine_link.frames import Chunk, Configure, Done, Failed, FromEngine, Prompt, RankState, Ready

T = TypeVar("T")
SOON = 1.0  # seconds after which a client may try again where the queue is full
LOADING = 5.0  # the same while the models load
MOST_BEHIND = 200_000  # frames that a client may be behind; each is a few hundred bytes
GONE = "rank 0 is gone"


class Ticket:
    """A request that waits or runs. What becomes of it comes to `news`: frames of rank 0, an exception that ends it, or
    None where `ends` has changed, the time of the loop's clock until which it may wait or run."""

    def __init__(self, ask: Ask, ends: float | None) -> None:
        self.ask, self.ends = ask, ends
        self.number = 0  # of the try that runs; 0 while it waits
        self.tokens = 0  # that rank 0 has said
        self.shown = False  # its reader has something of it
        self.again = False  # it has been lost once
        self.over = False  # it was ended, or nobody reads it any more
        self.news: asyncio.Queue[FromEngine | Exception | None] = asyncio.Queue()

    def move(self, number: int, ends: float | None) -> None:
        """It gets its turn, under this number; or goes back to the queue, which is 0."""
        self.number, self.ends = number, ends
        self.news.put_nowait(None)

    def end(self, error: Exception) -> None:
        """Ends it with an error, wherever it stands, behind what was said of it."""
        if not self.over:
            self.over = True
            self.news.put_nowait(error)

    def forget(self) -> None:
        """What was said of a try that is lost, and that nobody has seen."""
        self.again, self.tokens = True, 0
        while not self.news.empty():
            self.news.get_nowait()


class RemoteEngine:
    """What `engine.Engine` asks for. Rank 0 is heard over one wire after the other (`serve_wire`): it may die, and come
    back on a new one. A request that it leaves behind and that has shown nothing is tried once more."""

    def __init__(self, limits: Configure) -> None:
        self._limits = limits
        self._wire: AsyncWire | None = None
        self._phase, self._step = "loading", ""
        self._ranks: list[RankState] = []
        self._numbers = itertools.count(1)  # of tries, never the same over all wires
        self._waiting: deque[Ticket] = deque()
        self._running: dict[int, Ticket] = {}  # by the number of the try
        self._idle = asyncio.Event()
        self._idle.set()
        self._serves = False
        self.about: Ready | None = None
        self.events = Events(lambda on: self._send(frames.Watch(on)))
        self.to_drain = asyncio.Event()  # rank 0 wants to leave
        self.ready = asyncio.Event()  # rank 0 was ready once
        self.found: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # the target's folder

    @property
    def state(self) -> State:
        return State(self._phase, self._step, len(self._running), len(self._waiting), self._ranks)

    @property
    def _has_room(self) -> bool:
        """Whether rank 0 would begin with another request now."""
        return self.about is not None and self._phase == "ready" and len(self._running) < self.about.at_once

    async def answer(self, ask: Ask) -> AsyncGenerator[Prompt | Chunk | Done, bool | None]:
        """As `engine.Engine.answer` says."""
        ticket = Ticket(ask, _in(self._limits.queue_timeout))
        self._admit(ticket)
        try:
            frame = None
            while not isinstance(frame, Done):
                frame = await self._news(ticket)
                if isinstance(frame, Failed):
                    raise Unusable(frame.message) if frame.user else Broken(frame.message, "engine_error")
                assert isinstance(frame, Prompt | Chunk | Done)
                ticket.shown = True
                if (yield frame):
                    self._send(frames.Cancel(ticket.number))
        finally:
            self._leave(ticket)

    async def _news(self, ticket: Ticket) -> FromEngine:
        """The next frame of a request. Raises what ends it."""
        while True:
            ends = ticket.ends
            try:
                news = await _before(ends, ticket.news)
            except TimeoutError:
                if ticket.ends == ends:
                    raise self._late(ticket) from None
                continue
            if isinstance(news, Exception):
                raise news
            if news is not None:
                return news

    def _late(self, ticket: Ticket) -> Exception:
        if ticket.number:
            return Broken(f"the request took longer than {self._limits.request_timeout:g} s", "timeout")
        waited = f"waited {self._limits.queue_timeout:g} s (--queue-timeout) for"
        if self._phase == "recovering":
            return Refused(f"{waited} the engine to come back: try again later", 503, LOADING)
        return Refused(f"{waited} other requests to end: try again later", 429, SOON)

    def _admit(self, ticket: Ticket) -> None:
        """Puts it at the end of the queue. Raises Refused where it cannot be."""
        if self._phase == "loading":
            raise Refused(f"the model is being loaded ({self._step or 'starting'})", 503, LOADING)
        if self._phase not in ("ready", "recovering"):
            raise Refused(f"the server is {self._phase}", 503, LOADING if self._phase == "draining" else None)
        if ticket.ask.key is not None:
            self._replace(ticket.ask.key)
        if not self._has_room and len(self._waiting) >= self._limits.max_queue:
            raise Refused(f"the queue is full ({len(self._waiting)} requests wait): try again later", 429, SOON)
        self._waiting.append(ticket)
        self._next()

    def _replace(self, key: str) -> None:
        """A newer request takes the place of those with the same key."""
        for older in (*self._waiting, *self._running.values()):
            if older.ask.key == key:
                older.end(Broken("a newer request with the same key has replaced this one", "replaced"))
        self._waiting = deque(ticket for ticket in self._waiting if not ticket.over)

    def _next(self) -> None:
        """Gives their turn to those that have waited longest."""
        while self._has_room and self._waiting:
            ticket = self._waiting.popleft()
            ticket.move(next(self._numbers), _in(self._limits.request_timeout))
            self._running[ticket.number] = ticket
            self._idle.clear()
            self._send(frames.Start(ticket.number, ticket.ask.prompt, ticket.ask.sampling, ticket.ask.choices))

    def _leave(self, ticket: Ticket) -> None:
        """Nobody reads this request any more. Where it runs, its place is free once rank 0 answers the `Cancel`."""
        ticket.over = True
        with suppress(ValueError):
            self._waiting.remove(ticket)
        if ticket.number in self._running:
            self._send(frames.Cancel(ticket.number))

    async def serve_wire(self, wire: AsyncWire) -> None:
        """Hears what rank 0 says over this wire until it leaves or is gone, and closes it. Then comes the next one."""
        self._wire = wire
        try:
            while (frame := await wire.receive()) is not None and not isinstance(frame, frames.Lost):
                self._take(frame)
        finally:
            self._wire = None
        self._lose(GONE if frame is None else frame.message)
        await wire.close()

    def _take(self, frame: FromEngine) -> None:
        match frame:
            case frames.Loading(step=step):
                self._step = step
            case frames.Found(target=target) if not self.found.done():
                self.found.set_result(target)
            case Ready():
                self._begin(frame)
            case frames.Ranks(ranks=ranks):
                self._ranks = ranks
            case frames.Drain():
                self._phase = "draining"
                self.to_drain.set()
            case frames.Events(events=events):
                self.events.put(*events)
            case Prompt() | Chunk() | Done() | Failed():
                self._hand(frame)
            case _:
                pass

    def _begin(self, ready: Ready) -> None:
        """Rank 0 takes requests, for the first time or again."""
        self.about, self._step = ready, ""
        self.events.begin(ready)
        self.ready.set()
        if self._phase in ("loading", "recovering"):
            self._phase = "ready"
        if self._serves:
            self._send(frames.Serving())
        self._next()

    def _hand(self, frame: Prompt | Chunk | Done | Failed) -> None:
        ticket = self._running.get(frame.request)
        if ticket is None:
            return
        if isinstance(frame, Chunk):
            ticket.tokens += len(frame.token_ids)
        ticket.news.put_nowait(frame)
        if ticket.news.qsize() > MOST_BEHIND:
            ticket.end(Broken("the client reads too slowly", "timeout"))
        if isinstance(frame, Done | Failed):
            del self._running[frame.request]
            if not self._running:
                self._idle.set()
            self._next()

    def _lose(self, why: str) -> None:
        """Rank 0 is gone. The requests that ran there are tried again, before all that wait, or end."""
        if self._phase != "loading":
            self._phase = "recovering" if self._phase in ("ready", "recovering") else "dead"
        self._step = why
        self._ranks = [structs.replace(one, state="lost") if one.rank == 0 else one for one in self._ranks]
        tickets, self._running = self._running, {}
        self._idle.set()
        for ticket in reversed(tickets.values()):
            if not ticket.over:
                self._again(ticket, why)

    def _again(self, ticket: Ticket, why: str) -> None:
        """A request that rank 0 has left behind."""
        if ticket.shown or ticket.again or self._phase == "dead":
            plural = "s" * (ticket.tokens != 1)
            ticket.end(Broken(f"the answer broke off after {ticket.tokens} token{plural}: {why}", "engine_error"))
        else:
            ticket.forget()
            ticket.move(0, _in(self._limits.queue_timeout))
            self._waiting.appendleft(ticket)

    async def drained(self) -> None:
        """Waits for the requests that run, at most `drain_timeout`, refusing those that wait; then nothing runs."""
        self._phase = "dead" if self._wire is None else "draining"
        for ticket in self._waiting:
            ticket.end(Refused("the server is draining", 503, LOADING))
        self._waiting.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._limits.drain_timeout):
                await self._idle.wait()
        for ticket in self._running.values():
            ticket.end(Broken("the server is being stopped", "engine_error"))

    def serving(self) -> None:
        """Tells rank 0 that clients may come, and every later rank 0 when it is ready."""
        self._serves = True
        self._send(frames.Serving())

    def leave(self) -> None:
        """Sends rank 0 home."""
        self._send(frames.Leave())

    def _send(self, frame: frames.Frame) -> None:
        """Says something to rank 0, if there is one."""
        if self._wire is not None:
            self._wire.send(frame)


def _in(seconds: float | None) -> float | None:
    """The time of the loop's clock then; None where there is no end."""
    return None if seconds is None else asyncio.get_running_loop().time() + seconds


async def _before(ends: float | None, queue: asyncio.Queue[T]) -> T:
    """The next of a queue. Raises TimeoutError at that time of the loop's clock."""
    if not queue.empty():
        return queue.get_nowait()
    async with asyncio.timeout_at(ends):
        return await queue.get()
