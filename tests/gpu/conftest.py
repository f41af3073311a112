"""Fixtures of the GPU tests."""

from __future__ import annotations

import zlib
from typing import Any

import pytest

from swiftspec import _C
from tests.gpu.device import EMULATED, SEED


@pytest.fixture(autouse=True)
def own_order(request: pytest.FixtureRequest) -> None:
    """Seeds the schedule of the emulated GPU per test, so that it does not depend on the other tests."""
    native: Any = _C
    if EMULATED:
        native.seed(zlib.crc32(request.node.nodeid.encode()) + SEED)
