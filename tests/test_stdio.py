"""Standard output and error that are closed, full, or without a reader."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from swiftspec.stdio import OutputLost, command_streams
from tests.support.toy_pair import make_pair

ROOT = Path(__file__).parents[1]
CLOSED = "standard output is closed: redirect it to a file or to /dev/null"
FULL = "standard output cannot be written: No space left on device"
pytestmark = [
    pytest.mark.slow,  # each test starts processes
    pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here"),
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The flags of a request to a pair of models."""
    target, draft = make_pair(tmp_path_factory.mktemp("pair"))
    return f"--model {target} --draft-model {draft} --threads 1 --raw --prompt def --max-tokens 5 --ignore-eos"


def shell(command: str, **environment: str) -> tuple[int, str, str]:
    """Exit code, standard output and error of `python -m swiftspec.COMMAND` with these shell redirections."""
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m swiftspec.{command}"], cwd=ROOT, capture_output=True, text=True,
        timeout=100, env={**os.environ, **environment},
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("command", ["serve --version", "serve --help", "serve", "profile --help"])
def test_closed_standard_streams(command: str) -> None:
    assert shell(f"{command} >&-") == (1, "", f"swiftspec: error: {CLOSED}\n")
    if command != "serve":
        assert shell(f"{command} >/dev/full") == (1, "", f"swiftspec: error: {FULL}\n")


def test_a_full_disk_for_the_answer(pair: str) -> None:
    code, _, err = shell(f"serve {pair} >/dev/full")
    footer, error = err.splitlines()[-2:]
    assert (code, error) == (1, f"swiftspec: error: {FULL}")
    assert "tok/s, TTFT" in footer and "Traceback" not in err
    assert shell(f"serve {pair} --json >/dev/full") == (1, "", f"swiftspec: error: {FULL}\n")


def test_a_full_disk_for_the_trace(pair: str) -> None:
    """One warning line after a complete answer; also if the trace goes to standard output."""
    code, out, err = shell(f"serve {pair} --json --trace /dev/full")
    assert (code, err) == (0, "swiftspec: warning: --trace /dev/full is incomplete: No space left on device\n")
    assert json.loads(out)["usage"]["completion_tokens"] == 5
    code, out, err = shell(f"serve {pair} --json --trace /dev/stdout")
    assert (code, err) == (0, "") and "swiftspec_trace" in out


def test_undeliverable_messages_do_not_affect_the_answer(pair: str) -> None:
    code, whole, _ = shell(f"serve {pair} --temperature 0")
    assert code == 0 and whole
    for redirection in ("2>/dev/full", "2>&- <&-"):
        assert shell(f"serve {pair} --temperature 0 {redirection}") == (0, whole, ""), redirection
    code, out, _ = shell(f"serve {pair} --json --threads 900 2> >(true)", PYTHONUNBUFFERED="1")
    assert code == 0 and json.loads(out)["usage"]["completion_tokens"] == 5
    assert shell("serve --top-p 9 --prompt a 2>&-") == (2, "", "")
    assert shell("serve --prompt a >&- 2>&- <&-") == (1, "", "")


def test_later_descriptors_are_not_taken_for_standard_streams() -> None:
    code = (
        "import os, sys\nfrom swiftspec.stdio import command_streams\nwith command_streams(True):\n"
        "    print(os.open('/dev/null', os.O_RDONLY) > 2, sys.stderr.isatty(), file=open('{}', 'w'))"
    )
    for closed in ("<&-", ">&-", "2>&-", "<&- >&- 2>&-"):
        file = Path(os.environ.get("TMPDIR", "/tmp")) / f"swiftspec-streams-{os.getpid()}"
        script = code.format(file)
        subprocess.run(["bash", "-c", f'"$0" -c "$1" {closed}', sys.executable, script], cwd=ROOT, check=True)
        assert file.read_text() == "True False\n"
        file.unlink()


def test_replaced_streams_remain_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    streams = sys.stdout, sys.stderr
    with command_streams(True) as ours:
        assert (sys.stdout, sys.stderr) == streams
        ours.check()
        ours.flush()
    with command_streams(False):
        print("nothing")
    assert (sys.stdout, sys.stderr) == streams
    assert capsys.readouterr().out == ""
    assert issubclass(OutputLost, Exception)
