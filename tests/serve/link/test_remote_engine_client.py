"""RemoteEngineClient: the queue in front of a scripted rank 0."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest
from msgspec import structs

from swiftspec.params import SamplingParams
from swiftspec.serve.link import frames
from swiftspec.serve.link.engine_client import (
    EngineRequest,
    GenerationFailedError,
    InvalidRequestError,
    RequestRejectedError,
)
from swiftspec.serve.link.remote_engine_client import RemoteEngineClient
from tests.support.scripted_rank import READY, Rank0, run_with_rank0, start_group, start_request


def test_a_cancelled_request_reports_its_cost() -> None:
    async def scene(engine: RemoteEngineClient, rank0: Rank0) -> None:
        chunk = frames.TokensFrame(1, [7], 0)
        async with aclosing(engine.stream_frames(EngineRequest([1], SamplingParams()))) as answer:
            first = asyncio.create_task(anext(answer))
            assert isinstance(await rank0.next(), frames.StartFrame)
            rank0.send(chunk)
            assert await first == (0, chunk)
            last = asyncio.create_task(answer.asend(True))
            assert await rank0.next() == frames.CancelFrame(1)
            rank0.finish(1)
            _, done = await last
            assert isinstance(done, frames.DoneFrame) and done.request == 1
        other = start_request(engine, 2)
        assert isinstance(await rank0.next(), frames.StartFrame), "and no second Cancel before it"
        rank0.finish(2)
        await other

    run_with_rank0(scene)


def test_requests_run_one_after_the_other_in_their_order() -> None:
    async def scene(engine: RemoteEngineClient, rank0: Rank0) -> None:
        tasks = [start_request(engine, n) for n in range(3)]
        for n in range(3):
            start = await rank0.next()
            assert isinstance(start, frames.StartFrame) and start.prompt == [n]
            assert (engine.state.running, engine.state.waiting) == (1, 2 - n)
            chunk = frames.TokensFrame(start.request, [n], 0, None, "stop")
            rank0.send(chunk)
            rank0.finish(start.request)
            first, done = await tasks[n]
            assert first == chunk and isinstance(done, frames.DoneFrame)
            assert done.metrics["queue_time_ms"] >= 0
        assert (engine.state.running, engine.state.waiting) == (0, 0)

    run_with_rank0(scene)


def test_a_full_queue_and_a_long_wait_refuse_requests() -> None:
    async def scene(engine: RemoteEngineClient, rank0: Rank0) -> None:
        tasks = [start_request(engine, n) for n in range(3)]
        await rank0.next()
        with pytest.raises(RequestRejectedError) as refused:
            await start_request(engine, 3)
        assert refused.value.status == 429 and refused.value.retry_after
        for task in tasks[1:]:
            with pytest.raises(RequestRejectedError, match="queue timeout"):
                await task
        rank0.finish(1)
        await tasks[0]

    run_with_rank0(scene, queue_timeout=0.1)


def test_a_disconnect_cancels_and_the_next_request_starts_afterwards() -> None:
    async def scene(engine: RemoteEngineClient, rank0: Rank0) -> None:
        first, second, third = (start_request(engine, n) for n in range(3))
        start = await rank0.next()
        assert isinstance(start, frames.StartFrame)
        second.cancel()  # in the queue
        first.cancel()
        assert await rank0.next() == frames.CancelFrame(start.request)
        rank0.send(frames.TokensFrame(start.request, [1], 0))  # running when it was cancelled
        assert engine.state.running == 1
        rank0.finish(start.request)
        later = await rank0.next()
        assert isinstance(later, frames.StartFrame) and later.prompt == [2]
        rank0.finish(later.request)
        assert [type(frame) for frame in await third] == [frames.DoneFrame]

    run_with_rank0(scene)


def test_a_client_that_disconnects_when_its_request_starts_delays_no_other() -> None:
    async def scene(engine: RemoteEngineClient, rank0: Rank0) -> None:
        first, second = start_request(engine, 0), start_request(engine, 1)
        await rank0.next()
        rank0.finish(1)
        await first  # the second is at the head of the queue and has not run
        second.cancel()
        third = start_request(engine, 2)
        start = await rank0.next()
        assert isinstance(start, frames.StartFrame)
        if start.prompt == [1]:  # it had run
            assert await rank0.next() == frames.CancelFrame(start.request)
            rank0.finish(start.request)
            start = await rank0.next()
        assert isinstance(start, frames.StartFrame) and start.prompt == [2]
        rank0.finish(start.request)
        await third

    run_with_rank0(scene)


def test_as_many_requests_run_as_rank_0_supports_concurrently() -> None:
    """The others wait; one that ends or is cancelled makes room for the next and does not affect the others."""

    async def scene(engine: RemoteEngineClient, rank0: Rank0) -> None:
        rank0.send(structs.replace(READY, max_num_seqs=2))
        while engine.state.phase != "ready":
            await asyncio.sleep(0)
        tasks = [start_request(engine, n) for n in range(4)]
        first, second = await rank0.next(), await rank0.next()
        assert (first, second) == (
            frames.StartFrame(1, [0], SamplingParams()),
            frames.StartFrame(2, [1], SamplingParams()),
        )
        assert (engine.state.running, engine.state.waiting) == (2, 2)
        with pytest.raises(RequestRejectedError, match="full"):
            await start_request(engine, 4)
        rank0.send(frames.TokensFrame(2, [7], 0), frames.TokensFrame(1, [5], 0))
        tasks[0].cancel()
        assert await rank0.next() == frames.CancelFrame(1)
        assert (engine.state.running, engine.state.waiting) == (2, 2), (
            "its place is free after rank 0 confirms the cancel"
        )
        rank0.finish(1)
        assert await rank0.next() == frames.StartFrame(3, [2], SamplingParams())
        rank0.send(frames.FailedFrame(3, "no", False), frames.TokensFrame(2, [8], 0, None, "stop"))
        assert await rank0.next() == frames.StartFrame(4, [3], SamplingParams())
        rank0.finish(4)
        rank0.finish(2)
        assert [frame.token_ids for frame in await tasks[1] if isinstance(frame, frames.TokensFrame)] == [[7], [8]]
        with pytest.raises(GenerationFailedError, match="no"):
            await tasks[2]
        assert isinstance((await tasks[3])[-1], frames.DoneFrame)

    run_with_rank0(scene, ready=False)


def test_the_newest_request_of_a_key_replaces_the_earlier_ones() -> None:
    async def scene(engine: RemoteEngineClient, rank0: Rank0) -> None:
        first, other = start_request(engine, 0, key="a"), start_request(engine, 1, key="b")
        second = start_request(engine, 2, key="a")
        newest = start_request(engine, 3, key="a")
        for task in (first, second):
            with pytest.raises(GenerationFailedError, match="newer") as broken:
                await task
            assert broken.value.kind == "replaced"
        assert await rank0.next() == frames.StartFrame(1, [0], SamplingParams())
        assert await rank0.next() == frames.CancelFrame(1)
        rank0.finish(1)
        for task, prompt in ((other, [1]), (newest, [3])):
            start = await rank0.next()
            assert isinstance(start, frames.StartFrame) and start.prompt == prompt
            rank0.finish(start.request)
            await task

    run_with_rank0(scene)


def test_errors_of_a_request_end_only_that_request() -> None:
    async def scene(engine: RemoteEngineClient, rank0: Rank0) -> None:
        for user, kind in ((True, InvalidRequestError), (False, GenerationFailedError)):
            task = start_request(engine, 0)
            start = await rank0.next()
            assert isinstance(start, frames.StartFrame)
            rank0.send(frames.FailedFrame(start.request, "no", user))
            with pytest.raises(kind, match="no"):
                await task

    run_with_rank0(scene)


def test_a_request_has_a_time_limit() -> None:
    async def scene(engine: RemoteEngineClient, rank0: Rank0) -> None:
        task = start_request(engine, 0)
        await rank0.next()
        with pytest.raises(GenerationFailedError, match=r"longer than 0\.1 s"):
            await task
        assert await rank0.next() == frames.CancelFrame(1)
        rank0.finish(1)

    run_with_rank0(scene, request_timeout=0.1)


async def started(rank0: Rank0) -> frames.StartFrame:
    start = await rank0.next()
    assert isinstance(start, frames.StartFrame)
    return start


def test_requests_of_one_caller_count_as_one_in_the_queue() -> None:
    """They are admitted together, and run before those of later callers."""

    async def scene(engine: RemoteEngineClient, rank0: Rank0) -> None:
        running, group, other = start_group(engine, 0, 1), start_group(engine, 2, 3, 4, 5), start_request(engine, 6)
        first = await started(rank0)
        assert (engine.state.running, engine.state.waiting) == (1, 6)
        with pytest.raises(RequestRejectedError, match=r"the queue is full \(2 requests wait\)"):
            await start_group(engine, 7, 8)
        rank0.finish(first.request)
        for prompt in range(1, 7):
            start = await started(rank0)
            assert start.prompt == [prompt]
            rank0.send(frames.TokensFrame(start.request, [prompt], 0, None, "stop"))
            rank0.finish(start.request)
        assert len(await running) == 3 and len(await group) == 8 and len(await other) == 2

    run_with_rank0(scene)


def test_frames_of_one_caller_have_the_index_of_their_request() -> None:
    async def scene(engine: RemoteEngineClient, rank0: Rank0) -> None:
        rank0.send(structs.replace(READY, max_num_seqs=2))
        while engine.state.phase != "ready":
            await asyncio.sleep(0)
        async with aclosing(engine.stream_frames(*(EngineRequest([n], SamplingParams()) for n in range(3)))) as answer:
            first = asyncio.create_task(anext(answer))
            assert [(await started(rank0)).prompt for _ in range(2)] == [[0], [1]]
            rank0.send(frames.TokensFrame(2, [7], 0), frames.TokensFrame(1, [5], 0))
            assert await first == (1, frames.TokensFrame(2, [7], 0))
            second = asyncio.create_task(answer.asend(True))
            assert await rank0.next() == frames.CancelFrame(2), "only this request ends early"
            assert await second == (0, frames.TokensFrame(1, [5], 0))
            rank0.finish(2)
            index, done = await anext(answer)
            assert index == 1 and isinstance(done, frames.DoneFrame) and done.request == 2
            assert (await started(rank0)).prompt == [2]
        assert await rank0.next() == frames.CancelFrame(1) and await rank0.next() == frames.CancelFrame(3)
        rank0.finish(1)
        rank0.finish(3)

    run_with_rank0(scene, ready=False)


def test_the_time_limits_of_one_caller_cover_all_its_requests() -> None:
    """The queue timeout ends with the start of the first one."""

    async def scene(engine: RemoteEngineClient, rank0: Rank0) -> None:
        group, other = start_group(engine, 0, 1), start_request(engine, 2)
        start = await started(rank0)
        with pytest.raises(RequestRejectedError, match="queue timeout"):
            await other
        rank0.finish(start.request)
        start = await started(rank0)
        with pytest.raises(GenerationFailedError, match=r"longer than 0\.2 s"):
            await group
        assert await rank0.next() == frames.CancelFrame(start.request)
        rank0.finish(start.request)

    run_with_rank0(scene, queue_timeout=0.05, request_timeout=0.2)


def test_an_error_of_one_request_ends_those_of_its_caller() -> None:
    async def scene(engine: RemoteEngineClient, rank0: Rank0) -> None:
        for user, kind in ((True, InvalidRequestError), (False, GenerationFailedError)):
            group, other = start_group(engine, 0, 1, 2), start_request(engine, 3)
            rank0.send(frames.FailedFrame((await started(rank0)).request, "no", user))
            start = await started(rank0)
            assert start.prompt == [3], "the others do not start"
            with pytest.raises(kind, match="no"):
                await group
            rank0.finish(start.request)
            await other

    run_with_rank0(scene)


def test_the_newest_caller_of_a_key_replaces_all_requests_of_the_earlier_one() -> None:
    async def scene(engine: RemoteEngineClient, rank0: Rank0) -> None:
        older, newest = start_group(engine, 0, 1, key="a"), start_group(engine, 2, 3, key="a")
        with pytest.raises(GenerationFailedError, match="newer"):
            await older
        start = await started(rank0)
        assert await rank0.next() == frames.CancelFrame(start.request)
        rank0.finish(start.request)
        for prompt in (2, 3):
            start = await started(rank0)
            assert start.prompt == [prompt]
            rank0.finish(start.request)
        assert len(await newest) == 2

    run_with_rank0(scene)


def test_a_drain_completes_all_requests_of_a_caller_that_has_started() -> None:
    async def scene(engine: RemoteEngineClient, rank0: Rank0) -> None:
        running, waiting = start_group(engine, 0, 1), start_group(engine, 2, 3)
        start = await started(rank0)
        drained = asyncio.create_task(engine.drain())
        with pytest.raises(RequestRejectedError, match="draining"):
            await waiting
        rank0.finish(start.request)
        start = await started(rank0)
        assert start.prompt == [1] and not drained.done()
        rank0.finish(start.request)
        assert len(await running) == 2
        await drained

    run_with_rank0(scene)


def test_requests_are_refused_while_loading_and_draining() -> None:
    async def scene(engine: RemoteEngineClient, rank0: Rank0) -> None:
        rank0.send(frames.LoadingFrame("target weights 1 of 2 GB"), frames.ModelPathFrame("/m"))
        assert await engine.target_folder == "/m"
        with pytest.raises(RequestRejectedError, match="1 of 2 GB") as refused:
            await start_request(engine, 0)
        assert refused.value.status == 503
        rank0.send(READY)
        while engine.state.phase != "ready":
            await asyncio.sleep(0)
        running, waiting = start_request(engine, 1), start_request(engine, 2)
        start = await rank0.next()
        assert isinstance(start, frames.StartFrame)
        rank0.send(frames.DrainFrame())
        await engine.drain_requested.wait()
        drained = asyncio.create_task(engine.drain())
        with pytest.raises(RequestRejectedError, match="draining"):
            await waiting
        with pytest.raises(RequestRejectedError, match="draining"):
            await start_request(engine, 3)
        rank0.finish(start.request)
        await running
        await drained

    run_with_rank0(scene, ready=False)


def test_requests_beyond_the_drain_timeout_are_ended() -> None:
    async def scene(engine: RemoteEngineClient, rank0: Rank0) -> None:
        running = start_request(engine, 1)
        await rank0.next()
        await engine.drain()
        with pytest.raises(GenerationFailedError, match="stopped"):
            await running
        engine.shut_down_engine()
        assert await rank0.next() == frames.CancelFrame(1)
        assert await rank0.next() == frames.ShutdownFrame()

    run_with_rank0(scene, drain_timeout=0.1)
