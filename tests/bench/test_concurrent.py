"""Total rates of several clients: every system answers every prompt of a turn."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from bench import concurrent
from bench.common.completion_client import Speculation, StreamedAnswer
from swiftspec.errors import UserError

SPECULATION = Speculation(rounds=4, drafted=12, accepted=4)


class FakeClient:
    """A server whose answers have `tokens` tokens. It answers once `clients` requests have arrived."""

    def __init__(self, tokens: int, clients: int) -> None:
        self.tokens, self.asked, self._all_here = tokens, list[str](), threading.Barrier(clients)

    def answer(self, messages: Sequence[Mapping[str, str]], fields: Mapping[str, Any]) -> StreamedAnswer:
        assert fields["ignore_eos"] and fields["max_tokens"] == 8
        self.asked.append(messages[0]["content"])
        self._all_here.wait(timeout=10)
        return StreamedAnswer("", self.tokens, True, 1, 1.0, (), SPECULATION)


def server(client: FakeClient) -> concurrent.Server:
    return concurrent.Server("other", client)  # pyright: ignore[reportArgumentType]


def test_a_server_gets_the_requests_of_all_clients_at_once() -> None:
    client = FakeClient(8, clients=3)
    prompts = concurrent.Prompts(completes_code=False).take("fresh", 6)
    assert server(client).serve(3, prompts, concurrent.samplings("fresh", 6, 8, 0)) == 2.0
    assert sorted(client.asked) == sorted(prompts) and len({*prompts}) == 6


def test_an_answer_that_ends_early_is_an_error() -> None:
    prompts = concurrent.Prompts(completes_code=True).take("copy", 1)
    with pytest.raises(UserError, match="other: an answer is shorter than max_tokens"):
        server(FakeClient(7, clients=1)).serve(1, prompts, concurrent.samplings("copy", 1, 8, 0))


def test_too_few_different_prompts_are_an_error() -> None:
    with pytest.raises(UserError, match="use fewer turns or requests"):
        concurrent.Prompts(completes_code=True).take("fresh", 100_000)
