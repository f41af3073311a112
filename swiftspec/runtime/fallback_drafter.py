"""Continues without a drafter that is lost: the request belongs to the target, a drafter only makes it faster."""

from __future__ import annotations

import contextlib

from swiftspec.errors import DrafterLost
from swiftspec.messages import Proposal, RequestStart, VerifyResult
from swiftspec.runtime.drafter import Drafter, NoDrafter
from swiftspec.sampling.grammar import GrammarTooComplex

# torch reports device failures and exhausted memory as RuntimeError
FAILURES = (DrafterLost, GrammarTooComplex, RuntimeError, MemoryError)


class FallbackDrafter:
    """Delegates to a drafter and, once that is lost, continues with root-only proposals.

    `lost` is the reason, None as long as the drafter works. The next `open` attaches the drafter again.
    """

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._none = NoDrafter()
        self.lost: str | None = None

    @property
    def busy(self) -> float:
        return self._drafter.busy

    def open(self, start: RequestStart) -> None:
        self.lost = None
        self._none.open(start)
        try:
            self._drafter.open(start)
        except FAILURES as error:
            self._mark_lost(error)

    def propose(self) -> Proposal:
        if self.lost is None:
            try:
                return self._drafter.propose()
            except FAILURES as error:
                self._mark_lost(error)
        return self._none.propose()

    def grow(self) -> None:
        if self.lost is None:
            try:
                self._drafter.grow()
            except FAILURES as error:
                self._mark_lost(error)

    def observe(self, result: VerifyResult) -> None:
        if self.lost is None:
            try:
                self._drafter.observe(result)  # first, since a remote draft waits for it
            except FAILURES as error:
                self._mark_lost(error)
        self._none.observe(result)

    def close(self) -> None:
        with contextlib.suppress(*FAILURES):
            self._drafter.close()

    def _mark_lost(self, error: BaseException) -> None:
        self.lost = str(error) or type(error).__name__
