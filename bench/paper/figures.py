"""Figures 2, 7, 8 and 9, drawn from the numbers of a report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from bench.figure import svg_axes, svg_panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class PlottedNumber(Protocol):
    """A number of a report."""

    @property
    def figure(self) -> str: ...
    @property
    def system(self) -> str: ...
    @property
    def about(self) -> str: ...
    @property
    def metric(self) -> str: ...
    @property
    def value(self) -> float: ...
    @property
    def kind(self) -> str: ...


Numbers = Sequence[PlottedNumber]


def draw(numbers: Numbers, folder: Path) -> Iterator[Path]:
    """Draws the figures whose numbers exist as SVG files. Yields the files."""
    drawings = {"Figure 2": draw_tree_sizes, "Figure 7": draw_tasks, "Figure 8": draw_ablation, "Figure 9": draw_splits}
    for name, drawing in drawings.items():
        chosen = [number for number in numbers if number.figure == name]
        if chosen:
            file = folder / f"{name.lower().replace(' ', '')}.svg"
            drawing(chosen, file)
            yield file


def draw_tree_sizes(numbers: Numbers, file: Path) -> None:
    with svg_panels(file, 2) as panels:
        for axes, (symbol, title) in zip(panels, {"bs": "nodes per verification", "w": "leaves per expansion"}.items()):
            points = [(int(n.about.split()[1]), n.value) for n in numbers if n.about.startswith(f"{symbol} ")]
            axes.plot(*zip(*points, strict=True), marker="o")
            axes.set_xscale("log", base=2)
            axes.set_xticks([size for size, _ in points], [str(size) for size, _ in points])
            axes.set(xlabel=f"{symbol}, {title}", ylabel=f"tokens per round ({numbers[0].kind})", ylim=(0, None))


def draw_tasks(numbers: Numbers, file: Path) -> None:
    systems, families = (list(dict.fromkeys(getattr(n, name) for n in numbers)) for name in ("system", "about"))
    values = {(n.system, n.about): n.value for n in numbers}
    with svg_axes(file) as axes:
        width = 0.8 / len(systems)
        for number, system in enumerate(systems):
            at = [place + number * width for place in range(len(families))]
            axes.bar(at, [values.get((system, family), 0.0) for family in families], width, label=system)
        axes.set_xticks([place + 0.4 - width / 2 for place in range(len(families))], families)
        axes.set(ylabel=f"tok/s ({numbers[0].kind})")
        axes.legend()


def draw_ablation(numbers: Numbers, file: Path) -> None:
    chosen = [n for n in numbers if n.metric == "ratio to base" and n.kind != "quoted"]
    with svg_axes(file) as axes:
        _bars(axes, [n.system for n in chosen], [n.value for n in chosen])
        quoted = [n for n in numbers if n.kind == "quoted"]
        names = [n.system for n in chosen]
        places = [names.index(n.system) for n in quoted]
        axes.scatter(places, [n.value for n in quoted], marker="_", s=900, color="black", label="paper (Qwen2-72B)")
        axes.set(ylabel=f"tok/s relative to base ({chosen[0].kind}, greedy)")
        axes.legend()


def draw_splits(numbers: Numbers, file: Path) -> None:
    with svg_axes(file) as axes:
        _bars(axes, [n.about for n in numbers], [n.value for n in numbers])
        axes.set(xlabel="target + draft ranks", ylabel=f"tok/s ({numbers[0].kind})")


def _bars(axes: Axes, labels: Sequence[str], values: Sequence[float]) -> None:
    """Draws bars with their values."""
    axes.bar_label(axes.bar(labels, values), fmt="{:.3g}")
