"""AsyncEngine: requests of one or several event loops on one LLM."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from collections.abc import Awaitable, Callable, Generator
from contextlib import aclosing, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swiftspec import LLM, AsyncEngine, SamplingParams, TextChunk
from swiftspec.engine import Completion, Stats
from swiftspec.errors import UserError
from swiftspec.serve.link.engine_client import (
    EngineRequest,
    GenerationFailedError,
    InvalidRequestError,
    RequestRejectedError,
)
from swiftspec.serve.link.frames import DoneFrame, TokensFrame
from tests.support.toy_pair import make_pair

Options = dict[str, Any]
TREE: Options = {"draft_steps": 2, "verify_batch": 8, "graft_suffix": False, "self_switch": False}
TREES: Options = {**TREE, "max_num_seqs": 2, "adapt": False}
PARTICLES: Options = {"mode": "smc", "particles": 2, "smc_draft_tokens": 2, "smc_groups": 2}
LONG = SamplingParams(temperature=0.8, seed=1, max_tokens=30, ignore_eos=True)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_pair(tmp_path_factory.mktemp("pair"))


def load(pair: tuple[Path, Path], options: Options = TREE) -> LLM:
    return LLM(*pair, max_model_len=96, dtype="float64", **options)


class Gate:
    """Holds the decoding thread of an LLM before it delivers a chunk. `num_held`: number of chunks that were
    held. `error`: raised on the decoding thread when it continues."""

    def __init__(self, llm: LLM) -> None:
        self.num_held = 0
        self.error: Exception | None = None
        self._permits, self._run_batch = threading.Semaphore(0), llm.llm_engine.run_batch
        llm.llm_engine.run_batch = self._held_batch  # type: ignore[method-assign]

    def _held_batch(self, *arguments: Any) -> Generator[Any]:
        with closing(self._run_batch(*arguments)) as chunks:
            for chunk in chunks:
                self.num_held += 1
                assert self._permits.acquire(timeout=60)
                if self.error is not None:
                    raise self.error
                yield chunk

    def pass_chunks(self, count: int = 1_000_000) -> None:
        self._permits.release(count)

    async def until_held(self, count: int = 1) -> None:
        await until(lambda: self.num_held == count)


def run(llm: LLM, scene: Callable[[AsyncEngine], Awaitable[None]], **options: Any) -> None:
    """Runs a scene with an engine, and checks that the engine ends without requests."""

    async def main() -> None:
        async with AsyncEngine(llm, **options) as engine:
            await asyncio.wait_for(scene(engine), 100)
        assert (engine.state.phase, engine.state.running, engine.state.waiting) == ("dead", 0, 0)

    asyncio.run(main())


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not true():
            await asyncio.sleep(0.001)


async def read(engine: AsyncEngine, prompt: list[int], sampling: SamplingParams, **options: Any) -> list[TextChunk]:
    async with aclosing(engine.generate(prompt, sampling, **options)) as chunks:
        return [chunk async for chunk in chunks]


async def complete(engine: AsyncEngine, prompt: list[int], sampling: SamplingParams, **options: Any) -> Completion:
    chunks = await read(engine, prompt, sampling, **options)
    assert all(chunk.finish_reason is None for chunk in chunks[:-1])
    return Completion(tokens(chunks), chunks[-1].finish_reason or "", chunks[-1].stats or Stats())


def tokens(chunks: list[TextChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("config", [TREE, TREES, PARTICLES], ids=["tree", "trees", "particles"])
def test_concurrent_requests_have_the_text_of_an_llm(pair: tuple[Path, Path], config: Options) -> None:
    llm = load(pair, config)
    requests = [([5, n], replace(LONG, seed=n, max_tokens=10 + 4 * n)) for n in range(1, 5)]
    alone = [llm.llm_engine.generate(*request) for request in requests]

    async def scene(engine: AsyncEngine) -> None:
        completions = await asyncio.gather(*(complete(engine, *request) for request in requests))
        assert [each.token_ids for each in completions] == [each.token_ids for each in alone]
        assert [each.finish_reason for each in completions] == ["length"] * 4
        assert [each.stats.tokens for each in completions] == [14, 18, 22, 26]
        assert [each.stats.rounds for each in completions] == [each.stats.rounds for each in alone]
        streamed = await asyncio.gather(*(read(engine, *request) for request in requests))
        assert [tokens(chunks) for chunks in streamed] == [each.token_ids for each in alone]
        assert engine.info is not None and engine.info.max_num_seqs == llm.llm_engine.max_num_seqs

    run(llm, scene)


def test_a_stream_has_the_chunks_of_an_llm(pair: tuple[Path, Path]) -> None:
    llm = load(pair)
    sampling = replace(LONG, logprobs=2)
    alone = list(llm.stream([5, 6, 7], sampling))

    async def scene(engine: AsyncEngine) -> None:
        chunks = await read(engine, [5, 6, 7], sampling)
        assert [replace(each, stats=None) for each in chunks] == [replace(each, stats=None) for each in alone]
        assert alone[0].logprobs is not None and chunks[-1].stats is not None and alone[-1].stats is not None
        assert chunks[-1].stats.rounds == alone[-1].stats.rounds

    run(llm, scene)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("abandon", [False, True])
def test_a_closed_or_abandoned_stream_cancels_its_request(pair: tuple[Path, Path], abandon: bool) -> None:
    llm = load(pair)
    gate = Gate(llm)

    async def scene(engine: AsyncEngine) -> None:
        stream = engine.generate([5, 1], LONG)
        gate.pass_chunks(1)
        await anext(stream)
        await gate.until_held(2)
        if abandon:
            del stream
            gc.collect()
            for _ in range(20):  # the event loop closes the generators in tasks
                await asyncio.sleep(0)
        else:
            await stream.aclose()
        gate.pass_chunks()
        await until(lambda: engine.state.running == 0)
        assert llm.llm_engine.stats.rounds == 2 and llm.llm_engine.stats.tokens < 30
        assert len((await complete(engine, [5], replace(LONG, max_tokens=3))).token_ids) == 3

    run(llm, scene)


def test_a_cancelled_task_leaves_the_queue(pair: tuple[Path, Path]) -> None:
    llm = load(pair)
    gate = Gate(llm)

    async def scene(engine: AsyncEngine) -> None:
        running, waiting = (asyncio.create_task(complete(engine, [5, n], LONG)) for n in range(2))
        await gate.until_held()
        await until(lambda: engine.state.waiting == 1)
        waiting.cancel()
        await until(lambda: engine.state.waiting == 0)
        gate.pass_chunks()
        assert len((await running).token_ids) == 30

    run(llm, scene)


def test_a_request_ends_early_with_its_cost(pair: tuple[Path, Path]) -> None:
    async def scene(engine: AsyncEngine) -> None:
        request = EngineRequest([5, 1], SamplingParams(max_tokens=30, ignore_eos=True))
        async with aclosing(engine.stream_frames(request)) as frames:
            await anext(frames)
            _, frame = await frames.asend(True)
            while not isinstance(frame, DoneFrame):
                _, frame = await anext(frames)
            assert frame.timings["predicted_n"] > 0 and frame.metrics["mode"] == "serial"

    run(load(pair), scene)


@pytest.mark.parametrize("config", [TREE, TREES, PARTICLES], ids=["tree", "trees", "particles"])
def test_requests_of_one_caller_equal_each_alone(pair: tuple[Path, Path], config: Options) -> None:
    """Choices of one prompt, and other prompts."""
    llm = load(pair, config)
    samplings = [replace(LONG, seed=seed, max_tokens=4 + seed) for seed in range(3)]
    requests = [*(([5, 1], sampling) for sampling in samplings), ([7, 2, 3], samplings[2])]
    alone = [llm.llm_engine.generate(*request).token_ids for request in requests]

    async def scene(engine: AsyncEngine) -> None:
        engine_requests = [EngineRequest(prompt, sampling) for prompt, sampling in requests]
        found: list[list[int]] = [[] for _ in requests]
        num_running = set[int]()
        async with aclosing(engine.stream_frames(*engine_requests)) as frames:
            async for index, frame in frames:
                num_running.add(engine.state.running)
                if isinstance(frame, TokensFrame):
                    found[index] += frame.token_ids
        assert found == alone and max(num_running) <= llm.llm_engine.max_num_seqs

    run(llm, scene)


def test_texts_of_a_population_are_returned_if_requested(pair: tuple[Path, Path]) -> None:
    llm = load(pair, PARTICLES)
    alone = llm.llm_engine.generate([5, 1], LONG).stats.population.choices(2)

    async def scene(engine: AsyncEngine) -> None:
        async with aclosing(engine.stream_frames(EngineRequest([5, 1], LONG, choices=(2, 2)))) as frames:
            *_, (_, done) = [each async for each in frames]
        assert isinstance(done, DoneFrame) and done.extra["particles"] == 2
        assert [choice.token_ids for choice in done.choices] == [[*each.tokens] for each in alone]

    run(llm, scene)


def test_the_queue_rejects_and_replaces_requests(pair: tuple[Path, Path]) -> None:
    llm = load(pair)
    gate = Gate(llm)

    async def scene(engine: AsyncEngine) -> None:
        running = asyncio.create_task(complete(engine, [5, 1], LONG, replace_key="a"))
        await gate.until_held()
        waiting = asyncio.create_task(complete(engine, [5, 2], LONG))
        await until(lambda: engine.state.waiting == 1)
        with pytest.raises(RequestRejectedError, match="the queue is full") as full:
            await complete(engine, [5, 3], LONG)
        assert full.value.status == 429 and full.value.retry_after
        waiting.cancel()
        await asyncio.wait([waiting])
        newest = asyncio.create_task(complete(engine, [5, 4], LONG, replace_key="a"))
        with pytest.raises(GenerationFailedError, match="newer") as replaced:
            await running
        assert replaced.value.kind == "replaced"
        gate.pass_chunks()
        assert len((await newest).token_ids) == 30

    run(llm, scene, max_queue=1)


def test_waiting_and_running_have_time_limits(pair: tuple[Path, Path]) -> None:
    llm = load(pair)
    gate = Gate(llm)

    async def scene(engine: AsyncEngine) -> None:
        running = asyncio.create_task(complete(engine, [5, 1], LONG))
        await gate.until_held()
        with pytest.raises(RequestRejectedError, match=r"waited 0\.05 s \(queue timeout\)"):
            await complete(engine, [5, 2], LONG)
        with pytest.raises(GenerationFailedError, match=r"longer than 0\.5 s"):
            await running
        gate.pass_chunks()

    run(llm, scene, queue_timeout_s=0.05, request_timeout_s=0.5)


def test_event_loops_of_several_threads_share_an_engine(pair: tuple[Path, Path]) -> None:
    llm = load(pair, TREES)
    alone = {n: llm.llm_engine.generate([5, n], replace(LONG, seed=n)).token_ids for n in range(4)}
    engine, found = AsyncEngine(llm), dict[int, list[int]]()

    async def some(numbers: range) -> None:
        completions = await asyncio.gather(*(complete(engine, [5, n], replace(LONG, seed=n)) for n in numbers))
        found.update(zip(numbers, [each.token_ids for each in completions], strict=True))

    threads = [threading.Thread(target=asyncio.run, args=[some(range(at, 4, 2))]) for at in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    asyncio.run(engine.close())
    assert found == alone


def test_an_error_of_a_request_affects_no_other(pair: tuple[Path, Path]) -> None:
    llm = load(pair, TREES)
    alone = llm.llm_engine.generate([5, 1], LONG).token_ids

    async def scene(engine: AsyncEngine) -> None:
        good = asyncio.create_task(complete(engine, [5, 1], LONG))
        for prompt, message in (([], "empty"), ([5] * 96, "does not fit the context"), ([999], "outside 0..299")):
            with pytest.raises(InvalidRequestError, match=message):
                await complete(engine, prompt, LONG)
        bad: Any = ["a"]
        with pytest.raises(UserError, match="prompt token"):
            await complete(engine, bad, LONG)
        assert (await good).token_ids == alone

    run(llm, scene)


def test_an_error_outside_requests_ends_the_engine(pair: tuple[Path, Path]) -> None:
    llm = load(pair)
    gate = Gate(llm)

    async def scene(engine: AsyncEngine) -> None:
        running, waiting = (asyncio.create_task(complete(engine, [5, n], LONG)) for n in range(2))
        await gate.until_held()
        await until(lambda: engine.state.waiting == 1)
        gate.error = RuntimeError("the GPU is gone")
        gate.pass_chunks()
        with pytest.raises(GenerationFailedError, match="after 0 tokens: RuntimeError: the GPU is gone") as failed:
            await running
        assert failed.value.kind == "engine_error"
        for request in (waiting, complete(engine, [5], LONG)):
            with pytest.raises(RequestRejectedError, match="the engine is dead: RuntimeError") as rejected:
                await request
            assert rejected.value.status == 503 and rejected.value.retry_after is None
        assert engine.state.phase == "dead"

    run(llm, scene)


@pytest.mark.parametrize("drain_timeout_s", [60.0, 0.0])
def test_close_drains_or_aborts(pair: tuple[Path, Path], drain_timeout_s: float) -> None:
    llm = load(pair)
    gate = Gate(llm)

    async def scene() -> None:
        engine = AsyncEngine(llm)
        running, waiting = (asyncio.create_task(complete(engine, [5, n], LONG)) for n in range(2))
        await gate.until_held()
        await until(lambda: engine.state.waiting == 1)
        closing_task = asyncio.create_task(engine.close(drain_timeout_s))
        with pytest.raises(RequestRejectedError, match="draining"):
            await waiting
        if drain_timeout_s:
            gate.pass_chunks()
            assert len((await running).token_ids) == 30
        else:
            with pytest.raises(GenerationFailedError, match="being stopped"):
                await running
            gate.pass_chunks()
        await closing_task
        await engine.close()
        with pytest.raises(RequestRejectedError, match="the engine is dead: it was closed"):
            await complete(engine, [5], LONG)
        with pytest.raises(UserError, match="closed"):
            llm.generate([5], LONG)

    asyncio.run(asyncio.wait_for(scene(), 120))


def test_trace_events_are_recorded_for_subscribers(pair: tuple[Path, Path]) -> None:
    async def scene(engine: AsyncEngine) -> None:
        kinds = list[str]()
        async with aclosing(engine.events.subscribe(None)) as batches:
            assert [item.event.kind for item in await anext(batches) if not isinstance(item, int)] == ["head"]
            text = asyncio.create_task(complete(engine, [5, 1], replace(LONG, max_tokens=9)))
            async for batch in batches:
                events = [item.event for item in batch if not isinstance(item, int)]
                kinds += [event.kind for event in events]
                assert all(json.loads(event.line) for event in events)
                if "end" in kinds:
                    break
            assert len((await text).token_ids) == 9
        assert kinds[0] == "begin" and kinds.count("round") == (await text).stats.rounds

    run(load(pair), scene)


def test_http_defaults_come_from_the_model_and_the_caller(tmp_path: Path) -> None:
    target, draft = make_pair(tmp_path)
    (target / "generation_config.json").write_text('{"temperature": 0.5, "top_k": 7}', encoding="utf-8")

    async def scene(engine: AsyncEngine) -> None:
        assert engine.info is not None
        assert engine.info.defaults == {"temperature": 0.5, "top_k": 3}
        assert (engine.info.model, engine.info.draft_model) == (str(target), str(draft))

    run(load((target, draft)), scene, sampling_defaults={"top_k": 3})
