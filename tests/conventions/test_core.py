"""The core is the list in docs/walkthrough.md: small, and sufficient to decode."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from tests.conventions.sources import ROOT, imported_files, python_sources


def core() -> list[str]:
    """The files of the core, relative to swiftspec/."""
    text = (ROOT / "docs" / "walkthrough.md").read_text(encoding="utf-8")
    listed = text.partition("\n## The core\n")[2].partition("\n## ")[0]
    return re.findall(r"`swiftspec/([\w/]+\.py)`", listed)


def test_the_core_is_listed_once() -> None:
    assert len(core()) == len(set(core())) > 30


def test_the_core_imports_only_itself() -> None:
    files = set(core())
    outside = {file: found - files for file, found in imported_files(python_sources()).items() if file in files}
    assert {file: found for file, found in outside.items() if found - {"__init__.py"}} == {}


@pytest.mark.slow
def test_the_core_decodes_alone() -> None:
    """Every other module of the package is refused. A draft changes only the number of rounds."""
    files = [f"swiftspec/{file}" for file in core()]
    command = [sys.executable, "-m", "tests.support.core_alone", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    output = json.loads(done.stdout)
    assert len(output["alone"]) == 40 and output["with a draft"] == output["alone"] and output["accepted"] > 10
    less = subprocess.run(command[:-6], cwd=ROOT, capture_output=True, text=True)
    assert less.returncode != 0 and "is not in the core" in less.stderr
