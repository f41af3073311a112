"""Classes of the package have at most 15 fields: annotated names in their body, and attributes set in `__init__`."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.conventions.sources import parsed, python_sources

MAX_FIELDS = 15
FLAT = {  # classes with more; the docstring of each says why
    "AttentionSpec",
    "EngineConfig",
    "LayerWeights",
    "LoadOptions",
    "ResponsesRequest",
    "Runner",
    "SamplingFields",
    "SamplingParams",
    "Stats",
    "TensorNames",
}
UNDIVIDED: set[str] = set()  # without a reason: classes to divide


def field_names(definition: ast.ClassDef) -> set[str]:
    """The fields of a class, without inherited ones."""
    found = set()
    for statement in definition.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            if "ClassVar" not in ast.unparse(statement.annotation):
                found.add(statement.target.id)
        elif isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
            found |= {
                node.attr
                for node in ast.walk(statement)
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
                if isinstance(node.value, ast.Name) and node.value.id == "self"
            }
    return found


def large_classes(source: str) -> Iterator[str]:
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.ClassDef) and len(field_names(node)) > MAX_FIELDS:
            yield node.name


def test_classes_have_few_fields() -> None:
    assert {name for source in python_sources().values() for name in large_classes(source)} == FLAT | UNDIVIDED


def test_fields_are_counted() -> None:
    """Annotated fields and attributes count once each; class variables and inherited fields do not count."""
    declared = "\n".join(f"    f{number}: int" for number in range(MAX_FIELDS))
    init = "    def __init__(self):\n        self.f0 = 0\n"
    small = f"class Small(Base):\n    shared: ClassVar[int] = 0\n{declared}\n{init}"
    assert list(large_classes(small)) == []
    assert list(large_classes(f"{small}        self.a, self.b = 1, 2\n")) == ["Small"]
