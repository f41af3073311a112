"""Store of responses of the Responses API: in memory, bounded; the least recently used response is evicted first."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from swiftspec.serve.http.sse import ENCODER, EventLog

MAX_STORED_RESPONSES = 4096
RUNNING_STATUSES = frozenset({"queued", "in_progress"})


@dataclass(slots=True)
class StoredResponse:
    """A stored response.

    `owner`: index of the API key of the request, the only key that can read the response; None if the server requires
        no key.
    `input_items`: JSON array of the items before the output, those of the previous response included.
    `response`, `status`: JSON of the response, and its field `status`.
    `item_ids`: ids of the items of its output.
    `events`: events of a background response that was requested with `stream`.
    `task`: generates a background response.
    """

    id: str
    owner: int | None
    input_items: bytes
    response: bytes = b""
    status: str = "queued"
    item_ids: tuple[str, ...] = ()
    events: EventLog | None = None
    task: asyncio.Task[None] | None = None

    def update(self, response: Mapping[str, Any]) -> None:
        """Sets the state of the response."""
        self.response, self.status = ENCODER.encode(response), str(response["status"])
        self.item_ids = tuple(str(item["id"]) for item in response.get("output", ()))

    @property
    def num_bytes(self) -> int:
        """Size of the contents in bytes."""
        return len(self.input_items) + len(self.response) + (0 if self.events is None else self.events.num_bytes)

    @property
    def running(self) -> bool:
        """Whether the response is generated in the background and has not ended."""
        return self.status in RUNNING_STATUSES


class ResponseStore:
    """Bounded store of responses. Running responses are never evicted.

    `max_bytes`: limit of the summed sizes of the responses that are not running; 0 disables the store.
    `max_responses`: limit of their number.
    """

    def __init__(self, max_bytes: int, max_responses: int = MAX_STORED_RESPONSES) -> None:
        self._max_bytes, self._max_responses = max_bytes, max_responses
        self._running: dict[str, StoredResponse] = {}
        self._ended: OrderedDict[str, StoredResponse] = OrderedDict()  # the least recently used first
        self._by_item: dict[str, str] = {}  # ids of the ended responses by ids of their items
        self._num_bytes = 0  # of the ended ones, which do not change any more

    @property
    def enabled(self) -> bool:
        """Whether responses are stored."""
        return self._max_bytes > 0

    @property
    def num_running(self) -> int:
        """Number of running responses."""
        return len(self._running)

    def put(self, stored: StoredResponse) -> None:
        """Adds a response, or after its end moves it to those that can be evicted. Evicts responses until the limits
        hold, also this one if it alone exceeds them."""
        self.delete(stored.id)
        if stored.running:
            self._running[stored.id] = stored
            return
        self._ended[stored.id] = stored
        self._num_bytes += stored.num_bytes
        self._by_item |= dict.fromkeys(stored.item_ids, stored.id)
        while self._num_bytes > self._max_bytes or len(self._ended) > self._max_responses:
            self.delete(next(iter(self._ended)))

    def get(self, response_id: str, owner: int | None) -> StoredResponse | None:
        """Returns a response and marks it as used. Returns None if it is unknown or evicted, or has another owner."""
        stored = self._running.get(response_id) or self._ended.get(response_id)
        if stored is None or stored.owner != owner:
            return None
        if response_id in self._ended:
            self._ended.move_to_end(response_id)
        return stored

    def get_item(self, item_id: str, owner: int | None) -> dict[str, Any] | None:
        """Returns an item of the output of a response that has ended, or None; see `get`."""
        stored = self.get(self._by_item.get(item_id, ""), owner)
        if stored is None:
            return None
        return next(item for item in msgspec.json.decode(stored.response)["output"] if item["id"] == item_id)

    def delete(self, response_id: str) -> None:
        """Removes a response; does nothing if it is unknown."""
        self._running.pop(response_id, None)
        if (stored := self._ended.pop(response_id, None)) is not None:
            self._num_bytes -= stored.num_bytes
            for item in stored.item_ids:
                self._by_item.pop(item, None)
