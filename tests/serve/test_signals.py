"""The client of the tests under faults: outcomes of requests, and the faults in them."""

from __future__ import annotations

import httpx
import pytest

from swiftspec.serve.link.engine_client import GenerationFailedError, RequestRejectedError
from tests.support.http import Player
from tests.support.server_request import ClientRequest, RequestOutcome, disconnect_after, find_fault, send_request

TEXT = "def add(a, b):\n    return a + b\n"
STREAM, WHOLE = ClientRequest("a", 90), ClientRequest("a", 90, seed=3, stream=False)
OFF = "the answer was interrupted after 6 tokens: rank 1 is gone"


@pytest.mark.parametrize(
    "client_request",
    [STREAM, WHOLE, ClientRequest("a", 90, chat=True), ClientRequest("a", 90, stream=False, chat=True)],
    ids=str,
)
def test_a_complete_answer(player: Player, client: httpx.Client, client_request: ClientRequest) -> None:
    outcome = send_request(client, client_request)
    assert (outcome.end, outcome.text) == ("text", TEXT) and "metrics" in outcome.last
    assert len(outcome.piece_times) > 1 or not client_request.stream
    assert find_fault(client_request, outcome, TEXT, False) is None
    assert "answered wrongly" in (find_fault(client_request, outcome, TEXT + "b", False) or "")
    assert player.requests[0].sampling.seed == client_request.seed or client_request.seed is None


@pytest.mark.parametrize("client_request", [STREAM, WHOLE], ids=["stream", "whole"])
def test_an_interrupted_answer(player: Player, client: httpx.Client, client_request: ClientRequest) -> None:
    player.prepare(raises=GenerationFailedError(OFF, "engine_error"), after=2)
    outcome = send_request(client, client_request)
    assert (outcome.end, outcome.error, bool(outcome.text)) == ("broken", OFF, client_request.stream)
    assert find_fault(client_request, outcome, TEXT, False) is None
    assert not client_request.stream or "began wrongly" in (find_fault(client_request, outcome, "other", False) or "")
    player.prepare(raises=GenerationFailedError("rank 1 is gone", "engine_error"), after=2)
    outcome = send_request(client, client_request)
    assert outcome.end == "odd" and "rank 1 is gone" in (find_fault(client_request, outcome, TEXT, False) or "")


def test_a_request_that_is_refused_in_its_stream(player: Player, client: httpx.Client) -> None:
    player.prepare(raises=RequestRejectedError("waited 60 s", 503, 5.0), after=1)  # after the status was sent
    outcome = send_request(client, STREAM)
    assert (outcome.end, outcome.error) == ("refused", "waited 60 s")


def test_other_outcomes(player: Player, client: httpx.Client) -> None:
    player.prepare(raises=RequestRejectedError("the queue is full", 429, 1.0))
    refused = send_request(client, STREAM)
    player.prepare()
    cut = send_request(client, STREAM, disconnect_after(2))
    player.prepare(hold=1)
    hung = send_request(client, STREAM, timeout_s=0.3)
    assert [outcome.end for outcome in (refused, cut, hung)] == ["refused", "cut", "hung"] and len(cut.piece_times) == 2
    assert [find_fault(STREAM, outcome, TEXT, False) is None for outcome in (refused, cut, hung)] == [True, True, False]


def test_a_lost_front_end() -> None:
    with httpx.Client(base_url="http://127.0.0.1:9") as client:
        outcome = send_request(client, STREAM)
    assert outcome.end == "disconnected" and find_fault(STREAM, outcome, TEXT, True) is None
    assert "though the front end lived" in (find_fault(STREAM, outcome, TEXT, False) or "")


def test_the_longest_pause() -> None:
    assert RequestOutcome(piece_times=[1.0, 1.5, 4.0, 4.1]).longest_pause == 2.5 and RequestOutcome().longest_pause == 0
