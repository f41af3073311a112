"""Drafters propose what the target might say. Here: the protocol, the one that proposes nothing, and the guard."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from swiftspec.errors import DrafterLost
from swiftspec.messages import Proposal, VerifyResult
from swiftspec.params import SamplingParams

T = TypeVar("T")
FAILURES = (DrafterLost, RuntimeError, MemoryError)  # torch reports a failed device or a full memory as RuntimeError


class Drafter(Protocol):
    """Proposes sub-trees of likely continuations. May raise DrafterLost at any call; `open` attaches it again.

    `busy`: seconds that the draft model has spent in forwards, as far as is known here.
    """

    @property
    def busy(self) -> float: ...

    def open(self, request: int, tokens: Sequence[int], sampling: SamplingParams, prompt_len: int) -> None:
        """Starts from `tokens`, of which the last is the root and those from `prompt_len` on are output."""
        ...

    def propose(self) -> Proposal:
        """The sub-tree to verify next. Called once after `open` and once after each `observe`."""
        ...

    def grow(self) -> None:
        """Called while the target verifies: the place to expand ahead of the result."""
        ...

    def observe(self, result: VerifyResult) -> None:
        """Re-roots after a result; a drafter elsewhere starts to, and the caller has time until it asks."""
        ...

    def close(self) -> None:
        """Ends the request."""
        ...


class SteppedDrafter(Drafter, Protocol):
    """A drafter whose d, the expansions of a round, may be set between two rounds; 0 where it has none."""

    @property
    def steps(self) -> int: ...

    @steps.setter
    def steps(self, steps: int, /) -> None: ...


class NearDrafter(SteppedDrafter, Protocol):
    """A drafter in this process, which may be ready for a result."""

    def offer(self) -> Any:
        """What can answer the next result by itself, as `observe` and `propose` would; None where that takes Python."""
        ...


class NoDrafter:
    """Proposes nothing but the root: plain decoding."""

    busy = 0.0
    steps = 0

    def open(self, request: int, tokens: Sequence[int], sampling: SamplingParams, prompt_len: int) -> None:
        self._root = request, 0, len(tokens) - 1, tokens[-1]

    def propose(self) -> Proposal:
        return Proposal.root_only(*self._root)

    def grow(self) -> None:
        pass

    def observe(self, result: VerifyResult) -> None:
        at = result.prefix_len + len(result.tokens)
        self._root = result.request, result.round + 1, at, result.tokens[-1]

    def close(self) -> None:
        pass


class FallbackDrafter:
    """Stands for a drafter and, once that is lost, for none: the request goes on with root-only proposals.

    `lost` is the reason, for whoever reports it. The next `open` attaches the drafter again.
    """

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._none = NoDrafter()
        self.lost: str | None = None

    @property
    def busy(self) -> float:
        return self._drafter.busy

    def open(self, request: int, tokens: Sequence[int], sampling: SamplingParams, prompt_len: int) -> None:
        self.lost = None
        self._none.open(request, tokens, sampling, prompt_len)
        self._guard(lambda: self._drafter.open(request, tokens, sampling, prompt_len), lambda: None)

    def propose(self) -> Proposal:
        return self._guard(self._drafter.propose, self._none.propose)

    def grow(self) -> None:
        self._guard(self._drafter.grow, self._none.grow)

    def observe(self, result: VerifyResult) -> None:
        self._guard(lambda: self._drafter.observe(result), lambda: None)  # first: somebody waits for it
        self._none.observe(result)

    def close(self) -> None:
        with contextlib.suppress(*FAILURES):
            self._drafter.close()

    def _guard(self, ask: Callable[[], T], otherwise: Callable[[], T]) -> T:
        if self.lost is None:
            try:
                return ask()
            except FAILURES as error:
                self.lost = str(error) or type(error).__name__
        return otherwise()
