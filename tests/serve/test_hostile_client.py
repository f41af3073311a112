"""One client sends requests that take as much of the server as they can, beside a client that polls it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.server_process import ServerProcess

MAX_WAIT_S = 5.0  # on a busy machine; below 1 s on an idle one. The supervisor replaces a front end after 15 s.
LONG_TEXT = "a" * 8_000_000
MANY = 800_000


def grammar_chain(links: int) -> str:
    chain = "\n".join(f"r{number}: r{number + 1}" for number in range(links))
    return f'start: r0\n{chain}\nr{links}: "x"'


def schema_chain(links: int) -> dict[str, Any]:
    chain = {f"a{n}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/a{n + 1}"}}} for n in range(links)}
    return {"$ref": "#/$defs/a0", "$defs": {**chain, f"a{links}": {"type": "integer"}}}


def hostile_requests() -> Iterator[tuple[str, dict[str, Any]]]:
    text, chat = "/v1/completions", "/v1/chat/completions"
    one = {"prompt": "a", "max_tokens": 1}
    invalid = [-1] * MANY
    for path, field in (
        ("/detokenize", "tokens"),
        (text, "prompt"),
        (text, "allowed_token_ids"),
        (text, "stop_token_ids"),
        (text, "stop"),
        (chat, "messages"),
        (chat, "tools"),
        ("/v1/messages", "messages"),
        ("/v1/responses", "input"),
    ):
        yield path, {**one, field: invalid}
        yield path, {**one, field: [[]] * MANY}
    yield "/detokenize", {"tokens": [5] * MANY}
    yield text, {**one, "logit_bias": {str(number): 1e9 for number in range(MANY // 4)}}
    yield text, {"prompt": LONG_TEXT, "truncate_prompt_tokens": 5, "max_tokens": 1, "echo": True}
    yield "/tokenize", {"prompt": LONG_TEXT}
    yield text, {"prompt": "def f(", "max_tokens": 20, "logprobs": -1, "prompt_logprobs": -1}
    yield text, {"prompt": "def f(", "max_tokens": 20, "logprobs": -1, "stream": True}
    for links in (600, 2_674, 6_000):
        yield text, {**one, "guided_grammar": grammar_chain(links)}
        yield text, {**one, "guided_json": schema_chain(links)}
    yield text, {**one, "guided_regex": "(" * 20_000 + ")" * 20_000}
    yield text, {**one, "guided_grammar": "start: " + "(" * 60_000 + '"x"' + ")" * 60_000}


class PoliteClient(threading.Thread):
    """Polls the server until `stop`. `worst_s`: the longest wait for an answer."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url, self._ended = url, threading.Event()
        self.worst_s, self.failures, self.polls = 0.0, list[str](), 0

    def run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=60) as client:
            while not self._ended.is_set():
                began = time.monotonic()
                try:
                    client.get("/live").raise_for_status()
                except httpx.HTTPError as error:
                    self.failures.append(repr(error))
                self.polls += 1
                self.worst_s = max(self.worst_s, time.monotonic() - began)
                self._ended.wait(0.02)

    def stop(self) -> None:
        self._ended.set()
        self.join(60)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_hostile_client_stalls_nobody() -> None:
    with ServerProcess() as server, httpx.Client(base_url=server.url, timeout=120) as hostile:
        polite = PoliteClient(server.url)
        polite.start()
        for path, body in hostile_requests():
            data = json.dumps(body).encode()
            before = polite.worst_s
            status = hostile.post(path, content=data, headers={"content-type": "application/json"}).status_code
            print(f"{path} {str(body)[:60]}: {status}, worst wait so far {polite.worst_s:.2f} s")
            assert status < 500, (path, str(body)[:200])
            assert polite.worst_s < MAX_WAIT_S, (path, str(body)[:200], before, polite.worst_s)
        answer = hostile.post("/v1/completions", json={"prompt": "def f(", "max_tokens": 4, "temperature": 0})
        polite.stop()
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] > 0
    assert polite.failures == [] and polite.polls > 10
    assert not [line for line in server.stderr_lines if "restarting" in line or "Traceback" in line]
