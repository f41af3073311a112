"""/tree: the draft tree of a round, and its outcome."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from swiftspec.cli.tree_view import RoundHistory
from swiftspec.errors import UserError
from swiftspec.messages import VerifyResult
from swiftspec.observe.trace_format import RoundRecord
from tests.support.proposals import draft_proposal

TIMELINE: dict[str, Any] = {
    "tree": {
        "tokens": np.array([3, 5, 6, 7, 8, 9, 4]), "parents": np.array([-1, 0, 0, 1, 1, 3, 2]),
        "logprobs": np.log([1, 0.8, 0.1, 0.4, 0.2, 0.4, 0.1]), "expanded": np.array([1, 1, 1, 1, 0, 0, 0]),
    }
}  # fmt: skip


def round_record(
    round_: int, parents: tuple[int, ...], path: tuple[int, ...], tokens: tuple[int, ...], *more: Any
) -> RoundRecord:
    """A round that verifies tokens 3, 5, 6. `more`: p, and what reads the draft's timeline."""
    proposal, result = draft_proposal(1, round_, 1, (3, 5, 6), parents), VerifyResult(1, round_, 1, path, tokens)
    p, timeline = more or (None, None)
    return RoundRecord(proposal, result, [0.0] * 7, True, 0.0, p, timeline)


def test_a_tree_is_shown() -> None:
    lines: list[Any] = []
    rounds, out = RoundHistory(lines.append, lambda token: "\x1b[31m" if token == 8 else f"t{token}"), io.StringIO()
    console = Console(file=out, width=100, color_system=None)
    with pytest.raises(UserError, match="no round is recorded: use /tree on, then send a message"):
        rounds.command("", console)
    rounds.command("on", console)
    lines[0]([{"request": 1, "begin": {}}])
    with pytest.raises(UserError, match="send a message"):
        rounds.command("", console)
    lines[0]([round_record(4, (-1, 0, 0), (0, 1), (5, 7), [0.5, 0.25], lambda: TIMELINE)])
    rounds.command("0", console)
    assert out.getvalue().splitlines()[1:] == [
        "round 4: 2 draft tokens verified, 1 accepted; the target adds 't7'",
        "'t3'",
        "├─ 't5'  q 0.80  p 0.50  accepted",
        "│  └─ 't7'  q 0.50  survives",
        "│     └─ 't9'  q 1.00  survives",
        "└─ 't6'  q 0.10  p 0.25  rejected",
        "and 2 more nodes, not verified",
    ]
    with pytest.raises(UserError, match="only 1 round is recorded"):
        rounds.command("1", console)
    with pytest.raises(UserError, match="on, off or a number of rounds"):
        rounds.command("-1", console)
    rounds.command("off", console)
    assert lines[1] is None
