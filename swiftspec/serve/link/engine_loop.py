"""Decoding loop of an engine: decodes the requests that arrive as frames, as many concurrently as it supports."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from swiftspec import answer_stats
from swiftspec.errors import UserError, WorkerUnavailable
from swiftspec.observe.rpc_latency import RpcRecord
from swiftspec.observe.trace_format import TraceEntry, to_json, to_record, tokens_in
from swiftspec.serve.link import frames
from swiftspec.serve.link.frames import FrontEndLost

if TYPE_CHECKING:
    from swiftspec.batching.batch_request import BatchRequest
    from swiftspec.cache.prefix_cache import TokenText
    from swiftspec.engine import Stats, TokenChunk
    from swiftspec.messages import SampledLogprob
    from swiftspec.token_engine import TokenEngine


class FrameLink(Protocol):
    """The engine's end of the connection to the front end. All methods raise FrontEndLost if the front end is gone."""

    def send(self, frame: frames.Frame | Callable[[], frames.Frame]) -> None:
        """Sends a frame without blocking. If `frame` is a function, another thread calls it to create the frame."""
        ...

    def poll(self) -> frames.ToEngine | None:
        """Returns the next frame, or None if no frame has arrived. Called between rounds and prefill chunks."""
        ...

    def wait(self) -> frames.ToEngine | None:
        """Blocks until the next frame and returns it. May return None earlier."""
        ...


def ignore_stats(request: int, stats: Stats) -> None:
    """Default `on_stats` of `EngineLoop`: does nothing."""


class EngineLoop:
    """Decoding loop around an `LLMEngine`. A request arrives as a `StartFrame` and ends with a `DoneFrame` or
    `FailedFrame`.

    `send_rpc_records`: whether to send the records of RPCs to workers, which the front end exports as spans.
    `on_stats`: called with the number and the statistics of each completed request, before its `DoneFrame` is sent.
    `on_cache_change`: called with `Roles.reusable_texts` at the start, after the first tokens of each request, and
        before the next request starts or the loop waits. Must not block. None: not called.
    """

    def __init__(
        self,
        llm: TokenEngine,
        link: FrameLink,
        *,
        send_rpc_records: bool = False,
        on_stats: Callable[[int, Stats], None] = ignore_stats,
        on_cache_change: Callable[[Sequence[TokenText]], None] | None = None,
    ) -> None:
        self._llm, self._link, self._on_stats, self._on_cache_change = llm, link, on_stats, on_cache_change
        self._cache_changed = True  # since the last call of `on_cache_change`
        self.shutting_down = False  # set by `ShutdownFrame`
        self._lost: FrontEndLost | None = None  # raised when the running requests have ended
        self._queued: deque[frames.StartFrame] = deque()  # not started yet
        self._running = dict[int, tuple[int, int] | None]()  # requests in the engine, with their `choices`
        self._cancelled: set[int] = set()  # numbers of cancelled requests, queued or in the engine
        self._rpc_records: list[RpcRecord] = []  # not sent yet
        if send_rpc_records and llm.roles.rpc_log is not None:
            llm.roles.rpc_log.on_record = self._rpc_records.append

    def run(self) -> None:
        """Serves until a `ShutdownFrame`. Raises FrontEndLost if the front end is lost, and RankLost if a rank is."""
        while not self.shutting_down:
            self._report_cache()
            self._dispatch(self._link.wait())
            while self._queued and not self._aborting:
                self._decode_batch()
            if self._lost is not None:
                raise self._lost

    def reset(self) -> None:
        """Drops all requests and stops sending trace events, for the next front end."""
        self._lost = None
        for requests in (self._queued, self._running, self._cancelled):
            requests.clear()
        self._set_trace(False)

    @property
    def _aborting(self) -> bool:
        """Whether all requests are to end."""
        return self.shutting_down or self._lost is not None

    def _dispatch(self, frame: frames.ToEngine | None) -> None:
        if isinstance(frame, frames.StartFrame):
            self._queued.append(frame)
        elif isinstance(frame, frames.CancelFrame):
            if frame.request in self._running or any(start.request == frame.request for start in self._queued):
                self._cancelled.add(frame.request)
        elif isinstance(frame, frames.SubscribeFrame):
            self._set_trace(frame.on)
        elif isinstance(frame, frames.ShutdownFrame):
            self.shutting_down = True

    def _set_trace(self, on: bool) -> None:
        self._llm.listen(self._send_trace if on else None)

    def _send_trace(self, records: Sequence[TraceEntry]) -> None:
        """Sends trace events, or drops them if the front end is lost."""
        self._try_to(partial(self._link.send, partial(to_trace_frame, records)))

    def _report_cache(self) -> None:
        if self._cache_changed and self._on_cache_change is not None:
            self._on_cache_change(self._llm.roles.reusable_texts())
        self._cache_changed = False

    def _decode_batch(self) -> None:
        """Decodes queued and arriving requests until the queue is empty."""
        try:
            with closing(self._llm.run_batch(self._next_request, self._should_end)) as chunks:
                for request, chunk in chunks:
                    if self._lost is None:
                        self._send_chunk(request, chunk)
        except FrontEndLost:
            raise
        except UserError as error:
            if not self._running:  # the error does not belong to a request
                raise
            unavailable = isinstance(error, WorkerUnavailable)
            for number in sorted(self._running):
                self._finish(frames.FailedFrame(number, str(error), user=not unavailable, unavailable=unavailable))

    def _next_request(self) -> BatchRequest | None:
        """Returns the next request for the engine to start, or None if the queue is empty. Rejects invalid requests."""
        self._report_cache()
        self._receive_available()
        while self._queued and not self._aborting:
            start = self._queued.popleft()
            try:
                request = self._llm.request(start.request, start.prompt, start.sampling)
            except UserError as error:
                self._finish(frames.FailedFrame(start.request, str(error), user=True))
            else:
                self._running[start.request] = start.choices
                self._rpc_records.clear()
                self._cache_changed = True
                return request
        return None

    def _should_end(self, request: BatchRequest) -> bool:
        """Returns whether to end a request because it was cancelled or the front end shuts down or is lost. Must not
        raise, since it is also called during a prefill, in which all ranks have to take the same steps."""
        self._receive_available()
        return self._aborting or request.number in self._cancelled

    def _receive_available(self) -> None:
        """Processes the frames that have arrived."""
        while (frame := self._try_to(self._link.poll)) is not None:
            self._dispatch(frame)

    def _try_to(self, call: Callable[[], frames.ToEngine | None]) -> frames.ToEngine | None:
        """Returns the result of `call`, or None if the front end is lost."""
        try:
            return call()
        except FrontEndLost as error:
            self._lost = error
            return None

    def _send_chunk(self, request: BatchRequest, chunk: TokenChunk) -> None:
        """Sends the tokens of a round, and after the last round also the `DoneFrame` or `FailedFrame`."""
        number = request.number
        if chunk.prompt_logprobs is not None:
            for part in prompt_logprob_parts(chunk.prompt_logprobs):
                self._link.send(frames.PromptLogprobsFrame(number, to_token_logprobs(part)))
        logprobs = None if chunk.logprobs is None else to_token_logprobs(chunk.logprobs)
        if chunk.token_ids or chunk.finish_reason in (None, "stop", "length"):
            tokens, rpc_records = list(chunk.token_ids), [*self._rpc_records]
            self._rpc_records.clear()
            cached = request.stats.cached_tokens
            self._link.send(
                frames.TokensFrame(
                    request=number,
                    token_ids=tokens,
                    accepted=chunk.accepted,
                    logprobs=logprobs,
                    finish_reason=chunk.finish_reason,
                    rpc_records=rpc_records,
                    cached_tokens=cached,
                )
            )
        if chunk.token_ids and request.stats.tokens == len(chunk.token_ids):
            self._cache_changed = True  # since these are its first tokens, the cache holds its prompt
        self._report_cache()
        if request.error is not None:
            self._finish(frames.FailedFrame(number, str(request.error), user=False))
        elif chunk.finish_reason is not None:
            self._on_stats(number, request.stats)
            self._finish(self._done_frame(request, self._running[number]))

    def _finish(self, frame: frames.DoneFrame | frames.FailedFrame) -> None:
        """Removes a request and sends its last frame."""
        self._running.pop(frame.request, None)
        self._cache_changed = True
        self._cancelled.discard(frame.request)
        self._link.send(frame)

    def _done_frame(self, request: BatchRequest, choices: tuple[int, int] | None) -> frames.DoneFrame:
        llm, sampling, stats = self._llm, request.start.sampling, request.stats
        extra = answer_stats.guidance_stats(sampling) if sampling.guided else {}
        extra = {**extra, **answer_stats.synthetic_stats(stats)}
        if llm.config.mode == "smc":
            extra = {**extra, **answer_stats.population_stats(llm.config, stats)}
        timings = answer_stats.timings(stats, stats.tokens, llm.load_time)
        metrics = answer_stats.metrics(llm.config.for_request(sampling), stats, stats.tokens)
        choice_frames: list[frames.Choice] = []
        if choices is not None and stats.population is not None:
            choice_frames = [
                frames.Choice([*each.tokens], "stop" if each.stopped else "length", each.weight)
                for each in stats.population.choices(*choices)
            ]
        return frames.DoneFrame(request.number, timings, metrics, extra, choice_frames, stats.verified)


def prompt_logprob_parts(logprobs: Sequence[SampledLogprob]) -> Iterator[Sequence[SampledLogprob]]:
    """Yields the log-probabilities of a prompt in parts that each fit a frame."""
    values = max((len(one.top) for one in logprobs), default=0) + 1
    step = max(frames.MAX_LOGPROBS_PER_FRAME // values, 1)
    for start in range(0, max(len(logprobs), 1), step):
        yield logprobs[start : start + step]


def to_token_logprobs(logprobs: Sequence[SampledLogprob]) -> list[frames.TokenLogprob]:
    """Converts the engine's `SampledLogprob` objects to the `TokenLogprob` objects of a frame."""
    return [frames.TokenLogprob(one.logprob, list(one.top), one.rank) for one in logprobs]


def to_trace_frame(entries: Sequence[TraceEntry]) -> frames.TraceEventsFrame:
    """Converts trace entries to a frame. It is too slow for the decoding loop: call it in another thread."""
    events: list[frames.TraceEvent] = []
    for line in map(to_record, entries):
        kind = next(kind for kind in ("begin", "end", "round") if kind in line)
        events.append(frames.TraceEvent(kind, msgspec.json.encode(line, enc_hook=to_json), sorted(tokens_in(line))))
    return frames.TraceEventsFrame(events)


def engine_info(
    llm: TokenEngine, model: str, draft_model: str | None, defaults: Mapping[str, Any]
) -> frames.EngineInfo:
    """Returns the properties of the models and the engine for the front end. `defaults`: sampling parameters of
    requests that do not set them."""
    return frames.EngineInfo(
        model=model,
        draft_model=draft_model,
        max_model_len=llm.max_model_len,
        vocab_size=llm.vocab_size,
        eos_token_ids=list(llm.eos_token_ids),
        defaults=dict(defaults),
        plan=asdict(llm.config),
        load_ms=round(llm.load_time * 1e3, 3),
        trace_head=llm.roles.trace_header,
        max_num_seqs=llm.max_num_seqs,
        cache_tokens=llm.roles.cache_tokens,
    )
