"""A server and a subscriber that indexes its prefix cache, as a prefix-aware router does."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.kv_events import ClearedEvent, KvIndex, KvSubscriber
from tests.support.server_process import ServerProcess

pytestmark = pytest.mark.slow

SIZE, KEY = 16, "secret"
FUNCTION = "def add(first, second):\n    return first + second\n\n\n"
TOPIC = "kv@127.0.0.1:8000@demo"


@pytest.fixture
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ServerProcess]:
    """A server with a small prefix cache, which decodes one request at a time or, with the parameter 2, two."""
    addresses = {"endpoint": f"ipc://{tmp_path}/events", "replay_endpoint": f"ipc://{tmp_path}/replay"}
    events = {"enable_kv_cache_events": True, **addresses, "topic": TOPIC}
    flags = [
        "--threads", "1", "--max-num-seqs", str(getattr(request, "param", 1)), "--prefix-cache-memory", "1",
        "--kv-events-config", json.dumps(events), "--served-model-name", "demo", "--api-key", KEY, "--public-metrics",
        "--speculative-config.emulate", "target=20ms,draft=1ms",
    ]  # fmt: skip
    with ServerProcess(flags) as made:
        yield made


@pytest.fixture
def subscriber(server: ServerProcess, tmp_path: Path) -> Iterator[KvSubscriber]:
    made = KvSubscriber(f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay", TOPIC.encode())
    yield made
    made.close()


class Client:
    """Requests completions of a server."""

    def __init__(self, server: ServerProcess) -> None:
        self.http = httpx.Client(base_url=server.url, timeout=60, headers={"Authorization": f"Bearer {KEY}"})

    def tokens(self, text: str) -> list[int]:
        return self.http.post("/tokenize", json={"prompt": text}).json()["tokens"]

    def ask(self, prompt: list[int], max_tokens: int = 24) -> tuple[list[int], int]:
        """Prompt and answer, and the number of cached prompt tokens."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "return_token_ids": True}
        answer = self.http.post("/v1/completions", json=body).json()
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return [*prompt, *answer["choices"][0]["token_ids"]], cached


@pytest.mark.parametrize("server", [1, 2], ids=["one request", "two requests"], indirect=True)
def test_an_index_of_the_server_predicts_its_cached_tokens(server: ServerProcess, subscriber: KvSubscriber) -> None:
    client, index = Client(server), KvIndex(SIZE)
    one, two = client.tokens(FUNCTION * 6), client.tokens("class Shape:\n    sides = 4\n" * 8)
    text, cached = client.ask(one)
    assert cached == 0
    for _, batch in subscriber.replay():  # it has missed the first request
        index.apply(batch)
    assert index.matched_tokens(one) == len(one) // SIZE * SIZE
    for prompt in ([*text, *two[:9]], [*one[:70], *two], two, [*one, 5], two[:50]):
        predicted = index.matched_tokens(prompt[:-1])
        _, cached = client.ask(prompt)
        assert cached // SIZE * SIZE == predicted
        subscriber.follow(index)
    assert index.matched_tokens(two[:50]) == 50 // SIZE * SIZE
    fill = [client.tokens(f"name_{i} = {i}\n" * 12) for i in range(16)]  # more than the caches hold
    for prompt in fill:
        client.ask(prompt, 2)
    subscriber.follow(index)
    assert index.matched_tokens(two) == 0, "evicted"
    assert client.ask(two, 2)[1] == 0


def test_a_restart_clears_the_index(server: ServerProcess, subscriber: KvSubscriber) -> None:
    client, index = Client(server), KvIndex(SIZE)
    one = client.tokens(FUNCTION * 6)
    client.ask(one)
    for _, batch in subscriber.replay():
        index.apply(batch)
    os.kill(client.http.get("/health").json()["ranks"][0]["pid"], signal.SIGKILL)
    batch = subscriber.receive(60)
    while batch is not None and batch.events != [ClearedEvent()]:  # of the request, if published after the replay
        index.apply(batch)
        batch = subscriber.receive(60)
    assert batch is not None and subscriber.number == 0
    index.apply(batch)
    until(lambda: client.http.get("/ready").status_code == 200)
    assert client.ask(one)[1] == index.matched_tokens(one) == 0
    subscriber.follow(index)
    assert index.matched_tokens(one) == len(one) // SIZE * SIZE


def test_what_gateways_need_while_the_server_drains(server: ServerProcess, subscriber: KvSubscriber) -> None:
    """Metrics without a key, and, after SIGTERM, a running request that completes, readiness that ends before it does,
    liveness that does not, and 503 with Retry-After for others."""
    client = Client(server)
    for path, status in (("/metrics", 200), ("/ready", 200), ("/live", 200), ("/v1/models", 401), ("/load", 401)):
        assert httpx.get(server.url + path).status_code == status, path
    body: dict[str, Any] = {"prompt": "def add(", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with client.http.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        metrics = text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text)
        values = {sample.name: sample for family in metrics for sample in family.samples}
        assert values["vllm:num_requests_running"].value == 1
        assert int(values["vllm:cache_config_info"].labels["num_gpu_blocks"]) > 2048 // SIZE
        server.process.send_signal(signal.SIGTERM)
        until(lambda: httpx.get(f"{server.url}/ready").status_code == 503)
        assert httpx.get(f"{server.url}/live").status_code == 200
        refused = client.http.post("/v1/completions", json={"prompt": "a"})
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
        assert [*lines][-2:] == ["data: [DONE]", ""]
    assert server.process.wait(30) == 0


def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() < began + seconds
        time.sleep(0.05)
