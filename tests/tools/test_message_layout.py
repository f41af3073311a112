"""The layout of messages in C++ matches the output of `python -m tools.message_layout`."""

from __future__ import annotations

from tools import message_layout


def test_the_layout_is_current() -> None:
    text = message_layout.FILE.read_text(encoding="utf-8")
    assert text == message_layout.header_text(), "run python -m tools.message_layout"
