"""Interface of the engine to the HTTP endpoints: its state, and one generation as a stream of frames."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from swiftspec.errors import UserError
from swiftspec.serve.http.engine_link.frames import DoneFrame, EngineInfo, PromptLogprobsFrame, RankState, TokensFrame


@dataclass(frozen=True, slots=True)
class AsyncEngineRequest:
    """A request to the engine.

    `prompt`: token ids.
    `replace_key`: the request replaces unfinished requests with the same key.
    `choices`: (returned, sampled) texts of a population; None: a single text.
    """

    prompt: list[int]
    sampling: dict[str, Any]  # fields of SamplingParams that differ from their defaults
    replace_key: str | None = None
    choices: tuple[int, int] | None = None


class RequestRejectedError(UserError):
    """The engine cannot accept a request now.

    `status`: 429 (queue full, or queue timeout) or 503 (loading, recovering for too long, draining, or dead).
    `retry_after`: seconds; None if a retry is useless.
    """

    def __init__(self, message: str, status: int, retry_after: float | None) -> None:
        super().__init__(message)
        self.status, self.retry_after = status, retry_after


class InvalidRequestError(UserError):
    """The engine refuses the contents of a request: status 400."""


class GenerationFailedError(UserError):
    """A running request has failed. `kind`: "engine_error", "timeout" or "replaced"."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class EngineState:
    """State of the engine.

    `phase`: "loading", "ready", "recovering" (rank 0 restarts), "draining" or "dead" (rank 0 exited while draining).
    `detail`: progress of loading, or why rank 0 is lost.
    `running`, `waiting`: numbers of requests.
    `ranks`: as rank 0 last reported them.
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


class AsyncEngine(Protocol):
    """An engine that decodes up to `info.max_num_seqs` requests concurrently, first come, first served."""

    @property
    def state(self) -> EngineState: ...
    @property
    def info(self) -> EngineInfo | None:
        """Facts about the models; None before rank 0 is ready for the first time."""
        ...

    def generate(
        self, request: AsyncEngineRequest
    ) -> AsyncGenerator[PromptLogprobsFrame | TokensFrame | DoneFrame, bool | None]:
        """Yields the frames of one request, `DoneFrame` last. The first step waits in the queue.

        `asend(True)` ends the request early: `DoneFrame` still follows, possibly after further tokens. Closing the
        generator cancels the request; callers must close it (`contextlib.aclosing`).
        Raises RequestRejectedError, InvalidRequestError or GenerationFailedError.
        """
        ...
