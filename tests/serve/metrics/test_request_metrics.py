"""RequestRecorder: one record per request, however it ends, without an effect on the request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest
from msgspec import structs

from swiftspec.engine import Stats
from swiftspec.params import SamplingParams
from swiftspec.serve.link.engine_client import (
    EngineRequest,
    GenerationFailedError,
    InvalidRequestError,
    RequestRejectedError,
)
from swiftspec.serve.metrics.request_metrics import RequestRecord, RequestRecorder
from tests.support.scripted_engine import (
    ScriptedEngine,
    TickingClock,
    collect_deltas,
    complete_frames,
    scripted_deltas,
)

REQUEST = EngineRequest([1, 2], SamplingParams())


def test_a_complete_answer() -> None:
    frames = complete_frames(Stats(first_token_time=0.25), [3, 2])
    records: list[RequestRecord] = []
    engine = ScriptedEngine(frames)
    deltas = asyncio.run(collect_deltas(engine, RequestRecorder([records.append], TickingClock()), REQUEST))
    assert [delta.content for delta in deltas] == ["aaa", "aa", ""] and engine.closed == 1
    (record,) = records
    (choice,) = record.choices
    assert (choice.num_tokens, record.outcome, choice.done, record.accepted) == (5, "stop", frames[-1], True)
    assert (record.started_at, choice.token_times, record.ended_at, record.queue_time_s) == (1.0, [2.0, 3.0], 4.0, 0.75)


def outcomes(records: list[RequestRecord]) -> list[Any]:
    """Outcome, tokens and last frame of each request of one choice."""
    return [(record.outcome, record.choices[0].num_tokens, record.choices[0].done) for record in records]


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
        asyncio.run(collect_deltas(ScriptedEngine([error]), RequestRecorder([records.append]), REQUEST))
    assert [(record.outcome, record.error, record.accepted, record.queue_time_s) for record in records] == [
        (outcome, error, accepted, None)
    ]


def test_an_answer_without_a_finish_reason_is_an_error() -> None:
    """Whether the engine says that it is done or not."""
    tokens, done = complete_frames(Stats(), [3])
    unfinished = structs.replace(tokens, finish_reason=None)
    for frames in ([unfinished, done], [unfinished]):
        records: list[RequestRecord] = []
        with pytest.raises(GenerationFailedError, match="without a finish reason"):
            asyncio.run(collect_deltas(ScriptedEngine(frames), RequestRecorder([records.append]), REQUEST))
        assert outcomes(records) == [("error", 3, frames[-1] if len(frames) > 1 else None)]


def test_an_answer_ended_at_a_stop_string_has_finish_reason_stop() -> None:
    """Frames in flight still arrive, and the engine's statistics."""
    records: list[RequestRecord] = []
    *rounds, done = complete_frames(Stats(), [3, 2, 4])
    last = structs.replace(rounds[-1], finish_reason="length")
    engine = ScriptedEngine([*rounds[:-1], last, done])
    deltas = asyncio.run(collect_deltas(engine, RequestRecorder([records.append]), REQUEST, stop="aaa"))
    assert sum(delta.end_token - delta.first_token for delta in deltas) == 3
    assert outcomes(records) == [("stop", 9, done)]
    assert engine.num_stops == 1 and engine.closed == 1


def test_an_answer_closed_early_is_aborted() -> None:
    records: list[RequestRecord] = []
    engine = ScriptedEngine(complete_frames(Stats(), [3, 2]))

    async def request() -> None:
        async with aclosing(scripted_deltas(engine, RequestRecorder([records.append]), REQUEST)) as deltas:
            assert (await anext(deltas)).content == "aaa"
            assert not records

    asyncio.run(request())
    assert outcomes(records) == [("abort", 3, None)] and engine.closed == 1


@pytest.mark.parametrize("waits", [False, True])
def test_a_disconnect_aborts_the_request(waits: bool) -> None:
    """While it waits for the engine, or while a frame is being sent."""
    records: list[RequestRecord] = []

    class Endless(ScriptedEngine):
        async def stream_frames(self, *requests: EngineRequest) -> AsyncGenerator[Any, bool | None]:
            try:
                yield 0, complete_frames(Stats(), [1, 1])[0]
                await asyncio.Event().wait()
            finally:
                self.closed += 1

    engine = Endless()

    async def scene() -> None:
        sending, held = asyncio.Event(), asyncio.Event()

        async def request() -> None:
            async with aclosing(scripted_deltas(engine, RequestRecorder([records.append]), REQUEST)) as deltas:
                async for _ in deltas:
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
    assert outcomes(records) == [("abort", 1, None)] and engine.closed == 1


def test_the_choices_of_a_request_are_one_record() -> None:
    first, second = complete_frames(Stats(first_token_time=0.25), [3, 2]), complete_frames(Stats(), [4])
    last = structs.replace(second[0], finish_reason="length")
    pairs = [(1, last), (0, first[0]), (0, first[1]), (1, second[1]), (0, first[2])]
    records: list[RequestRecord] = []
    recorder = RequestRecorder([records.append], TickingClock())
    asyncio.run(collect_deltas(ScriptedEngine(pairs), recorder, REQUEST, REQUEST))
    (record,) = records
    assert [(choice.num_tokens, choice.finish_reason) for choice in record.choices] == [(5, "stop"), (4, "length")]
    assert (record.outcome, record.time_to_first_token_s, record.queue_time_s) == ("length", 1.0, 0.75)
    assert [choice.done for choice in record.choices] == [first[2], second[1]]
