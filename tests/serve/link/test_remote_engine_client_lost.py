"""RemoteEngineClient while rank 0 dies and restarts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from swiftspec.params import SamplingParams
from swiftspec.serve.errors import to_api_error
from swiftspec.serve.link import frames
from swiftspec.serve.link.engine_client import (
    EngineRequest,
    GenerationFailedError,
    RequestRejectedError,
)
from swiftspec.serve.link.remote_engine_client import RemoteEngineClient
from swiftspec.serve.link.request_queue import LOADING_RETRY_AFTER_S
from tests.support.scripted_rank import READY, Link, Rank0, run_link, start_group, start_request

LOST = frames.EngineLostFrame("rank 1 is gone")
RANKS = [frames.RankState(n, "target", 100 + n, "up", 0) for n in range(2)]


async def started(rank0: Rank0) -> frames.StartFrame:
    start = await rank0.next()
    assert isinstance(start, frames.StartFrame)
    return start


@pytest.mark.parametrize("last_frames", [[], [LOST]], ids=["gone", "Lost"])
def test_a_request_without_output_is_retried_before_all_others(last_frames: list[Any]) -> None:
    async def scene(link: Link) -> None:
        sampling = SamplingParams(temperature=0.5, seed=3)
        first = asyncio.create_task(anext(link.engine.stream_frames(EngineRequest([1], sampling))))
        other = start_request(link.engine, 2)
        before = await started(link.rank0)
        await link.lose_rank0(*last_frames)
        assert (link.engine.state.phase, link.engine.state.running, link.engine.state.waiting) == (
            "recovering",
            0,
            2,
        )
        rank0 = await link.restart_rank0(READY)
        again = await started(rank0)
        assert (again.prompt, again.sampling) == (before.prompt, before.sampling) == ([1], sampling)
        assert again.request != before.request
        rank0.send(
            frames.TokensFrame(before.request, [8], 0), frames.TokensFrame(again.request, [9], 0)
        )  # the former has exceeded its time
        assert await first == (0, frames.TokensFrame(again.request, [9], 0))
        rank0.finish(before.request)  # too late
        rank0.finish(again.request)
        rank0.finish((await started(rank0)).request)
        assert len(await other) == 1

    run_link(scene, READY)


def test_a_request_with_a_grammar_is_not_retried() -> None:
    """A grammar that overflows the stack of rank 0 would end it again."""

    async def scene(link: Link) -> None:
        first = asyncio.create_task(anext(link.engine.stream_frames(EngineRequest([1], SamplingParams(grammar="x")))))
        await started(link.rank0)
        await link.lose_rank0()
        with pytest.raises(GenerationFailedError, match="after 0 tokens"):
            await first
        assert link.engine.state.waiting == 0

    run_link(scene, READY)


def test_unread_heartbeats_do_not_count() -> None:
    """Tokens and loss arrive together, so that the reader of the answer does not run in between."""

    async def scene(link: Link) -> None:
        task = start_request(link.engine, 1)
        start = await started(link.rank0)
        await link.lose_rank0(frames.TokensFrame(start.request, [8], 0), LOST)
        rank0 = await link.restart_rank0(READY)
        again = (await started(rank0)).request
        rank0.finish(again)
        assert [(type(frame), frame.request) for frame in await task] == [(frames.DoneFrame, again)]

    run_link(scene, READY)


@pytest.mark.parametrize(
    ("frames_of", "message"),
    [
        (lambda n: [frames.TokensFrame(n, [5, 6], 0), frames.TokensFrame(n, [7], 0)], "after 3 tokens: rank 1 is gone"),
        (lambda n: [frames.TokensFrame(n, [5], 0)], "after 1 token: rank 1 is gone"),
        (lambda n: [frames.PromptLogprobsFrame(n, [])], "after 0 tokens: rank 1 is gone"),
    ],
)
def test_a_request_with_output_ends_with_its_number_of_tokens(
    frames_of: Callable[[int], list[Any]], message: str
) -> None:
    async def scene(link: Link) -> None:
        answer = link.engine.stream_frames(EngineRequest([1], SamplingParams()))
        first = asyncio.create_task(anext(answer))
        other = start_request(link.engine, 2)
        sent = frames_of((await started(link.rank0)).request)
        link.rank0.send(*sent)
        read = [(await first)[1]]
        await link.lose_rank0(LOST)
        with pytest.raises(GenerationFailedError, match=message) as broken:
            async for _, frame in answer:
                read.append(frame)
        assert broken.value.kind == "engine_error" and read == sent
        rank0 = await link.restart_rank0(READY)
        start = await started(rank0)
        assert start.prompt == [2], "those that waited go on"
        rank0.finish(start.request)
        await other

    run_link(scene, READY)


def test_the_requests_of_one_caller_are_retried_one_by_one() -> None:
    """Those that were complete are not repeated; one that was interrupted ends all of them."""

    async def scene(link: Link) -> None:
        group, interrupted = start_group(link.engine, 0, 1, 2), start_group(link.engine, 3, 4)
        start = await started(link.rank0)
        link.rank0.send(frames.TokensFrame(start.request, [5, 6], 0, None, "stop"))
        link.rank0.finish(start.request)
        assert (await started(link.rank0)).prompt == [1]
        await link.lose_rank0(LOST)
        rank0 = await link.restart_rank0(READY)
        for prompt in (1, 2):
            start = await started(rank0)
            assert start.prompt == [prompt]
            rank0.finish(start.request)
        assert len(await group) == 4
        start = await started(rank0)
        rank0.send(frames.TokensFrame(start.request, [5], 0), frames.LoadingFrame("read"))
        await link.until(lambda: link.engine.state.detail == "read")
        await asyncio.sleep(0)
        await link.lose_rank0(LOST)
        with pytest.raises(GenerationFailedError, match="after 1 token: rank 1 is gone"):
            await interrupted
        await link.restart_rank0(READY)

    run_link(scene, READY)


def test_a_request_is_retried_once() -> None:
    async def scene(link: Link) -> None:
        task = start_request(link.engine, 1)
        await started(link.rank0)
        await link.lose_rank0()
        await started(await link.restart_rank0(READY))
        await link.lose_rank0()
        with pytest.raises(GenerationFailedError, match="after 0 tokens: rank 0 has exited"):
            await task

    run_link(scene, READY)


def test_losing_rank_0_during_loading_does_not_count_as_a_retry() -> None:
    async def scene(link: Link) -> None:
        task = start_request(link.engine, 1)
        await started(link.rank0)
        await link.lose_rank0()
        for _ in range(3):
            await link.restart_rank0(frames.ModelPathFrame("/m"))
            await link.lose_rank0(frames.EngineLostFrame("rank 1 is gone again"))
            assert (link.engine.state.phase, link.engine.state.detail) == ("recovering", "rank 1 is gone again")
        rank0 = await link.restart_rank0(READY)
        rank0.finish((await started(rank0)).request)
        await task

    run_link(scene, READY)


def test_the_queue_accepts_requests_while_rank_0_restarts() -> None:
    async def scene(link: Link) -> None:
        await link.lose_rank0()
        tasks = [start_request(link.engine, n) for n in range(2)]
        await link.until(lambda: link.engine.state.waiting == 2)
        with pytest.raises(RequestRejectedError, match="the queue is full") as refused:
            await start_request(link.engine, 2)
        assert refused.value.status == 429
        rank0 = await link.restart_rank0()  # loading: nothing begins
        assert (link.engine.state.phase, link.engine.state.waiting) == ("recovering", 2)
        rank0.send(frames.EngineInfo("m", None, 200, 50, [1], {}, {}, 2.0))
        for n, task in enumerate(tasks):
            start = await started(rank0)
            assert start.prompt == [n]
            rank0.finish(start.request)
            await task
        assert link.engine.state.phase == "ready"
        assert link.engine.info is not None and link.engine.info.max_model_len == 200

    run_link(scene, READY)


def test_requests_that_wait_too_long_for_rank_0_are_refused() -> None:
    async def scene(link: Link) -> None:
        running = start_request(link.engine, 1)
        await started(link.rank0)
        await link.lose_rank0()
        waiting = start_request(link.engine, 2)
        for task in (running, waiting):
            with pytest.raises(RequestRejectedError, match=r"queue timeout.*restart") as refused:
                await task
            assert refused.value.status == 503 and refused.value.retry_after

    run_link(scene, READY, queue_timeout=0.05)


def test_a_retried_request_has_its_full_time_limit() -> None:
    async def scene(link: Link) -> None:
        task = start_request(link.engine, 1)
        await started(link.rank0)
        await link.lose_rank0()
        rank0 = await link.restart_rank0(READY)
        again = (await started(rank0)).request
        with pytest.raises(GenerationFailedError, match=r"longer than 0\.1 s") as broken:
            await task
        assert broken.value.kind == "timeout"
        assert await rank0.next() == frames.CancelFrame(again)
        rank0.finish(again)
        await link.until(lambda: not link.engine.state.running)

    run_link(scene, READY, request_timeout=0.1)


def test_a_disconnect_while_rank_0_restarts_drops_the_request() -> None:
    async def scene(link: Link) -> None:
        running, waiting, last = (start_request(link.engine, n) for n in range(3))
        await started(link.rank0)
        await link.lose_rank0()
        running.cancel()
        waiting.cancel()
        await asyncio.gather(running, waiting, return_exceptions=True)
        rank0 = await link.restart_rank0(READY)
        start = await started(rank0)
        assert start.prompt == [2]
        rank0.finish(start.request)
        await last

    run_link(scene, READY)


def test_a_cancelled_request_is_not_retried_after_losing_rank_0() -> None:
    async def scene(link: Link) -> None:
        left = start_request(link.engine, 1)
        start = await started(link.rank0)
        left.cancel()
        assert await link.rank0.next() == frames.CancelFrame(start.request)
        await link.lose_rank0()
        assert (link.engine.state.running, link.engine.state.waiting) == (0, 0)
        replaced = start_request(link.engine, 2, key="k")
        newest = start_request(link.engine, 3, key="k")
        with pytest.raises(GenerationFailedError, match="newer"):
            await replaced
        rank0 = await link.restart_rank0(READY)
        start = await started(rank0)
        assert start.prompt == [3]
        rank0.finish(start.request)
        await newest

    run_link(scene, READY)


def test_an_error_of_one_request_does_not_count_as_a_lost_engine() -> None:
    async def scene(link: Link) -> None:
        task, other = start_request(link.engine, 1), start_request(link.engine, 2)
        link.rank0.send(frames.FailedFrame((await started(link.rank0)).request, "no such thing", False))
        with pytest.raises(GenerationFailedError, match=r"^no such thing$"):
            await task
        link.rank0.finish((await started(link.rank0)).request)
        await other
        assert link.engine.state.phase == "ready"

    run_link(scene, READY)


def test_draining_without_rank_0_refuses_all_requests() -> None:
    async def scene(link: Link) -> None:
        running, waiting = start_request(link.engine, 1), start_request(link.engine, 2)
        await started(link.rank0)
        await link.lose_rank0()
        await link.engine.drain()
        link.engine.shut_down_engine()
        for task in (running, waiting, start_request(link.engine, 3)):
            with pytest.raises(RequestRejectedError, match=r"draining|dead"):
                await task
        assert link.engine.state.phase == "dead"

    run_link(scene, READY)


def test_rank_0_is_not_restarted_while_draining() -> None:
    async def scene(link: Link) -> None:
        running = start_request(link.engine, 1)
        await started(link.rank0)
        link.rank0.send(frames.DrainFrame())
        await link.engine.drain_requested.wait()
        with pytest.raises(RequestRejectedError, match="draining"):
            await start_request(link.engine, 2)
        drained = asyncio.create_task(link.engine.drain())
        await link.lose_rank0()
        with pytest.raises(GenerationFailedError, match="after 0 tokens"):
            await running
        await drained
        with pytest.raises(RequestRejectedError, match="dead") as refused:
            await start_request(link.engine, 3)
        assert refused.value.retry_after is None

    run_link(scene, READY)


def test_the_last_reported_ranks_remain_and_rank_0_is_lost_with_its_socket() -> None:
    async def scene(link: Link) -> None:
        engine: RemoteEngineClient = link.engine
        assert engine.state.all_ranks_up and list(engine.state.ranks) == RANKS
        await link.lose_rank0()
        assert [rank.state for rank in engine.state.ranks] == ["lost", "up"] and not engine.state.all_ranks_up
        anew = [frames.RankState(0, "target", 200, "up", 1), frames.RankState(1, "target", 101, "loading", 0)]
        await link.restart_rank0(frames.RankStatesFrame(anew))
        assert list(engine.state.ranks) == anew and not engine.state.all_ranks_up

    run_link(scene, frames.RankStatesFrame(RANKS), READY)


def test_each_rank_0_receives_the_serving_frame() -> None:
    async def scene(link: Link) -> None:
        assert await link.engine.target_folder == "/m"
        link.engine.announce_serving()
        assert await link.rank0.next() == frames.ServingFrame()
        await link.lose_rank0()
        rank0 = await link.restart_rank0(frames.ModelPathFrame("/elsewhere"), READY)
        assert await rank0.next() == frames.ServingFrame()
        assert await link.engine.target_folder == "/m", "the tokenizer is read once"

    run_link(scene, frames.ModelPathFrame("/m"), READY)


def test_the_state_is_loading_until_the_first_ready_frame() -> None:
    async def scene(link: Link) -> None:
        await link.lose_rank0(frames.EngineLostFrame("no memory"))
        with pytest.raises(RequestRejectedError, match=r"being loaded \(no memory") as refused:
            await start_request(link.engine, 1)
        assert refused.value.status == 503
        link.engine.announce_serving()  # without a connection
        rank0 = await link.restart_rank0(READY)
        assert await rank0.next() == frames.ServingFrame()

    run_link(scene)


def test_a_lost_target_worker_rejects_requests_until_it_is_back() -> None:
    """The running request goes on: it may be answered if the worker returns within its timeout."""

    async def scene(link: Link) -> None:
        engine, rank0 = link.engine, link.rank0
        running, waiting = start_request(engine, 1), start_request(engine, 2)
        first = await started(rank0)
        rank0.send(frames.TargetStateFrame("the worker is gone"))
        with pytest.raises(RequestRejectedError, match="unavailable: the worker is gone") as rejected:
            await waiting
        assert (rejected.value.status, rejected.value.retry_after) == (503, LOADING_RETRY_AFTER_S)
        with pytest.raises(RequestRejectedError, match="unavailable"):
            await start_request(engine, 3)
        assert (engine.state.phase, engine.state.running) == ("unavailable", 1)
        rank0.send(frames.FailedFrame(first.request, "no answer", user=False, unavailable=True))
        with pytest.raises(GenerationFailedError, match="no answer") as failed:
            await running
        assert failed.value.kind == "unavailable_error" and to_api_error(failed.value).status == 503
        rank0.send(frames.TargetStateFrame(None))
        await link.until(lambda: engine.state.phase == "ready")
        again = start_request(engine, 4)
        rank0.finish((await started(rank0)).request)
        assert len(await again) == 1

    run_link(scene, READY)


def test_a_restart_of_rank_0_ends_the_loss_of_the_target_worker() -> None:
    async def scene(link: Link) -> None:
        link.rank0.send(frames.TargetStateFrame("the worker is gone"))
        await link.until(lambda: link.engine.state.phase == "unavailable")
        await link.lose_rank0()
        assert link.engine.state.phase == "recovering"
        await link.restart_rank0(READY)
        await link.until(lambda: link.engine.state.phase == "ready")

    run_link(scene, READY)
