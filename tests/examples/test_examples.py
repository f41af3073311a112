"""Every program in examples/ runs as its docstring describes."""

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.support.smollm2 import smollm2

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
TESTED = {
    "offline.py": "rounds",
    "streaming.py": "def read_lines",
    "batch.py": "class Stack",
    "trace_one_round.py": "output of the round",
}


def run(*command: str, **variables: str) -> str:
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def test_every_example_is_run_and_listed() -> None:
    programs = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh")}
    assert programs == {
        *TESTED, "chat.py", "embed_in_fastapi.py", "openai_client.py", "two_ranks.py", "remote_draft_worker.sh"
    }  # fmt: skip
    readme = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert all(f"({name})" in readme for name in programs)


@pytest.mark.slow
@pytest.mark.parametrize("name", TESTED)
def test_the_programs_of_one_process(name: str) -> None:
    assert TESTED[name] in run(sys.executable, str(EXAMPLES / name))


@pytest.mark.slow
def test_chat() -> None:
    assert "Paris" in run(sys.executable, str(EXAMPLES / "chat.py"), "--model", str(smollm2()))


@pytest.mark.slow
def test_two_ranks_give_the_text_of_one() -> None:
    command = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    text = run(*command, str(EXAMPLES / "two_ranks.py"), OMP_NUM_THREADS="1")
    alone = run(sys.executable, str(EXAMPLES / "offline.py"), "--prompt", "def read_lines(path):\n")
    assert text.rpartition("\n")[0].splitlines()[:-1] == alone.rpartition("\n")[0].splitlines()[:-1]


@pytest.mark.slow
def test_a_remote_draft_worker() -> None:
    text = run("bash", str(EXAMPLES / "remote_draft_worker.sh"), PYTHON=sys.executable, PORT=str(free_port()))
    assert "return" in text


@pytest.mark.slow
def test_the_openai_client() -> None:
    port = free_port()
    server = subprocess.Popen([sys.executable, "-m", "swiftspec", "serve", "--port", str(port)], cwd=ROOT)
    try:
        wait_until_healthy(port, server)
        client = str(EXAMPLES / "openai_client.py")
        assert "return" in run(sys.executable, client, "--base-url", f"http://127.0.0.1:{port}/v1")
    finally:
        server.terminate()
        server.wait(60)


@pytest.mark.slow
def test_embedding_in_fastapi() -> None:
    port = free_port()
    server = subprocess.Popen([sys.executable, str(EXAMPLES / "embed_in_fastapi.py"), "--port", str(port)], cwd=ROOT)
    try:
        wait_until_healthy(port, server, "/llm/health")
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/complete?text=def%20fib(n):", timeout=60) as response:
            assert "return" in response.read().decode()
        client = str(EXAMPLES / "openai_client.py")
        assert "return" in run(sys.executable, client, "--base-url", f"http://127.0.0.1:{port}/llm/v1")
    finally:
        server.terminate()
        assert server.wait(60) in (0, -15)


def wait_until_healthy(port: int, server: subprocess.Popen[bytes], path: str = "/health") -> None:
    while server.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise AssertionError(f"the server exited with {server.returncode}")
