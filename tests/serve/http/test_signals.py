"""The client of the tests under faults: it sees how each request ended, and what is wrong with that."""

from __future__ import annotations

import httpx
import pytest

from swiftspec.serve.http.engine_link.engine import GenerationFailedError, RequestRejectedError
from tests.support.http import Player
from tests.support.server_request import Asked, Told, ask, cutting, fault

TEXT = "def add(a, b):\n    return a + b\n"
STREAM, WHOLE = Asked("a", 90), Asked("a", 90, seed=3, stream=False)
OFF = "the answer broke off after 6 tokens: rank 1 is gone"


@pytest.mark.parametrize(
    "asked", [STREAM, WHOLE, Asked("a", 90, chat=True), Asked("a", 90, stream=False, chat=True)], ids=str
)
def test_a_text(player: Player, client: httpx.Client, asked: Asked) -> None:
    told = ask(client, asked)
    assert (told.end, told.text) == ("text", TEXT) and "metrics" in told.last
    assert len(told.came) > 1 or not asked.stream
    assert fault(asked, told, TEXT, False) is None
    assert "answered wrongly" in (fault(asked, told, TEXT + "b", False) or "")
    assert player.requests[0].sampling.get("seed") == asked.seed or asked.seed is None


@pytest.mark.parametrize("asked", [STREAM, WHOLE], ids=["stream", "whole"])
def test_an_answer_that_breaks_off(player: Player, client: httpx.Client, asked: Asked) -> None:
    player.prepare(raises=GenerationFailedError(OFF, "engine_error"), after=2)
    told = ask(client, asked)
    assert (told.end, told.said, bool(told.text)) == ("broken", OFF, asked.stream)
    assert fault(asked, told, TEXT, False) is None
    assert not asked.stream or "began wrongly" in (fault(asked, told, "other", False) or "")
    player.prepare(raises=GenerationFailedError("rank 1 is gone", "engine_error"), after=2)
    told = ask(client, asked)
    assert told.end == "odd" and "rank 1 is gone" in (fault(asked, told, TEXT, False) or "")


def test_one_that_is_refused_in_its_stream(player: Player, client: httpx.Client) -> None:
    player.prepare(raises=RequestRejectedError("waited 60 s", 503, 5.0), after=1)  # once the status has gone out
    told = ask(client, STREAM)
    assert (told.end, told.said) == ("refused", "waited 60 s")


def test_other_ends(player: Player, client: httpx.Client) -> None:
    player.prepare(raises=RequestRejectedError("the queue is full", 429, 1.0))
    refused = ask(client, STREAM)
    player.prepare()
    cut = ask(client, STREAM, cutting(2))
    player.prepare(hold=1)
    hung = ask(client, STREAM, bound=0.3)
    assert [told.end for told in (refused, cut, hung)] == ["refused", "cut", "hung"] and len(cut.came) == 2
    assert [fault(STREAM, told, TEXT, False) is None for told in (refused, cut, hung)] == [True, True, False]


def test_a_front_end_that_is_gone() -> None:
    with httpx.Client(base_url="http://127.0.0.1:9") as client:
        told = ask(client, STREAM)
    assert told.end == "disconnected" and fault(STREAM, told, TEXT, True) is None
    assert "though the front end lived" in (fault(STREAM, told, TEXT, False) or "")


def test_the_longest_pause() -> None:
    assert Told(came=[1.0, 1.5, 4.0, 4.1]).longest_pause == 2.5 and Told().longest_pause == 0
