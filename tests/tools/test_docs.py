"""tools/docs.py: the pages that are made from the code say what the code says."""

from pathlib import Path

import pytest

from tools import docs


@pytest.mark.parametrize("name", docs.PAGES)
def test_the_committed_page_is_current(name: str) -> None:
    assert (docs.ROOT / name).read_text(encoding="utf-8") == docs.PAGES[name](), "python -m tools.docs writes it"


def test_a_stale_page_is_told_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert docs.main(["--check"], tmp_path) == 1
    assert "docs/reference/flags.md is out of date" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    assert docs.main([], tmp_path) == 0
    assert docs.main(["--check"], tmp_path) == 0


def test_a_cell_keeps_its_bars() -> None:
    assert docs.table(("a", "b"), [("x|y", "")]) == "| a | b |\n| --- | --- |\n| x\\|y |  |\n"
