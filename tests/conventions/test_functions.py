"""Functions of the package, the benchmarks and the tools have at most 70 lines; ruff limits their complexity."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.conventions.sources import ROOT

MAX_LINES = 70


def long_functions(source: str) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_LINES:
                yield node.name, lines


def files() -> list[Path]:
    return [path for folder in ("swiftspec", "bench", "tools") for path in sorted((ROOT / folder).rglob("*.py"))]


def test_functions_are_short() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {name} has {lines} lines"
        for path in files()
        for name, lines in long_functions(path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_a_long_function_is_found() -> None:
    assert list(long_functions("def f():\n" + "    x = 1\n" * MAX_LINES)) == [("f", MAX_LINES + 1)]
