"""Goes on without a drafter that is lost: the target's side owns the request, and a drafter only makes it faster."""

from __future__ import annotations

import contextlib

from swiftspec.errors import DrafterLost
from swiftspec.messages import Proposal, RequestStart, VerifyResult
from swiftspec.runtime.drafter import Drafter, NoDrafter
from swiftspec.sampling.grammar import GrammarTooComplex

# torch reports a failed device or a full memory as RuntimeError
FAILURES = (DrafterLost, GrammarTooComplex, RuntimeError, MemoryError)


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

    def open(self, opening: RequestStart) -> None:
        self.lost = None
        self._none.open(opening)
        try:
            self._drafter.open(opening)
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
                self._drafter.observe(result)  # first: somebody waits for it
            except FAILURES as error:
                self._mark_lost(error)
        self._none.observe(result)

    def close(self) -> None:
        with contextlib.suppress(*FAILURES):
            self._drafter.close()

    def _mark_lost(self, error: BaseException) -> None:
        self.lost = str(error) or type(error).__name__
