"""Ranks on two machines: network namespaces of this one, which only a pair of virtual interfaces connects."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

ADDRESSES = "10.213.7.1", "10.213.7.2"
PORT = 29621
PROMPT = ["--model", "demo", "--temperature", "0", "--raw", "--prompt", "def fib(n):", "--threads", "1", "--ignore-eos"]
TIMEOUT_S = 150.0


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[str]]:
    """Names of two network namespaces that reach each other."""
    names = [f"swiftspec-{side}-{os.getpid()}" for side in "ab"]
    ends = [f"{side}{os.getpid()}" for side in "ab"]
    if shutil.which("ip") is None or os.getuid() != 0:
        pytest.skip("network namespaces need root and iproute2")
    try:
        ip("netns", "add", names[0])
    except subprocess.CalledProcessError:
        pytest.skip("this machine allows no network namespaces")
    try:
        ip("netns", "add", names[1])
        ip("link", "add", ends[0], "netns", names[0], "type", "veth", "peer", "name", ends[1], "netns", names[1])
        for name, end, address in zip(names, ends, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def start(nodes: Sequence[str], folder: Path, *flags: str) -> list[subprocess.Popen[bytes]]:
    """Starts a command on one rank of each node. Its output is written to `folder`."""
    processes = []
    for rank, name in enumerate(nodes):
        launcher = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(rank),
            "--nproc-per-node", "1", "--master-addr", ADDRESSES[0], "--master-port", str(PORT), "-m", "swiftspec.serve",
        ]  # fmt: skip
        with (folder / f"out{rank}").open("wb") as out, (folder / f"err{rank}").open("wb") as err:
            command = ["ip", "netns", "exec", name, *launcher, *PROMPT, *flags]
            processes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err))
    return processes


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        process.wait(TIMEOUT_S)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", [["--mode", "async", "--draft-tp", "1"], ["--mode", "ar", "--target-tp", "2"]], ids=["async", "tp2"]
)
def test_the_text_is_that_of_one_machine(nodes: list[str], tmp_path: Path, flags: list[str]) -> None:
    alone = subprocess.run(
        [sys.executable, "-m", "swiftspec.serve", *PROMPT, "--mode", "ar", "--max-tokens", "32"],
        capture_output=True, check=True,
    )  # fmt: skip
    processes = start(nodes, tmp_path, *flags, "--max-tokens", "32")
    try:
        codes = [process.wait(TIMEOUT_S) for process in processes]
    finally:
        end(processes)
    assert codes == [0, 0], (tmp_path / "err0").read_text() + (tmp_path / "err1").read_text()
    assert (tmp_path / "out0").read_bytes() == alone.stdout


@pytest.mark.slow
def test_an_answer_survives_the_loss_of_the_drafts_machine(nodes: list[str], tmp_path: Path) -> None:
    processes = start(
        nodes,
        tmp_path,
        "--mode",
        "async",
        "--draft-tp",
        "1",
        "--max-tokens",
        "600",
        "--speculative-config.emulate",
        "target=20ms,draft=4ms",
    )
    try:
        wait_until(lambda: (tmp_path / "out0").read_bytes() != b"", processes[0], tmp_path)
        ip("-n", nodes[0], "link", "set", f"a{os.getpid()}", "down")
        # torchrun itself then waits for the other node for five minutes
        wait_until(lambda: "600 tok" in (tmp_path / "err0").read_text(), processes[0], tmp_path)
    finally:
        end(processes)
    assert "decoding continued without it" in (tmp_path / "err0").read_text()


def wait_until(holds: Callable[[], bool], process: subprocess.Popen[bytes], folder: Path) -> None:
    """Waits for a condition. Fails if it does not hold in time, or the process has ended without it."""
    deadline = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < deadline and process.poll() is None, (folder / "err0").read_text()
        time.sleep(0.1)
