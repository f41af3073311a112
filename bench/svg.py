"""SVG figures without a library."""

from __future__ import annotations

import math
from collections.abc import Sequence

COLOURS = ("#1b6ca8", "#d1495b")


def line_of(x0: float, y0: float, x1: float, y1: float, colour: str) -> str:
    """Returns an SVG line."""
    return f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" stroke="{colour}"/>'


def text_of(x: float, y: float, words: str, colour: str, anchor: str = "start", size: int = 12) -> str:
    """Returns an SVG text at a point."""
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}" font-size="{size}">{words}</text>'


def scatter(points: Sequence[tuple[str, float, float, float]], title: str, axis: str) -> str:
    """Returns a scatter plot as SVG, with numbered points and a legend.

    `points`: name, x on a logarithmic axis, share, and standard error of the share.
    """
    first = math.floor(math.log2(min(x for _, x, _, _ in points)))
    last = max(math.ceil(math.log2(max(x for _, x, _, _ in points))), first + 1)
    low = math.floor(20 * min(share - error for _, _, share, error in points)) / 20
    high = max(math.ceil(20 * max(share + error for _, _, share, error in points)) / 20, low + 0.05)

    def at(x: float, share: float) -> tuple[float, float]:
        return 60 + 440 * (math.log2(x) - first) / (last - first), 400 - 340 * (share - low) / (high - low)

    out = ['<svg xmlns="http://www.w3.org/2000/svg" width="760" height="460" font-family="sans-serif" font-size="12">']
    out += ['<rect width="760" height="460" fill="white"/>', text_of(60, 26, title, "#333", size=14)]
    for power in range(first, last + 1):
        (x, bottom), (_, top) = at(2.0**power, low), at(2.0**power, high)
        out += [line_of(x, bottom, x, top, "#e4e4e4"), text_of(x, 418, f"{2.0**power:g}x", "#333", "middle")]
    for step in range(round((high - low) * 20) + 1):
        share = low + step / 20
        (left, y), (right, _) = at(2.0**first, share), at(2.0**last, share)
        out += [line_of(left, y, right, y, "#e4e4e4"), text_of(52, y + 4, f"{100 * share:.0f} %", "#333", "end")]
    out.append(text_of(280, 444, axis, "#333", "middle"))
    for number, (name, x, share, error) in enumerate(points, 1):
        (across, up), (_, top), (_, bottom) = at(x, share), at(x, share + error), at(x, share - error)
        colour = COLOURS[0] if "smc" not in name else COLOURS[1]
        out += [line_of(across, top, across, bottom, colour)]
        out += [f'<circle cx="{across:.1f}" cy="{up:.1f}" r="3.5" fill="{colour}"/>']
        out += [text_of(across + 6, up - 5, str(number), colour)]
        out += [text_of(520, 60 + 20 * number, f"{number}  {name}", colour)]
    return "\n".join([*out, "</svg>\n"])
