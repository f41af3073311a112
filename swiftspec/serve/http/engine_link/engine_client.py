"""Client of the engine in rank 0: forwards up to `max_num_seqs` requests over the engine link and queues the others."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import TypeVar

from msgspec import structs

from swiftspec.serve.http.engine_link import frames
from swiftspec.serve.http.engine_link.async_engine import (
    AsyncEngineRequest,
    EngineState,
    GenerationFailedError,
    InvalidRequestError,
    RequestRejectedError,
)
from swiftspec.serve.http.engine_link.events import TraceEventBuffer
from swiftspec.serve.http.engine_link.frame_socket import AsyncFrameSocket
from swiftspec.serve.http.engine_link.frames import (
    DoneFrame,
    EngineInfo,
    FailedFrame,
    FromEngine,
    FrontendConfig,
    PromptLogprobsFrame,
    RankState,
    TokensFrame,
)

T = TypeVar("T")
QUEUE_FULL_RETRY_AFTER_S = 1.0
LOADING_RETRY_AFTER_S = 5.0  # also while rank 0 restarts
MAX_BUFFERED_FRAMES = 200_000  # unread frames of a request, a few hundred bytes each; with more it fails
ENGINE_GONE = "rank 0 has exited"


class PendingRequest:
    """Request that waits in the queue or runs in rank 0.

    `deadline`: time of the event loop's clock at which waiting or running times out; None: no limit.
    `updates`: queue of frames from rank 0, an exception that ends the request, and None whenever `deadline` changes.
    """

    def __init__(self, request: AsyncEngineRequest, deadline: float | None) -> None:
        self.request, self.deadline = request, deadline
        self.attempt = 0  # number under which it runs in rank 0; 0 while it waits
        self.num_tokens = 0  # tokens received from rank 0
        self.has_output = False  # the caller has received a frame
        self.retried = False  # rank 0 was lost during an earlier attempt
        self.finished = False  # failed, or closed by its caller
        self.updates: asyncio.Queue[FromEngine | Exception | None] = asyncio.Queue()

    def schedule(self, attempt: int, deadline: float | None) -> None:
        """Marks the request as running with the number `attempt`, or as waiting if that is 0, and sets its deadline."""
        self.attempt, self.deadline = attempt, deadline
        self.updates.put_nowait(None)

    def fail(self, error: Exception) -> None:
        """Ends the request with an error, which its caller gets after the frames that are already in `updates`."""
        if not self.finished:
            self.finished = True
            self.updates.put_nowait(error)

    def reset_for_retry(self) -> None:
        """Discards the unread frames of an attempt that was lost with rank 0."""
        self.retried, self.num_tokens = True, 0
        while not self.updates.empty():
            self.updates.get_nowait()


class EngineClient:
    """Implementation of `AsyncEngine` over the engine link. After each restart of rank 0 `serve_connection` gets a new
    connection. A request that was running is then repeated once, if its caller has not received a frame."""

    def __init__(self, config: FrontendConfig) -> None:
        self._config = config
        self._socket: AsyncFrameSocket | None = None
        self._phase, self._detail = "loading", ""
        self._ranks: list[RankState] = []
        self._attempts = itertools.count(1)  # numbers that are unique over all connections
        self._waiting: deque[PendingRequest] = deque()
        self._running: dict[int, PendingRequest] = {}  # by attempt number
        self._idle = asyncio.Event()
        self._idle.set()
        self._announced = False
        self.info: EngineInfo | None = None
        self.events = TraceEventBuffer(lambda on: self._send(frames.SubscribeFrame(on)))
        self.drain_requested = asyncio.Event()  # set when rank 0 sends DrainFrame
        self.was_ready = asyncio.Event()  # set when rank 0 is ready for the first time
        self.target_folder: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def state(self) -> EngineState:
        return EngineState(self._phase, self._detail, len(self._running), len(self._waiting), self._ranks)

    @property
    def _has_capacity(self) -> bool:
        """Whether rank 0 would start another request immediately."""
        return self.info is not None and self._phase == "ready" and len(self._running) < self.info.max_num_seqs

    async def generate(
        self, request: AsyncEngineRequest
    ) -> AsyncGenerator[PromptLogprobsFrame | TokensFrame | DoneFrame, bool | None]:
        """See `AsyncEngine.generate`."""
        pending = PendingRequest(request, _deadline_after(self._config.queue_timeout))
        self._enqueue(pending)
        try:
            frame = None
            while not isinstance(frame, DoneFrame):
                frame = await self._next_frame(pending)
                if isinstance(frame, FailedFrame):
                    raise (
                        InvalidRequestError(frame.message)
                        if frame.user
                        else GenerationFailedError(frame.message, "engine_error")
                    )
                assert isinstance(frame, PromptLogprobsFrame | TokensFrame | DoneFrame)
                pending.has_output = True
                if (yield frame):
                    self._send(frames.CancelFrame(pending.attempt))
        finally:
            self._release(pending)

    async def _next_frame(self, pending: PendingRequest) -> FromEngine:
        """Returns the next frame of a request. Raises the exception that ends the request, or its timeout."""
        while True:
            deadline = pending.deadline
            try:
                update = await _get_before(deadline, pending.updates)
            except TimeoutError:
                if pending.deadline == deadline:
                    raise self._timeout_error(pending) from None
                continue
            if isinstance(update, Exception):
                raise update
            if update is not None:
                return update

    def _timeout_error(self, pending: PendingRequest) -> Exception:
        if pending.attempt:
            return GenerationFailedError(f"the request took longer than {self._config.request_timeout:g} s", "timeout")
        waited = f"waited {self._config.queue_timeout:g} s (--queue-timeout) for"
        if self._phase == "recovering":
            return RequestRejectedError(f"{waited} the engine to restart: try again later", 503, LOADING_RETRY_AFTER_S)
        return RequestRejectedError(f"{waited} other requests to end: try again later", 429, QUEUE_FULL_RETRY_AFTER_S)

    def _enqueue(self, pending: PendingRequest) -> None:
        """Appends a request to the queue. Raises RequestRejectedError if rank 0 is not serving or the queue is full."""
        if self._phase == "loading":
            raise RequestRejectedError(
                f"the model is being loaded ({self._detail or 'starting'})", 503, LOADING_RETRY_AFTER_S
            )
        if self._phase not in ("ready", "recovering"):
            raise RequestRejectedError(
                f"the server is {self._phase}", 503, LOADING_RETRY_AFTER_S if self._phase == "draining" else None
            )
        if pending.request.replace_key is not None:
            self._replace_older(pending.request.replace_key)
        if not self._has_capacity and len(self._waiting) >= self._config.max_queue:
            raise RequestRejectedError(
                f"the queue is full ({len(self._waiting)} requests wait): try again later",
                429,
                QUEUE_FULL_RETRY_AFTER_S,
            )
        self._waiting.append(pending)
        self._start_waiting()

    def _replace_older(self, key: str) -> None:
        """Fails the unfinished requests whose replace key is `key`."""
        for older in (*self._waiting, *self._running.values()):
            if older.request.replace_key == key:
                older.fail(GenerationFailedError("a newer request with the same key has replaced this one", "replaced"))
        self._waiting = deque(pending for pending in self._waiting if not pending.finished)

    def _start_waiting(self) -> None:
        """Starts waiting requests, the oldest first, while rank 0 has capacity."""
        while self._has_capacity and self._waiting:
            pending = self._waiting.popleft()
            pending.schedule(next(self._attempts), _deadline_after(self._config.request_timeout))
            self._running[pending.attempt] = pending
            self._idle.clear()
            self._send(
                frames.StartFrame(
                    pending.attempt, pending.request.prompt, pending.request.sampling, pending.request.choices
                )
            )

    def _release(self, pending: PendingRequest) -> None:
        """Removes a request that its caller has closed. A running request is cancelled and counts as running
        until rank 0 confirms the `CancelFrame`."""
        pending.finished = True
        with suppress(ValueError):
            self._waiting.remove(pending)
        if pending.attempt in self._running:
            self._send(frames.CancelFrame(pending.attempt))

    async def serve_connection(self, connection: AsyncFrameSocket) -> None:
        """Receives frames over one connection until rank 0 exits or is lost, then closes the connection."""
        self._socket = connection
        try:
            while (frame := await connection.receive()) is not None and not isinstance(frame, frames.EngineLostFrame):
                self._dispatch(frame)
        finally:
            self._socket = None
        self._on_engine_lost(ENGINE_GONE if frame is None else frame.message)
        await connection.close()

    def _dispatch(self, frame: FromEngine) -> None:
        match frame:
            case frames.LoadingFrame(detail=detail):
                self._detail = detail
            case frames.ModelPathFrame(target=target) if not self.target_folder.done():
                self.target_folder.set_result(target)
            case EngineInfo():
                self._on_ready(frame)
            case frames.RankStatesFrame(ranks=ranks):
                self._ranks = ranks
            case frames.DrainFrame():
                self._phase = "draining"
                self.drain_requested.set()
            case frames.TraceEventsFrame(events=events):
                self.events.put(*events)
            case PromptLogprobsFrame() | TokensFrame() | DoneFrame() | FailedFrame():
                self._deliver(frame)
            case _:
                pass

    def _on_ready(self, ready: EngineInfo) -> None:
        """Handles `EngineInfo`: rank 0 is ready, for the first time or after a restart. Starts waiting requests."""
        self.info, self._detail = ready, ""
        self.events.begin(ready)
        self.was_ready.set()
        if self._phase in ("loading", "recovering"):
            self._phase = "ready"
        if self._announced:
            self._send(frames.ServingFrame())
        self._start_waiting()

    def _deliver(self, frame: PromptLogprobsFrame | TokensFrame | DoneFrame | FailedFrame) -> None:
        pending = self._running.get(frame.request)
        if pending is None:
            return
        if isinstance(frame, TokensFrame):
            pending.num_tokens += len(frame.token_ids)
        pending.updates.put_nowait(frame)
        if pending.updates.qsize() > MAX_BUFFERED_FRAMES:
            pending.fail(GenerationFailedError("the client reads too slowly", "timeout"))
        if isinstance(frame, DoneFrame | FailedFrame):
            del self._running[frame.request]
            if not self._running:
                self._idle.set()
            self._start_waiting()

    def _on_engine_lost(self, reason: str) -> None:
        """Handles the loss of rank 0: its running requests are repeated, ahead of the waiting ones, or fail."""
        if self._phase != "loading":
            self._phase = "recovering" if self._phase in ("ready", "recovering") else "dead"
        self._detail = reason
        self._ranks = [structs.replace(one, state="lost") if one.rank == 0 else one for one in self._ranks]
        tickets, self._running = self._running, {}
        self._idle.set()
        for pending in reversed(tickets.values()):
            if not pending.finished:
                self._retry_or_fail(pending, reason)

    def _retry_or_fail(self, pending: PendingRequest, reason: str) -> None:
        """Handles a request that was running when rank 0 was lost. Puts it at the front of the queue, or fails it if
        its caller has received a frame, it was retried before, or rank 0 does not restart."""
        if pending.has_output or pending.retried or self._phase == "dead":
            plural = "s" * (pending.num_tokens != 1)
            pending.fail(
                GenerationFailedError(
                    f"the answer was interrupted after {pending.num_tokens} token{plural}: {reason}", "engine_error"
                )
            )
        else:
            pending.reset_for_retry()
            pending.schedule(0, _deadline_after(self._config.queue_timeout))
            self._waiting.appendleft(pending)

    async def drain(self) -> None:
        """Rejects new and waiting requests, waits up to `drain_timeout` seconds for the running ones, then fails those
        that remain."""
        self._phase = "dead" if self._socket is None else "draining"
        for pending in self._waiting:
            pending.fail(RequestRejectedError("the server is draining", 503, LOADING_RETRY_AFTER_S))
        self._waiting.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.drain_timeout):
                await self._idle.wait()
        for pending in self._running.values():
            pending.fail(GenerationFailedError("the server is being stopped", "engine_error"))

    def announce_serving(self) -> None:
        """Sends `ServingFrame` to rank 0 now and after each of its restarts."""
        self._announced = True
        self._send(frames.ServingFrame())

    def shut_down_engine(self) -> None:
        """Sends `ShutdownFrame` to rank 0, which shuts down all ranks."""
        self._send(frames.ShutdownFrame())

    def _send(self, frame: frames.Frame) -> None:
        """Sends a frame to rank 0, or drops it if rank 0 is not connected."""
        if self._socket is not None:
            self._socket.send(frame)


def _deadline_after(seconds: float | None) -> float | None:
    """Returns the time of the event loop's clock in `seconds` from now. None stands for no deadline."""
    return None if seconds is None else asyncio.get_running_loop().time() + seconds


async def _get_before(deadline: float | None, queue: asyncio.Queue[T]) -> T:
    """Returns the next item of a queue. Raises TimeoutError at `deadline`, a time of the event loop's clock."""
    if not queue.empty():
        return queue.get_nowait()
    async with asyncio.timeout_at(deadline):
        return await queue.get()
