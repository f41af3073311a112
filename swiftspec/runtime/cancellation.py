"""Cancellation of a request during its prefill."""

from __future__ import annotations

from collections.abc import Callable

from swiftspec.errors import RequestFailed


class Cancelled(RequestFailed):
    """The request was cancelled by its client."""


class CancelCheck:
    """Called by a rank's runners before each prefill chunk. Raises Cancelled if the request is to end; the chunks
    prefilled by then stay valid in the cache.

    `cancelled`: returns True to end the request. On a leader, or in a single process, it asks the request's owner; on a
    follower it asks the leader.
    `on_continue`: called if the request continues.
    `on_progress`: called before each chunk, so that a long prefill counts as progress.
    """

    def __init__(self) -> None:
        self.cancelled: Callable[[], bool] = lambda: False
        self.on_continue: Callable[[], None] = lambda: None
        self.on_progress: Callable[[], None] = lambda: None

    def __call__(self) -> None:
        self.on_progress()
        if self.cancelled():
            raise Cancelled("the request was cancelled while its prompt was read")
        self.on_continue()
