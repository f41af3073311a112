"""Parameters in docstrings: each entry "`name`:" names a parameter or, in a class, a name that the class uses."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.conventions.sources import parsed, python_sources

# Entries begin a line or a sentence; several names may share one.
ENTRY = re.compile(r"(?:^|[.:] )[ -]*((?:`[a-z_]\w*`, )*`[a-z_]\w*`):", re.MULTILINE)


def documented(docstring: str) -> Iterator[str]:
    """Yields the names that have an entry."""
    for entry in ENTRY.findall(docstring):
        yield from re.findall(r"\w+", entry)


def unknown_names(source: str) -> list[str]:
    """Returns "function: name" for each entry that names no parameter, and "class: name" for a class."""
    found = []
    for node in ast.walk(parsed(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        entries = [*documented(ast.get_docstring(node) or "")]
        if not entries:
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            known = {argument.arg for argument in ast.walk(node.args) if isinstance(argument, ast.arg)}
        else:
            known = {
                getattr(each, field)
                for each in ast.walk(node)
                for field in ("id", "attr", "arg", "name")
                if isinstance(getattr(each, field, None), str)
            }
        found += [f"{node.name}: {name}" for name in entries if name not in known]
    return found


def test_docstrings_name_existing_parameters() -> None:
    found = {path: names for path, source in python_sources().items() if (names := unknown_names(source))}
    assert found == {}


@pytest.mark.parametrize(
    ("docstring", "found"),
    [
        ("Adds. `a`: one. `b`, `c`: others.", ["f: b", "f: c"]),
        ("Adds.\n\n    `a`: one.\n    - `d`: no parameter.", ["f: d"]),
        ("The counters for `row_bits`: [n].", []),
    ],
)
def test_entries_are_found(docstring: str, found: list[str]) -> None:
    assert unknown_names(f'def f(a):\n    """{docstring}"""') == found
