"""The server, started by its command on one rank and on two, with unmodified client libraries."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from swiftspec.serve.__main__ import main
from tests.support.clients import anthropic, openai
from tests.support.http import until
from tests.support.server_process import ROOT, ServerProcess
from tests.support.toy_pair import make_pair

HELLO: Any = [{"role": "user", "content": "def add(a, b):"}]
EXACT = ["--dtype", "float64", "--threads", "1"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def server(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    """A server of the demo models."""
    with ServerProcess([*EXACT], request.param) as server:
        yield server


@pytest.fixture(scope="module")
def alone() -> Iterator[ServerProcess]:
    with ServerProcess(["--threads", "1"]) as server:
        yield server


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:
        yield client


def posted(body: bytes) -> bytes:
    """The bytes of an HTTP request."""
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


@functools.cache
def expected(prompt: str, tokens: int, *flags: str) -> str:
    """The text of the command without a server."""
    command = [
        sys.executable, "-m", "swiftspec.serve", *EXACT, "--json", "--prompt", prompt, "--max-tokens", str(tokens),
        *flags,
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=100)
    return json.loads(done.stdout)["text"]


def test_openai(client: openai.OpenAI) -> None:
    text = expected("def add(a, b):", 24, "--temperature", "0")
    answer = client.chat.completions.create(model="swiftspec-demo", messages=HELLO, max_tokens=24, temperature=0)
    assert answer.choices[0].message.content == text
    stream = client.chat.completions.create(
        model="swiftspec-demo", messages=HELLO, max_tokens=24, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 24
    raw = expected("def add(a, b):", 24, "--raw", "--temperature", "0.8", "--seed", "5")
    whole = client.completions.create(
        model="swiftspec-demo", prompt="def add(a, b):", max_tokens=24, temperature=0.8, seed=5
    )
    assert whole.choices[0].text == raw
    assert (
        client.responses.create(
            model="swiftspec-demo", input="def add(a, b):", max_output_tokens=24, temperature=0
        ).output_text
        == text
    )
    assert [model.id for model in client.models.list()] == ["swiftspec-demo"]


def test_openai_async(server: ServerProcess) -> None:
    async def several() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="-") as client:
            requests = [
                client.completions.create(model="swiftspec-demo", prompt=f"def f{n % 2}(", max_tokens=16, temperature=0)
                for n in range(6)
            ]
            return [answer.choices[0].text for answer in await asyncio.gather(*requests)]

    texts = asyncio.run(several())
    assert texts == texts[:2] * 3 and texts[0] != ""


def test_openai_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="context") as too_long:
        client.completions.create(model="swiftspec-demo", prompt="word " * 5000)
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="swiftspec-demo", prompt="a", temperature=-1)
    assert client.completions.create(model="swiftspec-demo", prompt="a", max_tokens=1).usage


def test_anthropic(server: ServerProcess) -> None:
    with anthropic.Anthropic(base_url=server.url, api_key="-") as client:
        body: Any = {"model": "swiftspec-demo", "max_tokens": 24, "messages": HELLO, "extra_body": {"temperature": 0}}
        text = expected("def add(a, b):", 24, "--temperature", "0")
        answer = client.messages.create(**body)
        assert [block.text for block in answer.content if block.type == "text"] == [text]
        with client.messages.stream(**body) as stream:
            assert "".join(stream.text_stream) == text


def test_langchain(server: ServerProcess) -> None:
    from langchain_openai import ChatOpenAI  # takes seconds

    chat = ChatOpenAI(base_url=f"{server.url}/v1", api_key="-", model="swiftspec-demo", temperature=0, max_tokens=24)  # pyright: ignore
    text = expected("def add(a, b):", 24, "--temperature", "0")
    assert chat.invoke("def add(a, b):").content == text
    assert "".join(str(chunk.content) for chunk in chat.stream("def add(a, b):")) == text


def test_curl(server: ServerProcess) -> None:
    body = json.dumps({"prompt": "def add(a, b):", "max_tokens": 8, "stream": True})
    command = ["curl", "-sN", f"{server.url}/v1/completions", "-H", "content-type: application/json", "-d", body]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.endswith("data: [DONE]\n\n")


def test_output_follows_a_json_schema(client: openai.OpenAI) -> None:
    schema = {
        "type": "object", "required": ["name", "age"], "additionalProperties": False,
        "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
    }  # fmt: skip
    form: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    for seed in range(4):
        answer = client.chat.completions.create(
            model="swiftspec-demo", messages=HELLO, response_format=form, seed=seed, max_tokens=300
        )
        if answer.choices[0].finish_reason == "stop":
            found = json.loads(answer.choices[0].message.content or "")
            assert set(found) == {"name", "age"} and len(found["name"]) <= 8 and found["age"] <= 99


def test_hundreds_of_requests_with_a_third_disconnected(alone: ServerProcess) -> None:
    """No request hangs, nothing grows, and every complete answer equals that of the same request alone."""
    dice = random.Random(7)
    with httpx.Client(base_url=alone.url, timeout=60) as client:

        def ask(number: int) -> dict[str, Any]:
            return {"prompt": f"def function_{number % 10}(", "max_tokens": 24, "temperature": 0.7, "seed": number % 10}

        def whole(number: int) -> str:
            answer = client.post("/v1/completions", json=ask(number))
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"][0]["text"]

        def cut(number: int) -> None:
            seconds = dice.choice([0.0, 0.002, 0.01, 0.03])
            with socket.create_connection(("127.0.0.1", int(alone.url.rpartition(":")[2]))) as raw:
                body = json.dumps(ask(number) | {"stream": True}).encode()
                raw.sendall(posted(body))
                raw.settimeout(seconds or 0.0001)
                with suppress(TimeoutError):
                    raw.recv(1 << 16)

        alone_texts = [whole(number) for number in range(10)]
        for number in range(100):
            whole(number)
        before = alone.resource_usage()
        for number in range(400):
            if dice.random() < 1 / 3:
                cut(number)
            else:
                assert whole(number) == alone_texts[number % 10]
        after = alone.resource_usage()
        assert client.get("/health").json()["running"] == 0
    assert after.keys() == before.keys()
    for process, (memory, files) in after.items():
        assert memory < before[process][0] + (32 << 20) and files <= before[process][1] + 8


def test_hostile_input_is_refused_and_the_server_survives(alone: ServerProcess) -> None:
    port = int(alone.url.rpartition(":")[2])
    deep = '{"prompt": "a", "x": ' + "[" * 20_000 + "]" * 20_000 + "}"
    bomb = "(" * 20_000 + "a" + ")" * 20_000
    bodies: list[tuple[str, bytes]] = [
        ("/v1/completions", b'{"prompt": "' + b"a" * 10_000_000 + b'"}'),
        ("/v1/completions", json.dumps({"prompt": list(range(100_000))}).encode()),
        ("/v1/completions", json.dumps({"prompt": [10**9]}).encode()),
        ("/v1/completions", json.dumps({"prompt": [-1]}).encode()),
        ("/v1/completions", b'{"prompt": "\xff\xfe"}'),
        ("/v1/completions", b'{"prompt": "\\ud800"}'),
        ("/v1/completions", deep.encode()),
        ("/v1/completions", b"[]"), ("/v1/completions", b""), ("/v1/completions", b"nonsense"),
        ("/v1/completions", json.dumps({"prompt": "a", "structured_outputs": {"regex": bomb}}).encode()),
        ("/v1/completions", json.dumps({"prompt": "a", "logit_bias": {str(n): 1 for n in range(5000)}}).encode()),
        ("/v1/completions", json.dumps({"prompt": "a", "stop": ["x"] * 1000}).encode()),
        ("/v1/completions", json.dumps({"prompt": "a", "max_tokens": 10**30}).encode()),
        ("/v1/chat/completions", json.dumps({"messages": [{"role": "user", "content": "a"}] * 50_000}).encode()),
        ("/v1/chat/completions", json.dumps({"messages": [{"role": {"a": 1}, "content": 5}]}).encode()),
    ]  # fmt: skip
    with httpx.Client(base_url=alone.url, timeout=60) as client:
        for path, body in bodies:
            answer = client.post(path, content=body, headers={"content-type": "application/json"})
            assert 400 <= answer.status_code < 500, (path, body[:60], answer.status_code, answer.text[:300])
            assert answer.json()["error"]["message"], body[:60]
        half_open = [socket.create_connection(("127.0.0.1", port)) for _ in range(50)]
        for raw in half_open[::2]:
            raw.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Le")
        with socket.create_connection(("127.0.0.1", port)) as flood:
            flood.settimeout(20)
            try:
                for _ in range(1000):
                    flood.sendall(b"X-Header: " + b"a" * 1000 + b"\r\n")
                assert re.match(rb"HTTP/1.1 4\d\d", flood.recv(1 << 16))
            except (ConnectionResetError, BrokenPipeError):
                pass
        assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200
        for raw in half_open:
            raw.close()


def test_a_disconnect_during_a_long_prefill_frees_the_engine() -> None:
    """A disconnect during a prefill frees the engine after the current chunk."""
    with (
        ServerProcess(["--speculative-config.emulate", "target=2000ms,draft=1ms"]) as server,
        httpx.Client(base_url=server.url) as c,
    ):
        body = json.dumps({"prompt": [5] * 1800}).encode()
        with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as raw:
            raw.sendall(posted(body))
            until(lambda: c.get("/health").json()["running"] == 1)
        until(lambda: c.get("/health").json()["running"] == 0, 9.0)  # the rest of the prefill takes 14 s, a chunk 2 s


@pytest.mark.parametrize("victim", ["serve.frontend", "serve.rank_process"])
def test_a_killed_process_is_restarted_and_the_other_one_remains(victim: str) -> None:
    """The front end, or rank 0, during an answer."""
    with ServerProcess(["--threads", "1", "--speculative-config.emulate", "target=20ms,draft=1ms"]) as server:
        before = parts(server)
        with httpx.Client(base_url=server.url, timeout=30) as client:
            ask: Any = {"prompt": "def add(", "max_tokens": 200, "stream": True, "ignore_eos": True}
            with suppress(httpx.HTTPError), client.stream("POST", "/v1/completions", json=ask) as stream:
                lines = stream.iter_lines()
                next(lines)
                os.kill(before[victim], signal.SIGKILL)
                list(lines)
        began, answer = time.monotonic(), None
        while answer is None or answer.status_code != 200:
            assert time.monotonic() < began + 30
            with suppress(httpx.HTTPError):
                ask = {"prompt": "def add(", "max_tokens": 4}
                answer = httpx.post(f"{server.url}/v1/completions", json=ask, timeout=30)
        after = parts(server)
        assert {name for name in before if before[name] != after[name]} == {victim}
        assert httpx.get(f"{server.url}/health").status_code == 200


def parts(server: ServerProcess) -> dict[str, int]:
    """The processes of the front end and of rank 0."""
    found = {}
    for process in server.processes():
        command = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
        names = ("serve.frontend", "serve.rank_process")
        found |= {name: process for name in names if f"swiftspec.{name}".encode() in command}
    return found


@pytest.mark.parametrize(("ranks", "number"), [(1, signal.SIGTERM), (1, signal.SIGINT), (2, signal.SIGTERM)])
def test_a_signal_lets_the_request_finish_and_refuses_others(tmp_path: Path, ranks: int, number: int) -> None:
    target, draft = make_pair(tmp_path)
    flags = [
        "--model",
        str(target),
        "--draft-model",
        str(draft),
        "--speculative-config.emulate",
        "target=40ms,draft=1ms",
    ]
    with ServerProcess([*flags, "--threads", "1"], ranks) as server:
        ask: Any = {"prompt": "def add(", "max_tokens": 60, "temperature": 0, "stream": True, "ignore_eos": True}
        with httpx.Client(base_url=server.url, timeout=30) as client:
            with client.stream("POST", "/v1/completions", json=ask) as stream:
                lines = stream.iter_lines()
                next(lines)
                server.process.send_signal(number)  # torchrun passes it on to all ranks
                events = list(lines)
            assert events[-2:] == ["data: [DONE]", ""], events[-4:]
        assert server.process.wait(60) in ((0,) if ranks == 1 else (0, 1, -15, 143))


def test_invalid_configurations_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["--port", str(taken.getsockname()[1])]) == 1
    assert "cannot listen on" in capsys.readouterr().err
    assert main(["--port", "0", "--prompt", "a"]) == 2
    assert "--prompt" in capsys.readouterr().err
    assert main(["--port", "0", "--seed", "3"]) == 2
    assert "--seed is not supported by a server" in capsys.readouterr().err
    assert main(["--port", "0", "--host", "no.such.host.invalid"]) == 1
    assert "no.such.host.invalid" in capsys.readouterr().err


def test_models_that_cannot_be_loaded_end_the_server(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "swiftspec.serve", "--port", "0", "--model", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1 and "error" in done.stderr and "Traceback" not in done.stderr
