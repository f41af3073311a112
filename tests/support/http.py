"""An engine that generates a given text, the HTTP application around it, and a server thread for real clients."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool
from starlette.types import ASGIApp

from swiftspec.params import SamplingParams
from swiftspec.sampling.grammar_process import build_grammar
from swiftspec.serve.app import create_app
from swiftspec.serve.link.engine_client import EngineRequest, EngineState, RequestFrame
from swiftspec.serve.link.frames import (
    Choice,
    DoneFrame,
    EngineInfo,
    PromptLogprobsFrame,
    TokenLogprob,
    TokensFrame,
)
from swiftspec.serve.link.trace_events import TraceEventBuffer
from swiftspec.serve.middleware.request_id import RequestIdMiddleware
from swiftspec.text.codec import TextCodec

TIMINGS = {
    "cache_n": 3, "prompt_n": 7, "prompt_ms": 2.0, "predicted_n": 5, "predicted_ms": 4.0, "draft_n": 9,
    "draft_n_accepted": 4,
}  # fmt: skip
SPECULATION = {
    "num_spec_steps": 3, "num_draft_tokens": 9, "num_accepted_draft_tokens": 4, "num_accepted_tokens_per_pos": [3, 1],
    "num_chances_per_pos": [3, 3],
    "acceptance_by_source": {"draft_model": {"num_draft_tokens": 9, "num_accepted_draft_tokens": 4}},
}  # fmt: skip
METRICS = {
    "queue_time_ms": 0.5, "time_to_first_token_ms": 2.5, "generation_time_ms": 4.0,
    "graph_captures": 0,
    "speculative_decoding": SPECULATION, "mode": "serial", "target_busy": 0.5, "draft_busy": 0.25,
}  # fmt: skip
READY = EngineInfo("target", "draft", 256, 320, [0], {}, {"mode": "serial"}, 1.0)


def token_logprobs(tokens: Sequence[int], count: int, logprob: float = -0.5) -> list[TokenLogprob]:
    """Log-probabilities as an engine returns them: the token itself first."""
    length = None if count < 0 else count  # -1: as many as this engine knows
    tops = [[(token, logprob), *((other, -2.0 - other) for other in range(1, 30))][:length] for token in tokens]
    return [TokenLogprob(logprob, top, 1) for top in tops]


@dataclass
class Player:
    """An engine that generates `text` in rounds of `size` tokens, or raises `raises` after `after` rounds. After `hold`
    rounds it waits until its client disconnects. It records all `requests`, the cancelled ones in `closed` and those
    that were ended early in `stopped`.

    `texts`: text and log-probability of each token, of the first requests; the others have `text`.
    """

    codec: TextCodec
    text: str = "def add(a, b):\n    return a + b\n"
    size: int = 3
    reason: str = "stop"
    more: dict[str, Any] = field(default_factory=dict)
    texts: list[tuple[str, float]] = field(default_factory=list)
    choices: list[tuple[str, str, float]] = field(default_factory=list)  # text, finish reason and weight of each
    raises: Exception | None = None
    after: int = 0
    hold: int | None = None
    info: EngineInfo | None = READY
    state: EngineState = field(default_factory=lambda: EngineState("ready", "", 0, 0))
    events: TraceEventBuffer = field(default_factory=lambda: TraceEventBuffer(lambda on: None))
    requests: list[EngineRequest] = field(default_factory=list)
    closed: list[EngineRequest] = field(default_factory=list)
    stopped: list[EngineRequest] = field(default_factory=list)
    holding: threading.Event = field(default_factory=threading.Event)
    cancelled: threading.Event = field(default_factory=threading.Event)

    def tokens(self, text: str | None = None) -> list[int]:
        return list(self.codec.tokenizer.encode(self.text if text is None else text, add_special_tokens=False))

    @property
    def grammar(self) -> str:
        """The grammar of the latest request; empty without one."""
        return self.requests[-1].sampling.grammar or ""

    def prepare(self, **values: Any) -> None:
        """Resets everything and sets these fields."""
        self.__dict__.update(replace(Player(self.codec), **values).__dict__)

    async def stream_frames(self, *requests: EngineRequest) -> AsyncGenerator[tuple[int, RequestFrame], bool | None]:
        """Answers the requests one after the other, or round by round if the engine decodes several concurrently."""
        answers = [self._answer(request) for request in requests]
        waiting = deque((index, False) for index in range(len(requests)))
        concurrent = self.info is not None and self.info.max_num_seqs > 1
        try:
            while waiting:
                index, stop = waiting.popleft()
                try:
                    frame = await answers[index].asend(stop or None)
                except StopAsyncIteration:
                    continue
                item = index, bool((yield index, frame))
                if concurrent:
                    waiting.append(item)
                else:
                    waiting.appendleft(item)
        finally:
            for answer in answers:
                await answer.aclose()

    async def _answer(self, request: EngineRequest) -> AsyncGenerator[RequestFrame, bool | None]:
        number = len(self.requests)
        self.requests.append(request)
        text, logprob = self.texts[number] if number < len(self.texts) else (self.text, -0.5)
        ended = False
        try:
            if request.sampling.prompt_logprobs is not None:
                yield PromptLogprobsFrame(1, token_logprobs(request.prompt[1:], request.sampling.prompt_logprobs))
            tokens = self.tokens(text)
            cut = tokens[: request.sampling.max_tokens]
            rounds = [cut[at : at + self.size] for at in range(0, len(cut), self.size)]
            for number, part in enumerate(rounds):
                if self.raises is not None and number == self.after:
                    raise self.raises
                if number == self.hold:
                    self.holding.set()
                    await asyncio.Event().wait()
                last = number + 1 == len(rounds)
                reason = None if not last else self.reason if cut == tokens else "length"
                top = request.sampling.logprobs
                frame_logprobs = None if top is None else token_logprobs(part, top, logprob)
                if (yield TokensFrame(1, part, len(part) - 1, frame_logprobs, reason, [], TIMINGS["cache_n"])):
                    self.stopped.append(request)
                    break
            ended = True
            choices = () if request.choices is None else self.choices[: request.choices[0]]
            choice_frames = [Choice(self.tokens(text), why, weight) for text, why, weight in choices]
            yield DoneFrame(1, TIMINGS, METRICS, self.more, choice_frames)
        finally:
            if not ended:
                self.closed.append(request)
                self.cancelled.set()


def changed_fields(sampling: SamplingParams) -> dict[str, Any]:
    """The sampling parameters that differ from their defaults."""
    defaults = asdict(SamplingParams())
    return {name: value for name, value in asdict(sampling).items() if value != defaults[name]}


async def compile_in_thread(kind: str, text: str) -> str:
    """Compiles a grammar in a thread of this process, which is faster than the process of `create_app`'s default."""
    return await run_in_threadpool(build_grammar, kind, text)


def application(player: Player, **options: Any) -> FastAPI:
    """The application around the engine; it serves one model under two names."""
    return create_app(player, lambda: player.codec, ["toy", "other"], compile=compile_in_thread, **options)


@contextlib.contextmanager
def serving(app: ASGIApp, port: int = 0, **options: Any) -> Iterator[str]:
    """Runs a server in a thread of this process; yields its URL. `options`: of `uvicorn.Config`."""
    listener = socket.create_server(("127.0.0.1", port))
    options = {"log_level": "error", "timeout_graceful_shutdown": 1, **options}
    server = uvicorn.Server(uvicorn.Config(RequestIdMiddleware(app), **options))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Polls until a condition holds that another thread establishes."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not become true"
        time.sleep(0.002)
