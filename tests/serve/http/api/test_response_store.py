"""ResponseStore against a model: bounded, evicts the least recently used response, never a running one."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from swiftspec.serve.http.api.response_store import ResponseStore, StoredResponse

MAX_BYTES, MAX_RESPONSES = 1000, 4
IDS = st.sampled_from("abcdefgh")
OWNERS = st.sampled_from([None, 0, 1])


def stored(name: str, owner: int | None, padding: int, status: str = "completed") -> StoredResponse:
    made = StoredResponse(name, owner, b"x" * padding)
    made.update({"status": status})
    return made


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.store = ResponseStore(MAX_BYTES, MAX_RESPONSES)
        self.ended: dict[str, StoredResponse] = {}  # the least recently used first
        self.running: dict[str, StoredResponse] = {}

    def add_ended(self, made: StoredResponse) -> None:
        self.ended.pop(made.id, None)
        self.ended[made.id] = made
        while len(self.ended) > MAX_RESPONSES or sum(one.num_bytes for one in self.ended.values()) > MAX_BYTES:
            del self.ended[next(iter(self.ended))]

    @rule(name=IDS, owner=OWNERS, padding=st.integers(0, 1200))
    def put(self, name: str, owner: int | None, padding: int) -> None:
        made = stored(name, owner, padding)
        self.running.pop(name, None)
        self.store.put(made)
        self.add_ended(made)

    @rule(name=IDS, owner=OWNERS)
    def start(self, name: str, owner: int | None) -> None:
        made = stored(name, owner, 5000, "queued")
        self.ended.pop(name, None)
        self.store.put(made)
        self.running[name] = made

    @rule(name=IDS, padding=st.integers(0, 1200), status=st.sampled_from(["completed", "cancelled", "failed"]))
    def end(self, name: str, padding: int, status: str) -> None:
        made = self.running.pop(name, None)
        if made is not None:
            made.input_items = b"x" * padding
            made.update({"status": status})
            self.store.put(made)
            self.add_ended(made)

    @rule(name=IDS, owner=OWNERS)
    def get(self, name: str, owner: int | None) -> None:
        expected = self.running.get(name) or self.ended.get(name)
        found = self.store.get(name, owner)
        assert found is (expected if expected is not None and expected.owner == owner else None)
        if found is not None and name in self.ended:
            self.ended[name] = self.ended.pop(name)

    @rule(name=IDS)
    def delete(self, name: str) -> None:
        self.store.delete(name)
        self.ended.pop(name, None)
        self.running.pop(name, None)

    @invariant()
    def running_responses_are_counted(self) -> None:
        assert self.store.num_running == len(self.running)


StoreMachine.TestCase.settings = settings(max_examples=20, stateful_step_count=25, deadline=None)
TestStore = StoreMachine.TestCase


def test_a_store_of_no_bytes_is_disabled() -> None:
    assert ResponseStore(1).enabled and not ResponseStore(0).enabled
