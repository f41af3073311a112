"""Replicas in Ray Serve: the application of `swiftspec.deploy.ray` on a cluster of one machine, and OpenAI's client."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from ray import serve

from swiftspec import SamplingParams
from swiftspec.deploy.ray import rank_replicas, ray_application
from swiftspec.llm_engine import LLMEngine
from swiftspec.startup.built_in_models import DEMO_MODELS
from swiftspec.text.codec import TextCodec
from tests.support.clients import openai

ARGS = {"model": "demo", "device": "cpu", "threads": 1, "temperature": 0.0}
PROMPT = "def fib(n):"
SLOW = "target=20ms,draft=1ms"  # so that requests run long enough to be interrupted
TIMEOUT_S = 90.0


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Starts a cluster, and returns the address of its HTTP proxy."""
    port = 18231
    start_ray()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()
    ray.shutdown()


def start_ray(attempts: int = 3) -> None:
    """Starts Ray, again if it does not start within its 30 seconds on a busy machine."""
    try:
        ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
    except Exception as error:  # Ray raises no other type
        ray.shutdown()
        if attempts == 1 or "timed out during startup" not in str(error):
            raise
        start_ray(attempts - 1)


def deploy(*, ranks: int = 1, changes: Mapping[str, Any] | None = None, **values: Any) -> None:
    """Deploys the application and waits until it is ready. `changes`: options of the deployment, as a Serve config sets
    them. `values`: further settings."""
    app = ray_application({**ARGS, **values, "ranks": ranks})
    engine: Any = app._bound_deployment.options(**changes or {})
    serve.run(engine.bind({**ARGS, **values}, ranks), name="app", route_prefix="/")


def client(url: str, session: str | None = None) -> Any:
    headers = {} if session is None else {"x-session-id": session}
    return openai.OpenAI(base_url=f"{url}/v1", api_key="-", default_headers=headers, max_retries=0, timeout=TIMEOUT_S)


def stream(url: str, session: str | None = None, max_tokens: int = 48) -> str:
    """Returns the streamed text of a completion."""
    chunks = client(url, session).completions.create(
        model="swiftspec-demo", prompt=PROMPT, max_tokens=max_tokens, stream=True, extra_body={"ignore_eos": True}
    )
    return "".join(chunk.choices[0].text for chunk in chunks)


def expected(max_tokens: int) -> str:
    """Returns the text of an engine in this process."""
    codec, llm = TextCodec(DEMO_MODELS.target), LLMEngine(DEMO_MODELS.target, DEMO_MODELS.draft)
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return codec.decode(llm.generate(codec.encode(PROMPT), sampling).token_ids)


def replica_pids() -> list[int]:
    """Returns the processes of the replicas."""
    return [pid for pid, title, _ in processes() if title.startswith("ray::ServeReplica:app:Engine")]


def processes() -> Iterator[tuple[int, str, int]]:
    """Yields process ID, command line and parent of each process of this machine."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                title, stat = (folder / "cmdline").read_text(), (folder / "stat").read_text()
            except OSError:  # it has ended
                continue
            yield int(folder.name), title, int(stat.rpartition(")")[2].split()[1])


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < end, "timeout"
        time.sleep(0.1)


def running_replicas() -> int:
    states: Any = serve.status().applications["app"].deployments["Engine"].replica_states
    return states.get("RUNNING", 0)


@pytest.mark.slow
def test_replicas_behind_one_address(url: str) -> None:
    """Streams of two replicas have the text of one engine alone; a conversation stays where its prefix is."""
    deploy(changes={"num_replicas": 2})
    text = expected(48)
    with ThreadPoolExecutor(8) as pool:
        assert [*pool.map(lambda _: stream(url), range(8))] == [text] * 8
    for session in ("a", "b", "c"):
        cached = []
        for _ in range(3):
            answer = client(url, session).completions.create(
                model="swiftspec-demo", prompt=f"# {session} {'x = 1; ' * 20}", max_tokens=4
            )
            cached.append(answer.usage.prompt_tokens_details.cached_tokens)
        assert cached[1] > 0 and cached[2] == cached[1], session
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client(url).completions.create(model="swiftspec-demo", prompt=PROMPT, max_tokens=-1)


@pytest.mark.long
def test_a_replica_of_two_ranks(url: str) -> None:
    """The ranks end with their replica."""
    deploy(ranks=2, mode="async")
    assert stream(url) == expected(48)
    health = httpx.get(f"{url}/health", timeout=TIMEOUT_S)
    assert health.status_code == 200
    (replica,) = replica_pids()
    ranks = {pid for pid, title, parent in processes() if parent == replica and "swiftspec.deploy.replica" in title}
    assert ranks
    deploy(ranks=1)
    wait_until(lambda: not ranks & {pid for pid, _, _ in processes()})


@pytest.mark.slow
def test_a_client_that_disconnects_frees_the_replica(url: str) -> None:
    deploy(emulate=SLOW)
    with httpx.stream(
        "POST", f"{url}/v1/completions", json={"prompt": PROMPT, "max_tokens": 400, "stream": True}, timeout=TIMEOUT_S
    ) as response:
        next(response.iter_lines())
    wait_until(lambda: httpx.get(f"{url}/load", timeout=TIMEOUT_S).json()["server_load"] == 0)


@pytest.mark.slow
def test_a_killed_replica_is_replaced(url: str) -> None:
    """Its requests fail with an error, and those of the other replica go on."""
    deploy(changes={"num_replicas": 2}, emulate=SLOW)
    text = expected(200)

    def run(session: int) -> str:
        try:
            return stream(url, f"session {session}", 200)
        except (openai.APIError, httpx.HTTPError) as error:
            return f"error {type(error).__name__}"

    with ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(run, session) for session in range(6)]
        wait_until(lambda: httpx.get(f"{url}/load", timeout=TIMEOUT_S).json()["server_load"] > 0)
        killed = replica_pids()[0]
        os.kill(killed, signal.SIGKILL)
        found = [answer.result() for answer in answers]
    assert all(answer == text or answer.startswith("error ") for answer in found), found
    assert text in found and any(answer != text for answer in found)
    wait_until(lambda: running_replicas() == 2 and killed not in replica_pids())
    assert stream(url) == expected(48)


@pytest.mark.long
def test_replicas_follow_the_load(url: str) -> None:
    """Under load a second replica starts, and it goes when the load does, without an error of a request."""
    scaling = {
        "min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 1, "upscale_delay_s": 0.5,
        "downscale_delay_s": 1, "metrics_interval_s": 0.2, "look_back_period_s": 1,
    }  # fmt: skip
    deploy(changes={"autoscaling_config": scaling}, emulate=SLOW)
    assert running_replicas() == 1
    text = expected(100)

    def answer_all() -> bool:
        assert [*pool.map(lambda _: stream(url, None, 100), range(4))] == [text] * 4
        return running_replicas() == 2

    with ThreadPoolExecutor(4) as pool:
        wait_until(answer_all)
    wait_until(lambda: running_replicas() == 1)
    assert stream(url, None, 100) == text


def test_only_sessions_of_a_lost_replica_move() -> None:
    names = [f"replica {number}" for number in range(5)]
    before = {session: rank_replicas(session, names)[0] for session in map(str, range(200))}
    after = {session: rank_replicas(session, names[1:])[0] for session in before}
    assert all(after[session] == first for session, first in before.items() if first != names[0])
    assert {*before.values()} == {*names}
