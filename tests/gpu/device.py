"""What these tests run on: a GPU, or, where SWIFTSPEC_EMULATED names the module that tests/simt/emulate.py has built,
the emulated one."""

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
    """All cases on a GPU; on the emulated one, which is slow, the first so many; of a change the first few."""
    if FEW and few is not None:
        return cases[:few]
    return cases[:emulated] if EMULATED else cases


def captured(work: Callable[[], T]) -> Callable[[], T]:
    """`work` as a graph: each call replays it and returns the tensors that it returned when it was captured. Graphs are
    not emulated: there each call does the work."""
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
def emulated_gpu(*parts: int, shared: int = 0) -> Iterator[None]:
    """The emulated GPU with so many multiprocessors in each of its parts, across which no cluster lies, and so many
    bytes of shared memory if they are given."""
    native: Any = _C
    native.gpu(parts, shared)
    try:
        yield
    finally:
        native.gpu((16, 16, 16, 16))
