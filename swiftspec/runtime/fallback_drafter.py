"""Fallback: decoding continues without a local draft that has failed, since the target can decode alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from swiftspec.errors import DrafterLost
from swiftspec.messages import Proposal, RequestStart, VerifyResult
from swiftspec.runtime.drafter import Drafter, DrafterWrapper, NoDrafter
from swiftspec.sampling.grammar import GrammarTooComplex

# torch reports device failures and exhausted memory as RuntimeError
FAILURES = (DrafterLost, GrammarTooComplex, RuntimeError, MemoryError)


class FallbackDrafter(DrafterWrapper[Drafter]):
    """A drafter that delegates to another one and, after that one has failed, to a spare one without a model. The next
    request uses the other drafter again.
    """

    def __init__(self, drafter: Drafter, spare: Drafter | None = None) -> None:
        """`spare`: must not fail; None: proposes only the root."""
        super().__init__(drafter)
        self._spare = NoDrafter() if spare is None else spare
        self._lost_reason: str | None = None

    @property
    def lost_reason(self) -> str | None:
        return self._lost_reason

    def open(self, start: RequestStart) -> None:
        self._lost_reason = None
        self._spare.open(start)
        super().open(start)

    def propose(self) -> Proposal:
        return self._call(self.inner.propose) or self._spare.propose()

    def observe(self, result: VerifyResult) -> None:
        super().observe(result)  # first, since a remote draft waits for it
        self._spare.observe(result)

    def close(self) -> None:
        with contextlib.suppress(*FAILURES):
            self.inner.close()
        self._spare.close()

    def _call(self, method: Callable[..., Any], *args: Any) -> Any:
        """Calls a method of the inner drafter. Returns None if that is lost or fails."""
        if self._lost_reason is None:
            try:
                return method(*args)
            except FAILURES as error:
                self._lost_reason = str(error) or type(error).__name__
        return None
