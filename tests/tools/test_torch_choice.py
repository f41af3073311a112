"""Which torch `make` installs: the one that the driver can run."""

from __future__ import annotations

import re
import subprocess
from types import SimpleNamespace

import pytest
import torch

from tools.torch_choice import choose, driver_cuda, works

INDEX = "https://example.org/whl/"


@pytest.mark.parametrize(
    ("cuda", "index", "arguments", "problem"),
    [
        (None, "", ["torch==2.13.0"], None),
        ((13, 1), "", ["torch>=2.11"], None),
        ((13, 0), INDEX, ["--index-url", "https://example.org/whl/cu130", "torch>=2.11"], None),
        ((12, 9), INDEX, ["--index-url", "https://example.org/whl/cu128", "torch>=2.11"], None),
        ((12, 6), INDEX, ["--index-url", "https://example.org/whl/cu126", "torch>=2.11"], None),
        ((12, 4), INDEX, ["--index-url", "https://example.org/whl/cu126", "torch>=2.11"], None),
        ((12, 4), "", ["torch>=2.11"], "the default torch needs 13.0: .*TORCH_INDEX.* whose folder cu126 fits"),
        ((12, 8), "", ["torch>=2.11"], "the default torch needs 13.0: .*TORCH_INDEX.* whose folder cu128 fits"),
        ((11, 8), INDEX, ["torch>=2.11"], "supports CUDA 11.8, which is too old for torch"),
    ],
)
def test_torch_fits_the_driver(
    cuda: tuple[int, int] | None, index: str, arguments: list[str], problem: str | None
) -> None:
    found, line = choose(cuda, index)
    assert found == arguments and (line is None) == (problem is None)
    if line is not None and problem is not None:
        assert re.search(problem, line) and "\n" not in line


@pytest.mark.parametrize(
    ("said", "cuda"), [("| NVIDIA-SMI 550.54  Driver Version: 550.54  CUDA Version: 12.4 |", (12, 4)), ("", None)]
)
def test_the_driver_names_its_cuda_version(
    monkeypatch: pytest.MonkeyPatch, said: str, cuda: tuple[int, int] | None
) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=said))
    assert driver_cuda() == cuda


@pytest.mark.parametrize(
    ("version", "gpu", "kept"), [("2.11.0+cu128", True, True), ("2.10.1", True, False), ("2.13.0+cpu", False, False)]
)
def test_an_installed_torch_is_kept_if_it_runs_on_the_gpu(
    monkeypatch: pytest.MonkeyPatch, version: str, gpu: bool, kept: bool
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert works() == (version if kept else None)
