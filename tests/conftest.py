"""What every test shares."""

import os
from collections.abc import Iterator

import pytest
import torch

from swiftspec import _C
from tests.support.ranks import Pool

# The models here are tiny: a second thread costs more in barriers than it computes, above all on a busy machine.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where tests run two at a time and by groups (`make test`, `make test-slow`), those of a file share a worker and
    what they have set up. Slow ones that start several ranks or processes all stay on one worker, one after the other;
    what only computes runs beside them."""
    for item in items:
        slow = item.get_closest_marker("slow") or item.get_closest_marker("long")
        ranks = slow and {"distributed", "fuzz", "lab", "serve"} & {part.name for part in item.path.parents}
        item.add_marker(pytest.mark.xdist_group("ranks" if ranks else item.path.name))


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
