"""Functions of the package, the benchmarks and the tools have at most 70 lines; ruff limits their complexity. Calls in
the package have at most 6 positional arguments."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.conventions.sources import ROOT, parsed, python_sources

MAX_LINES = 70
MAX_POSITIONAL = 6  # arguments of a call; further ones are named


def long_functions(source: str) -> Iterator[tuple[str, int]]:
    for node in ast.walk(parsed(source)):
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


def long_calls(source: str) -> Iterator[tuple[int, int]]:
    """The line of each call with too many positional arguments, and their number."""
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Call) and len(node.args) > MAX_POSITIONAL:
            yield node.lineno, len(node.args)


def test_arguments_of_long_calls_are_named() -> None:
    found = [
        f"swiftspec/{path}:{line}: {count} positional arguments"
        for path, source in python_sources().items()
        for line, count in long_calls(source)
    ]
    assert found == []


def test_a_long_call_is_found() -> None:
    assert list(long_calls("f(1, 2, 3, 4, 5, 6)\nf(1, 2, 3,\n  4, 5, *six, 7, eight=8)")) == [(2, 7)]
