"""What the HTTP side sees of the engine: its state, and one answer as it comes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from swiftspec.errors import UserError
from swiftspec.serve.http.engine_link.frames import Chunk, Done, Prompt, RankState, Ready


@dataclass(frozen=True, slots=True)
class Ask:
    """One request to the engine. `key`: of one client's requests with the same key the newest replaces the others.
    `choices`: how many texts of a population, and of how many that are drawn."""

    prompt: list[int]
    sampling: dict[str, Any]  # the fields of SamplingParams that are given
    key: str | None = None
    choices: tuple[int, int] | None = None


class Refused(UserError):
    """The engine cannot take a request now. `status`: 429 (the queue is full, or it waited too long) or 503 (loading,
    recovering for too long, draining, or gone). `retry_after`: seconds; None where another try is no use."""

    def __init__(self, message: str, status: int, retry_after: float | None) -> None:
        super().__init__(message)
        self.status, self.retry_after = status, retry_after


class Unusable(UserError):
    """A request that the engine refuses for what it asks: a 400."""


class Broken(UserError):
    """Something broke while a request ran. `kind`: "engine_error", "timeout" or "replaced"."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class State:
    """`phase`: "loading", "ready", "recovering" (it was ready, and rank 0 is gone or loads again), "draining" or "dead"
    (rank 0 has gone while it was draining), and `step` says more; how many requests there are; the ranks, as rank 0 has
    told last."""

    phase: str
    step: str
    running: int
    waiting: int
    ranks: Sequence[RankState] = ()

    @property
    def whole(self) -> bool:
        """Whether no rank is missing."""
        return all(rank.state == "up" for rank in self.ranks)


class Engine(Protocol):
    """Serves as many requests at a time as it has room for, mostly one; first come, first served."""

    @property
    def state(self) -> State: ...
    @property
    def about(self) -> Ready | None:
        """What rank 0 has said of itself; None before it is ready."""
        ...

    def answer(self, ask: Ask) -> AsyncGenerator[Prompt | Chunk | Done, bool | None]:
        """The frames of one answer, `Done` last. The first step waits in the queue. Sending True in place of a step
        ends the request where it is: `Done` still comes, maybe after chunks that nobody wants. Closing the generator,
        which every caller must see to (`contextlib.aclosing`), cancels it. Raises Refused, Unusable or Broken."""
        ...
