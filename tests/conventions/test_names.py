"""A public class or function name is defined once in swiftspec/, so that a search or a stack trace identifies it."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Mapping

from tests.conventions.sources import parsed, python_sources

# Names that several modules define on purpose, and why.
SHARED = {
    "main": "the entry point of a command",
    "run": "the entry point of a command that another module has parsed",
    "router": "each HTTP endpoint module exports its FastAPI routes under this name",
}
BACKENDS = "backends/"  # the backends implement one protocol: the same functions and handles in each


def definitions(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """The files that define each public class or function at module level."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for path, source in sources.items():
        for node in parsed(source).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith(
                "_"
            ):
                found[node.name].add(path)
    return found


def duplicates(sources: Mapping[str, str]) -> dict[str, list[str]]:
    """Names with more than one definition, several backends counting as one."""
    found = {}
    for name, paths in definitions(sources).items():
        homes = {BACKENDS if path.startswith(BACKENDS) else path for path in paths}
        if len(homes) > 1 and name not in SHARED:
            found[name] = sorted(paths)
    return found


def test_a_public_name_is_defined_once() -> None:
    assert duplicates(python_sources()) == {}


def test_duplicates_are_found() -> None:
    assert duplicates({"a.py": "class Kept: pass", "b/c.py": "class Kept: pass"}) == {"Kept": ["a.py", "b/c.py"]}
    assert duplicates({"backends/x.py": "def pack(): pass", "backends/y.py": "def pack(): pass"}) == {}
    assert duplicates({"a.py": "def main(): pass", "b.py": "def main(): pass"}) == {}
