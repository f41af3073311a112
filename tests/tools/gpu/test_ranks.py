"""Ranks of one machine without torchrun."""

from __future__ import annotations

import pytest

from tools.gpu import ranks

CODE = """
import os, sys, time
names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"
line = " ".join(os.environ[name] for name in names)
os.write(1, (line + os.linesep).encode())  # one call, so that the lines of the ranks do not interleave
if sys.argv[1:] == ["fail"]:
    if os.environ["RANK"] == "1":
        sys.exit(7)
    time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "code"), [((), 0), (("fail",), 7)])
def test_ranks_end_together(capfd: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: int) -> None:
    """If one fails, the others do not run on."""
    started = ranks.start(3, ["-c", CODE, *arguments])
    assert ranks.wait(started) == code
    assert all(rank.wait(10) is not None for rank in started)
    if code == 0:
        assert sorted(capfd.readouterr().out.splitlines()) == [f"{rank} {rank} 3 3 127.0.0.1" for rank in range(3)]


def test_usage(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["ranks", "two", "module"])
    assert ranks.main() == 2 and "usage: python -m tools.gpu.ranks" in capsys.readouterr().err
