"""The HTML report of a profile."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import profile_report
from tests.support.profiles import profile, run


def test_the_report_is_one_file_with_every_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    timeline = {
        "wait": [0.0, 0.1], "target": {"verify": [0.1, 1.0]}, "path": [0], "draft": {"forwards": [[0.2, 0.6, 8]]},
    }  # fmt: skip
    whole = profile(
        run("async", 3, 1, 300, 500, d=4), run("async", 3, 1, 310, d=4, verify_batch=16, variation=True),
        run("serial", 4, 4, 100, d=2, ops="reference"), lanes=[timeline],
        steps=[{"side": "target", "tp": tp, "rows": 8, "seconds": [1 / tp, 2 / tp]} for tp in (1, 2)],
    )  # fmt: skip
    (tmp_path / "p.json").write_text(json.dumps(whole))
    assert profile_report.main([str(tmp_path / "p.json")]) == 0
    page = (tmp_path / "p.html").read_text()
    assert page.count("<svg") == len(profile_report.FIGURES) == 5
    assert "async 3+1 bs 8 w 8 d 4" in page
    assert "src=" not in page and "@import" not in page
    nothing = profile_report.html(profile(run("ar", 4, 0, 1.0)))
    assert nothing.count("<svg") == 1
