"""The queue in front of rank 0, which a script plays here."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest
from msgspec import structs

from swiftspec.serve.http.engine_link import frames
from swiftspec.serve.http.engine_link.engine import Ask, Broken, Refused, Unusable
from swiftspec.serve.http.engine_link.engine_client import RemoteEngine
from tests.support.scripted_rank import READY, Rank0, begin, play


def test_a_request_that_is_ended_still_says_what_it_cost() -> None:
    async def scene(engine: RemoteEngine, rank0: Rank0) -> None:
        chunk = frames.Chunk(1, [7], 0)
        async with aclosing(engine.answer(Ask([1], {}))) as answer:
            first = asyncio.create_task(anext(answer))
            assert isinstance(await rank0.next(), frames.Start)
            rank0.say(chunk)
            assert await first == chunk
            last = asyncio.create_task(answer.asend(True))
            assert await rank0.next() == frames.Cancel(1)
            rank0.end(1)
            assert isinstance(await last, frames.Done)
        other = begin(engine, 2)
        assert isinstance(await rank0.next(), frames.Start), "and no second Cancel before it"
        rank0.end(2)
        await other

    play(scene)


def test_requests_run_one_after_the_other_in_their_order() -> None:
    async def scene(engine: RemoteEngine, rank0: Rank0) -> None:
        tasks = [begin(engine, n) for n in range(3)]
        for n in range(3):
            start = await rank0.next()
            assert isinstance(start, frames.Start) and start.prompt == [n]
            assert (engine.state.running, engine.state.waiting) == (1, 2 - n)
            chunk = frames.Chunk(start.request, [n], 0, None, "stop")
            rank0.say(chunk)
            rank0.end(start.request)
            assert (await tasks[n])[0] == chunk
        assert (engine.state.running, engine.state.waiting) == (0, 0)

    play(scene)


def test_a_full_queue_refuses_and_a_long_wait_does() -> None:
    async def scene(engine: RemoteEngine, rank0: Rank0) -> None:
        tasks = [begin(engine, n) for n in range(3)]
        await rank0.next()
        with pytest.raises(Refused) as refused:
            await begin(engine, 3)
        assert refused.value.status == 429 and refused.value.retry_after
        for task in tasks[1:]:
            with pytest.raises(Refused, match="--queue-timeout"):
                await task
        rank0.end(1)
        await tasks[0]

    play(scene, queue_timeout=0.1)


def test_a_client_that_leaves_cancels_and_the_next_begins_only_then() -> None:
    async def scene(engine: RemoteEngine, rank0: Rank0) -> None:
        first, second, third = (begin(engine, n) for n in range(3))
        start = await rank0.next()
        assert isinstance(start, frames.Start)
        second.cancel()  # in the queue
        first.cancel()
        assert await rank0.next() == frames.Cancel(start.request)
        rank0.say(frames.Chunk(start.request, [1], 0))  # under way when it was cancelled
        assert engine.state.running == 1
        rank0.end(start.request)
        later = await rank0.next()
        assert isinstance(later, frames.Start) and later.prompt == [2]
        rank0.end(later.request)
        assert await third == [frames.Done(later.request, {}, {}, {})]

    play(scene)


def test_a_client_that_leaves_as_its_turn_comes_holds_nobody_up() -> None:
    async def scene(engine: RemoteEngine, rank0: Rank0) -> None:
        first, second = begin(engine, 0), begin(engine, 1)
        await rank0.next()
        rank0.end(1)
        await first  # the second has its turn now, and has not run since
        second.cancel()
        third = begin(engine, 2)
        start = await rank0.next()
        assert isinstance(start, frames.Start)
        if start.prompt == [1]:  # it had
            assert await rank0.next() == frames.Cancel(start.request)
            rank0.end(start.request)
            start = await rank0.next()
        assert isinstance(start, frames.Start) and start.prompt == [2]
        rank0.end(start.request)
        await third

    play(scene)


def test_as_many_run_as_rank_0_takes_at_once() -> None:
    """The others wait; one that ends or leaves makes room for the next and disturbs nobody."""

    async def scene(engine: RemoteEngine, rank0: Rank0) -> None:
        rank0.say(structs.replace(READY, at_once=2))
        while engine.state.phase != "ready":
            await asyncio.sleep(0)
        tasks = [begin(engine, n) for n in range(4)]
        first, second = await rank0.next(), await rank0.next()
        assert (first, second) == (frames.Start(1, [0], {}), frames.Start(2, [1], {}))
        assert (engine.state.running, engine.state.waiting) == (2, 2)
        with pytest.raises(Refused, match="full"):
            await begin(engine, 4)
        rank0.say(frames.Chunk(2, [7], 0), frames.Chunk(1, [5], 0))
        tasks[0].cancel()
        assert await rank0.next() == frames.Cancel(1)
        assert (engine.state.running, engine.state.waiting) == (2, 2), "its place is free once rank 0 says so"
        rank0.end(1)
        assert await rank0.next() == frames.Start(3, [2], {})
        rank0.say(frames.Failed(3, "no", False), frames.Chunk(2, [8], 0, None, "stop"))
        assert await rank0.next() == frames.Start(4, [3], {})
        rank0.end(4)
        rank0.end(2)
        assert [frame.token_ids for frame in await tasks[1] if isinstance(frame, frames.Chunk)] == [[7], [8]]
        with pytest.raises(Broken, match="no"):
            await tasks[2]
        assert isinstance((await tasks[3])[-1], frames.Done)

    play(scene, ready=False)


def test_the_newest_request_of_a_key_replaces_the_others() -> None:
    async def scene(engine: RemoteEngine, rank0: Rank0) -> None:
        first, other = begin(engine, 0, key="a"), begin(engine, 1, key="b")
        second = begin(engine, 2, key="a")
        newest = begin(engine, 3, key="a")
        for task in (first, second):
            with pytest.raises(Broken, match="newer") as broken:
                await task
            assert broken.value.kind == "replaced"
        assert await rank0.next() == frames.Start(1, [0], {})
        assert await rank0.next() == frames.Cancel(1)
        rank0.end(1)
        for task, prompt in ((other, [1]), (newest, [3])):
            start = await rank0.next()
            assert isinstance(start, frames.Start) and start.prompt == prompt
            rank0.end(start.request)
            await task

    play(scene)


def test_errors_of_a_request_end_that_request_alone() -> None:
    async def scene(engine: RemoteEngine, rank0: Rank0) -> None:
        for user, kind in ((True, Unusable), (False, Broken)):
            task = begin(engine, 0)
            start = await rank0.next()
            assert isinstance(start, frames.Start)
            rank0.say(frames.Failed(start.request, "no", user))
            with pytest.raises(kind, match="no"):
                await task

    play(scene)


def test_a_request_has_its_time() -> None:
    async def scene(engine: RemoteEngine, rank0: Rank0) -> None:
        task = begin(engine, 0)
        await rank0.next()
        with pytest.raises(Broken, match=r"longer than 0\.1 s"):
            await task
        assert await rank0.next() == frames.Cancel(1)
        rank0.end(1)

    play(scene, request_timeout=0.1)


def test_while_loading_and_draining_nobody_is_served() -> None:
    async def scene(engine: RemoteEngine, rank0: Rank0) -> None:
        rank0.say(frames.Loading("target weights 1 of 2 GB"), frames.Found("/m"))
        assert await engine.found == "/m"
        with pytest.raises(Refused, match="1 of 2 GB") as refused:
            await begin(engine, 0)
        assert refused.value.status == 503
        rank0.say(READY)
        while engine.state.phase != "ready":
            await asyncio.sleep(0)
        running, waiting = begin(engine, 1), begin(engine, 2)
        start = await rank0.next()
        assert isinstance(start, frames.Start)
        rank0.say(frames.Drain())
        await engine.to_drain.wait()
        drained = asyncio.create_task(engine.drained())
        with pytest.raises(Refused, match="draining"):
            await waiting
        with pytest.raises(Refused, match="draining"):
            await begin(engine, 3)
        rank0.end(start.request)
        await running
        await drained

    play(scene, ready=False)


def test_what_runs_longer_than_draining_may_take_is_ended() -> None:
    async def scene(engine: RemoteEngine, rank0: Rank0) -> None:
        running = begin(engine, 1)
        await rank0.next()
        await engine.drained()
        with pytest.raises(Broken, match="stopped"):
            await running
        engine.leave()
        assert await rank0.next() == frames.Cancel(1)
        assert await rank0.next() == frames.Leave()

    play(scene, drain_timeout=0.1)
