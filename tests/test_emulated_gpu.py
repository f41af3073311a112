"""tests/gpu on the emulated GPU of tests/simt: the kernels' own code, from the bindings to the last instruction."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simt.emulate import build

ROOT = Path(__file__).resolve().parent.parent
COMPILER = shutil.which("g++")  # clang++ wants other words for -Wno-clobbered

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(COMPILER is None or sys.platform != "linux", reason="no g++, or no Linux"),
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(str(COMPILER), tmp_path_factory.mktemp("emulated"))


@pytest.mark.parametrize("name", ["linear", "cuda_ops", "verify", "peers", "graph"])
def test_what_a_gpu_must_pass(module: Path, name: str) -> None:
    command = [sys.executable, "-m", "pytest", f"tests/gpu/test_{name}.py", "-m", "gpu", "-q", "-p", "no:cacheprovider"]
    environment = os.environ | {"SWIFTSPEC_EMULATED": str(module), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout
