"""An asyncio event that any thread can set."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress


class LoopEvent:
    """Event of the running event loop, like `asyncio.Event`, that may be set by other threads too."""

    def __init__(self) -> None:
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._event = asyncio.Event()

    def set(self) -> None:
        """Wakes the tasks that wait, or does nothing if their event loop is closed. Thread-safe."""
        with suppress(RuntimeError):  # the loop is closed
            if threading.get_ident() == self._thread:
                self._event.set()
            else:
                self._loop.call_soon_threadsafe(self._event.set)

    def clear(self) -> None:
        """Makes `wait` block until the next `set`. Called on the event loop only."""
        self._event.clear()

    async def wait(self) -> None:
        """Blocks until the event is set."""
        await self._event.wait()

    def time(self) -> float:
        """Returns the time of the event loop's clock, in seconds. Thread-safe."""
        return self._loop.time()
