"""Figures of the benchmarks, drawn by matplotlib (extra `report`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@contextmanager
def svg_axes(file: Path) -> Iterator[Axes]:
    """Yields the axes of a figure with one panel, see `svg_panels`."""
    with svg_panels(file) as (axes,):
        yield axes


@contextmanager
def svg_panels(file: Path, panels: int = 1) -> Iterator[Sequence[Axes]]:
    """Yields the axes of a figure with panels side by side, and then writes the figure to `file` as SVG. Equal data
    gives equal bytes."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": file.stem}):  # letters as text: a smaller file
        figure = Figure(figsize=(7, 5) if panels == 1 else (4.5 * panels, 4), layout="constrained")
        yield [figure.add_subplot(1, panels, panel + 1) for panel in range(panels)]
        figure.savefig(file, format="svg", metadata={"Date": None})


def scale_speeds(axes: Axes) -> None:
    """Makes the horizontal axis logarithmic, with labels such as 2x and 1/4x."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda speed, _: f"{speed:g}x" if speed >= 1 else f"1/{1 / speed:g}x")
