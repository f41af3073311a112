"""Request groups in the queue or in the engine: `PendingGroup`, the engine requests of one caller, and
`PendingRequest`, one of them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from swiftspec.serve.link.engine_client import EngineRequest, GenerationFailedError, RequestFrame
from swiftspec.serve.link.frames import TokensFrame
from swiftspec.serve.link.loop_event import LoopEvent

if TYPE_CHECKING:
    from swiftspec.engine import Stats

MAX_BUFFERED_FRAMES = 200_000  # unread frames of a group, a few hundred bytes each; with more it fails


class PendingRequest:
    """Engine request that waits in the queue or runs in the engine. `index`: its position in the group."""

    def __init__(self, group: PendingGroup, index: int, request: EngineRequest) -> None:
        self.group, self.index, self.request = group, index, request
        self.attempt = 0  # number under which it runs in the engine; 0 while it waits
        self.num_tokens = 0  # tokens received from the engine
        self.has_output = False  # the caller has received a frame
        self.retried = False  # the engine was lost during an earlier attempt
        self.waiting_since = group.time()  # when it entered the queue, or entered it again after a loss
        self.queue_time_s = 0.0  # in the queue, over all attempts
        self.stats: Stats | None = None  # of a request that an engine in this process has completed


class PendingGroup:
    """Request group: the engine requests of one caller and their unread frames. They enter the queue together, share
    one time limit, and an error ends all of them. Belongs to the event loop that creates it; frames may arrive from any
    thread.

    `deadline`: time of the event loop's clock at which waiting or running times out; None: no limit.
    """

    def __init__(self, requests: Sequence[EngineRequest], timeout_s: float | None) -> None:
        """`timeout_s`: seconds that the group may wait for the start of its first request; None: no limit."""
        self.finished = False  # failed, or closed by its caller
        self._updates: deque[tuple[PendingRequest, RequestFrame] | Exception] = deque()  # an exception ends the group
        self._changed = LoopEvent()  # set when `_updates` or `deadline` changes
        self.members = [PendingRequest(self, index, request) for index, request in enumerate(requests)]
        self.wait(timeout_s)

    def wait(self, timeout_s: float | None) -> None:
        """Marks the group as waiting for its first start, for at most `timeout_s` seconds."""
        self.started = False
        self._set_deadline(timeout_s)

    def start(self, member: PendingRequest, timeout_s: float | None) -> None:
        """Marks a request as running. The first start in a group begins the time limit of `timeout_s` seconds, which
        covers all members, including those that still wait."""
        member.queue_time_s += self.time() - member.waiting_since
        if not self.started:
            self.started = True
            self._set_deadline(timeout_s)

    def _set_deadline(self, timeout_s: float | None) -> None:
        self.deadline = None if timeout_s is None else self.time() + timeout_s
        self._changed.set()

    def time(self) -> float:
        """Returns the time of the event loop's clock, in seconds. Thread-safe."""
        return self._changed.time()

    @property
    def num_tokens(self) -> int:
        """Tokens received from the engine."""
        return sum(member.num_tokens for member in self.members)

    def put(self, member: PendingRequest, frame: RequestFrame) -> None:
        """Appends a frame for the caller. Fails the group if more than `MAX_BUFFERED_FRAMES` are unread."""
        if self.finished:
            return
        self._updates.append((member, frame))
        if isinstance(frame, TokensFrame):
            member.num_tokens += len(frame.token_ids)
        if len(self._updates) > MAX_BUFFERED_FRAMES:
            self.fail(GenerationFailedError("the client reads too slowly", "timeout"))
        self._changed.set()

    def fail(self, error: Exception) -> None:
        """Ends the group with an error, which its caller gets after the unread frames."""
        if not self.finished:
            self.finished = True
            self._updates.append(error)
            self._changed.set()

    def reset_for_retry(self, member: PendingRequest) -> None:
        """Discards the unread frames of an attempt that was lost with the engine."""
        member.retried, member.num_tokens, member.attempt, member.waiting_since = True, 0, 0, self.time()
        self._updates = deque(
            update for update in self._updates if isinstance(update, Exception) or update[0] is not member
        )

    async def next(self) -> tuple[PendingRequest, RequestFrame]:
        """Returns the next frame and its request. Raises the exception that ends the group, or TimeoutError at the
        deadline."""
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
