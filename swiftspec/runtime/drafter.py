"""Drafters propose the tokens that the target verifies: the protocol, a base of wrappers, and the drafter that proposes
nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from swiftspec.messages import Proposal, RequestStart, VerifyResult


class Drafter(Protocol):
    """A drafter: proposes trees of likely continuations. Any call may raise DrafterLost; the next `open` uses the
    drafter again.

    `busy`: seconds that the draft model has spent in forwards, as far as this process knows.
    `lost_reason`: why a wrapper proposes without its drafter, which is lost or late; None otherwise. A drafter without
        such a wrapper raises DrafterLost instead.
    """

    @property
    def busy(self) -> float: ...

    @property
    def lost_reason(self) -> str | None: ...

    def open(self, start: RequestStart) -> None:
        """Starts or resumes a request from its verified tokens."""

    def propose(self) -> Proposal:
        """Returns the proposal of the next round. Called once after `open` and once after each `observe`."""
        ...

    def grow(self) -> None:
        """Expands the tree before the result is known. Called while the target verifies."""

    def observe(self, result: VerifyResult) -> None:
        """Receives the result of a verification and re-roots the tree, at the latest before the next proposal."""

    def close(self) -> None:
        """Ends the request."""


Inner = TypeVar("Inner", bound=Drafter)


class DrafterWrapper(Generic[Inner]):
    """A drafter that forwards every call to the drafter `inner`. Subclasses override what they change: single calls, or
    all of them with `_call`."""

    def __init__(self, inner: Inner) -> None:
        self.inner = inner

    @property
    def busy(self) -> float:
        return self.inner.busy

    @property
    def lost_reason(self) -> str | None:
        return self.inner.lost_reason

    def open(self, start: RequestStart) -> None:
        self._call(self.inner.open, start)

    def propose(self) -> Proposal:
        return self._call(self.inner.propose)

    def grow(self) -> None:
        self._call(self.inner.grow)

    def observe(self, result: VerifyResult) -> None:
        self._call(self.inner.observe, result)

    def close(self) -> None:
        self._call(self.inner.close)

    def _call(self, method: Callable[..., Any], *args: Any) -> Any:
        """Calls a method of the inner drafter."""
        return method(*args)


class NoDrafter:
    """A drafter without a model: proposes only the root, which is autoregressive decoding."""

    busy = 0.0
    lost_reason = None
    draft_steps = 0

    def open(self, start: RequestStart) -> None:
        self._root = start.request, 0, len(start.tokens) - 1, start.tokens[-1]

    def propose(self) -> Proposal:
        return Proposal.root_only(*self._root)

    def grow(self) -> None:
        pass

    def observe(self, result: VerifyResult) -> None:
        at = result.prefix_len + len(result.tokens)
        self._root = result.request, result.round + 1, at, result.tokens[-1]

    def close(self) -> None:
        pass
