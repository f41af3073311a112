"""The protobuf modules of the workers match the output of `python -m tools.protos`."""

from __future__ import annotations

from tools import protos


def test_the_messages_are_current() -> None:
    for name, text in protos.made().items():
        assert (protos.ROOT / name).read_text(encoding="utf-8") == text, "run python -m tools.protos"
