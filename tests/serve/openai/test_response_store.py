"""ResponseStore against a model: bounded, evicts the least recently used response."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, rule

from swiftspec.serve.openai.response_store import ResponseStore, StoredResponse
from tests.support.cases import examples

MAX_BYTES, MAX_RESPONSES = 1000, 4
IDS = st.sampled_from("abcdefgh")
OWNERS = st.sampled_from([None, 0, 1])


def stored(name: str, owner: int | None, padding: int) -> StoredResponse:
    made = StoredResponse(name, owner, b"x" * padding)
    made.update({"status": "completed"})
    return made


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.store = ResponseStore(MAX_BYTES, MAX_RESPONSES)
        self.ended: dict[str, StoredResponse] = {}  # the least recently used first

    def add_ended(self, made: StoredResponse) -> None:
        self.ended.pop(made.id, None)
        self.ended[made.id] = made
        while len(self.ended) > MAX_RESPONSES or sum(one.num_bytes for one in self.ended.values()) > MAX_BYTES:
            del self.ended[next(iter(self.ended))]

    @rule(name=IDS, owner=OWNERS, padding=st.integers(0, 1200))
    def put(self, name: str, owner: int | None, padding: int) -> None:
        made = stored(name, owner, padding)
        self.store.put(made)
        self.add_ended(made)

    @rule(name=IDS, owner=OWNERS)
    def get(self, name: str, owner: int | None) -> None:
        expected = self.ended.get(name)
        found = self.store.get(name, owner)
        assert found is (expected if expected is not None and expected.owner == owner else None)
        if found is not None and name in self.ended:
            self.ended[name] = self.ended.pop(name)

    @rule(name=IDS)
    def delete(self, name: str) -> None:
        self.store.delete(name)
        self.ended.pop(name, None)


StoreMachine.TestCase.settings = settings(max_examples=examples(20), stateful_step_count=25)
TestStore = StoreMachine.TestCase
