"""`AsyncEngine`: an `LLM` behind asyncio, for Python programs and for the HTTP application in the same process."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from swiftspec.engine import Stats, TokenChunk
from swiftspec.errors import UserError
from swiftspec.llm import LLM, Conversation, Prompt
from swiftspec.messages import SampledLogprob
from swiftspec.params import SamplingParams
from swiftspec.runtime.current_device import set_current_device
from swiftspec.serve.link import frames
from swiftspec.serve.link.engine_client import EngineRequest, InvalidRequestError
from swiftspec.serve.link.engine_loop import EngineLoop, engine_info
from swiftspec.serve.link.pending_request import PendingGroup
from swiftspec.serve.link.request_queue import RequestQueue
from swiftspec.text.outputs import OutputBuilder, TextChunk, TextRequest

LOG = logging.getLogger("swiftspec.serve")


class AsyncEngine(RequestQueue):
    """Asynchronous engine in this process: one thread decodes with an `LLM`, and coroutines of any event loop read the
    output. `max_num_seqs` requests are decoded concurrently, and the others wait in FIFO order.

        async with AsyncEngine("path/to/target", "path/to/draft") as engine:
            async for chunk in engine.generate("Hello", SamplingParams(temperature=0.0)):
                print(chunk.text, end="")

    The engine owns its `LLM` and closes it in `close`. `swiftspec.serve.app.create_app` serves an engine over
    HTTP.

    Requests raise RequestRejectedError if the queue is full, its timeout has passed or the engine is closed,
    InvalidRequestError if they cannot be served, and GenerationFailedError if decoding fails; all are UserErrors. An
    error of one request does not affect the others. An error outside requests ends the engine: all requests fail, and
    `state.phase` is "dead".
    """

    def __init__(
        self,
        model: LLM | str | Path | None,
        draft_model: str | Path | None = None,
        *,
        max_queue: int = 256,
        queue_timeout_s: float | None = None,
        request_timeout_s: float | None = None,
        sampling_defaults: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """`model`: an `LLM`, or with `draft_model` and `options` the arguments of one.
        `max_queue`: number of requests that may wait; further ones are rejected. The choices of an HTTP request
            count as one.
        `queue_timeout_s`, `request_timeout_s`: how long a request may wait and be decoded; None: no limit.
        `sampling_defaults`: fields of SamplingParams for HTTP requests that do not set them; they override those of the
            model's generation_config.json.
        """
        super().__init__(max_queue, queue_timeout_s, request_timeout_s)
        self.llm = model if isinstance(model, LLM) else LLM(model, draft_model, **options)
        self._link = InProcessLink(self._on_frame)
        self._ranks = [frames.RankState(0, "target", os.getpid(), "up", 0)]
        session = self.llm.session
        defaults = {**session.model_defaults, **(sampling_defaults or {})}
        self._on_ready(engine_info(session.llm, str(session.codec.path), session.draft_model, defaults))
        self._thread = Thread(target=self._run, name="swiftspec decoding", daemon=True)
        self._thread.start()
        atexit.register(self._finish)

    async def generate(
        self,
        prompt: Prompt | Conversation,
        sampling_params: SamplingParams | None = None,
        *,
        replace_key: str | None = None,
    ) -> AsyncGenerator[TextChunk]:
        """Streams one request: yields what each round adds to the output, as `LLM.stream` does. Closing the iterator
        cancels the request.

        `prompt`, `sampling_params`: see `LLM.stream`. `replace_key`: the request replaces unfinished requests with the
        same key, which raise GenerationFailedError.
        """
        try:
            builder = await asyncio.to_thread(self.llm.prepare_stream, prompt, sampling_params)
        except UserError as error:
            raise InvalidRequestError(str(error)) from None
        group = self._group(builder.request, replace_key)
        async with aclosing(self._pieces(group, builder)) as pieces:
            async for piece in pieces:
                yield piece

    async def close(self, drain_timeout_s: float = 0.0) -> None:
        """Rejects new and waiting requests, waits up to `drain_timeout_s` seconds for the running ones, fails those
        that remain, ends the decoding thread and closes the `LLM`. Later calls return without effect."""
        if self._thread.is_alive():
            await self._drain("draining", drain_timeout_s)
        await asyncio.to_thread(self._finish)
        self.events.close()

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def _finish(self) -> None:
        """Ends the decoding thread. The interpreter's shutdown must not begin while native code runs on it."""
        self._send(frames.ShutdownFrame())
        self._thread.join()
        atexit.unregister(self._finish)

    def _group(self, request: TextRequest, key: str | None) -> PendingGroup:
        """Returns a group of one request."""
        engine_request = EngineRequest(request.prompt_token_ids, request.sampling, key)
        return PendingGroup([engine_request], self._queue_timeout_s)

    async def _pieces(self, group: PendingGroup, builder: OutputBuilder) -> AsyncGenerator[TextChunk]:
        """Yields the output of a request. The last piece follows when the engine has ended the request."""
        prompt_logprobs, last, is_complete = tuple[SampledLogprob, ...](), None, None
        async with aclosing(self._frames(group)) as received:
            with suppress(StopAsyncIteration):
                while True:
                    _, frame = await received.asend(is_complete)
                    is_complete = None
                    if isinstance(frame, frames.PromptLogprobsFrame):
                        prompt_logprobs += to_logprobs(frame.logprobs)
                    elif isinstance(frame, frames.TokensFrame) and last is None:
                        piece, prompt_logprobs = builder.push(_token_chunk(frame, prompt_logprobs or None)), ()
                        if builder.finish_reason is None:
                            yield piece
                        else:
                            last, is_complete = piece, frame.finish_reason is None
        if last is not None:
            yield builder.with_stats(last, group.members[0].stats or Stats())

    def _send(self, frame: frames.ToEngine) -> None:
        self._link.put(frame)

    def _on_frame(self, frame: Any) -> None:
        if isinstance(frame, frames.TraceEventsFrame):
            self.events.put(*frame.events)
        else:
            self._deliver(frame)

    def _on_stats(self, request: int, stats: Stats) -> None:
        """Stores the statistics of a completed request for `generate`."""
        self._running[request].stats = stats

    def _run(self) -> None:
        """Runs the decoding thread."""
        reason = "it was closed"
        try:
            set_current_device(self.llm.llm_engine.device)
            EngineLoop(self.llm.llm_engine, self._link, on_stats=self._on_stats).run()
        except Exception as error:
            LOG.exception("the engine has failed")
            reason = f"{type(error).__name__}: {error}"
        self._on_engine_lost("dead", reason)
        self._link.close()
        self.llm.close()


class InProcessLink:
    """Connection between an engine loop and the engine client of the same process; implements `FrameLink`.

    `on_frame`: receives the frames from the engine, on the decoding thread or, for trace events, on another one.
    """

    def __init__(self, on_frame: Callable[[frames.Frame], None]) -> None:
        self._on_frame = on_frame
        self._inbox: SimpleQueue[frames.ToEngine] = SimpleQueue()
        self._executor = ThreadPoolExecutor(1, "swiftspec traces")  # starts its thread at the first trace event

    def put(self, frame: frames.ToEngine) -> None:
        """Queues a frame for the engine. Thread-safe."""
        self._inbox.put(frame)

    def send(self, frame: frames.Frame | Callable[[], frames.Frame]) -> None:
        """See `FrameLink.send`."""
        if isinstance(frame, frames.Frame):
            self._on_frame(frame)
        else:
            self._executor.submit(self._create_and_send, frame)

    def poll(self) -> frames.ToEngine | None:
        """See `FrameLink.poll`."""
        try:
            return self._inbox.get_nowait()
        except Empty:
            return None

    def wait(self) -> frames.ToEngine:
        """See `FrameLink.wait`."""
        return self._inbox.get()

    def close(self) -> None:
        """Ends the thread that creates trace events."""
        self._executor.shutdown(wait=False)

    def _create_and_send(self, create: Callable[[], frames.Frame]) -> None:
        try:
            self._on_frame(create())
        except Exception:
            LOG.exception("trace events are lost")


def to_logprobs(logprobs: Sequence[frames.TokenLogprob]) -> tuple[SampledLogprob, ...]:
    """Converts the `TokenLogprob` objects of a frame to the engine's `SampledLogprob` objects."""
    return tuple(SampledLogprob(one.logprob, tuple(one.top), one.rank) for one in logprobs)


def _token_chunk(frame: frames.TokensFrame, prompt_logprobs: tuple[SampledLogprob, ...] | None) -> TokenChunk:
    """Converts a frame to a chunk of the engine."""
    logprobs = None if frame.logprobs is None else to_logprobs(frame.logprobs)
    return TokenChunk(tuple(frame.token_ids), frame.accepted, frame.finish_reason, logprobs, prompt_logprobs)
