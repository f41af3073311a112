"""The queue while rank 0 dies and comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from swiftspec.serve.http.engine_link import frames
from swiftspec.serve.http.engine_link.engine import Ask, Broken, Refused
from swiftspec.serve.http.engine_link.engine_client import RemoteEngine
from tests.support.scripted_rank import READY, Rank0, Stage, act, begin

LOST = frames.Lost("rank 1 is gone")
RANKS = [frames.RankState(n, "target", 100 + n, "up", 0) for n in range(2)]


async def started(rank0: Rank0) -> frames.Start:
    start = await rank0.next()
    assert isinstance(start, frames.Start)
    return start


@pytest.mark.parametrize("said", [[], [LOST]], ids=["gone", "Lost"])
def test_a_request_that_has_shown_nothing_is_tried_again_before_all_others(said: list[Any]) -> None:
    async def scene(stage: Stage) -> None:
        sampling = {"grammar": "x", "seed": 3}
        first = asyncio.create_task(anext(stage.engine.answer(Ask([1], sampling))))
        other = begin(stage.engine, 2)
        before = await started(stage.rank0)
        await stage.lose(*said)
        assert (stage.engine.state.phase, stage.engine.state.running, stage.engine.state.waiting) == (
            "recovering",
            0,
            2,
        )
        rank0 = await stage.anew(READY)
        again = await started(rank0)
        assert (again.prompt, again.sampling) == (before.prompt, before.sampling) == ([1], sampling)
        assert again.request != before.request
        rank0.say(frames.Chunk(before.request, [8], 0), frames.Chunk(again.request, [9], 0))  # the former is too late
        assert await first == frames.Chunk(again.request, [9], 0)
        rank0.end(before.request)  # too late
        rank0.end(again.request)
        rank0.end((await started(rank0)).request)
        assert len(await other) == 1

    act(scene, READY)


def test_what_was_said_and_not_read_yet_does_not_count() -> None:
    """Chunk and loss come at once: whoever reads the answer has had no turn between them."""

    async def scene(stage: Stage) -> None:
        task = begin(stage.engine, 1)
        start = await started(stage.rank0)
        await stage.lose(frames.Chunk(start.request, [8], 0), LOST)
        rank0 = await stage.anew(READY)
        again = (await started(rank0)).request
        rank0.end(again)
        assert await task == [frames.Done(again, {}, {}, {})]

    act(scene, READY)


@pytest.mark.parametrize(
    ("shown", "told"),
    [
        (lambda n: [frames.Chunk(n, [5, 6], 0), frames.Chunk(n, [7], 0)], "after 3 tokens: rank 1 is gone"),
        (lambda n: [frames.Chunk(n, [5], 0)], "after 1 token: rank 1 is gone"),
        (lambda n: [frames.Prompt(n, [])], "after 0 tokens: rank 1 is gone"),
    ],
)
def test_one_that_has_shown_something_ends_with_how_far_it_came(shown: Callable[[int], list[Any]], told: str) -> None:
    async def scene(stage: Stage) -> None:
        answer = stage.engine.answer(Ask([1], {}))
        first = asyncio.create_task(anext(answer))
        other = begin(stage.engine, 2)
        said = shown((await started(stage.rank0)).request)
        stage.rank0.say(*said)
        read = [await first]
        await stage.lose(LOST)
        with pytest.raises(Broken, match=told) as broken:
            async for frame in answer:
                read.append(frame)
        assert broken.value.kind == "engine_error" and read == said
        rank0 = await stage.anew(READY)
        start = await started(rank0)
        assert start.prompt == [2], "those that waited go on"
        rank0.end(start.request)
        await other

    act(scene, READY)


def test_it_is_tried_again_once() -> None:
    async def scene(stage: Stage) -> None:
        task = begin(stage.engine, 1)
        await started(stage.rank0)
        await stage.lose()
        await started(await stage.anew(READY))
        await stage.lose()
        with pytest.raises(Broken, match="after 0 tokens: rank 0 is gone"):
            await task

    act(scene, READY)


def test_a_rank_0_that_goes_while_it_loads_costs_no_try() -> None:
    async def scene(stage: Stage) -> None:
        task = begin(stage.engine, 1)
        await started(stage.rank0)
        await stage.lose()
        for _ in range(3):
            await stage.anew(frames.Found("/m"))
            await stage.lose(frames.Lost("rank 1 is gone again"))
            assert (stage.engine.state.phase, stage.engine.state.step) == ("recovering", "rank 1 is gone again")
        rank0 = await stage.anew(READY)
        rank0.end((await started(rank0)).request)
        await task

    act(scene, READY)


def test_the_queue_takes_requests_while_rank_0_comes_back() -> None:
    async def scene(stage: Stage) -> None:
        await stage.lose()
        tasks = [begin(stage.engine, n) for n in range(2)]
        await stage.until(lambda: stage.engine.state.waiting == 2)
        with pytest.raises(Refused, match="the queue is full") as refused:
            await begin(stage.engine, 2)
        assert refused.value.status == 429
        rank0 = await stage.anew()  # loading: nothing begins
        assert (stage.engine.state.phase, stage.engine.state.waiting) == ("recovering", 2)
        rank0.say(frames.Ready("m", None, 200, 50, [1], {}, {}, 2.0))
        for n, task in enumerate(tasks):
            start = await started(rank0)
            assert start.prompt == [n]
            rank0.end(start.request)
            await task
        assert stage.engine.state.phase == "ready"
        assert stage.engine.about is not None and stage.engine.about.max_model_len == 200

    act(scene, READY)


def test_those_that_wait_too_long_for_rank_0_are_refused() -> None:
    async def scene(stage: Stage) -> None:
        running = begin(stage.engine, 1)
        await started(stage.rank0)
        await stage.lose()
        waiting = begin(stage.engine, 2)
        for task in (running, waiting):
            with pytest.raises(Refused, match=r"--queue-timeout.*come back") as refused:
                await task
            assert refused.value.status == 503 and refused.value.retry_after

    act(scene, READY, queue_timeout=0.05)


def test_one_that_is_tried_again_has_its_time_anew() -> None:
    async def scene(stage: Stage) -> None:
        task = begin(stage.engine, 1)
        await started(stage.rank0)
        await stage.lose()
        rank0 = await stage.anew(READY)
        again = (await started(rank0)).request
        with pytest.raises(Broken, match=r"longer than 0\.1 s") as broken:
            await task
        assert broken.value.kind == "timeout"
        assert await rank0.next() == frames.Cancel(again)
        rank0.end(again)
        await stage.until(lambda: not stage.engine.state.running)

    act(scene, READY, request_timeout=0.1)


def test_a_client_that_leaves_while_rank_0_comes_back_is_forgotten() -> None:
    async def scene(stage: Stage) -> None:
        running, waiting, last = (begin(stage.engine, n) for n in range(3))
        await started(stage.rank0)
        await stage.lose()
        running.cancel()
        waiting.cancel()
        await asyncio.gather(running, waiting, return_exceptions=True)
        rank0 = await stage.anew(READY)
        start = await started(rank0)
        assert start.prompt == [2]
        rank0.end(start.request)
        await last

    act(scene, READY)


def test_one_that_was_cancelled_as_rank_0_went_is_not_tried_again() -> None:
    async def scene(stage: Stage) -> None:
        left = begin(stage.engine, 1)
        start = await started(stage.rank0)
        left.cancel()
        assert await stage.rank0.next() == frames.Cancel(start.request)
        await stage.lose()
        assert (stage.engine.state.running, stage.engine.state.waiting) == (0, 0)
        replaced = begin(stage.engine, 2, key="k")
        newest = begin(stage.engine, 3, key="k")
        with pytest.raises(Broken, match="newer"):
            await replaced
        rank0 = await stage.anew(READY)
        start = await started(rank0)
        assert start.prompt == [3]
        rank0.end(start.request)
        await newest

    act(scene, READY)


def test_an_error_of_one_request_is_no_loss() -> None:
    async def scene(stage: Stage) -> None:
        task, other = begin(stage.engine, 1), begin(stage.engine, 2)
        stage.rank0.say(frames.Failed((await started(stage.rank0)).request, "no such thing", False))
        with pytest.raises(Broken, match=r"^no such thing$"):
            await task
        stage.rank0.end((await started(stage.rank0)).request)
        await other
        assert stage.engine.state.phase == "ready"

    act(scene, READY)


def test_draining_while_rank_0_is_gone_refuses_all() -> None:
    async def scene(stage: Stage) -> None:
        running, waiting = begin(stage.engine, 1), begin(stage.engine, 2)
        await started(stage.rank0)
        await stage.lose()
        await stage.engine.drained()
        stage.engine.leave()
        for task in (running, waiting, begin(stage.engine, 3)):
            with pytest.raises(Refused, match=r"draining|dead"):
                await task
        assert stage.engine.state.phase == "dead"

    act(scene, READY)


def test_a_rank_0_that_goes_while_it_drains_does_not_come_back() -> None:
    async def scene(stage: Stage) -> None:
        running = begin(stage.engine, 1)
        await started(stage.rank0)
        stage.rank0.say(frames.Drain())
        await stage.engine.to_drain.wait()
        with pytest.raises(Refused, match="draining"):
            await begin(stage.engine, 2)
        drained = asyncio.create_task(stage.engine.drained())
        await stage.lose()
        with pytest.raises(Broken, match="after 0 tokens"):
            await running
        await drained
        with pytest.raises(Refused, match="dead") as refused:
            await begin(stage.engine, 3)
        assert refused.value.retry_after is None

    act(scene, READY)


def test_ranks_are_those_told_last_and_rank_0_is_lost_with_its_wire() -> None:
    async def scene(stage: Stage) -> None:
        engine: RemoteEngine = stage.engine
        assert engine.state.whole and list(engine.state.ranks) == RANKS
        await stage.lose()
        assert [rank.state for rank in engine.state.ranks] == ["lost", "up"] and not engine.state.whole
        anew = [frames.RankState(0, "target", 200, "up", 1), frames.RankState(1, "target", 101, "loading", 0)]
        await stage.anew(frames.Ranks(anew))
        assert list(engine.state.ranks) == anew and not engine.state.whole

    act(scene, frames.Ranks(RANKS), READY)


def test_each_rank_0_hears_that_clients_may_come() -> None:
    async def scene(stage: Stage) -> None:
        assert await stage.engine.found == "/m"
        stage.engine.serving()
        assert await stage.rank0.next() == frames.Serving()
        await stage.lose()
        rank0 = await stage.anew(frames.Found("/elsewhere"), READY)
        assert await rank0.next() == frames.Serving()
        assert await stage.engine.found == "/m", "the tokenizer is read once"

    act(scene, frames.Found("/m"), READY)


def test_before_the_first_ready_it_loads_however_often_rank_0_goes() -> None:
    async def scene(stage: Stage) -> None:
        await stage.lose(frames.Lost("no memory"))
        with pytest.raises(Refused, match=r"being loaded \(no memory") as refused:
            await begin(stage.engine, 1)
        assert refused.value.status == 503
        stage.engine.serving()  # to nobody
        rank0 = await stage.anew(READY)
        assert await rank0.next() == frames.Serving()

    act(scene)
