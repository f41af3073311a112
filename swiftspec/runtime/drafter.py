"""Drafters propose what the target might say. Here: the protocol, and the one that proposes nothing."""

from __future__ import annotations

from typing import Protocol

from swiftspec.messages import Proposal, RequestStart, VerifyResult


class Drafter(Protocol):
    """Proposes sub-trees of likely continuations. May raise DrafterLost at any call; `open` attaches it again.

    `busy`: seconds that the draft model has spent in forwards, as far as is known here.
    """

    @property
    def busy(self) -> float: ...

    def open(self, opening: RequestStart) -> None:
        """Starts a request, or goes on with one, from its verified tokens."""

    def propose(self) -> Proposal:
        """The sub-tree to verify next. Called once after `open` and once after each `observe`."""
        ...

    def grow(self) -> None:
        """Called while the target verifies: the place to expand ahead of the result."""

    def observe(self, result: VerifyResult) -> None:
        """Re-roots after a result; a drafter elsewhere starts to, and the caller has time until it asks."""

    def close(self) -> None:
        """Ends the request."""


class NoDrafter:
    """Proposes nothing but the root: plain decoding."""

    busy = 0.0
    draft_steps = 0

    def open(self, opening: RequestStart) -> None:
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
