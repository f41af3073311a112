"""What the tests of this folder share."""

from __future__ import annotations

import zlib
from typing import Any

import pytest

from swiftspec import _C
from tests.gpu.device import EMULATED, SEED


@pytest.fixture(autouse=True)
def own_order(request: pytest.FixtureRequest) -> None:
    """On the emulated GPU a test draws the same order of everything alone and among others."""
    native: Any = _C
    if EMULATED:
        native.seed(zlib.crc32(request.node.nodeid.encode()) + SEED)
