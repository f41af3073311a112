"""What every test shares."""

import os
from collections.abc import Iterator

import pytest
import torch

from swiftspec import _C
from tests.support.ranks import Pool

# The models here are tiny: a second thread costs more in barriers than it computes, above all on a busy machine.
torch.set_num_threads(1)

LONGEST = ("test_emulated_gpu", "test_group", "test_restarts_end_to_end", "test_serve_ranks",
           "test_chaos", "test_sanitized")  # fmt: skip


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where tests run two at a time (`make test`, `make test-slow`), those of a file share a worker and what they have
    set up. The longest files come first, so that none of them is left for the end."""
    if not config.pluginmanager.hasplugin("xdist"):  # a bare machine with a GPU
        return
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))
    for item in items:
        item.add_marker(pytest.mark.xdist_group(item.path.name))


@pytest.fixture(autouse=True)
def own_threads() -> Iterator[None]:
    """A command that runs in this process takes threads and cores for itself; the tests after it have what they had."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    yield
    torch.set_num_threads(1)
    _C.set_threads(1)
    if cores is not None:
        os.sched_setaffinity(0, cores)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four ranks for all tests: to start some costs seconds."""
    ranks = Pool(4)
    yield ranks
    ranks.close()


@pytest.fixture(params=["avx512_bf16", "avx512", "avx2"])
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """The test runs once at every level of instructions that this CPU has."""
    best = _C.level()
    if not _C.use_level(request.param):
        pytest.skip(f"this CPU has no {request.param}")
    yield request.param
    assert _C.use_level(best)
