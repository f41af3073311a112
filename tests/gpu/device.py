"""The device of these tests: a GPU, or the emulated one if SWIFTSPEC_EMULATED names the module that
tests/simt/emulate.py has built."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from swiftspec import _C
from swiftspec.backends.cuda import devices
from swiftspec.errors import UserError

T = TypeVar("T")

_module = os.environ.get("SWIFTSPEC_EMULATED")
EMULATED = _module is not None
FEW = EMULATED and os.environ.get("SWIFTSPEC_EMULATED_CASES", "more") == "few"  # what every change runs
SEED = int(os.environ.get("SWIFTSPEC_EMULATED_SEED", "1"))
if _module is not None:
    from tests.simt.emulate import install

    install(Path(_module), SEED)

DEVICE = torch.device("cpu") if EMULATED else torch.device("cuda", 0)


def _why_not() -> str:
    try:
        devices.require_usable(DEVICE)
    except UserError as error:
        return str(error)
    return ""


WHY_NOT = "" if EMULATED else _why_not()

needs_kernels = pytest.mark.skipif(WHY_NOT != "", reason=WHY_NOT)
real = pytest.mark.skipif(EMULATED or not torch.cuda.is_available(), reason="no NVIDIA GPU")


def most(cases: list[T], emulated: int, few: int | None = None) -> list[T]:
    """All cases on a GPU; on the emulated GPU, which is slow, the first `emulated`, or `few` for quick runs."""
    if FEW and few is not None:
        return cases[:few]
    return cases[:emulated] if EMULATED else cases


def captured(work: Callable[[], T]) -> Callable[[], T]:
    """Captures `work` in a graph. Each call replays it and returns the tensors of the capture. The emulated GPU has no
    graphs, so each call runs `work` there."""
    if EMULATED:
        return work
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = work()

    def replay() -> T:
        graph.replay()
        return out

    return replay


@contextmanager
def emulated_gpu(*parts: int, shared: int = 0, driver: int = 12040) -> Iterator[None]:
    """Configures the emulated GPU: `parts` are the multiprocessors of each GPC (a cluster lies within one of them),
    `shared` the bytes of shared memory per block (0: the default), `driver` the CUDA version of its driver."""
    native: Any = _C
    native.gpu(parts, shared, driver)
    try:
        yield
    finally:
        native.gpu((16, 16, 16, 16))
