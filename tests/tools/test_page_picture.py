"""docs/page.svg, and that it is the output of tools/page_picture.mjs for the recorded trace."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs" / "page.svg"
MOST = 200_000  # bytes


def test_the_committed_picture_is_small_and_complete() -> None:
    picture = PICTURE.read_text(encoding="utf-8")
    ElementTree.fromstring(picture)
    assert len(picture.encode()) < MOST
    assert picture.count("http") == 1  # the namespace: no font and no image from elsewhere


@pytest.mark.slow
def test_the_committed_picture_is_that_of_the_recorded_trace(tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node")
    for part in ("swiftspec/serve/page", "tools"):
        shutil.copytree(ROOT / part, tmp_path / part)
    (tmp_path / "docs").mkdir()
    subprocess.run([node, "tools/page_picture.mjs"], cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / "docs" / "page.svg").read_text() == PICTURE.read_text()
