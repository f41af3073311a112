"""The pages: those that tools/docs.py generates match the code, and the others name only existing files."""

import contextlib
import re
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from swiftspec.errors import UserError
from swiftspec.runtime.executors import FEATURES
from tools import docs, execution_paths

FOLDERS = "swiftspec|csrc|tests|bench|tools|docs|profiles"


@pytest.mark.parametrize("name", docs.PAGES)
def test_the_committed_page_is_current(name: str) -> None:
    assert (docs.ROOT / name).read_text(encoding="utf-8") == docs.PAGES[name](), "run python -m tools.docs"


@pytest.mark.parametrize("machine", execution_paths.MACHINES, ids=lambda machine: machine.name)
def test_no_executor_supports_more_than_a_slower_one(machine: execution_paths.Machine) -> None:
    """docs/paths.md relies on it: for a request with several features the slowest row applies."""
    populations = machine.population_executors()
    for offer in (machine.expansion_executors(), machine.verification_executors(), populations):
        taken = [frozenset(name for name in FEATURES if kind.supports(frozenset({name}))) for kind in offer]
        assert all(kind.supports(all_of_them) for kind, all_of_them in zip(offer, taken))
        assert all(faster <= slower for faster, slower in pairwise(taken))
        assert taken[-1] == set(FEATURES) - ({"hidden states"} if offer is populations else set())


@dataclass(frozen=True)
class FeatureRecorder(execution_paths.Machine):
    """Offers executors that support everything and records the requested features."""

    requested: set[str] = field(default_factory=set)
    name: str = "recorder"

    def supports(self, required: frozenset[str]) -> bool:
        self.requested.update(required)
        return True

    def offer(self) -> list[Any]:
        return [self]

    expansion_executors = verification_executors = population_executors = offer


def test_the_page_of_paths_covers_every_feature() -> None:
    recorder = FeatureRecorder(group=True)
    for _, select, requests in execution_paths.PHASES:
        for case in requests:
            with contextlib.suppress(UserError):
                select(recorder, case)
    assert recorder.requested == set(FEATURES)


def test_every_reason_for_eager_execution_occurs_on_the_page() -> None:
    page = " ".join(docs.paths_page().split())
    for reasons in execution_paths.EAGER_REASONS.values():
        assert all(reason in page for reason in reasons.values())


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
