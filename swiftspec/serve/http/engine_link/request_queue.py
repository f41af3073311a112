"""Request queue in front of an engine: starts up to `max_num_seqs` requests and holds the others."""

from __future__ import annotations

import asyncio
import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import suppress
from threading import RLock
from typing import TYPE_CHECKING

from swiftspec.serve.http.engine_link import frames
from swiftspec.serve.http.engine_link.engine_client import (
    EngineRequest,
    EngineState,
    GenerationFailedError,
    InvalidRequestError,
    RequestRejectedError,
)
from swiftspec.serve.http.engine_link.frames import (
    DoneFrame,
    EngineInfo,
    FailedFrame,
    PromptLogprobsFrame,
    RankState,
    TokensFrame,
)
from swiftspec.serve.http.engine_link.loop_event import LoopEvent
from swiftspec.serve.http.engine_link.trace_events import TraceEventBuffer

if TYPE_CHECKING:
    from swiftspec.engine import Stats

QUEUE_FULL_RETRY_AFTER_S = 1.0
LOADING_RETRY_AFTER_S = 5.0  # also while rank 0 restarts
MAX_BUFFERED_FRAMES = 200_000  # unread frames of a request, a few hundred bytes each; with more it fails
RequestFrame = PromptLogprobsFrame | TokensFrame | DoneFrame | FailedFrame


class PendingRequest:
    """Request that waits in the queue or runs in the engine. Belongs to the event loop that creates it; frames may
    arrive from any thread.

    `deadline`: time of the event loop's clock at which waiting or running times out; None: no limit.
    """

    def __init__(self, request: EngineRequest, timeout_s: float | None) -> None:
        self.request = request
        self.attempt = 0  # number under which it runs in the engine; 0 while it waits
        self.num_tokens = 0  # tokens received from the engine
        self.has_output = False  # the caller has received a frame
        self.retried = False  # the engine was lost during an earlier attempt
        self.finished = False  # failed, or closed by its caller
        self.stats: Stats | None = None  # of a request that an engine in this process has completed
        self._updates: deque[RequestFrame | Exception] = deque()  # an exception ends the request
        self._changed = LoopEvent()  # set when `_updates` or `deadline` changes
        self.schedule(0, timeout_s)

    def schedule(self, attempt: int, timeout_s: float | None) -> None:
        """Marks the request as running with the number `attempt`, or as waiting if that is 0. `timeout_s`: seconds
        until it times out."""
        self.attempt = attempt
        self.deadline = None if timeout_s is None else self._changed.time() + timeout_s
        self._changed.set()

    def put(self, frame: RequestFrame) -> None:
        """Appends a frame for the caller. Fails the request if more than `MAX_BUFFERED_FRAMES` are unread."""
        if self.finished:
            return
        self._updates.append(frame)
        if isinstance(frame, TokensFrame):
            self.num_tokens += len(frame.token_ids)
        if len(self._updates) > MAX_BUFFERED_FRAMES:
            self.fail(GenerationFailedError("the client reads too slowly", "timeout"))
        self._changed.set()

    def fail(self, error: Exception) -> None:
        """Ends the request with an error, which its caller gets after the unread frames."""
        if not self.finished:
            self.finished = True
            self._updates.append(error)
            self._changed.set()

    def reset_for_retry(self) -> None:
        """Discards the unread frames of an attempt that was lost with the engine."""
        self.retried, self.num_tokens = True, 0
        self._updates.clear()

    async def next(self) -> RequestFrame:
        """Returns the next frame. Raises the exception that ends the request, or TimeoutError at the deadline."""
        while not self._updates:
            self._changed.clear()
            deadline = self.deadline
            try:
                async with asyncio.timeout_at(deadline):
                    await self._changed.wait()
            except TimeoutError:
                if self.deadline == deadline:
                    raise
        update = self._updates.popleft()
        if isinstance(update, Exception):
            raise update
        return update


class RequestQueue(ABC):
    """Implementation of `EngineClient` that sends frames to an engine and receives its frames, from any thread.

    `max_queue`: number of requests that may wait.
    `queue_timeout_s`, `request_timeout_s`: how long a request may wait and run; None: no limit.
    """

    def __init__(self, max_queue: int, queue_timeout_s: float | None, request_timeout_s: float | None) -> None:
        self._max_queue, self._queue_timeout_s, self._request_timeout_s = max_queue, queue_timeout_s, request_timeout_s
        self._phase, self._detail = "loading", ""
        self._ranks: list[RankState] = []
        self._attempts = itertools.count(1)  # numbers that are unique over all connections
        self._lock = RLock()  # held while the fields below change
        self._waiting: deque[PendingRequest] = deque()
        self._running: dict[int, PendingRequest] = {}  # by attempt number
        self._idle: LoopEvent | None = None  # set when no request runs, while `drain` waits
        self.info: EngineInfo | None = None
        self.events = TraceEventBuffer(lambda on: self._send(frames.SubscribeFrame(on)))

    @property
    def state(self) -> EngineState:
        """Phase of the engine, and numbers of running and waiting requests."""
        return EngineState(self._phase, self._detail, len(self._running), len(self._waiting), self._ranks)

    @abstractmethod
    def _send(self, frame: frames.ToEngine) -> None:
        """Sends a frame to the engine, or drops it if there is no engine. Does not block."""

    def stream_frames(
        self, request: EngineRequest
    ) -> AsyncGenerator[PromptLogprobsFrame | TokensFrame | DoneFrame, bool | None]:
        """Yields the frames of one request, for the HTTP endpoints; see `EngineClient.stream_frames`."""
        return self._frames(PendingRequest(request, self._queue_timeout_s))

    async def _frames(
        self, pending: PendingRequest
    ) -> AsyncGenerator[PromptLogprobsFrame | TokensFrame | DoneFrame, bool | None]:
        self._enqueue(pending)
        try:
            frame = None
            while not isinstance(frame, DoneFrame):
                try:
                    frame = await pending.next()
                except TimeoutError:
                    raise self._timeout_error(pending) from None
                if isinstance(frame, FailedFrame):
                    raise (
                        InvalidRequestError(frame.message)
                        if frame.user
                        else GenerationFailedError(frame.message, "engine_error")
                    )
                pending.has_output = True
                if (yield frame):
                    self._send(frames.CancelFrame(pending.attempt))
        finally:
            self._release(pending)

    def _timeout_error(self, pending: PendingRequest) -> Exception:
        if pending.attempt:
            return GenerationFailedError(f"the request took longer than {self._request_timeout_s:g} s", "timeout")
        waited = f"waited {self._queue_timeout_s:g} s (queue timeout) for"
        if self._phase == "recovering":
            return RequestRejectedError(f"{waited} the engine to restart: try again later", 503, LOADING_RETRY_AFTER_S)
        return RequestRejectedError(f"{waited} other requests to end: try again later", 429, QUEUE_FULL_RETRY_AFTER_S)

    def _enqueue(self, pending: PendingRequest) -> None:
        """Appends a request to the queue. Raises RequestRejectedError if the engine is not serving or the queue is
        full."""
        with self._lock:
            if self._phase == "loading":
                raise RequestRejectedError(
                    f"the model is being loaded ({self._detail or 'starting'})", 503, LOADING_RETRY_AFTER_S
                )
            if self._phase not in ("ready", "recovering"):
                raise self._unavailable_error()
            if pending.request.replace_key is not None:
                self._replace_older(pending.request.replace_key)
            if not self._has_capacity and len(self._waiting) >= self._max_queue:
                raise RequestRejectedError(
                    f"the queue is full ({len(self._waiting)} requests wait): try again later",
                    429,
                    QUEUE_FULL_RETRY_AFTER_S,
                )
            self._waiting.append(pending)
            self._start_waiting()

    def _unavailable_error(self) -> RequestRejectedError:
        """Returns the error for requests that wait or arrive while the engine is draining or dead."""
        why = f": {self._detail}" if self._detail else ""
        retry_after = LOADING_RETRY_AFTER_S if self._phase == "draining" else None
        return RequestRejectedError(f"the engine is {self._phase}{why}", 503, retry_after)

    def _replace_older(self, key: str) -> None:
        """Fails the unfinished requests whose replace key is `key`."""
        for older in (*self._waiting, *self._running.values()):
            if older.request.replace_key == key:
                older.fail(GenerationFailedError("a newer request with the same key has replaced this one", "replaced"))
        self._waiting = deque(pending for pending in self._waiting if not pending.finished)

    @property
    def _has_capacity(self) -> bool:
        """Whether the engine would start another request immediately."""
        return self.info is not None and self._phase == "ready" and len(self._running) < self.info.max_num_seqs

    def _start_waiting(self) -> None:
        """Starts waiting requests, the oldest first, while the engine has capacity."""
        while self._has_capacity and self._waiting:
            pending = self._waiting.popleft()
            pending.schedule(next(self._attempts), self._request_timeout_s)
            self._running[pending.attempt] = pending
            request = pending.request
            self._send(frames.StartFrame(pending.attempt, request.prompt, request.sampling, request.choices))

    def _release(self, pending: PendingRequest) -> None:
        """Removes a request that its caller has closed. A running request is cancelled and counts as running
        until the engine confirms the `CancelFrame`."""
        with self._lock:
            pending.finished = True
            with suppress(ValueError):
                self._waiting.remove(pending)
            if pending.attempt in self._running:
                self._send(frames.CancelFrame(pending.attempt))

    def _on_ready(self, ready: EngineInfo) -> None:
        """Handles `EngineInfo`: the engine is ready, for the first time or after a restart. Starts waiting requests."""
        with self._lock:
            self.info, self._detail = ready, ""
            self.events.begin(ready)
            if self._phase in ("loading", "recovering"):
                self._phase = "ready"
            self._start_waiting()

    def _deliver(self, frame: RequestFrame) -> None:
        """Handles a frame of a request."""
        with self._lock:
            pending = self._running.get(frame.request)
            if pending is None:
                return
            pending.put(frame)
            if isinstance(frame, DoneFrame | FailedFrame):
                del self._running[frame.request]
                self._notify_idle()
                self._start_waiting()

    def _notify_idle(self) -> None:
        if self._idle is not None and not self._running:
            self._idle.set()

    def _on_engine_lost(self, phase: str, reason: str) -> None:
        """Handles the loss of the engine. `phase`: the next phase. In "recovering" running requests are repeated, ahead
        of the waiting ones, or fail; in "dead" all requests fail."""
        with self._lock:
            self._phase, self._detail = phase, reason
            lost, self._running = self._running, {}
            for pending in reversed(lost.values()):
                if not pending.finished:
                    self._retry_or_fail(pending, reason)
            if phase == "dead":
                self._reject_waiting()
            self._notify_idle()

    def _retry_or_fail(self, pending: PendingRequest, reason: str) -> None:
        """Handles a request that was running when the engine was lost. Puts it at the front of the queue, or fails it
        if its caller has received a frame, it was retried before, or the engine does not restart."""
        if pending.has_output or pending.retried or self._phase == "dead":
            plural = "s" * (pending.num_tokens != 1)
            pending.fail(
                GenerationFailedError(
                    f"the answer was interrupted after {pending.num_tokens} token{plural}: {reason}", "engine_error"
                )
            )
        else:
            pending.reset_for_retry()
            pending.schedule(0, self._queue_timeout_s)
            self._waiting.appendleft(pending)

    def _reject_waiting(self) -> None:
        for pending in self._waiting:
            pending.fail(self._unavailable_error())
        self._waiting.clear()

    async def _drain(self, phase: str, timeout_s: float) -> None:
        """Rejects new and waiting requests, waits up to `timeout_s` seconds for the running ones, then fails those that
        remain. `phase`: "draining", or "dead" if the engine is lost."""
        idle = LoopEvent()
        with self._lock:
            self._phase, self._idle = phase, idle
            self._reject_waiting()
            self._notify_idle()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await idle.wait()
        with self._lock:
            for pending in self._running.values():
                pending.fail(GenerationFailedError("the engine is being stopped", "engine_error"))
