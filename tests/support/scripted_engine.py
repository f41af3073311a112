"""An engine that yields scripted frames."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from swiftspec import answer_stats
from swiftspec.config import EngineConfig
from swiftspec.engine import Stats
from swiftspec.serve.format.generation_output import GenerationOutput, GenerationRequest, OutputDelta, stream_deltas
from swiftspec.serve.link.engine_client import EngineRequest, EngineState
from swiftspec.serve.link.frames import DoneFrame, EngineInfo, RankState, TokensFrame
from swiftspec.serve.link.trace_events import TraceEventBuffer
from swiftspec.serve.metrics.request_metrics import RequestRecorder

PLAN = {"mode": "serial", "target_tp": 1, "verify_batch": 8}
RANKS = [RankState(0, "target", 7, "up", 0)]
INFO = EngineInfo("/models/target", "/models/draft", 100, 50, [1], {}, PLAN, 1500.0)


class ScriptedEngine:
    """Yields the frames of one list per call, or (index, frame) pairs of several requests; an exception in a list is
    raised. `num_stops`: how often the caller ended a request early."""

    def __init__(self, *responses: Sequence[Any]) -> None:
        self.state, self.info = EngineState("ready", "", 1, 2, RANKS), INFO
        self.events = TraceEventBuffer(lambda on: None)
        self._responses, self.closed, self.num_stops = list(responses), 0, 0

    async def stream_frames(self, *requests: EngineRequest) -> AsyncGenerator[Any, bool | None]:
        try:
            for frame in self._responses.pop(0):
                if isinstance(frame, BaseException):
                    raise frame
                self.num_stops += bool((yield frame if isinstance(frame, tuple) else (0, frame)))
        finally:
            self.closed += 1


class TickingClock:
    """A clock that advances by 1 second at each reading."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def complete_frames(stats: Stats, tokens: Sequence[int] = (), mode: str = "serial") -> list[TokensFrame | DoneFrame]:
    """The frames of a complete request, one TokensFrame per number in `tokens`."""
    chunks = [TokensFrame(1, [0] * n, 0, None, "stop" if at == len(tokens) else None) for at, n in enumerate(tokens, 1)]
    timings = answer_stats.timings(stats, sum(tokens), 0.0)
    metrics = answer_stats.metrics(EngineConfig(mode=mode), stats, sum(tokens)) | {"queue_time_ms": 750.0}
    return [*chunks, DoneFrame(1, timings, metrics, {})]


class LetterCodec:
    """A tokenizer for which token n has the n-th letter as its text."""

    special, byte_tokens = frozenset[int](), frozenset[int]()

    def token_text(self, tokens: Sequence[int]) -> str:
        return "".join(chr(ord("a") + token) for token in tokens)


def scripted_deltas(
    engine: ScriptedEngine, recorder: RequestRecorder, *requests: EngineRequest, stop: str = ""
) -> AsyncGenerator[OutputDelta]:
    """The output of these requests as the endpoints read it. `stop`: a stop string that ends each of them."""
    codec: Any = LetterCodec()
    stops = [stop] if stop else []
    outputs = [GenerationOutput.create(GenerationRequest(request, stops), codec) for request in requests]
    return stream_deltas(outputs, engine, recorder)


async def collect_deltas(
    engine: ScriptedEngine, recorder: RequestRecorder, *requests: EngineRequest, stop: str = ""
) -> list[OutputDelta]:
    """All of `scripted_deltas`."""
    async with aclosing(scripted_deltas(engine, recorder, *requests, stop=stop)) as deltas:
        return [delta async for delta in deltas]
