"""bench/common/completion_client.py: decoding of streams, and what servers report about speculative decoding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from bench.common.completion_client import (
    CompletionClient,
    Speculation,
    read_answer,
    reported_speculation,
    timed_events,
)
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


def test_counters_are_read_after_each_answer() -> None:
    with connected(lambda _: (200, chat_stream(["a", "b"], USAGE))) as (server, client):
        for drafts, drafted, accepted in ((4, 12, 8), (6, 18, 13)):
            server.pages["/metrics"] = COUNTERS.format(drafts=drafts, drafted=drafted, accepted=accepted)
            answer = client.answer(USER, {})
    assert answer.speculation == Speculation(2, 6, 5)
