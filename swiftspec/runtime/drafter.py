"""Drafters propose what the target might say. Here: the protocol, the one that proposes nothing, and the one that goes
on without a lost drafter."""

from __future__ import annotations

import contextlib
from typing import Protocol

from swiftspec.errors import DrafterLost
from swiftspec.messages import Opening, Proposal, VerifyResult

FAILURES = (DrafterLost, RuntimeError, MemoryError)  # torch reports a failed device or a full memory as RuntimeError


class Drafter(Protocol):
    """Proposes sub-trees of likely continuations. May raise DrafterLost at any call; `open` attaches it again.

    `busy`: seconds that the draft model has spent in forwards, as far as is known here.
    """

    @property
    def busy(self) -> float: ...

    def open(self, opening: Opening) -> None:
        """Starts a request, or goes on with one, from its verified tokens."""
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
    def draft_steps(self) -> int: ...

    @draft_steps.setter
    def draft_steps(self, steps: int, /) -> None: ...


class NoDrafter:
    """Proposes nothing but the root: plain decoding."""

    busy = 0.0
    draft_steps = 0

    def open(self, opening: Opening) -> None:
        self._root = opening.request, 0, len(opening.tokens) - 1, opening.tokens[-1]

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

    def open(self, opening: Opening) -> None:
        self.lost = None
        self._none.open(opening)
        try:
            self._drafter.open(opening)
        except FAILURES as error:
            self._lose(error)

    def propose(self) -> Proposal:
        if self.lost is None:
            try:
                return self._drafter.propose()
            except FAILURES as error:
                self._lose(error)
        return self._none.propose()

    def grow(self) -> None:
        if self.lost is None:
            try:
                self._drafter.grow()
            except FAILURES as error:
                self._lose(error)

    def observe(self, result: VerifyResult) -> None:
        if self.lost is None:
            try:
                self._drafter.observe(result)  # first: somebody waits for it
            except FAILURES as error:
                self._lose(error)
        self._none.observe(result)

    def close(self) -> None:
        with contextlib.suppress(*FAILURES):
            self._drafter.close()

    def _lose(self, error: BaseException) -> None:
        self.lost = str(error) or type(error).__name__
