"""A server, started by its command, that decodes several requests concurrently."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx
import pytest

from tests.serve.test_server import posted
from tests.support.server_process import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
EXACT = ["--dtype", "float64", "--threads", "1", "--max-queue", "100"]
PARTICLES = ["--mode", "smc", "--smc-groups", "3", "--particles", "3"]
TREES = ["--mode", "serial", "--max-num-seqs", "3"]


@pytest.fixture(
    scope="module",
    params=[(PARTICLES, 1), (TREES, 1), (TREES, 2)],
    ids=["particles", "trees", "trees on two ranks"],
)
def server(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    """A server of the demo models."""
    flags, ranks = request.param
    with ServerProcess([*EXACT, *flags], ranks) as server:
        yield server


def request_body(number: int) -> dict[str, Any]:
    """A request body; prompts, lengths and stop criteria differ by number."""
    words = "x = 1\n" * (number * 37 % 50)
    stop = {"stop": ["\n\n"]} if number % 3 == 0 else {}
    seed = {"temperature": 0.7, "seed": number, "max_tokens": 16 + number * 13 % 60}
    seed |= {"frequency_penalty": 0.5} if number % 4 == 0 else {}
    return {"prompt": f"{words}def function_{number}(", **seed, **stop}


def whole(client: httpx.Client, number: int) -> str:
    answer = client.post("/v1/completions", json=request_body(number))
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def streamed(client: httpx.Client, number: int) -> str:
    with client.stream("POST", "/v1/completions", json=request_body(number) | {"stream": True}) as stream:
        lines = [line.removeprefix("data: ") for line in stream.iter_lines() if line.startswith("data: {")]
    parts = [json.loads(line) for line in lines]
    return "".join(part["choices"][0]["text"] for part in parts if part["choices"])


def test_concurrent_requests_equal_requests_alone(server: ServerProcess) -> None:
    """While other clients disconnect, and other requests are refused."""
    numbers, dice = range(12), random.Random(3)
    with httpx.Client(base_url=server.url, timeout=120) as client, ThreadPoolExecutor(16) as pool:
        alone = [whole(client, number) for number in numbers]
        assert len({*alone}) > 6
        most, over = 0, threading.Event()

        def watch() -> None:
            nonlocal most
            while not over.is_set():
                most = max(most, client.get("/health").json()["running"])
                time.sleep(0.005)

        def cut(number: int) -> None:
            with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as raw:
                raw.sendall(
                    posted(httpx.Request("POST", server.url, json=request_body(number) | {"stream": True}).read())
                )
                raw.settimeout(dice.choice([0.001, 0.05, 0.2]))
                with suppress(TimeoutError):
                    raw.recv(1 << 16)

        def refused(number: int) -> None:
            bad = client.post("/v1/completions", json=request_body(number) | {"stop_token_ids": [10**6]})
            assert bad.status_code == 400 and "\n" not in bad.json()["error"]["message"]

        watching = pool.submit(watch)
        texts = [pool.submit(whole if number % 2 else streamed, client, number) for number in numbers]
        others = [pool.submit(cut if number % 2 else refused, number) for number in range(8)]
        assert [text.result() for text in texts] == alone
        for other in others:
            other.result()
        over.set()
        watching.result()
        assert most == 3
        end = time.monotonic() + 30
        while client.get("/health").json()["running"]:
            assert time.monotonic() < end
        assert client.get("/health/generate").json()["status"] == "ok"


def test_guided_requests_are_answered_in_a_batch() -> None:
    """Each takes both sequences of this server, so the others wait for it."""
    guidance = {"guidance_scale": 2.0, "negative_prompt": "def other():\n", "stop": None}
    bodies = [request_body(number) | (guidance if number % 2 else {}) for number in range(6)]
    with (
        ServerProcess([*EXACT, "--max-num-seqs", "2"]) as server,
        httpx.Client(base_url=server.url, timeout=120) as client,
        ThreadPoolExecutor(len(bodies)) as pool,
    ):

        def text(body: dict[str, Any]) -> str:
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"][0]["text"]

        alone = [text(body) for body in bodies]
        assert [*pool.map(text, bodies)] == alone
        assert all(text(body | {"guidance_scale": 1.0}) != alone[i] for i, body in enumerate(bodies) if i % 2)


def test_choices_of_one_request(server: ServerProcess) -> None:
    """With `smc` texts of its particles, all cut at the stop string; trees have none."""
    body = {"prompt": "def add(a, b):\n    return", "temperature": 0.9, "max_tokens": 12, "smc": {}, "n": 3}
    with httpx.Client(base_url=server.url, timeout=120) as client:
        answers = [client.post("/v1/completions", json=body | {"seed": seed}).json() for seed in range(6)]
        if "error" in answers[0]:
            assert "this server runs mode serial" in answers[0]["error"]["message"]
            return
        for answer in answers:
            weights = [choice["weight"] for choice in answer["choices"]]
            assert sum(weights) == pytest.approx(1) and weights == sorted(weights, reverse=True)
            assert answer["exact"] is False and answer["usage"]["completion_tokens"] <= 12 * len(weights)
        assert max(len(answer["choices"]) for answer in answers) > 1, "unless all are copies"
        cut = client.post("/v1/completions", json=body | {"stop": ["\n"], "seed": 0, "max_tokens": 60}).json()
        assert all("\n" not in choice["text"] for choice in cut["choices"])
        assert client.get("/health").json()["running"] == 0


def test_choices_and_prompts_are_independent_samples(server: ServerProcess) -> None:
    """They run concurrently, and equal the requests that have one of them."""
    prompts = [f"{'x = 1' * number}def function_{number}(" for number in range(4)]
    body = {"temperature": 0.7, "seed": 5, "max_tokens": 20}
    with httpx.Client(base_url=server.url, timeout=120) as client:

        def texts(**more: Any) -> list[str]:
            answer = client.post("/v1/completions", json=body | more)
            assert answer.status_code == 200, answer.text
            return [choice["text"] for choice in answer.json()["choices"]]

        alone = [texts(prompt=prompt, n=2) for prompt in prompts]
        assert [texts(prompt=prompt) for prompt in prompts] == [pair[:1] for pair in alone]
        assert texts(prompt=prompts, n=2) == [text for pair in alone for text in pair]
        assert any(first != second for first, second in alone)
