"""Fallback: decoding continues without a local draft that has failed, since the target can decode alone."""

from __future__ import annotations

import contextlib

from swiftspec.errors import DrafterLost
from swiftspec.messages import Proposal, RequestStart, VerifyResult
from swiftspec.runtime.drafter import Drafter, NoDrafter
from swiftspec.sampling.grammar import GrammarTooComplex

# torch reports device failures and exhausted memory as RuntimeError
FAILURES = (DrafterLost, GrammarTooComplex, RuntimeError, MemoryError)


class FallbackDrafter:
    """A drafter that delegates to another one and, after that one has failed, to a spare one without a model.

    `lost_reason`: reason of the failure, None while the other drafter works. The next request uses the other drafter
    again.
    """

    def __init__(self, drafter: Drafter, spare: Drafter | None = None) -> None:
        """`spare`: must not fail; None: proposes only the root."""
        self._drafter = drafter
        self._spare = NoDrafter() if spare is None else spare
        self.lost_reason: str | None = None

    @property
    def busy(self) -> float:
        return self._drafter.busy

    def open(self, start: RequestStart) -> None:
        self.lost_reason = None
        self._spare.open(start)
        try:
            self._drafter.open(start)
        except FAILURES as error:
            self._mark_lost(error)

    def propose(self) -> Proposal:
        if self.lost_reason is None:
            try:
                return self._drafter.propose()
            except FAILURES as error:
                self._mark_lost(error)
        return self._spare.propose()

    def grow(self) -> None:
        if self.lost_reason is None:
            try:
                self._drafter.grow()
            except FAILURES as error:
                self._mark_lost(error)

    def observe(self, result: VerifyResult) -> None:
        if self.lost_reason is None:
            try:
                self._drafter.observe(result)  # first, since a remote draft waits for it
            except FAILURES as error:
                self._mark_lost(error)
        self._spare.observe(result)

    def close(self) -> None:
        with contextlib.suppress(*FAILURES):
            self._drafter.close()
        self._spare.close()

    def _mark_lost(self, error: BaseException) -> None:
        self.lost_reason = str(error) or type(error).__name__
