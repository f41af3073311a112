"""`python -m swiftspec.serve replay`: the files that it accepts and serves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from starlette.testclient import TestClient

from swiftspec.errors import UserError
from swiftspec.serve import replay
from swiftspec.serve.__main__ import main
from tests.support import synthetic_traces


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return synthetic_traces.write(
        tmp_path / "one.jsonl", [synthetic_traces.head(), *synthetic_traces.request(1, synthetic_traces.rounds(1, 3))]
    )


def test_the_page_and_the_trace_are_served_and_nothing_else(file: Path) -> None:
    replay.check_trace(file)
    client = TestClient(replay.replay_app(file))
    assert client.get("/health").json() == {"status": "replay", "trace": "one.jsonl"}
    assert client.get("/replay.jsonl").text == file.read_text()
    assert "<title>SwiftSpec</title>" in client.get("/").text
    missing = client.get("/v1/models")
    assert missing.status_code == 404 and "has no model" in missing.json()["error"]["message"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a trace"), ("{}\n", "is not a trace"), ("x\n", "is not a trace"),
        ('{"swiftspec_trace": 2}\n', "not a trace"),
        ('{"swiftspec_trace": 1}\n[]\n', "line 2, is damaged: it is not a JSON object"),
        ('{"swiftspec_trace": 1}\nx\n{}\n', "line 2, is not valid JSON"),
        ('{"swiftspec_trace": 1}\n' + "[" * 10**5 + "\n{}\n", "line 2, cannot be parsed as JSON"),
        ('{"swiftspec_trace": 1}\n\xff\n{}\n', "line 2,"),
    ],
)  # fmt: skip
def test_an_invalid_trace_is_reported_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match=message) as error:
        replay.check_trace(bad)
    assert "\n" not in str(error.value)


def test_a_truncated_last_line_is_ignored(file: Path) -> None:
    file.write_text(file.read_text() + '{"request": 1, "rou')
    replay.check_trace(file)


def test_a_pipe_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe cannot be read"):
        replay.check_trace(tmp_path / "pipe")


@pytest.mark.parametrize(
    ("flags", "message", "code"),
    [
        (["none.jsonl"], "none.jsonl cannot be read", 1), ([], "required: FILE", 2),
        (["x", "--port", "a"], "--port must be a whole number in 0..65535, not a", 2),
        (["x", "--model", "m"], "unrecognized arguments", 2),
    ],
)  # fmt: skip
def test_invalid_arguments_are_refused(
    capsys: pytest.CaptureFixture[str], flags: list[str], message: str, code: int
) -> None:
    assert main(["replay", *flags]) == code
    output = capsys.readouterr().err
    assert message in output and output.count("\n") == 1


@pytest.mark.slow
def test_as_a_process(file: Path) -> None:
    command = [sys.executable, "-m", "swiftspec.serve", "replay", str(file), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        url = line.strip().rpartition(" ")[2]
        assert line == f"swiftspec: replaying one.jsonl, listening on {url}\n"
        assert httpx.get(f"{url}/replay.jsonl").text == file.read_text()
        assert httpx.get(url, headers={"host": "evil.example"}).status_code == 403
        process.terminate()
        assert process.wait(20) == 143 and process.stderr.read() == ""
