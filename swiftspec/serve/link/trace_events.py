"""Buffer of trace events, which the front end sends to the subscribers of /v1/spec/events.

The engine records trace events only while there are subscribers. The events go into one ring buffer, which each
subscriber reads at its own speed. A subscriber that is too slow receives the number of events that it missed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from itertools import islice
from threading import RLock

import msgspec

from swiftspec.serve.link.frames import EngineInfo, TraceEvent
from swiftspec.serve.link.loop_event import LoopEvent

MAX_BUFFERED_EVENTS = 10_000  # in the ring buffer
MAX_BUFFERED_BYTES = 32 << 20  # total size of the lines in the ring buffer
FLUSH_INTERVAL_S = 0.016  # a frame at 60 Hz: the page does not draw more often
MAX_BATCH_EVENTS = 64  # events per write


@dataclass(frozen=True, slots=True)
class NumberedEvent:
    """Trace event with its sequence number. Number 0 is the header, which every subscriber receives first."""

    number: int
    event: TraceEvent


class TraceEventBuffer:
    """Ring buffer of trace events. Thread-safe.

    `set_recording`: callback that turns recording in the engine on or off.
    `max_events`, `max_bytes`: limits of the buffer; `max_bytes` counts the lines of the events.
    """

    def __init__(
        self,
        set_recording: Callable[[bool], None],
        max_events: int = MAX_BUFFERED_EVENTS,
        max_bytes: int = MAX_BUFFERED_BYTES,
    ) -> None:
        self._set_recording, self._max_events, self._max_bytes = set_recording, max_events, max_bytes
        self._lock = RLock()  # held while the fields below change
        self._ring: deque[NumberedEvent] = deque()
        self._num_bytes, self._last_number = 0, 0  # bytes in the ring buffer; last sequence number
        self._header: TraceEvent | None = None
        self._subscribers: set[LoopEvent] = set()  # set when events arrive
        self._closed = False

    def begin(self, ready: EngineInfo) -> None:
        """Handles a start or restart of the engine: appends a header, since the engine now numbers its requests from 1
        again, and turns recording on if there are subscribers."""
        with self._lock:
            self._header = TraceEvent("head", msgspec.json.encode(ready.trace_head), [])
            self.put(self._header)
            if self._subscribers:
                self._set_recording(True)

    def put(self, *events: TraceEvent) -> None:
        """Appends events and drops the oldest ones beyond the limits."""
        with self._lock:
            for event in events:
                self._last_number += 1
                self._ring.append(NumberedEvent(self._last_number, event))
                self._num_bytes += len(event.line)
            while self._ring and (len(self._ring) > self._max_events or self._num_bytes > self._max_bytes):
                self._num_bytes -= len(self._ring.popleft().event.line)
            self._notify()

    def close(self) -> None:
        """Ends the generators of all subscribers."""
        with self._lock:
            self._closed = True
            self._notify()

    async def subscribe(self, after: int | None) -> AsyncGenerator[list[NumberedEvent | int]]:
        """Yields batches of events: the header, then events as they arrive. An int in a batch is the number of events
        that this subscriber missed.

        `after`: sequence number of the last event that the subscriber has; None: begin with the next event. A number
            that does not exist yet, as after a restart of the front end, begins with the oldest event.
        Callers must close the generator (`contextlib.aclosing`).
        """
        changed = LoopEvent()
        with self._lock:
            position = self._last_number if after is None else after if after <= self._last_number else 0
            self._subscribers.add(changed)
            if len(self._subscribers) == 1:
                self._set_recording(True)
        try:
            if self._header is not None:
                yield [NumberedEvent(0, self._header)]
            while not self._closed:
                if position == self._last_number:
                    await changed.wait()
                    await asyncio.sleep(FLUSH_INTERVAL_S)  # events that arrive meanwhile join the batch
                changed.clear()
                batch, position = self._read(position)
                if batch:
                    yield batch
        finally:
            with self._lock:
                self._subscribers.remove(changed)
                if not self._subscribers:
                    self._set_recording(False)

    def _read(self, position: int) -> tuple[list[NumberedEvent | int], int]:
        """Returns the next batch after the sequence number `position`, and the sequence number of its last event."""
        with self._lock:
            first = self._last_number - len(self._ring) + 1
            missed = [first - 1 - position] if position + 1 < first else []
            position = max(position, first - 1)
            batch = list(islice(self._ring, position + 1 - first, position + 1 - first + MAX_BATCH_EVENTS))
            return [*missed, *batch], position + len(batch)

    def _notify(self) -> None:
        for changed in self._subscribers:
            changed.set()
