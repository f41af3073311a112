"""Without the optional dependencies the engine chats and serves; what needs one ends with the command to install it."""

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import httpx
import pytest

from swiftspec.errors import UserError
from swiftspec.extras import EXTRAS, ExtraName, require_extra
from tests.support.pty_terminal import Terminal
from tests.support.server_process import ROOT, ServerProcess

OF_DEVELOPERS = {"test", "lint", "bench", "report"}
BLOCKED = sorted({module for extra in EXTRAS.values() for module in extra.modules})
SITE_CUSTOMIZE = f"""
import sys

class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name in {BLOCKED!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, NotInstalled())
"""
PROMPT = ("--raw", "--prompt", "def f(", "--max-tokens", "4")


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    """The environment of processes in which no optional dependency can be imported."""
    (tmp_path / "sitecustomize.py").write_text(SITE_CUSTOMIZE)
    return {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}


def swiftspec(variables: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "swiftspec", *arguments], cwd=ROOT, env={**os.environ, **variables}, text=True,
        capture_output=True,
    )  # fmt: skip


def requirements(of: Sequence[str]) -> set[str]:
    """The names of the packages, without versions."""
    return {re.split(r"[^\w-]", requirement)[0] for requirement in of}


def test_the_extras_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional = {name: requirements(of) for name, of in project["optional-dependencies"].items()}
    assert optional.keys() - OF_DEVELOPERS == set(EXTRAS) == set(get_args(ExtraName))
    for name in EXTRAS:
        assert optional[name] <= optional["test"]
        assert not optional[name] & requirements(project["dependencies"])


def test_an_extra_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in EXTRAS:
        require_extra(name, "this")
    monkeypatch.setitem(sys.modules, "google.protobuf", None)
    with pytest.raises(UserError, match=r"^--draft-url needs gRPC: run pip install '\.\[network\]' in "):
        require_extra("network", "--draft-url")
    monkeypatch.setitem(sys.modules, "opentelemetry", None)  # the parent package
    monkeypatch.delitem(sys.modules, "opentelemetry.sdk", raising=False)
    with pytest.raises(UserError, match=r"^this needs OpenTelemetry"):
        require_extra("otel", "this")


@pytest.mark.slow
def test_one_generation_and_a_chat_without_extras(variables: dict[str, str]) -> None:
    done = swiftspec(variables, "generate", *PROMPT)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
    chat = Terminal(["-m", "swiftspec", "chat", "--max-tokens", "4"], **variables)
    chat.until(">>>")
    chat.send("def f(\r")
    chat.until(r"4 tok, ")
    chat.until(">>>")
    chat.send("\x04")
    assert chat.leave() == 0


@pytest.mark.slow
def test_a_server_without_extras(variables: dict[str, str]) -> None:
    with ServerProcess(variables=variables) as server:
        answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "def f(", "max_tokens": 4}, timeout=60)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("extra", "arguments"),
    [
        ("network", ("generate", *PROMPT, "--draft-url", "127.0.0.1:9")),
        ("network", ("generate", *PROMPT, "--target-url", "127.0.0.1:9")),
        ("network", ("serve", "--port", "0", "--draft-url", "127.0.0.1:9")),
        ("network", ("worker", "draft")),
        ("otel", ("generate", *PROMPT, "--otlp-endpoint", "http://127.0.0.1:9")),
        ("otel", ("serve", "--port", "0", "--otlp-endpoint", "http://127.0.0.1:9")),
        ("kv-events", ("serve", "--port", "0", "--kv-events-config.enable_kv_cache_events", "true")),
    ],
)
def test_what_needs_an_extra_ends_with_one_line(
    variables: dict[str, str], extra: str, arguments: Sequence[str]
) -> None:
    done = swiftspec(variables, *arguments)
    assert done.returncode == 1
    assert f": run pip install '.[{extra}]' in " in done.stderr.splitlines()[-1], done.stderr
    assert "Traceback" not in done.stderr
