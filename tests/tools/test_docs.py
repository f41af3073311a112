"""The pages: those that tools/docs.py generates match the code, and the others name only existing files."""

import contextlib
import re
from itertools import pairwise
from pathlib import Path

import pytest

from swiftspec.capabilities import EXECUTORS
from swiftspec.errors import UserError
from tools import docs, execution_paths

FOLDERS = "swiftspec|csrc|tests|bench|tools|docs|profiles"


@pytest.mark.parametrize("name", docs.PAGES)
def test_the_committed_page_is_current(name: str) -> None:
    assert (docs.ROOT / name).read_text(encoding="utf-8") == docs.PAGES[name](), "run python -m tools.docs"


@pytest.mark.parametrize("machine", execution_paths.MACHINES, ids=lambda machine: machine.name)
def test_no_executor_supports_more_than_a_slower_one(machine: execution_paths.Machine) -> None:
    """docs/paths.md relies on it: for a request with several features the slowest row applies."""
    for offer in (machine.expansion_executors(), machine.verification_executors(), machine.population_executors()):
        missing = [{name for column in kind.columns for name in EXECUTORS[column]} for kind in offer]
        assert all(faster >= slower for faster, slower in pairwise(missing)) and not missing[-1]


def test_the_page_of_paths_covers_every_feature_and_every_executor() -> None:
    required, columns = set[str](), set[str]()
    for _, phase, requests, _ in execution_paths.PHASES:
        for case in requests:
            for machine in execution_paths.MACHINES:
                with contextlib.suppress(UserError):
                    executors, features = phase(machine, case)
                    required |= features
                    columns |= {column for executor in executors for column in executor.columns}
    assert columns == set(EXECUTORS) and required >= {name for column in EXECUTORS.values() for name in column}


def test_a_stale_page_is_reported_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert docs.main(["--check"], tmp_path) == 1
    assert "docs/reference/flags.md is out of date" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    assert docs.main([], tmp_path) == 0
    assert docs.main(["--check"], tmp_path) == 0


def test_a_table_cell_escapes_vertical_bars() -> None:
    assert docs.table(("a", "b"), [("x|y", "")]) == "| a | b |\n| --- | --- |\n| x\\|y |  |\n"


def pages() -> list[str]:
    """All except the log, which names files as they were on its day."""
    found = [docs.ROOT / "README.md", *docs.ROOT.glob("docs/**/*.md")]
    return [page.relative_to(docs.ROOT).as_posix() for page in sorted(found)]


@pytest.mark.parametrize("name", pages())
def test_pages_name_existing_files(name: str) -> None:
    page = docs.ROOT / name
    text = page.read_text(encoding="utf-8")
    linked = [page.parent / link for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", text)]
    named = [docs.ROOT / path for path in re.findall(rf"`((?:{FOLDERS})/[\w./-]*\w)", text)]
    missing = {str(path) for path in linked + named if not path.exists()}
    assert not missing


def test_the_readme_is_short_and_has_its_two_commands() -> None:
    text = (docs.ROOT / "README.md").read_bytes()
    assert len(text) <= 10_000
    assert b"\nmake chat\n" in text and b"\nmake test\n" in text


@pytest.mark.slow
def test_the_example_of_the_readme_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    text = (docs.ROOT / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(docs.ROOT)
    exec(compile(example, "README.md", "exec"), {})
    assert capsys.readouterr().out.strip()
