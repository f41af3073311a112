"""Cancellation of a request during its prefill."""

from __future__ import annotations

from collections.abc import Callable

from swiftspec.errors import RequestFailed


class Cancelled(RequestFailed):
    """Raised if a client has cancelled its request before or during the prefill."""


class CancelCheck:
    """Cancellation check, which a rank's runners call before each prefill chunk. Raises Cancelled if the request is
    cancelled; the KV of earlier chunks stays valid.

    `cancelled`: returns whether the request is cancelled. A leader or a single process asks the client of the request;
    a follower waits for the leader's decision.
    `on_continue`: called if the request is not cancelled; a leader notifies its followers.
    `on_progress`: called before each chunk, so that a long prefill is not mistaken for a blocked process.
    """

    def __init__(self) -> None:
        self.cancelled: Callable[[], bool] = lambda: False
        self.on_continue: Callable[[], None] = lambda: None
        self.on_progress: Callable[[], None] = lambda: None

    def __call__(self) -> None:
        self.on_progress()
        if self.cancelled():
            raise Cancelled("the request was cancelled during prefill")
        self.on_continue()
