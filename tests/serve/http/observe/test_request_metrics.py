"""Whoever looks at requests hears of each one, once, however it ends, and the request goes on as without."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest

from swiftspec.engine import Stats
from swiftspec.serve.http.engine_link.engine import Ask, Broken, Refused, Unusable
from swiftspec.serve.http.observe.request_metrics import Seen, Watched
from tests.support.scripted_engine import ABOUT, Played, Ticks, served, whole

ASK = Ask([1, 2], {})


def test_a_whole_answer() -> None:
    frames = whole(Stats(first_token_time=0.25), [3, 2])
    seen: list[Seen] = []
    engine = Played(frames)
    watched = Watched(engine, [seen.append], Ticks())
    assert asyncio.run(served(watched, ASK)) == frames and engine.closed == 1
    (one,) = seen
    assert (one.tokens, one.reason, one.done, one.answered) == (5, "stop", frames[-1], True)
    assert (one.began, one.came, one.ended, one.queued) == (1.0, [2.0, 3.0], 4.0, 0.75)
    assert (watched.state, watched.about) == (engine.state, ABOUT)


@pytest.mark.parametrize(
    ("error", "reason", "answered"),
    [
        (Refused("full", 429, 1.0), "busy", False), (Refused("loading", 503, 1.0), "unavailable", False),
        (Unusable("no"), "invalid", False), (Broken("gone", "engine_error"), "error", True),
        (Broken("late", "timeout"), "error", True), (Broken("newer", "replaced"), "abort", True),
    ],
)  # fmt: skip
def test_an_error_goes_through(error: Exception, reason: str, answered: bool) -> None:
    seen: list[Seen] = []
    with pytest.raises(type(error)):
        asyncio.run(served(Watched(Played([error]), [seen.append]), ASK))
    assert [(one.reason, one.error, one.answered, one.queued) for one in seen] == [(reason, error, answered, None)]


def test_an_answer_that_the_server_ends_at_a_stop_string_has_stopped() -> None:
    """What was on its way comes all the same, and the engine's word."""
    seen: list[Seen] = []
    *_, done = frames = whole(Stats(), [3, 2, 4])
    engine = Played(frames)

    async def request() -> None:
        async with aclosing(Watched(engine, [seen.append]).answer(ASK)) as answer:
            frame, over = await anext(answer), True
            while frame != done:
                frame, over = await answer.asend(over), None

    asyncio.run(request())
    assert [(one.reason, one.tokens, one.done) for one in seen] == [("stop", 9, done)]
    assert engine.over == 1 and engine.closed == 1


def test_one_that_is_closed_before_its_end_is_aborted() -> None:
    seen: list[Seen] = []
    engine = Played(whole(Stats(), [3, 2]))
    assert len(asyncio.run(served(Watched(engine, [seen.append]), ASK, 1))) == 1
    assert [(one.reason, one.tokens, one.done) for one in seen] == [("abort", 3, None)] and engine.closed == 1


@pytest.mark.parametrize("waits", [False, True])
def test_a_client_that_leaves_aborts(waits: bool) -> None:
    """While the engine is waited for, or while what it gave is being sent."""
    seen: list[Seen] = []

    class Endless(Played):
        async def answer(self, ask: Ask) -> AsyncGenerator[Any, bool | None]:
            try:
                yield whole(Stats(), [1, 1])[0]
                await asyncio.Event().wait()
            finally:
                self.closed += 1

    engine = Endless()

    async def scene() -> None:
        sending, held = asyncio.Event(), asyncio.Event()

        async def request() -> None:
            async with aclosing(Watched(engine, [seen.append]).answer(ASK)) as frames:
                async for _ in frames:
                    sending.set()
                    if not waits:
                        await held.wait()

        task = asyncio.create_task(request())
        await sending.wait()
        for _ in range(3):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scene())
    assert [(one.reason, one.tokens) for one in seen] == [("abort", 1)] and engine.closed == 1
