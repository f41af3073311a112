"""What ends a request while its prompt is read."""

from __future__ import annotations

from collections.abc import Callable

from swiftspec.errors import RequestFailed


class Cancelled(RequestFailed):
    """Nobody waits for the request any more."""


class CancelCheck:
    """What a rank's runners call before each chunk of a prompt. Raises Cancelled where the request is to end; what has
    been read by then stays in the cache and is right.

    `cancelled` says so, at a leader or in a process alone for the request's owner, at a follower for its leader. `on_continue`
    is called where the request goes on, and `on_progress` before each chunk: a long prompt is progress.
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
