"""Lines and words of a figure, without a library."""

from __future__ import annotations


def line_of(x0: float, y0: float, x1: float, y1: float, colour: str) -> str:
    return f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" stroke="{colour}"/>'


def text_of(x: float, y: float, text: str, colour: str, anchor: str = "start", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}" font-size="{size}">{text}</text>'
