"""bench/common/completion_client.py: decoding of streams, and what servers report about speculative decoding."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from bench.common.completion_client import (
    CompletionClient,
    Speculation,
    counted_speculation,
    read_answer,
    reported_speculation,
    timed_events,
)
from swiftspec.errors import UserError
from tests.support.openai_server import OpenAIServer, Script, chat_stream, event, openai_server

USER = [{"role": "user", "content": "hi"}]
USAGE = {"choices": [], "usage": {"completion_tokens": 7}}
TIMINGS = {"timings": {"predicted_n": 10, "draft_n": 8, "draft_n_accepted": 5}}
SPECULATIVE = {
    "metrics": {
        "speculative_decoding": {"num_spec_steps": 4, "num_draft_tokens": 30, "num_accepted_draft_tokens": 6}
    }
}  # fmt: skip
COUNTERS = """\
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{{engine="0"}} {drafts}
vllm:spec_decode_num_drafts_total{{engine="1"}} 1.0
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{{engine="0"}} 1.7e9
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {drafted}
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {accepted}
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="0"}} 900
"""


@contextmanager
def connected(script: Script, **options: Any) -> Iterator[tuple[OpenAIServer, CompletionClient]]:
    with openai_server(script) as server:
        options = {"model": None, "chat": True, "api_key": None, **options}
        with CompletionClient("theirs", server.url, **options) as client:
            yield server, client


def test_events_that_arrive_in_pieces_have_the_time_of_their_end() -> None:
    pieces = [
        (1.0, b": comment\n\nda"),
        (2.0, b'ta: {"a": 1}\n'),
        (3.0, b"\ndata:x\r\nid: 4\ndata: \xe4"),
        (4.0, b"\n"),
    ]
    assert list(timed_events(pieces)) == [(2.0, '{"a": 1}'), (3.0, "x"), (4.0, "�")]


def test_an_answer_counts_tokens_and_times_of_text() -> None:
    chunks = [
        {"choices": [{"delta": {"role": "assistant", "content": ""}}], "usage": {"completion_tokens": 0}},
        {"choices": [{"delta": {"reasoning_content": "hm"}}], "usage": {"completion_tokens": 3}},
        {"choices": [{"delta": {"content": "a b"}}], "usage": {"completion_tokens": 5}},
        {"choices": [{"delta": {}, "finish_reason": "stop"}]},
        USAGE,
    ]
    answer = read_answer(
        [*((float(at), event(chunk)) for at, chunk in enumerate(chunks)), (9.0, b"data: [DONE]\n")], 9.5
    )
    assert (answer.text, answer.tokens, answer.counted, answer.first_tokens) == ("a b", 7, True, 3)
    assert (answer.decode_tokens, answer.decode_seconds, answer.gaps, answer.seconds) == (4, 1.0, [1.0], 9.5)


def test_without_usage_chunks_with_text_are_counted() -> None:
    completion = [{"choices": [{"text": text}]} for text in ("a", "", "b", "c")]
    answer = read_answer([(float(at), event(chunk)) for at, chunk in enumerate(completion)], 5.0)
    assert (answer.text, answer.tokens, answer.counted, answer.decode_tokens) == ("abc", 3, False, 2)


def test_an_answer_in_one_chunk_or_without_text_has_no_decode_time() -> None:
    one = read_answer([(1.0, chat_stream(["all"], USAGE))], 2.0)
    none = read_answer([(1.0, chat_stream([], {"usage": {"completion_tokens": 1}}))], 2.0)
    assert (one.tokens, one.decode_tokens, one.decode_seconds) == (7, 0, 0.0)
    assert (none.tokens, none.decode_tokens, none.decode_seconds, none.text) == (1, 0, 0.0, "")


@pytest.mark.parametrize(
    ("chunks", "speculation"),
    [
        ([SPECULATIVE, TIMINGS], Speculation(4, 30, 6)),
        ([TIMINGS, {"choices": []}], Speculation(4, 8, 5)),
        ([{"timings": {"predicted_n": 10}}], Speculation(9, 0, 0)),
        ([{"metrics": {}, **TIMINGS}], None),
        ([USAGE], None),
    ],
    ids=["SwiftSpec", "llama-server", "llama-server without a draft", "SwiftSpec without it", "others"],
)
def test_speculation_that_responses_report(chunks: list[dict[str, Any]], speculation: Speculation | None) -> None:
    assert reported_speculation(chunks) == speculation


def test_ratios_of_speculation() -> None:
    found = Speculation(4, 8, 5) + Speculation(1, 2, 0)
    assert (found.tokens_per_round, found.accepted_share) == (2.0, 0.5)
    assert (Speculation().tokens_per_round, Speculation(3).accepted_share) == (None, None)


def test_counters_of_vllm() -> None:
    assert counted_speculation(COUNTERS.format(drafts=4, drafted=12.0, accepted=8)) == Speculation(5, 12, 8)
    assert counted_speculation("vllm:num_requests_running 1.0\n") is None


def test_counters_are_read_after_each_answer() -> None:
    with connected(lambda _: (200, chat_stream(["a", "b"], USAGE))) as (server, client):
        for drafts, drafted, accepted in ((4, 12, 8), (6, 18, 13)):
            server.pages["/metrics"] = COUNTERS.format(drafts=drafts, drafted=drafted, accepted=accepted)
            answer = client.answer(USER, {})
    assert answer.speculation == Speculation(2, 6, 5)


def test_a_server_that_refuses_stream_options_is_measured_without() -> None:
    def strict(body: dict[str, Any]) -> tuple[int, bytes]:
        allowed = body.get("stream_options", {}).keys() <= {"include_usage"}
        return (200, chat_stream(["a"], USAGE)) if allowed else (400, b'{"error": {"message": "unknown field"}}')

    with connected(strict, api_key="secret") as (server, client):
        client.warm_up({"temperature": 0})
        assert client.answer(USER, {"max_tokens": 3}).tokens == 7
    path, last = server.requests[-1]
    assert path == "/v1/chat/completions" and last == {
        "model": "toy", "stream": True, "max_tokens": 3, "messages": USER, "stream_options": {"include_usage": True},
    }  # fmt: skip
    assert set(server.keys) == {"Bearer secret"}


def test_completions_send_the_text() -> None:
    with connected(lambda _: (200, event({"choices": [{"text": "a"}]})), chat=False, model="m") as (server, client):
        client.answer(USER, {})
    path, body = server.requests[0]
    assert (path, body["prompt"], body["model"], "messages" in body) == ("/v1/completions", "hi", "m", False)


FAILURES = {
    "503 loading": (503, json.dumps({"error": {"message": "loading"}}).encode()),
    "400 no\nsuch field": (400, json.dumps({"detail": "no\nsuch field"}).encode()),
    "500 <html>": (500, b"<html>"),
    "rank 1 is gone": (200, chat_stream(["a"], {"error": {"message": "rank 1 is gone"}})),
    "the response contains no server-sent event": (200, b'{"choices": []}'),
}


@pytest.mark.parametrize("cause", FAILURES)
def test_errors_name_server_and_cause_in_one_line(cause: str) -> None:
    with connected(lambda _: FAILURES[cause]) as (server, client), pytest.raises(UserError) as caught:
        client.warm_up({})
    message = str(caught.value)
    assert message.startswith(f"theirs ({server.url}): ") and message.endswith(cause.replace("\n", " "))


def test_a_server_without_models_or_without_a_listener() -> None:
    with connected(lambda _: (200, b"")) as (server, client):
        server.pages.clear()
        with pytest.raises(UserError, match=r"theirs .*/v1/models: 404"):
            client.warm_up({})
        server.pages["/v1/models"] = '{"data": []}'
        with pytest.raises(UserError, match="lists no model; use --model"):
            client.warm_up({})
    with (
        CompletionClient("gone", server.url, model="m", chat=True, api_key=None) as client,
        pytest.raises(UserError, match=r"gone .*refused"),
    ):
        client.warm_up({})
