"""The command `swiftspec` and its sub-commands."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import swiftspec.__main__ as swiftspec_main
from swiftspec.__main__ import SUBCOMMANDS, main
from swiftspec.serve import __main__ as serve_main
from swiftspec.settings.settings import Settings, env_name

ROOT = Path(__file__).parents[2]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Settings.model_fields:
        monkeypatch.delenv(env_name(name), raising=False)
    monkeypatch.setattr(sys, "stdin", io.StringIO())


@pytest.fixture
def dispatched(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The command lines that reach the dispatcher of `python -m swiftspec.serve`, which does not run them."""
    calls: list[list[str]] = []

    def dispatch(argv: list[str], first: bool) -> int:
        calls.append(list(argv))
        return 0

    monkeypatch.setattr(serve_main, "_dispatch", dispatch)
    return calls


def test_help_lists_the_subcommands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    page = capsys.readouterr().out
    for name, text in SUBCOMMANDS.items():
        assert f"  {name}" in page and text in page


@pytest.mark.slow
@pytest.mark.parametrize("name", [None, "chat", "serve", "generate"])
def test_help_imports_no_torch(name: str | None) -> None:
    argv = ["--help"] if name is None else [name, "--help"]
    code = (
        "import sys\nfrom swiftspec.__main__ import main\n"
        f"try:\n    code = main({argv!r})\nexcept SystemExit as error:\n    code = error.code\n"
        "print('torch' in sys.modules, code or 0, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr.split() == ["False", "0"]
    assert done.stdout.startswith("usage: swiftspec" if name is None else f"usage: swiftspec {name}")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("swiftspec ")


def test_an_unknown_command_is_one_line_and_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["srve", "--port", "1"]) == 2
    assert capsys.readouterr().err == "swiftspec: error: unknown command 'srve' (did you mean 'serve'?)\n"
    assert main(["x\ny"]) == 2
    assert capsys.readouterr().err == "swiftspec: error: unknown command 'x\\ny' (--help lists the commands)\n"
    assert main(["run", "gemma3"]) == 2
    assert "(use `swiftspec chat MODEL`, or " in capsys.readouterr().err
    assert main(["org/name"]) == 2
    assert "(for a chat with this model: `swiftspec chat MODEL`)" in capsys.readouterr().err


def test_flags_without_a_command_are_those_of_serve(dispatched: list[list[str]]) -> None:
    assert main(["--port", "7"]) == 0
    assert main([]) == 0  # a prompt in a pipe
    assert dispatched == [["--port", "7"], []]


def test_no_arguments_in_a_terminal_print_the_help(
    dispatched: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal())
    assert main([]) == 0
    assert dispatched == [] and capsys.readouterr().out.startswith("usage: swiftspec COMMAND")


def test_serve_has_a_default_port(dispatched: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["serve", "--host", "0.0.0.0"]) == 0
    assert main(["serve", "--port", "0"]) == 0
    monkeypatch.setenv("SWIFTSPEC_PORT", "9")
    assert main(["serve"]) == 0
    assert dispatched == [["--host", "0.0.0.0", "--port", "8000"], ["--port", "0"], []]


def test_generate_takes_a_prompt_or_a_pipe(
    dispatched: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--prompt", "a"]) == 0
    assert main(["generate", "--raw"]) == 0
    assert dispatched == [["--prompt", "a"], ["--raw"]]
    monkeypatch.setattr(sys, "stdin", Terminal())
    assert main(["generate"]) == 2
    assert "no prompt: pass it with --prompt, --prompt-file or standard input" in capsys.readouterr().err


def test_generate_of_the_serve_module_is_the_subcommand(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[Any] = []
    monkeypatch.setattr(serve_main, "run_rank", lambda command, first: commands.append(command) or 0)
    assert serve_main.main(["generate", "--prompt", "a"]) == main(["generate", "--prompt", "a"]) == 0
    assert commands[0] == commands[1] and commands[0].prompt == "a"


def test_chat_needs_a_terminal(
    dispatched: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat"]) == 2
    assert "`swiftspec chat` needs a terminal" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert main(["chat", "--raw"]) == 0
    assert dispatched == [["--raw"]]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["chat", "--prompt", "a"], "--prompt, --prompt-file and --json are not supported by `swiftspec chat`"),
        (["chat", "--port", "1"], "--port is not supported by `swiftspec chat`"),
        (["generate", "--port", "1", "--prompt", "a"], "--port is not supported by `swiftspec generate`"),
        (["serve", "--prot", "1"], "unrecognized arguments: --prot 1"),
        (["worker", "both"], "specify the model of the worker: `swiftspec worker draft`"),
    ],
)
def test_flags_of_another_command_are_refused(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["worker", "replay"])
def test_worker_and_replay_are_those_of_serve(name: str, dispatched: list[list[str]]) -> None:
    assert main([name, "x"]) == 0
    assert dispatched == [[name, "x"]]


def test_profile_gets_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr("swiftspec.lab.profile.main", lambda argv, prog: calls.append((argv, prog)) or 0)
    assert main(["profile", "--dry-run"]) == 0
    assert calls == [(["--dry-run"], "swiftspec profile")]


@pytest.mark.parametrize(
    ("argv", "module", "code"),
    [
        (["pair", "x"], "bench.pair", 2),
        (["exactness"], "bench.exactness", 2),
        (["profile", "trace", "x"], "bench.timeline", 1),
        (["profile", "report", "x"], "bench.profile_report", 1),
        (["profile", "predict"], "bench.prediction", 1),
    ],
)
def test_a_moved_command_names_its_module(
    argv: list[str], module: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == code
    error = capsys.readouterr().err
    assert f"python -m {module}" in error and error.count("\n") == 1


@pytest.mark.slow
def test_the_module_is_the_same_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "swiftspec", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == swiftspec_main.help_page() + "\n"


def test_an_interrupt_while_a_command_is_imported_ends_it_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(swiftspec_main, "import_module", interrupted)
    assert main(["doctor"]) == 130
