"""Store of responses of the Responses API: in memory, bounded; the least recently used response is evicted first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from swiftspec.serve.sse import ENCODER

MAX_STORED_RESPONSES = 4096
MAX_STORED_BYTES = 256 << 20


@dataclass(slots=True)
class StoredResponse:
    """A stored response.

    `owner`: index of the API key of the request, the only key that can read the response; None if the server requires
        no key.
    `input_items`: JSON array of the items before the output, those of the previous response included.
    `response`: JSON of the response.
    `item_ids`: ids of the items of its output.
    """

    id: str
    owner: int | None
    input_items: bytes
    response: bytes = b""
    item_ids: tuple[str, ...] = ()

    def update(self, response: Mapping[str, Any]) -> None:
        """Sets the response."""
        self.response = ENCODER.encode(response)
        self.item_ids = tuple(str(item["id"]) for item in response.get("output", ()))

    @property
    def num_bytes(self) -> int:
        """Size of the contents in bytes."""
        return len(self.input_items) + len(self.response)


class ResponseStore:
    """Bounded store of responses.

    `max_bytes`: limit of the summed sizes of the responses. `max_responses`: limit of their number.
    """

    def __init__(self, max_bytes: int = MAX_STORED_BYTES, max_responses: int = MAX_STORED_RESPONSES) -> None:
        self._max_bytes, self._max_responses = max_bytes, max_responses
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()  # the least recently used first
        self._by_item: dict[str, str] = {}  # ids of responses by ids of their items
        self._num_bytes = 0

    def put(self, stored: StoredResponse) -> None:
        """Adds a response. Evicts responses until the limits hold, also this one if it alone exceeds them."""
        self.delete(stored.id)
        self._responses[stored.id] = stored
        self._num_bytes += stored.num_bytes
        self._by_item |= dict.fromkeys(stored.item_ids, stored.id)
        while self._num_bytes > self._max_bytes or len(self._responses) > self._max_responses:
            self.delete(next(iter(self._responses)))

    def get(self, response_id: str, owner: int | None) -> StoredResponse | None:
        """Returns a response and marks it as used. Returns None if it is unknown or evicted, or has another owner."""
        stored = self._responses.get(response_id)
        if stored is None or stored.owner != owner:
            return None
        self._responses.move_to_end(response_id)
        return stored

    def get_item(self, item_id: str, owner: int | None) -> dict[str, Any] | None:
        """Returns an item of the output of a response, or None; see `get`."""
        stored = self.get(self._by_item.get(item_id, ""), owner)
        if stored is None:
            return None
        return next(item for item in msgspec.json.decode(stored.response)["output"] if item["id"] == item_id)

    def delete(self, response_id: str) -> None:
        """Removes a response; does nothing if it is unknown."""
        if (stored := self._responses.pop(response_id, None)) is not None:
            self._num_bytes -= stored.num_bytes
            for item in stored.item_ids:
                self._by_item.pop(item, None)
