"""The files of the page: their structure, and unit tests of their modules."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from swiftspec.serve import replay
from swiftspec.serve.page_routes import PAGE_FOLDER

HERE = Path(__file__).resolve().parent
MODULES = sorted(PAGE_FOLDER.glob("*.js"))
MARKUP = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|setAttribute\([\"']on"
)


@pytest.fixture
def node() -> str:
    found = shutil.which("node")
    if found is None:
        pytest.skip("no node: the modules are only read")
    return found


@pytest.mark.slow
def test_unit_tests_of_the_modules(node: str) -> None:
    done = subprocess.run([node, "--test", HERE / "modules.test.mjs"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("file", MODULES, ids=lambda file: file.name)
def test_a_module_is_javascript(node: str, file: Path) -> None:
    subprocess.run([node, "--check", file], check=True)


@pytest.mark.parametrize("file", MODULES, ids=lambda file: file.name)
def test_a_module_is_short_has_a_header_and_writes_no_markup(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert text.startswith("// ") and len(text.splitlines()) < 300
    assert MARKUP.findall(text) == []
    assert max(map(len, text.splitlines())) <= 120


def test_every_file_is_local() -> None:
    texts = {file.name: file.read_text(encoding="utf-8") for file in PAGE_FOLDER.glob("*.*")}
    named = set(re.findall(r'"page/([\w./]+)"', "".join(texts.values())))
    named |= set(re.findall(r'from "\./([\w.]+)"', "".join(texts.values())))
    assert named | {"index.html"} == {file.relative_to(PAGE_FOLDER).as_posix() for file in PAGE_FOLDER.rglob("*.*")}
    for name, text in texts.items():
        assert set(re.findall(r"https?://[^\s\"']+", text)) <= {"http://www.w3.org/2000/svg"}, name
    assert not re.search(r"<[^>]*\s(style|on\w+)=", texts["index.html"])


@pytest.mark.parametrize("name", ["pair", "large"])
def test_a_recorded_trace_is_small_and_complete(name: str) -> None:
    file = PAGE_FOLDER / "traces" / f"{name}.jsonl"
    replay.check_trace(file)
    assert file.stat().st_size <= 300_000
