"""Sessions of several clients on one loaded model, each with its own KV cache, and a fair lock for the model."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Lock
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from swiftspec.config import EngineConfig

GONE_MESSAGE = "the session no longer exists: open it again with all tokens"
IDLE_GRACE_S = 0.5  # seconds; longest wait for a session to finish the work that follows its answer
ID_BYTES = 16  # drawn from a secure random generator, so that ids cannot be guessed


class FairLock:
    """Fair (FIFO) lock: while a thread waits, each other thread acquires the lock at most once."""

    def __init__(self) -> None:
        self._lock, self._taken = Lock(), False
        self._waiting: deque[Lock] = deque()

    def __enter__(self) -> None:
        with self._lock:
            if not self._taken:
                self._taken = True
                return
            turn = Lock()
            turn.acquire()
            self._waiting.append(turn)
        turn.acquire()

    def try_acquire(self) -> bool:
        """Acquires the lock if it is free, and returns whether it has done so. The caller must then call `release`."""
        with self._lock:
            taken, self._taken = self._taken, True
            return not taken

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def release(self) -> None:
        """Passes the lock to the first waiting thread, or frees it."""
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()  # the lock itself stays taken
            else:
                self._taken = False


class SessionGone(Exception):
    """The worker does not know the session: it was evicted or ended, or the worker was restarted."""


class WorkerFull(Exception):
    """All sessions of the worker are in use."""


class SessionRole(Protocol):
    """Role of a session. `shape`: config of the session's rounds."""

    shape: EngineConfig | None


R = TypeVar("R", bound=SessionRole)


@dataclass(eq=False, slots=True)
class WorkerSession(Generic[R]):
    """Session of one client.

    `masked`: tokens that a draft never proposes.
    `lock`: held by the thread that executes a message of the session.
    `stream`: server of the stream that has attached the session last.
    `last_answer`: last message and its answers.
    """

    id: str
    role: R
    masked: tuple[int, ...]
    last_used: float  # time of the last message, in seconds of the sessions' clock
    lock: Lock = field(default_factory=Lock)
    ended: bool = False
    stream: Any = None
    last_answer: tuple[Any, Any] | None = None


class WorkerSessions(Generic[R]):
    """The sessions of a worker: at most `max_sessions`, with LRU eviction. `sweep` ends sessions that have been idle
    for more than `idle_timeout_s` seconds."""

    def __init__(
        self,
        make: Callable[[EngineConfig, tuple[int, ...]], R],
        max_sessions: int,
        idle_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        on_end: Callable[[R], None] = lambda role: None,
    ) -> None:
        """`make`: returns the role of a new session with that config and those masked tokens, and with its own KV
        cache. Raises UserError if the config exceeds the worker's memory.

        `on_end`: called with the role of each session that has ended.
        """
        self._make, self._most, self._idle, self._clock, self._ended = make, max_sessions, idle_timeout_s, clock, on_end
        self._lock = Lock()
        self._sessions: dict[str, WorkerSession[R]] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def find(self, name: str) -> WorkerSession[R]:
        """Returns the session with the id `name`. Raises SessionGone if it does not exist."""
        with self._lock:
            session = self._sessions.get(name)
        if session is None:
            raise SessionGone(GONE_MESSAGE)
        return session

    @contextmanager
    def in_use(self, session: WorkerSession[R]) -> Iterator[None]:
        """Context manager for a call of a session: holds the session's lock. Raises SessionGone if the session has
        ended."""
        with session.lock:
            if session.ended:
                raise SessionGone(GONE_MESSAGE)
            yield
            session.last_used = self._clock()

    def open(self, name: str, shape: EngineConfig, masked: tuple[int, ...] = ()) -> WorkerSession[R]:
        """Returns the session with the id `name` if it exists and has the config `shape` and the tokens `masked`,
        otherwise a new session. Raises WorkerFull if all sessions are in use."""
        with suppress(SessionGone):
            session = self.find(name)
            if session.role.shape == shape and session.masked == masked:
                return session
            self.end(name)
        try:
            return self._create(shape, masked)
        except (
            WorkerFull
        ):  # a session that still does the work after its answer becomes idle soon; other sessions continue meanwhile
            self._wait_for_idle_session()
            return self._create(shape, masked)

    def _create(self, shape: EngineConfig, masked: tuple[int, ...]) -> WorkerSession[R]:
        with self._lock:
            while len(self._sessions) >= self._most:
                self._evict()
            role = self._make(shape, masked)
            session = WorkerSession(secrets.token_hex(ID_BYTES), role, masked, self._clock())
            self._sessions[session.id] = session
            return session

    def end(self, name: str) -> None:
        """Waits for the call in progress of a session, then ends the session and frees its memory. An unknown session
        is ignored."""
        with self._lock:
            session = self._sessions.pop(name, None)
        if session is not None:
            with session.lock:
                session.ended = True
            self._ended(session.role)

    def sweep(self) -> None:
        """Ends the sessions that have been idle too long. To be called periodically."""
        with self._lock:
            for session in [each for each in self._sessions.values() if self._clock() - each.last_used > self._idle]:
                self._try_end(session)

    def _evict(self) -> None:
        if not any(map(self._try_end, self._by_last_use())):
            raise WorkerFull(
                f"all {self._most} sessions of this worker are in use: start it with a larger --max-sessions"
            )

    def _wait_for_idle_session(self) -> None:
        """Blocks until the least recently used session is idle, for at most IDLE_GRACE_S."""
        with self._lock:
            rested = self._by_last_use()
        if rested and rested[0].lock.acquire(timeout=IDLE_GRACE_S):
            rested[0].lock.release()

    def _by_last_use(self) -> list[WorkerSession[R]]:
        """Returns all sessions, least recently used first."""
        return sorted(self._sessions.values(), key=lambda each: each.last_used)

    def _try_end(self, session: WorkerSession[R]) -> bool:
        """Ends a session, unless a call of it is in progress. Returns whether it has ended the session."""
        if not session.lock.acquire(blocking=False):
            return False
        session.ended = True
        session.lock.release()
        del self._sessions[session.id]
        self._ended(session.role)
        return True
