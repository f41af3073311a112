"""What every test shares."""

from collections.abc import Iterator

import pytest
import torch

from swiftspec import _C

# The models here are tiny: a second thread costs more in barriers than it computes, above all on a busy machine.
torch.set_num_threads(1)


@pytest.fixture(params=["avx512_bf16", "avx512", "avx2"])
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """The test runs once at every level of instructions that this CPU has."""
    best = _C.level()
    if not _C.use_level(request.param):
        pytest.skip(f"this CPU has no {request.param}")
    yield request.param
    assert _C.use_level(best)
