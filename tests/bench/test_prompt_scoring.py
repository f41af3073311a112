"""bench/prompt_scoring.py: its requests and its table."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bench import prompt_scoring
from bench.prompt_scoring import KINDS
from tests.support.openai_server import openai_server


@pytest.mark.slow
def test_requests_alternate_and_no_prompt_is_sent_twice(capsys: pytest.CaptureFixture[str]) -> None:
    with openai_server(lambda _: (200, b"{}")) as server:
        prompt_scoring.main(["--url", server.url, "--lengths", "20,30", "--requests", "2"])
    sent: list[dict[str, Any]] = [body for _, body in server.requests]
    assert len(sent) == len({json.dumps(body["prompt"]) for body in sent}) == 2 * 3 * len(KINDS)
    assert [len(body["prompt"]) for body in sent] == [20] * 12 + [30] * 12
    scored = ["echo" in body or "prompt_logprobs" in body for body in sent[4:12]]
    assert scored == [False, True, True, True, True, True, True, False], "the second request begins with another kind"
    assert all(body["max_tokens"] == (0 if "echo" in body or "prompt_logprobs" in body else 1) for body in sent)
    assert capsys.readouterr().out.count("\n") == 2 + 2 * len(KINDS)
