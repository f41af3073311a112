"""Several orchestrators on one loaded model: a session each, with a cache of its own, and turns at the model."""

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
from swiftspec.distributed.rpc.status import SessionGone, WorkerFull

GONE_MESSAGE = "the session is gone: begin again from the tokens"
IDLE_GRACE_S = 0.5  # seconds; what a session still does once its answer is out is over by then
ID_BYTES = 16  # drawn by the system's generator: nobody guesses one


class FairLock:
    """A lock that goes round in the order in which it is asked for: nobody waits for more than one turn of each of the
    others."""

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
        """Whether nobody has the turn: then the caller has it, until `end`."""
        with self._lock:
            taken, self._taken = self._taken, True
            return not taken

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def release(self) -> None:
        """The turn is the next one's."""
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()  # it stays taken
            else:
                self._taken = False


class SessionState(Protocol):
    """What a session does on the model (drafting.py, verifying.py)."""

    @property
    def shape(self) -> EngineConfig: ...
    @property
    def busy(self) -> float: ...


W = TypeVar("W", bound=SessionState)


@dataclass(eq=False, slots=True)
class WorkerSession(Generic[W]):
    """One orchestrator's work. `lock` is held by whoever is at it."""

    id: bytes
    state: W
    last_used: float  # when it was last at work
    lock: Lock = field(default_factory=Lock)
    ended: bool = False
    busy: float = 0.0  # seconds in forwards, as far as somebody was told
    last_answer: tuple[bytes, Any] | None = None  # the request served last, and its answer


class WorkerSessions(Generic[W]):
    """At most `most` of them; the one that rested longest makes room. One that rests for `idle` seconds ends."""

    def __init__(
        self,
        make: Callable[[EngineConfig], W],
        max_sessions: int,
        idle_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        on_end: Callable[[W], None] = lambda work: None,
    ) -> None:
        """`make`: work of a shape, on a cache of its own. Raises UserError on a shape that has no room. `ended`: hears
        of it once its session is gone."""
        self._make, self._most, self._idle, self._clock, self._ended = make, max_sessions, idle_timeout_s, clock, on_end
        self._lock = Lock()
        self._sessions: dict[bytes, WorkerSession[W]] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def find(self, name: bytes) -> WorkerSession[W]:
        """Raises SessionGone where there is none of that id."""
        with self._lock:
            session = self._sessions.get(name)
        if session is None:
            raise SessionGone(GONE_MESSAGE)
        return session

    @contextmanager
    def in_use(self, session: WorkerSession[W]) -> Iterator[None]:
        """Around whatever a session does. Raises SessionGone where it went while others were at it."""
        with session.lock:
            if session.ended:
                raise SessionGone(GONE_MESSAGE)
            yield
            session.last_used = self._clock()

    def open(self, name: bytes, shape: EngineConfig) -> WorkerSession[W]:
        """The session, or another one where it is gone, never was, or has another shape. Raises Full."""
        with suppress(SessionGone):
            session = self.find(name)
            if session.state.shape == shape:
                return session
            self.end(name)
        try:
            return self._create(shape)
        except (
            WorkerFull
        ):  # what one of them still does after its answer is over in a moment; the others go on meanwhile
            self._wait_for_idle_session()
            return self._create(shape)

    def _create(self, shape: EngineConfig) -> WorkerSession[W]:
        with self._lock:
            while len(self._sessions) >= self._most:
                self._evict()
            session = WorkerSession(secrets.token_bytes(ID_BYTES), self._make(shape), self._clock())
            self._sessions[session.id] = session
            return session

    def end(self, name: bytes) -> None:
        """Gives up its memory once nobody is at work in it. One that is gone is no error."""
        with self._lock:
            session = self._sessions.pop(name, None)
        if session is not None:
            with session.lock:
                session.ended = True
            self._ended(session.state)

    def sweep(self) -> None:
        """Ends those that have rested too long. To be called now and then."""
        with self._lock:
            for session in [each for each in self._sessions.values() if self._clock() - each.last_used > self._idle]:
                self._try_end(session)

    def _evict(self) -> None:
        if not any(map(self._try_end, self._by_last_use())):
            raise WorkerFull(f"all {self._most} sessions of this worker are at work: start it with more --max-sessions")

    def _wait_for_idle_session(self) -> None:
        """Until nobody is at work in the session that rested longest, or for a moment."""
        with self._lock:
            rested = self._by_last_use()
        if rested and rested[0].lock.acquire(timeout=IDLE_GRACE_S):
            rested[0].lock.release()

    def _by_last_use(self) -> list[WorkerSession[W]]:
        """All, the one that rested longest first."""
        return sorted(self._sessions.values(), key=lambda each: each.last_used)

    def _try_end(self, session: WorkerSession[W]) -> bool:
        """Ends a session, unless somebody is at work in it."""
        if not session.lock.acquire(blocking=False):
            return False
        session.ended = True
        session.lock.release()
        del self._sessions[session.id]
        self._ended(session.state)
        return True
