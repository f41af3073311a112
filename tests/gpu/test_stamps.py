"""Stamps of the kernels of a layer, in builds with SWIFTSPEC_STAMPS."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from bench.gpu import cases, shapes, stamps
from bench.gpu.stamps import POINTS
from bench.gpu.timing import captured
from swiftspec import _C
from swiftspec.backends.cuda import cuda
from tests.gpu.device import DEVICE, EMULATED, needs_kernels

pytestmark = [
    pytest.mark.gpu,
    needs_kernels,
    pytest.mark.skipif(not hasattr(_C, "start_stamps"), reason="a build without SWIFTSPEC_STAMPS"),
]


def run_once(calls: Sequence[Callable[[], Any]]) -> Callable[[], None]:
    """Runs the calls in place of a capture, for the emulated GPU."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    return lambda: None


def test_every_warp_reaches_its_points_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """All kernels of a layer with stamps, in the order of their launches. Warps without a tile, and blocks of attention
    without keys, skip the points of the work that they do not have."""
    monkeypatch.setitem(shapes.MODELS, "small", (256, 4, 2, 64, 512, 512))
    monkeypatch.setattr(cases, "operators", lambda device: {cases.OURS: cuda, "unfused": None})
    with torch.inference_mode():
        launches = stamps.recorded("small", 8, 40, str(DEVICE), run_once if EMULATED else captured)
    widths = ("256 x 512", "", "256 x 256", "256 x 1024", "512 x 256")
    assert [launch.kernel for launch in launches] == [f"linear {width}" if width else "attention" for width in widths]
    for launch in launches:
        clocks = launch.records[:, :POINTS]
        work = launch.points.index("planned" if launch.kernel == "attention" else "first tile")
        assert (clocks[:, :work] > 0).all() and (clocks[:, -3:] > 0).all() and (clocks > 0).all(1).any()
        for warp in clocks:
            assert (np.diff(warp[warp > 0]) >= 0).all()
    for launch, found in zip(launches, stamps.reduce(launches)["kernels"], strict=True):
        assert found["blocks"] == len(np.unique(launch.blocks))
    assert [*stamps.trace_events(launches)]
