"""Per-request records: `RequestRecorder` measures each request and passes its record to callbacks at its end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from swiftspec.observe.rpc_latency import RpcRecord
from swiftspec.serve.link.engine_client import (
    EngineRequest,
    GenerationFailedError,
    InvalidRequestError,
    RequestFrame,
    RequestRejectedError,
)
from swiftspec.serve.link.frames import DoneFrame, TokensFrame


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
class ChoiceRecord:
    """Measurements of one engine request, which decodes one choice of a request. Times are seconds of the monotonic
    clock."""

    request: EngineRequest
    token_times: list[float] = field(default_factory=list)  # when the tokens of each round arrived
    num_tokens: int = 0  # that arrived
    finish_reason: str | None = None
    done: DoneFrame | None = None  # statistics of the engine; None if the engine request did not complete

    @property
    def num_output_tokens(self) -> int:
        """Tokens of the answer. Of a completed request these are fewer than arrived if a stop string cut the answer."""
        return self.num_tokens if self.done is None else int(self.done.timings.get("predicted_n", self.num_tokens))


@dataclass(slots=True)
class RequestRecord:
    """Measurements of one request in the front end. Times are seconds of `clock`."""

    choices: list[ChoiceRecord]
    started_at: float
    context: RequestContext
    clock: Callable[[], float]
    rpc_records: list[RpcRecord] = field(default_factory=list)  # RPCs to workers
    ended_at: float = 0.0
    outcome: str = "error"  # stop, length, abort, error, busy, unavailable or invalid
    error: Exception | None = None

    def add_frame(self, index: int, frame: RequestFrame) -> None:
        """Adds a frame of the choice `index`."""
        choice = self.choices[index]
        if isinstance(frame, DoneFrame):
            choice.done = frame
        elif isinstance(frame, TokensFrame):
            choice.token_times.append(self.clock())
            choice.num_tokens += len(frame.token_ids)
            self.rpc_records += frame.rpc_records
            choice.finish_reason = choice.finish_reason or frame.finish_reason

    @property
    def accepted(self) -> bool:
        """Whether the engine accepted the request; False if it was refused."""
        return self.outcome in ("stop", "length", "abort", "error")

    @property
    def first_choice(self) -> ChoiceRecord | None:
        """The choice that produced the first tokens; None if there are none."""
        started = [choice for choice in self.choices if choice.token_times]
        return min(started, key=lambda choice: choice.token_times[0], default=None)

    @property
    def time_to_first_token_s(self) -> float | None:
        """Time to the first tokens of any choice, in seconds, the queue included. None without tokens."""
        first = self.first_choice
        return None if first is None else first.token_times[0] - self.started_at

    @property
    def queue_time_s(self) -> float | None:
        """Time in the queue in seconds, of the choice that produced the first tokens. None if that choice did not
        complete or has no tokens."""
        first = self.first_choice
        return None if first is None or first.done is None else 1e-3 * first.done.metrics["queue_time_ms"]

    def finish_reason(self) -> str | None:
        """Returns the finish reason of the request, or None if a choice has not ended: "length" if it is that of any
        choice."""
        reasons = [choice.finish_reason for choice in self.choices]
        return None if None in reasons else next((reason for reason in reasons if reason != "stop"), "stop")


class RequestRecorder:
    """Measures requests, including those that are still running.

    `on_finished`: callbacks that get the record of each request when it completes, fails or is cancelled.
    `clock`: returns the current time in seconds.
    """

    def __init__(
        self, on_finished: Sequence[Callable[[RequestRecord], None]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._on_finished, self._clock = on_finished, clock
        self._live: list[RequestRecord] = []

    def live_tokens(self) -> int:
        """Returns the number of prompt and output tokens of all choices that are being decoded. A choice counts from
        its first token on."""
        choices = [choice for record in self._live for choice in record.choices]
        return sum(
            len(each.request.prompt) + each.num_tokens for each in choices if each.token_times and each.done is None
        )

    @contextmanager
    def record(self, requests: Sequence[EngineRequest]) -> Iterator[RequestRecord]:
        """Records one request, whose choices are these engine requests, while the block runs. The block adds the frames
        (`RequestRecord.add_frame`); how it ends determines the outcome."""
        choices = [ChoiceRecord(request) for request in requests]
        record = RequestRecord(choices, self._clock(), REQUEST_CONTEXT.get(), self._clock)
        cancelled = False
        self._live.append(record)
        try:
            yield record
        except (GeneratorExit, asyncio.CancelledError):  # the client disconnected
            cancelled = True
            raise
        except Exception as error:
            record.error = error
            raise
        finally:
            self._live = [each for each in self._live if each is not record]
            record.ended_at = self._clock()
            if record.error is not None:
                record.outcome = _outcome(record.error)
            else:
                record.outcome = record.finish_reason() or ("abort" if cancelled else "error")
            for callback in self._on_finished:
                callback(record)


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
