"""The sources of the package, parsed by `ast`: what each file imports and uses."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "swiftspec"


def python_sources() -> dict[str, str]:
    """The source of every module, by its path from swiftspec/."""
    files = sorted(PACKAGE.rglob("*.py"))
    written = [file for file in files if not file.stem.endswith(("_pb2", "_pb2_grpc"))]
    return {file.relative_to(PACKAGE).as_posix(): file.read_text(encoding="utf-8") for file in written}


def native_sources() -> dict[str, str]:
    """The source of every file of csrc, by its path from there."""
    csrc = ROOT / "csrc"
    files = [file for file in sorted(csrc.rglob("*")) if file.is_file()]
    return {file.relative_to(csrc).as_posix(): file.read_text(encoding="utf-8") for file in files}


@functools.cache
def parsed(source: str) -> ast.Module:
    """The syntax tree of a module. Cached, since every rule uses it; must not be changed."""
    return ast.parse(source)


def package(path: str) -> str:
    """model/weights.py -> model; decode.py -> decode."""
    return PurePosixPath(path).parts[0].removesuffix(".py").removesuffix(".pyi")


def module(path: str) -> str:
    """model/weights.py -> swiftspec.model.weights; model/__init__.py -> swiftspec.model."""
    return ".".join(("swiftspec", *PurePosixPath(path).with_suffix("").parts)).removesuffix(".__init__")


def imports(path: str, tree: ast.AST) -> Iterator[str]:
    """Dotted names of everything imported: `from a import b` gives a.b, relative ones are made absolute."""
    package = ("swiftspec", *PurePosixPath(path).parts[:-1])
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            base = ".".join(part for part in (base, node.module) if part)
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = ast.unparse(node.func).rpartition(".")[2]
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.args[0].value


def names(path: str, tree: ast.AST) -> Iterator[str]:
    """Dotted names of everything used, with `import x as y` undone, and of everything imported."""
    alias_of: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            alias_of |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            alias_of |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    yield from imports(path, tree)
    for node in ast.walk(tree):
        parts: list[str] = []
        inner: ast.AST = node
        while isinstance(inner, ast.Attribute):
            parts.append(inner.attr)
            inner = inner.value
        if isinstance(inner, ast.Name):
            yield ".".join([alias_of.get(inner.id, inner.id), *reversed(parts)])
        elif parts:
            yield ".".join(["?", *reversed(parts)])


@functools.cache
def names_in(path: str, source: str) -> frozenset[str]:
    return frozenset(names(path, parsed(source)))


def uses(path: str, source: str, wanted: set[str]) -> list[str]:
    """The wanted names that occur: dotted names from their beginning, bare names as any part."""
    found = set()
    for name in names_in(path, source):
        found |= {w for w in wanted if name == w or name.startswith(w + ".")}
        found |= {w for w in wanted if "." not in w and w in name.split(".")}
    return sorted(found)


def imported_files(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Which files each file imports, lazily or not."""
    path_of = {module(path): path for path in sources}
    found: dict[str, set[str]] = {}
    for path, source in sources.items():
        found[path] = set()
        for name in imports(path, parsed(source)):
            target = path_of.get(name) or path_of.get(name.rpartition(".")[0])
            if target not in (None, path):
                found[path].add(target)
    return found


def cycles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """The groups of nodes that reach each other, sorted."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        queue = [*edges.get(start, ())]
        while queue:
            node = queue.pop()
            if node not in seen:
                seen.add(node)
                queue += edges.get(node, ())
        return seen

    reach = {node: reached(node) for node in edges}
    groups = {frozenset(other for other in reach[node] if node in reach.get(other, ())) for node in reach}
    return sorted(sorted(group) for group in groups if len(group) > 1)
