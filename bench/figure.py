"""Figures of the benchmarks, drawn by matplotlib (extra `report`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@contextmanager
def svg_axes(file: Path) -> Iterator[Axes]:
    """Yields the axes of a figure, and then writes the figure to `file` as SVG. Equal data gives equal bytes."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": file.stem}):  # letters as text: a smaller file
        figure = Figure(figsize=(7, 5), layout="constrained")
        yield figure.add_subplot()
        figure.savefig(file, format="svg", metadata={"Date": None})


def scale_speeds(axes: Axes) -> None:
    """Makes the horizontal axis logarithmic, with labels such as 2x and 1/4x."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda speed, _: f"{speed:g}x" if speed >= 1 else f"1/{1 / speed:g}x")
