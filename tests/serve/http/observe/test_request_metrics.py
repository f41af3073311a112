"""InstrumentedEngine: one record per request, however it ends, without an effect on the request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest

from swiftspec.engine import Stats
from swiftspec.serve.http.engine_link.engine_client import (
    EngineRequest,
    GenerationFailedError,
    InvalidRequestError,
    RequestRejectedError,
)
from swiftspec.serve.http.observe.request_metrics import InstrumentedEngine, RequestRecord
from tests.support.scripted_engine import INFO, ScriptedEngine, TickingClock, collect_frames, complete_frames

REQUEST = EngineRequest([1, 2], {})


def test_a_complete_answer() -> None:
    frames = complete_frames(Stats(first_token_time=0.25), [3, 2])
    records: list[RequestRecord] = []
    engine = ScriptedEngine(frames)
    instrumented = InstrumentedEngine(engine, [records.append], TickingClock())
    assert asyncio.run(collect_frames(instrumented, REQUEST)) == frames and engine.closed == 1
    (record,) = records
    assert (record.num_tokens, record.outcome, record.done, record.accepted) == (5, "stop", frames[-1], True)
    assert (record.started_at, record.token_times, record.ended_at, record.queue_time_s) == (1.0, [2.0, 3.0], 4.0, 0.75)
    assert (instrumented.state, instrumented.info) == (engine.state, INFO)


@pytest.mark.parametrize(
    ("error", "outcome", "accepted"),
    [
        (RequestRejectedError("full", 429, 1.0), "busy", False),
        (RequestRejectedError("loading", 503, 1.0), "unavailable", False),
        (InvalidRequestError("no"), "invalid", False), (GenerationFailedError("gone", "engine_error"), "error", True),
        (GenerationFailedError("late", "timeout"), "error", True),
        (GenerationFailedError("newer", "replaced"), "abort", True),
    ],
)  # fmt: skip
def test_an_error_is_passed_on(error: Exception, outcome: str, accepted: bool) -> None:
    records: list[RequestRecord] = []
    with pytest.raises(type(error)):
        asyncio.run(collect_frames(InstrumentedEngine(ScriptedEngine([error]), [records.append]), REQUEST))
    assert [(record.outcome, record.error, record.accepted, record.queue_time_s) for record in records] == [
        (outcome, error, accepted, None)
    ]


def test_an_answer_ended_at_a_stop_string_has_finish_reason_stop() -> None:
    """Frames in flight still arrive, and the engine's statistics."""
    records: list[RequestRecord] = []
    *_, done = frames = complete_frames(Stats(), [3, 2, 4])
    engine = ScriptedEngine(frames)

    async def request() -> None:
        async with aclosing(InstrumentedEngine(engine, [records.append]).stream_frames(REQUEST)) as frames:
            frame, over = await anext(frames), True
            while frame != done:
                frame, over = await frames.asend(over), None

    asyncio.run(request())
    assert [(record.outcome, record.num_tokens, record.done) for record in records] == [("stop", 9, done)]
    assert engine.num_stops == 1 and engine.closed == 1


def test_an_answer_closed_early_is_aborted() -> None:
    records: list[RequestRecord] = []
    engine = ScriptedEngine(complete_frames(Stats(), [3, 2]))
    assert len(asyncio.run(collect_frames(InstrumentedEngine(engine, [records.append]), REQUEST, 1))) == 1
    assert [(record.outcome, record.num_tokens, record.done) for record in records] == [
        ("abort", 3, None)
    ] and engine.closed == 1


@pytest.mark.parametrize("waits", [False, True])
def test_a_disconnect_aborts_the_request(waits: bool) -> None:
    """While it waits for the engine, or while a frame is being sent."""
    records: list[RequestRecord] = []

    class Endless(ScriptedEngine):
        async def stream_frames(self, request: EngineRequest) -> AsyncGenerator[Any, bool | None]:
            try:
                yield complete_frames(Stats(), [1, 1])[0]
                await asyncio.Event().wait()
            finally:
                self.closed += 1

    engine = Endless()

    async def scene() -> None:
        sending, held = asyncio.Event(), asyncio.Event()

        async def request() -> None:
            async with aclosing(InstrumentedEngine(engine, [records.append]).stream_frames(REQUEST)) as frames:
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
    assert [(record.outcome, record.num_tokens) for record in records] == [("abort", 1)] and engine.closed == 1
