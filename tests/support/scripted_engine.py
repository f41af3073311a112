"""An engine that plays what it is told to."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from swiftspec.config import EngineConfig
from swiftspec.engine import Stats
from swiftspec.serve import answer_stats
from swiftspec.serve.http.engine_link.engine import Ask, State
from swiftspec.serve.http.engine_link.frames import Chunk, Done, RankState, Ready
from swiftspec.serve.http.observe.request_metrics import Watched

PLAN = {"mode": "serial", "target_tp": 1, "verify_batch": 8}
RANKS = [RankState(0, "target", 7, "up", 0)]
ABOUT = Ready("/models/target", "/models/draft", 100, 50, [1], {}, PLAN, 1500.0)


class Played:
    """Gives these frames for each request, one list after the other; an exception in a list is raised. `over`: how
    often it was told that this is enough."""

    def __init__(self, *answers: Sequence[Any]) -> None:
        self.state, self.about = State("ready", "", 1, 2, RANKS), ABOUT
        self._answers, self.closed, self.over = list(answers), 0, 0

    async def answer(self, ask: Ask) -> AsyncGenerator[Any, bool | None]:
        try:
            for frame in self._answers.pop(0):
                if isinstance(frame, BaseException):
                    raise frame
                self.over += bool((yield frame))
        finally:
            self.closed += 1


class Ticks:
    """A clock that goes on by 1 second whenever it is read."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def whole(stats: Stats, tokens: Sequence[int] = (), mode: str = "serial") -> list[Chunk | Done]:
    """The frames of a whole answer, a chunk for each number of tokens."""
    chunks = [Chunk(1, [0] * n, 0, None, "stop" if at == len(tokens) else None) for at, n in enumerate(tokens, 1)]
    timings = answer_stats.timings(stats, sum(tokens), 0.0)
    return [*chunks, Done(1, timings, answer_stats.metrics(EngineConfig(mode=mode), stats, sum(tokens)), {})]


async def served(engine: Watched, ask: Ask, most: int | None = None) -> list[Any]:
    """The frames of a request, as a server takes them: to `Done`, or so many."""
    taken: list[Any] = []
    async with aclosing(engine.answer(ask)) as frames:
        async for frame in frames:
            taken.append(frame)
            if isinstance(frame, Done) or len(taken) == most:
                break
    return taken
