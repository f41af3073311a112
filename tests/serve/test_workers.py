"""Workers and `generate`, started by their commands as separate processes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from swiftspec.builder.load_options import WorkerAddress as Named
from swiftspec.cli.worker import run_worker
from swiftspec.distributed.remote.worker import Worker
from swiftspec.distributed.transport.grpc.endpoint import RpcSecurity
from swiftspec.distributed.transport.grpc.server import RpcServer
from swiftspec.errors import UserError
from swiftspec.model.vocabulary import Vocabulary
from swiftspec.params import SamplingParams
from swiftspec.serve.__main__ import main
from swiftspec.settings.settings import Settings
from swiftspec.startup.worker_endpoints import load_security
from tests.support.clients import openai
from tests.support.collector import collecting
from tests.support.draft_heads import make_eagle3
from tests.support.server_process import RESTORE_SIGNALS, ROOT, ServerProcess
from tests.support.workers import client_on_workers

SERVE = (sys.executable, "-m", "swiftspec.serve")
PROMPT = ("--raw", "--prompt", "def read_lines(path):", "--json", "--max-tokens", "48", "--ignore-eos")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "SWIFTSPEC_TOKEN": "secret"}


class WorkerAddress:
    """`swiftspec worker SIDE`, listening at `url`. `ranks`: several under torchrun."""

    def __init__(self, side: str, *flags: str, ranks: int = 1) -> None:
        run = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
        start = SERVE if ranks == 1 else (*run, *SERVE[1:])
        self.process = subprocess.Popen(
            [*RESTORE_SIGNALS, *start, "worker", side, "--listen", "127.0.0.1:0", *flags],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
        )
        assert self.process.stderr is not None
        lines = []
        for line in self.process.stderr:
            lines.append(line)
            if found := re.search(r"worker listening on (\S+)", line):
                self.url = found[1]
                return
        raise AssertionError("".join(lines))

    def end(self, number: int) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)


@contextmanager
def workers(*flags: str) -> Iterator[dict[str, WorkerAddress]]:
    found: dict[str, WorkerAddress] = {}
    try:
        for side in ("target", "draft"):
            found[side] = WorkerAddress(side, *flags)
        yield found
    finally:
        for worker in found.values():
            worker.process.kill()
            worker.process.wait()


def command(*flags: str) -> list[str]:
    return [*SERVE, *flags]


def finished(flags: Sequence[str]) -> tuple[int, str, str]:
    done = subprocess.run(command(*flags), cwd=ROOT, capture_output=True, text=True, env=ENVIRONMENT, timeout=120)
    return done.returncode, done.stdout, done.stderr


def answer(flags: Sequence[str]) -> dict:
    code, out, err = finished(flags)
    assert code == 0, err
    return json.loads(out)


@pytest.mark.slow
@pytest.mark.timeout(300)  # it starts a dozen processes
def test_decoding_on_workers_gives_the_text_of_one_process() -> None:
    sampled = (*PROMPT, "--temperature", "0.8", "--seed", "5")
    plain = answer((*sampled, "--mode", "ar"))
    with workers() as found:
        target, draft = found["target"], found["draft"]
        both = ("--target-url", target.url, "--draft-url", draft.url)
        for mode in ("async", "serial"):
            answered = answer(("generate", *both, *sampled, "--mode", mode))
            assert answered["token_ids"] == plain["token_ids"] and answered["metrics"]["drafter_lost"] is None
            assert answered["timings"]["draft_n_accepted"] > 0
        local_draft = ("--draft-model", str(ROOT / "swiftspec/demo/draft"))
        answered = answer(("generate", "--target-url", target.url, *local_draft, *sampled))
        assert answered["token_ids"] == plain["token_ids"] and answered["timings"]["draft_n_accepted"] > 0
        with collecting() as collector:
            flags = ("--draft-url", draft.url, "--otlp-endpoint", collector.url)
            with ServerProcess(flags, variables={"SWIFTSPEC_TOKEN": "secret"}) as served:
                body = {"prompt": "def read_lines(path):", "max_tokens": 48, "temperature": 0.8, "seed": 5}
                url, full_body = f"{served.url}/v1/completions", {**body, "ignore_eos": True}
                assert httpx.post(url, json=full_body, timeout=60).json()["choices"][0]["text"] == plain["text"]
            assert collector.names.count("draft worker") == collector.names.count("draft") > 5
        assert draft.end(signal.SIGKILL) == -signal.SIGKILL
        answered = answer(("generate", *both, *sampled))
        assert answered["token_ids"] == plain["token_ids"] and "not been reached" in answered["metrics"]["drafter_lost"]
        assert target.end(signal.SIGTERM) == 0
        code, out, err = finished(("generate", *both, *sampled, "--remote-timeout", "1"))
        assert code == 1 and not out and re.search(r"error: --target-url \S+ is unavailable: .*; start it with", err)


def server_answers(server: ServerProcess) -> list[str]:
    """Returns the texts that the endpoints give for the same prompt."""
    code = "def read_lines(path):"
    shape: Any = {"model": "target", "max_tokens": 24, "temperature": 0.8}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        text = client.completions.create(prompt=code, seed=5, logprobs=2, stop=["("], **shape).choices[0]
        assert text.logprobs is not None and text.logprobs.top_logprobs is not None
        assert all(len(each) >= 2 for each in text.logprobs.top_logprobs)
        chat: Any = [{"role": "user", "content": code}]
        pieces = client.chat.completions.create(messages=chat, seed=5, stream=True, **shape)
        streamed = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    body = {**shape, "messages": chat, "temperature": 0}  # Anthropic's API has no seed
    message = httpx.post(f"{server.url}/v1/messages", json=body, timeout=60).json()
    return [text.text, streamed, message["content"][0]["text"]]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_server_in_front_of_a_target_worker_waits_for_it_after_a_loss() -> None:
    with ServerProcess(("--served-model-name", "target")) as local:
        expected = server_answers(local)
    worker = WorkerAddress("target", "--model", "demo")
    flags = ("--target-url", worker.url, "--draft-model", str(ROOT / "swiftspec/demo/draft"), "--remote-timeout", "2")
    try:
        with ServerProcess(flags, variables={"SWIFTSPEC_TOKEN": "secret"}) as served:
            assert server_answers(served) == expected
            worker.end(signal.SIGKILL)
            body = {"prompt": "def f(", "max_tokens": 4}
            answers = [httpx.post(f"{served.url}/v1/completions", json=body, timeout=60) for _ in range(2)]
            assert [each.status_code for each in answers] == [503, 503]
            assert answers[0].json()["error"]["type"] == "unavailable_error"
            health = wait_for(served.url, 503)
            assert health["status"] == "unavailable" and health["ranks"][0]["state"] == "lost"
            assert 'ready{model_name="target"} 0.0' in httpx.get(f"{served.url}/metrics").text
            worker = WorkerAddress("target", "--model", "demo", "--listen", worker.url)
            assert wait_for(served.url, 200)["status"] == "ok"
            assert server_answers(served) == expected
    finally:
        worker.process.kill()
    notes = [line for line in served.stderr_lines if "--target-url" in line]
    assert len(notes) == 2 and "does not answer; requests get status 503" in notes[0] and "answers again" in notes[1]


def wait_for(url: str, status: int) -> dict[str, Any]:
    """Returns the body of /health once it has that status."""
    for _ in range(600):
        if (answer := httpx.get(f"{url}/health", timeout=60)).status_code == status:
            return answer.json()
        time.sleep(0.1)
    raise AssertionError(f"/health did not become {status}")


def stop_and_continue(found: dict[str, WorkerAddress]) -> None:
    """A lost draft costs speed; a stopped target is waited for, or ends the answer with one line within the timeout."""
    sampling, prompt = SamplingParams(temperature=0.7, seed=3, max_tokens=120, ignore_eos=True), [5, 17, 3]
    security = RpcSecurity(token="secret")
    target_worker, draft_worker = (
        Named(found[side].url, f"--{side}-url", security, 2.0) for side in ("target", "draft")
    )
    target, draft = found["target"].process, found["draft"].process
    with client_on_workers(target_worker, draft_worker) as running:
        plain = running.generate(prompt, replace(sampling, verify_batch=1)).token_ids
        stream = running.stream(prompt, sampling)
        text = [*next(stream).token_ids]
        draft.send_signal(signal.SIGSTOP)
        text += [token for chunk in islice(stream, 4) for token in chunk.token_ids]
        assert running.stats.drafter_lost is not None
        draft.send_signal(signal.SIGCONT)
        target.send_signal(signal.SIGSTOP)
        threading.Timer(0.5, target.send_signal, [signal.SIGCONT]).start()
        assert [*text, *(token for chunk in stream for token in chunk.token_ids)] == plain
        stream = running.stream(prompt, sampling)
        next(stream)
        target.send_signal(signal.SIGSTOP)
        with pytest.raises(UserError, match=r"--target-url \S+ did not answer in time: send the request again"):
            list(stream)
        target.send_signal(signal.SIGCONT)
        repeated = running.generate(prompt, sampling)
        assert repeated.token_ids == plain and repeated.stats.accepted > 0


@pytest.mark.slow
def test_either_worker_may_be_stopped_or_killed_during_decoding() -> None:
    """A lost draft costs speed; a lost target ends the answer with one line within the timeout."""
    flags = ("--max-model-len", "1000", "--speculative-config.emulate", "target=20ms,draft=1ms")
    with workers(*flags) as found:
        stop_and_continue(found)
        both = ("--target-url", found["target"].url, "--draft-url", found["draft"].url, "--remote-timeout", "2")
        text = [*both, "--raw", "--prompt", "def f(", "--max-tokens", "400", "--ignore-eos", "--temperature", "0"]
        running = subprocess.Popen(
            command("generate", *text), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT
        )
        assert running.stdout is not None
        first = running.stdout.read(10)
        found["draft"].end(signal.SIGKILL)
        more = running.stdout.read(40)
        assert first and more, "it goes on alone"
        found["target"].end(signal.SIGKILL)
        _, err = running.communicate(timeout=60)
        assert running.returncode == 1
        lines = [line for line in err.decode().splitlines() if "error" in line]
        assert len(lines) == 1 and "--target-url" in lines[0] and "is unavailable" in lines[0]


@pytest.mark.slow
def test_a_worker_of_two_ranks_names_the_lost_one() -> None:
    worker = WorkerAddress("target", ranks=2)
    try:
        answered = answer(("generate", "--target-url", worker.url, *PROMPT))
        assert answered["usage"]["completion_tokens"] == 48
        pid = worker.process.pid
        children = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        (follower,) = [child for child in children if b"\0RANK=1\0" in Path(f"/proc/{child}/environ").read_bytes()]
        os.kill(follower, signal.SIGKILL)
        _, err = worker.process.communicate(timeout=60)
    finally:
        worker.process.kill()
    lines = [line for line in err.splitlines() if line.startswith("swiftspec:")]
    assert worker.process.returncode == 1 and len(lines) == 1 and "rank 0 exits: rank 1 disconnected" in lines[0]


def test_a_worker_that_cannot_listen_shuts_down_its_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[str] = []
    rank = SimpleNamespace(leave=lambda: left.append("home"))
    model = SimpleNamespace(side="draft", path=Path("model"), rank=rank)
    codec = SimpleNamespace(vocabulary=Vocabulary("model", "", {0: "a"}, {}))
    worker = SimpleNamespace(serve=None, model_info=SimpleNamespace(to_json=lambda: "{}"))
    monkeypatch.setattr("swiftspec.cli.worker._load", lambda *args: (model, codec))
    monkeypatch.setattr("swiftspec.builder.worker_model.make_worker", lambda *args: worker)
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(UserError, match="cannot listen"):
        run_worker("draft", Settings(listen=f"127.0.0.1:{taken.getsockname()[1]}"), lambda: None)
    assert left == ["home"]


def test_a_worker_ends_when_its_gpu_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every later request would fail, and the GPU is free for a new process only when this one is gone."""

    def serve(server: RpcServer, stop_queue: SimpleQueue[int], sweep: Callable[[], None]) -> None:
        bound: Any = sweep
        worker: Worker = bound.__self__
        worker.on_error(RuntimeError("no error of a GPU"))
        assert stop_queue.empty()
        worker.on_error(RuntimeError("CUDA error: unspecified launch failure"))
        stop_queue.get_nowait()

    monkeypatch.setattr(RpcServer, "run", serve)
    with pytest.raises(UserError, match=r"the GPU failed, restart this worker: .*unspecified launch failure"):
        run_worker("draft", Settings(model="demo", listen="127.0.0.1:0"), lambda: None)


NONSENSE = [
    (("worker",), "specify the model of the worker"),
    (("worker", "draft", "--port", "1"), "not supported by a worker"),
    (
        ("worker", "target", "--speculative-config.synthetic_acceptance_length", "2"),
        "not supported by a worker; set it on the clients",
    ),
    (("worker", "target", "--listen", "0.0.0.0:1"), "open to other machines"),
    (("worker", "target", "--listen", "nowhere"), "HOST:PORT"),
    (("worker", "target", "--prompt", "x"), "--prompt-file and --json are not supported by a worker"),
    (("generate", "--target-url", "127.0.0.1:1", "--port", "1"), "--port is not supported by `swiftspec generate`"),
    (("generate", "--target-url", "example.com:1", "--prompt", "x"), "another machine"),
    (("--target-url", "127.0.0.1:1", "--model", "x", "--prompt", "x"), "specifies the same model"),
    (("--draft-url", "127.0.0.1:1", "--mode", "smc", "--prompt", "x"), "not supported in mode smc"),
    (("--target-url", "127.0.0.1:1", "--prompt", "x"), "is unavailable"),
]


@pytest.mark.parametrize(("flags", "message"), NONSENSE)
def test_invalid_values_are_refused_in_one_line(
    flags: Sequence[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags) in (1, 2)
    lines = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert len(lines) == 1 and message in lines[0]


def test_a_draft_head_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_eagle3(tmp_path)
    assert main(("worker", "draft", "--model", str(tmp_path))) == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert len(lines) == 1 and "is a draft head" in lines[0]


def test_tokens_and_certificates_are_read(tmp_path: Path) -> None:
    from swiftspec.cli.arguments import parse_command

    (tmp_path / "token").write_text("secret\n")
    (tmp_path / "ca.pem").write_text("-----BEGIN CERTIFICATE-----\n")
    read = load_security(
        parse_command(["--token", f"@{tmp_path / 'token'}", "--tls-ca", str(tmp_path / "ca.pem")]).settings
    )
    assert read.token == "secret" and read.ca is not None and read.metadata == (("authorization", "Bearer secret"),)
    for flags in (["--token", f"@{tmp_path / 'none'}"], ["--tls-ca", str(tmp_path / "token")], ["--token", "a b\n"]):
        with pytest.raises(UserError):
            load_security(parse_command(flags).settings)
