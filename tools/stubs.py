"""Writes swiftspec/_C.pyi, the types of the native extension, from the extension itself.

    python -m tools.stubs [--check]

A build without CUDA lacks the definitions whose names have "cuda" in them; those the file keeps as they are. `--check`
writes nothing and says whether the file is current.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

from swiftspec import _C

STUB = Path(__file__).resolve().parents[1] / "swiftspec" / "_C.pyi"
WIDTH = 120
HEAD = '''"""SwiftSpec's native operators, as `python -m tools.stubs` reads them from the extension (csrc/bind)."""

from collections.abc import Callable, Sequence

import numpy
import torch

Array = torch.Tensor | numpy.ndarray

build_info: str
cuda_built: bool
cuda_archs: tuple[int, ...]
'''
# what pybind11 takes, in the words of those who call it
PLAIN = {
    "typing.SupportsInt | typing.SupportsIndex": "int",
    "typing.SupportsFloat | typing.SupportsIndex": "float",
    "collections.abc.Sequence": "Sequence",
    "collections.abc.Callable": "Callable",
    "torch.Tensor | numpy.ndarray": "Array",
}
Definition = ast.ClassDef | ast.FunctionDef


def is_cuda(name: str) -> bool:
    """Whether a definition is there only where CUDA is built."""
    return "cuda" in name.lower()


def definitions(source: str) -> dict[str, Definition]:
    return {node.name: node for node in ast.parse(source).body if isinstance(node, Definition)}


def made() -> str:
    """What pybind11-stubgen makes of the extension that is installed here."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pybind11_stubgen", "swiftspec._C", "-o", folder, "--exit-code"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"stubs: pybind11-stubgen failed\n{done.stderr}")
        return (Path(folder) / "swiftspec" / "_C.pyi").read_text()


def fresh() -> dict[str, Definition]:
    """The definitions that the file should have: those of this build, and those of CUDA that only the file knows."""
    source = made()
    for long, short in PLAIN.items():
        source = source.replace(long, short)
    found = definitions(source)
    if not _C.cuda_built:
        kept = definitions(STUB.read_text()) if STUB.exists() else {}
        found |= {name: node for name, node in kept.items() if is_cuda(name)}
    return found


def text_of(node: Definition, indent: str = "") -> str:
    """A definition in the file's style: docstrings wrapped, bodies that say nothing on the line of their head."""
    said = ast.get_docstring(node)
    inner, body = indent + "    ", ""
    if said:
        words = f'"""{" ".join(said.split())}"""'
        body += textwrap.fill(words, WIDTH, initial_indent=inner, subsequent_indent=inner) + "\n"
    if isinstance(node, ast.ClassDef):
        methods = [text_of(child, inner) for child in node.body if isinstance(child, ast.FunctionDef)]
        return f"{indent}class {node.name}:\n" + (body + "".join(methods) or f"{inner}...\n")
    head = ast.unparse(ast.FunctionDef(node.name, node.args, [], node.decorator_list, node.returns, lineno=0))
    return textwrap.indent(head, indent) + ("\n" + body if body else " ...\n")


def current() -> bool:
    """Whether the file has the definitions that it should have, however they are set."""

    def told(found: dict[str, Definition]) -> dict[str, str]:
        return {name: re.sub(r"\s+", " ", text_of(node)) for name, node in found.items()}

    return told(definitions(STUB.read_text())) == told(fresh())


def write() -> None:
    """The file anew, and as ruff sets it."""
    found = fresh()
    names = sorted(found, key=lambda name: (is_cuda(name), isinstance(found[name], ast.FunctionDef), name))
    STUB.write_text(HEAD + "\n" + "\n".join(text_of(found[name]) for name in names))
    subprocess.run([sys.executable, "-m", "ruff", "format", "--quiet", str(STUB)], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=inspect.cleandoc(__doc__ or ""))
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where the file is not current")
    if not parser.parse_args().check:
        write()
    elif not current():
        raise SystemExit("stubs: swiftspec/_C.pyi is not current; run python -m tools.stubs")


if __name__ == "__main__":
    main()
