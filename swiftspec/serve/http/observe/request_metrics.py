"""An engine whose requests are looked at: what came of each one, told once it has ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass, field

from swiftspec.observe.rpc_latency import Hop
from swiftspec.serve.http.engine_link.engine import Ask, Broken, Engine, Refused, State, Unusable
from swiftspec.serve.http.engine_link.frames import Chunk, Done, Prompt, Ready


@dataclass(frozen=True, slots=True)
class Visit:
    """What a client's request says beside its body. `traceparent`, `tracestate`: W3C's, as they came."""

    path: str = ""
    id: str = ""
    traceparent: str = ""
    tracestate: str = ""


NOBODY = Visit()
VISIT: ContextVar[Visit] = ContextVar("visit", default=NOBODY)  # of the task that serves it


@dataclass(slots=True)
class Seen:
    """What the front end saw of one request. Times in seconds on the monotonic clock."""

    ask: Ask
    began: float
    visit: Visit
    came: list[float] = field(default_factory=list)  # when the tokens of each round came
    tokens: int = 0
    hops: list[Hop] = field(default_factory=list)  # exchanges with workers
    ended: float = 0.0
    reason: str = "error"  # stop, length or abort; error, busy or unavailable (see Refused), invalid where it broke
    error: Exception | None = None
    done: Done | None = None  # what the engine says of it; None of a request that did not come to its end

    @property
    def answered(self) -> bool:
        """Whether it was taken on: else the engine has done nothing for it."""
        return self.reason in ("stop", "length", "abort", "error")

    @property
    def queued(self) -> float | None:
        """How long it waited for its turn: what its first tokens took beyond the engine's own time to them."""
        if self.done is None or not self.came:
            return None
        return max(self.came[0] - self.began - 1e-3 * self.done.metrics["time_to_first_token_ms"], 0.0)


class Watched:
    """An Engine like the one inside. Each of `hears` is told of a request when it has ended, however it did."""

    def __init__(
        self, engine: Engine, hears: Sequence[Callable[[Seen], None]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine, self._hears, self._clock = engine, hears, clock

    @property
    def state(self) -> State:
        return self._engine.state

    @property
    def about(self) -> Ready | None:
        return self._engine.about

    async def answer(self, ask: Ask) -> AsyncGenerator[Prompt | Chunk | Done, bool | None]:
        """As `engine.Engine.answer` says."""
        seen = Seen(ask, self._clock(), VISIT.get())
        over: bool | None = None
        try:
            async with aclosing(self._engine.answer(ask)) as frames:
                while True:
                    frame = await frames.asend(over)
                    self._look(seen, frame)
                    over = yield frame
                    if over:
                        seen.reason = "stop"
        except StopAsyncIteration:
            return
        except (GeneratorExit, asyncio.CancelledError):  # the client has left; or it has all, and wants no more
            seen.reason = "abort" if seen.reason == "error" else seen.reason
            raise
        except Exception as error:
            seen.error, seen.reason = error, _reason(error)
            raise
        finally:
            seen.ended = self._clock()
            for hear in self._hears:
                hear(seen)

    def _look(self, seen: Seen, frame: Prompt | Chunk | Done) -> None:
        if isinstance(frame, Done):
            seen.done = frame
        elif isinstance(frame, Chunk):
            seen.came.append(self._clock())
            seen.tokens += len(frame.token_ids)
            seen.hops += frame.hops
            if frame.finish_reason is not None and seen.reason == "error":
                seen.reason = frame.finish_reason


def _reason(error: Exception) -> str:
    match error:
        case Refused():
            return "busy" if error.status == 429 else "unavailable"
        case Unusable():
            return "invalid"
        case Broken(kind="replaced"):
            return "abort"
        case _:
            return "error"
