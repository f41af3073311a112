"""Per-request records: an engine wrapper that measures each request and passes the record to callbacks at its end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass, field

from swiftspec.observe.rpc_latency import RpcRecord
from swiftspec.serve.http.engine_link.engine_client import (
    EngineClient,
    EngineRequest,
    EngineState,
    GenerationFailedError,
    InvalidRequestError,
    RequestRejectedError,
)
from swiftspec.serve.http.engine_link.frames import DoneFrame, EngineInfo, PromptLogprobsFrame, TokensFrame
from swiftspec.serve.http.engine_link.trace_events import TraceEventBuffer


@dataclass(frozen=True, slots=True)
class RequestContext:
    """The HTTP request that an engine request belongs to: path, request id and W3C trace headers.

    `api_key`: index of the client's key in the server's list; None if the server requires no key.
    """

    path: str = ""
    id: str = ""
    traceparent: str = ""
    tracestate: str = ""
    api_key: int | None = None


NO_CONTEXT = RequestContext()
REQUEST_CONTEXT: ContextVar[RequestContext] = ContextVar("visit", default=NO_CONTEXT)  # set by SecurityMiddleware


@dataclass(slots=True)
class RequestRecord:
    """Measurements of one request in the front end. Times are seconds of the monotonic clock."""

    request: EngineRequest
    started_at: float
    context: RequestContext
    token_times: list[float] = field(default_factory=list)  # when the tokens of each round arrived
    num_tokens: int = 0  # that arrived
    rpc_records: list[RpcRecord] = field(default_factory=list)  # RPCs to workers
    ended_at: float = 0.0
    outcome: str = "error"  # stop, length, abort, error, busy, unavailable or invalid
    error: Exception | None = None
    done: DoneFrame | None = None  # statistics of the engine; None if the request did not complete

    @property
    def accepted(self) -> bool:
        """Whether the engine accepted the request; False if it was refused."""
        return self.outcome in ("stop", "length", "abort", "error")

    @property
    def num_output_tokens(self) -> int:
        """Tokens of the answer. Of a completed request these are fewer than arrived if a stop string cut the answer."""
        return self.num_tokens if self.done is None else int(self.done.timings.get("predicted_n", self.num_tokens))

    @property
    def queue_time_s(self) -> float | None:
        """Time in the queue in seconds: `token_times[0] - started_at`, minus rank 0's time to first token, which begins
        after the queue. None if the request did not complete or has no tokens."""
        if self.done is None or not self.token_times:
            return None
        return max(self.token_times[0] - self.started_at - 1e-3 * self.done.metrics["time_to_first_token_ms"], 0.0)


class InstrumentedEngine:
    """Wrapper of an `EngineClient` that measures each request.

    `on_finished`: callbacks that get the record of each request when it completes, fails or is cancelled.
    `clock`: returns the current time in seconds.
    """

    def __init__(
        self,
        engine: EngineClient,
        on_finished: Sequence[Callable[[RequestRecord], None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self._on_finished, self._clock = engine, on_finished, clock

    @property
    def state(self) -> EngineState:
        return self._engine.state

    @property
    def info(self) -> EngineInfo | None:
        return self._engine.info

    @property
    def events(self) -> TraceEventBuffer:
        return self._engine.events

    async def stream_frames(
        self, request: EngineRequest
    ) -> AsyncGenerator[PromptLogprobsFrame | TokensFrame | DoneFrame, bool | None]:
        """See `EngineClient.stream_frames`."""
        record = RequestRecord(request, self._clock(), REQUEST_CONTEXT.get())
        stop: bool | None = None
        try:
            async with aclosing(self._engine.stream_frames(request)) as frames:
                while True:
                    frame = await frames.asend(stop)
                    self._record_frame(record, frame)
                    stop = yield frame
                    if stop:
                        record.outcome = "stop"
        except StopAsyncIteration:
            return
        except (
            GeneratorExit,
            asyncio.CancelledError,
        ):  # the client disconnected, or the caller closed the generator after the end
            record.outcome = "abort" if record.outcome == "error" else record.outcome
            raise
        except Exception as error:
            record.error, record.outcome = error, _outcome(error)
            raise
        finally:
            record.ended_at = self._clock()
            for callback in self._on_finished:
                callback(record)

    def _record_frame(self, record: RequestRecord, frame: PromptLogprobsFrame | TokensFrame | DoneFrame) -> None:
        if isinstance(frame, DoneFrame):
            record.done = frame
        elif isinstance(frame, TokensFrame):
            record.token_times.append(self._clock())
            record.num_tokens += len(frame.token_ids)
            record.rpc_records += frame.rpc_records
            if frame.finish_reason is not None and record.outcome == "error":
                record.outcome = frame.finish_reason


def _outcome(error: Exception) -> str:
    match error:
        case RequestRejectedError():
            return "busy" if error.status == 429 else "unavailable"
        case InvalidRequestError():
            return "invalid"
        case GenerationFailedError(kind="replaced"):
            return "abort"
        case _:
            return "error"
