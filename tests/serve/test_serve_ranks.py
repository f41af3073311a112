"""The command on several ranks, with and without torchrun: the same text as with one rank, one-line errors, and no
processes left behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from swiftspec.serve.__main__ import main
from tests.support.pty_terminal import Terminal
from tests.support.server_process import RESTORE_SIGNALS
from tests.support.toy_pair import CONTEXT, byte_level_tokenizer, make_pair, write_tokenizer

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
SERVE = ["-m", "swiftspec.serve"]
EXACT = ["--dtype", "float64", "--prompt", "def add(a", "--ignore-eos", "--json", "--temperature", "0.8", "--seed", "3"]
LONG = ["--prompt", "def add(a", "--ignore-eos", "--verify-batch", "1", "--draft-steps", "1"]


def slow(value: object) -> Any:
    return pytest.param(value, marks=pytest.mark.slow)


def long(value: object) -> Any:
    """Marks a case that ends like another one."""
    return pytest.param(value, marks=pytest.mark.long)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The flags that name a pair."""
    target, draft = make_pair(tmp_path_factory.mktemp("pair"))
    return ["--model", str(target), "--draft-model", str(draft), "--threads", "1"]


def python(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *argv], cwd=ROOT, text=True, capture_output=True, timeout=100)


class Ranks:
    """One process per rank, started without a launcher: only the ranks themselves ensure that none is left."""

    def __init__(self, count: int, argv: Sequence[str], more: Mapping[int, Mapping[str, str]] | None = None) -> None:
        """`more`: environment variables of single ranks, and further flags in the variable FLAGS."""
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        job = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        self.processes = [
            subprocess.Popen(
                [sys.executable, *SERVE, *argv, *(more or {}).get(rank, {}).get("FLAGS", "").split()],
                cwd=ROOT,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, **job, "RANK": str(rank), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
                | dict((more or {}).get(rank, {})),
            )
            for rank in range(count)
        ]

    def wait_for_text(self) -> None:
        out = self.processes[0].stdout
        assert out is not None
        assert out.read(1), self.processes[0].communicate()

    def end(self, seconds: float) -> list[tuple[int, str]]:
        """Exit code and standard error of each, which must exit within that time."""
        deadline = time.monotonic() + seconds
        return [
            (process.wait(max(deadline - time.monotonic(), 0.01)), process.communicate()[1])
            for process in self.processes
        ]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.fixture
def started() -> Iterator[list[Ranks]]:
    """Every process in the list is dead after the test."""
    ranks: list[Ranks] = []
    yield ranks
    for one in ranks:
        one.kill()


@pytest.mark.slow
def test_the_output_under_torchrun_equals_that_of_one_process(
    pair: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*pair, *EXACT, "--mode", "ar", "--max-tokens", "60"]) == 0
    alone = json.loads(capsys.readouterr().out)
    flags = ["--max-tokens", "60", "--draft-steps", "2", "--speculative-config.self_switch", "false"]
    both = python(*TORCHRUN, "2", *SERVE, *pair, *EXACT, *flags)
    assert both.returncode == 0
    answer = json.loads(both.stdout)
    assert answer["token_ids"] == alone["token_ids"] and answer["text"] == alone["text"]
    metrics = answer["metrics"]
    assert (metrics["mode"], metrics["split"]) == ("async", {"target_tp": 1, "draft_tp": 1})
    assert metrics["drafter_lost"] is None and metrics["speculative_decoding"]["num_spec_steps"] < 50


@pytest.mark.slow
def test_the_ranks_mask_what_rank_0_has_found(
    pair: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only rank 0 has the tokenizers. Here the draft is the target with two renamed special tokens, and a bias makes
    the target draw them."""
    draft = tmp_path / "draft"
    shutil.copytree(pair[1], draft)
    write_tokenizer(draft, byte_level_tokenizer(("<|end|>", "<|bot|>", "<|user|>")))
    flags = [
        *pair[:2],
        *pair[4:],
        *EXACT,
        "--max-tokens",
        "40",
        "--override-generation-config.logit_bias",
        '{"1": 4, "2": 4}',
    ]
    assert main([*flags, "--mode", "ar"]) == 0
    alone = json.loads(capsys.readouterr().out)
    both = python(*SERVE, *flags, "--draft-model", str(draft), "--target-tp", "2", "--draft-tp", "2")
    assert both.returncode == 0 and "never proposes" not in both.stderr  # --json
    answer, masked = json.loads(both.stdout), [token for token in alone["token_ids"] if token in (1, 2)]
    assert answer["token_ids"] == alone["token_ids"] and masked
    accepted = answer["metrics"]["speculative_decoding"]
    assert accepted["num_spec_steps"] >= len(masked), "each of them ends a round"


@pytest.mark.slow
def test_the_command_starts_its_ranks(pair: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*pair, *EXACT, "--mode", "ar", "--max-tokens", "60"]) == 0
    alone = json.loads(capsys.readouterr().out)
    both = python(*SERVE, *pair, *EXACT, "--max-tokens", "60", "--target-tp", "1", "--draft-tp", "1")
    assert (both.returncode, both.stderr) == (0, "")
    answer = json.loads(both.stdout)
    assert answer["token_ids"] == alone["token_ids"]
    assert answer["metrics"]["split"] == {"target_tp": 1, "draft_tp": 1}


@pytest.mark.parametrize("number", [slow(signal.SIGINT), long(signal.SIGTERM), slow(signal.SIGKILL)])
def test_the_started_ranks_end_with_the_command(pair: list[str], number: signal.Signals) -> None:
    process = subprocess.Popen(
        [*RESTORE_SIGNALS, sys.executable, *SERVE, *pair, *LONG, "--target-tp", "1", "--draft-tp", "1"],
        cwd=ROOT,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    process.stdout.read(1)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == 2
    process.send_signal(number)
    _, errors = process.communicate(timeout=20)  # until none of them has the streams open
    assert process.returncode == (-9 if number == signal.SIGKILL else 128 + number) and "Traceback" not in errors


@pytest.mark.slow
def test_the_chat_under_torchrun(pair: list[str]) -> None:
    flags = [
        *pair,
        "--ignore-eos",
        "--temperature",
        "0",
        "--draft-steps",
        "2",
        "--speculative-config.emulate",
        "target=10ms",
    ]
    chat = Terminal([*TORCHRUN, "2", *SERVE, *flags], TERM="xterm")
    chat.until(r"async on 1 \+ 1 ranks, d = 2[\s\S]*>>>")
    chat.send("def add(\r")
    chat.until(r"<sent>[\s\S]{8}")
    chat.send("\x03")
    stopped = chat.until(r"stopped, \d+ tok, [\s\S]*>>>")
    assert int(re.search(r"stopped, (\d+)", stopped).group(1)) < CONTEXT - 40  # type: ignore[union-attr]
    chat.send("/set max_tokens 5\r")
    chat.until(r"max_tokens = 5[\s\S]*>>>")
    chat.send("class\r")
    chat.until(r"5 tok, [\s\S]*tok/round[\s\S]*>>>")
    chat.send("/quit\r")
    assert chat.leave() == 0
    assert "Traceback" not in chat.output


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_rank_that_dies_ends_the_job(pair: list[str], started: list[Ranks], victim: int) -> None:
    """Rank 1 shares the target with rank 0, rank 2 is the draft. The loss of a draft alone does not end the job."""
    ranks = Ranks(3, [*pair, *LONG, "--target-tp", "2"])
    started.append(ranks)
    ranks.wait_for_text()
    ranks.processes[victim].kill()
    ends = ranks.end(10)
    survivors = [end for rank, end in enumerate(ends) if rank != victim]
    assert all("Traceback" not in err for _, err in survivors)
    if victim == 2:
        assert [code for code, _ in survivors] == [0, 0]
        assert "the drafter was lost (the draft group disconnected" in ends[0][1]
    else:
        speakers = {0: (1, 2), 1: (0,)}[victim]
        assert all(ends[rank][0] == 1 for rank in speakers), ends
        # a living rank 0 shuts the draft down, which may have noticed before that rank 0 ends
        assert victim == 0 or ends[2][0] in (0, 1), ends
        for rank in speakers:
            last = ends[rank][1].splitlines()[-1]
            assert re.match(rf"swiftspec: rank {rank} exits: .*(disconnected|has ended)", last), ends


@pytest.mark.parametrize("number", [slow(signal.SIGTERM), long(signal.SIGINT)])
def test_signals_to_torchrun_leave_no_process(pair: list[str], number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, *TORCHRUN, "3", *SERVE, *pair, *LONG], cwd=ROOT, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.read(1)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == 3
    process.send_signal(number)
    process.communicate(timeout=20)
    assert process.returncode != 0
    assert not [child for child in children if Path(f"/proc/{child}").exists()]


@pytest.mark.slow
def test_a_signal_during_the_start_leaves_no_process(pair: list[str]) -> None:
    process = subprocess.Popen(
        [sys.executable, *TORCHRUN, "3", *SERVE, *pair, *LONG], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    children: list[str] = []
    while len(children) < 3 and process.poll() is None:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        time.sleep(0.1)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith(b"swiftspec: libraries"):  # during the start
            break
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=15)
    assert process.returncode != 0
    assert not [child for child in children if Path(f"/proc/{child}").exists()]


@pytest.mark.slow
def test_more_ranks_than_cores_are_warned_about(pair: list[str], started: list[Ranks]) -> None:
    count = (os.cpu_count() or 1) + 1
    if count > 5:
        pytest.skip("too many cores for a test")
    ranks = Ranks(count, [*pair, "--prompt", "a", "--max-tokens", "3", "--json"])
    started.append(ranks)
    (code, err), *_ = ranks.end(60)
    assert code == 0 and f"warning: {count} ranks share this machine's cores" in err


@pytest.mark.slow
def test_bad_input_gets_one_line(pair: list[str], started: list[Ranks]) -> None:
    ranks = Ranks(2, [*pair, "--prompt", "a", "--target-tp", "2", "--draft-tp", "1"])
    started.append(ranks)
    (code, err), (_, other) = ranks.end(20)
    reason = "error: --target-tp 2 and --draft-tp 1 must be at least 1 and add up to 2 ranks\n"
    assert (code, err) == (2, f"swiftspec: {reason}")
    assert other == f"swiftspec: rank 1: {reason}", "with no launcher to end it, it speaks for itself after a while"


@pytest.mark.slow
def test_ranks_with_different_modes_fail_immediately(pair: list[str], started: list[Ranks]) -> None:
    ranks = Ranks(2, [*pair, *LONG], {1: {"FLAGS": "--mode serial"}})
    started.append(ranks)
    ends = ranks.end(60)
    line = "rank 1 was started with mode serial, rank 0 with mode async: start all ranks with the same command\n"
    assert [code for code, _ in ends] == [1, 1]
    last = [err.splitlines(keepends=True)[-1] for _, err in ends]
    assert last == [f"swiftspec: error: {line}", f"swiftspec: rank 1: error: {line}"]


@pytest.mark.slow
def test_an_error_of_one_rank_ends_the_others(pair: list[str], started: list[Ranks]) -> None:
    """Only rank 1 finds no GPU: rank 0 receives the error."""
    ranks = Ranks(2, [*pair, *LONG], {1: {"FLAGS": "--device cuda", "CUDA_VISIBLE_DEVICES": ""}})
    started.append(ranks)
    (code, err), (other, _) = ranks.end(60)
    assert (code, other) == (1, 1)
    assert err.splitlines()[-1].startswith("swiftspec: error: rank 1: device cuda: PyTorch finds no NVIDIA GPU")


@pytest.mark.slow
def test_a_port_in_use_is_one_line(
    pair: list[str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        for name, value in {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, value)
        code = main([*pair, *EXACT])
    line = f"swiftspec: error: port {port} is in use on this machine: choose another one (MASTER_PORT)\n"
    assert (code, *capfd.readouterr()) == (1, "", line)
