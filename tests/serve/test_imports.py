"""The commands without a server do not import its dependencies."""

import subprocess
import sys

import pytest

SERVER = {"fastapi", "starlette", "uvicorn", "msgspec", "llguidance"}
FRONT = "swiftspec.serve.__main__, swiftspec.cli.arguments, swiftspec.cli.generate, swiftspec.cli.chat"


@pytest.mark.slow
def test_the_commands_without_a_port_import_no_server() -> None:
    code = f"import sys, {FRONT}; print(*sorted({SERVER!r} & set(sys.modules)), 'swiftspec.serve.app' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]
