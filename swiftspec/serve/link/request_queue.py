"""Request queue in front of an engine: starts up to `max_num_seqs` requests and holds the others."""

from __future__ import annotations

import asyncio
import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import suppress
from threading import RLock

from swiftspec.serve.link import frames
from swiftspec.serve.link.engine_client import (
    EngineRequest,
    EngineState,
    GenerationFailedError,
    InvalidRequestError,
    RequestFrame,
    RequestRejectedError,
)
from swiftspec.serve.link.frames import (
    DoneFrame,
    EngineInfo,
    FailedFrame,
    RankState,
)
from swiftspec.serve.link.loop_event import LoopEvent
from swiftspec.serve.link.pending_request import PendingGroup, PendingRequest
from swiftspec.serve.link.trace_events import TraceEventBuffer

QUEUE_FULL_RETRY_AFTER_S = 1.0
LOADING_RETRY_AFTER_S = 5.0  # also while rank 0 restarts, or the worker of the target is lost


class RequestQueue(ABC):
    """Implementation of `EngineClient` that sends frames to an engine and receives its frames, from any thread.

    `max_queue`: number of groups (the engine requests of one caller) that may wait.
    `queue_timeout_s`, `request_timeout_s`: how long a group may wait and run; None: no limit.
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

    def stream_frames(self, *requests: EngineRequest) -> AsyncGenerator[tuple[int, RequestFrame], bool | None]:
        """Yields the frames of the requests of one caller, for the HTTP endpoints; see `EngineClient.stream_frames`."""
        return self._frames(PendingGroup(requests, self._queue_timeout_s))

    async def _frames(self, group: PendingGroup) -> AsyncGenerator[tuple[int, RequestFrame], bool | None]:
        with self._lock:
            self._enqueue(group)
            self._start_waiting()
        num_unfinished = len(group.members)
        try:
            while num_unfinished:
                try:
                    pending, frame = await group.next()
                except TimeoutError:
                    raise self._timeout_error(group) from None
                num_unfinished -= isinstance(frame, DoneFrame)
                pending.has_output = True
                if (yield pending.index, frame):
                    self._send(frames.CancelFrame(pending.attempt))
        finally:
            self._release(group)

    def _timeout_error(self, group: PendingGroup) -> Exception:
        if group.started:
            return GenerationFailedError(f"the request took longer than {self._request_timeout_s:g} s", "timeout")
        waited = f"waited {self._queue_timeout_s:g} s (queue timeout) for"
        if self._phase == "recovering":
            return RequestRejectedError(f"{waited} the engine to restart: try again later", 503, LOADING_RETRY_AFTER_S)
        return RequestRejectedError(f"{waited} other requests to end: try again later", 429, QUEUE_FULL_RETRY_AFTER_S)

    def _enqueue(self, group: PendingGroup) -> None:
        """Appends the requests of a group to the queue, all or none. Raises RequestRejectedError if the engine is not
        serving or the queue is full."""
        if self._phase == "loading":
            raise RequestRejectedError(
                f"the model is being loaded ({self._detail or 'starting'})", 503, LOADING_RETRY_AFTER_S
            )
        if self._phase not in ("ready", "recovering"):
            raise self._unavailable_error()
        self._replace_older({pending.request.replace_key for pending in group.members} - {None})
        if not self._has_capacity and (num_waiting := self._num_waiting_groups) >= self._max_queue:
            raise RequestRejectedError(
                f"the queue is full ({num_waiting} requests wait): try again later", 429, QUEUE_FULL_RETRY_AFTER_S
            )
        self._waiting.extend(group.members)

    @property
    def _num_waiting_groups(self) -> int:
        """Number of groups without a request that has started."""
        return len({pending.group for pending in self._waiting if not pending.group.started})

    def _unavailable_error(self) -> RequestRejectedError:
        """Returns the error for requests that wait or arrive while the engine is unavailable, draining or dead."""
        why = f": {self._detail}" if self._detail else ""
        retry_after = None if self._phase == "dead" else LOADING_RETRY_AFTER_S
        return RequestRejectedError(f"the engine is {self._phase}{why}", 503, retry_after)

    def _replace_older(self, keys: set[str | None]) -> None:
        """Fails the unfinished requests whose replace key is one of `keys`."""
        if not keys:
            return
        for older in (*self._waiting, *self._running.values()):
            if older.request.replace_key in keys:
                older.group.fail(
                    GenerationFailedError("a newer request with the same key has replaced this one", "replaced")
                )
        self._drop_finished()

    def _drop_finished(self) -> None:
        """Removes the requests of finished groups from the queue."""
        self._waiting = deque(pending for pending in self._waiting if not pending.group.finished)

    @property
    def _has_capacity(self) -> bool:
        """Whether the engine would start another request immediately."""
        serving = self._phase in ("ready", "draining")
        return serving and self.info is not None and len(self._running) < self.info.max_num_seqs

    def _start_waiting(self) -> None:
        """Starts waiting requests, the oldest first, while the engine has capacity. A drain starts only the remaining
        requests of groups that have started."""
        while self._has_capacity and self._waiting and (self._phase == "ready" or self._waiting[0].group.started):
            pending = self._waiting.popleft()
            pending.attempt = next(self._attempts)
            pending.group.start(pending, self._request_timeout_s)
            self._running[pending.attempt] = pending
            request = pending.request
            self._send(frames.StartFrame(pending.attempt, request.prompt, request.sampling, request.choices))

    def _release(self, group: PendingGroup) -> None:
        """Removes a group that its caller has closed. A running request is cancelled and counts as running until the
        engine confirms the `CancelFrame`."""
        with self._lock:
            group.finished = True
            self._drop_finished()
            for pending in group.members:
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

    def _on_target_state(self, lost: str | None) -> None:
        """Handles the loss and the return of a remote target. Requests that wait or arrive meanwhile are rejected; the
        running one has its own timeout."""
        with self._lock:
            if self._phase not in ("ready", "unavailable"):
                return
            self._phase, self._detail = ("ready", "") if lost is None else ("unavailable", lost)
            if lost is not None:
                self._reject_waiting()
            self._start_waiting()

    def _deliver(self, frame: RequestFrame | FailedFrame) -> None:
        """Handles a frame of a request."""
        with self._lock:
            pending = self._running.get(frame.request)
            if pending is None:
                return
            if isinstance(frame, FailedFrame):
                kind = "unavailable_error" if frame.unavailable else "engine_error"
                pending.group.fail(
                    InvalidRequestError(frame.message) if frame.user else GenerationFailedError(frame.message, kind)
                )
                self._drop_finished()
            else:
                if isinstance(frame, DoneFrame):
                    frame.metrics["queue_time_ms"] = round(pending.queue_time_s * 1e3, 3)
                pending.group.put(pending, frame)
            if isinstance(frame, DoneFrame | FailedFrame):
                del self._running[frame.request]
                self._start_waiting()
                self._notify_idle()

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
                if not pending.group.finished:
                    self._retry_or_fail(pending, reason)
            self._drop_finished()
            if phase == "dead":
                self._reject_waiting()
            self._notify_idle()

    def _retry_or_fail(self, pending: PendingRequest, reason: str) -> None:
        """Handles a request that was running when the engine was lost. Puts it at the front of the queue, or fails its
        group if the caller has received a frame of it, it was retried before, or the engine does not restart. A request
        with a grammar, which runs in a foreign library, is not retried: it may be what ended the engine."""
        group = pending.group
        suspect = pending.retried or pending.request.sampling.grammar is not None
        if pending.has_output or suspect or self._phase == "dead":
            plural = "s" * (group.num_tokens != 1)
            group.fail(
                GenerationFailedError(
                    f"the answer was interrupted after {group.num_tokens} token{plural}: {reason}", "engine_error"
                )
            )
        else:
            group.reset_for_retry(pending)
            group.wait(self._queue_timeout_s)
            self._waiting.appendleft(pending)

    def _reject_waiting(self) -> None:
        """Fails the groups that wait; if the engine is dead, also those of which some requests have run."""
        for pending in self._waiting:
            if self._phase == "dead" or not pending.group.started:
                pending.group.fail(self._unavailable_error())
        self._drop_finished()

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
                pending.group.fail(GenerationFailedError("the engine is being stopped", "engine_error"))
            self._drop_finished()
