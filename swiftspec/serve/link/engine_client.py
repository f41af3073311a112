"""Engine interface for the HTTP endpoints: the protocol `EngineClient`, its requests, state and exceptions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from swiftspec.errors import UserError
from swiftspec.params import SamplingParams
from swiftspec.serve.link.frames import DoneFrame, EngineInfo, PromptLogprobsFrame, RankState, TokensFrame
from swiftspec.serve.link.trace_events import TraceEventBuffer

RequestFrame = PromptLogprobsFrame | TokensFrame | DoneFrame  # output of a request


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """Request to the engine.

    `prompt`: token ids.
    `replace_key`: the request replaces unfinished requests with the same key; None: it replaces no request.
    `choices`: (number of texts to return, number to sample) in mode smc; None: a single text.
    """

    prompt: list[int]
    sampling: SamplingParams
    replace_key: str | None = None
    choices: tuple[int, int] | None = None


class RequestRejectedError(UserError):
    """Raised if the engine cannot accept a request now.

    `status`: HTTP status 429 (queue full, or queue timeout) or 503 (loading, recovering for too long, unavailable,
    draining, dead).
    `retry_after`: seconds after which the client may retry; None if a retry is useless.
    """

    def __init__(self, message: str, status: int, retry_after: float | None) -> None:
        super().__init__(message)
        self.status, self.retry_after = status, retry_after


class InvalidRequestError(UserError):
    """Raised if the contents of a request are invalid (HTTP status 400)."""


class GenerationFailedError(UserError):
    """Raised if an accepted request fails. `kind`: "engine_error", "unavailable_error" (the worker of the target is
    lost), "timeout" or "replaced" (by a request with the same `replace_key`)."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class EngineState:
    """State of the engine.

    `phase`: "loading", "ready", "recovering" (rank 0 restarts), "unavailable" (the worker of the target is lost),
        "draining" or "dead" (shutting down without rank 0).
    `detail`: progress of loading, or the reason for the loss of rank 0 or of the worker.
    `running`, `waiting`: number of requests in rank 0 and in the queue; each choice counts.
    `ranks`: states that rank 0 last reported.
    """

    phase: str
    detail: str
    running: int
    waiting: int
    ranks: Sequence[RankState] = ()

    @property
    def all_ranks_up(self) -> bool:
        """Whether no rank is lost or loading."""
        return all(rank.state == "up" for rank in self.ranks)


class EngineClient(Protocol):
    """Engine that decodes up to `info.max_num_seqs` requests concurrently, first come, first served. `AsyncEngine`
    decodes in this process, `RemoteEngineClient` in rank 0 of a server."""

    @property
    def state(self) -> EngineState: ...
    @property
    def info(self) -> EngineInfo | None:
        """Properties of the models and the engine; None before it is ready for the first time."""
        ...

    @property
    def events(self) -> TraceEventBuffer:
        """Trace events, which the engine records while there are subscribers."""
        ...

    def stream_frames(self, *requests: EngineRequest) -> AsyncGenerator[tuple[int, RequestFrame], bool | None]:
        """Yields the frames of the requests of one caller, each with the index of its request; `DoneFrame` is the last
        one of a request, and its `metrics` include `queue_time_ms`. The first frame follows after the time in the
        queue.

        The requests enter the queue together, all or none, and run concurrently as far as the engine supports it,
        otherwise one after the other. They count as one request for the queue's limits and do not replace one another.

        `asend(True)` ends the request of the last frame early: its `DoneFrame` still follows, possibly after further
        tokens. Closing the generator cancels all requests; callers must close it (`contextlib.aclosing`).
        Raises RequestRejectedError if the engine cannot accept the requests, InvalidRequestError if the contents of one
        are invalid, and GenerationFailedError if one fails later.
        """
        ...
