"""Import rules that import-linter cannot express: cycles, libraries of the core, and who may call a model's forward.

The order of the packages is the import-linter contract in pyproject.toml; `make lint` checks it.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Callable, Mapping
from pathlib import PurePosixPath

import pytest

from tests.conventions.sources import ROOT, cycles, imported_files, imports, package, parsed, python_sources, uses

CONTRACT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"][0]
LAYERS = {name: layer for layer, name in enumerate(reversed(CONTRACT["layers"]))} | {"_C": 0, "demo": 0}
USER_INTERFACE = LAYERS["profiles"]  # from this layer on, packages print and read the environment
CORE_LIBRARIES = set(sys.stdlib_module_names) | {"torch", "numpy", "safetensors", "swiftspec"}
ALLOWED_LIBRARIES = {  # by file or folder
    "distributed/transport/grpc/": {"grpc", "grpc_health", "grpc_reflection", "google"},
    "runtime/coroutines.py": {"greenlet"},
    "sampling/grammar.py": {"llguidance"},
    "sampling/grammar_process.py": {"llguidance"},
    "text/": {"transformers", "tokenizers", "huggingface_hub", "jinja2"},
}  # fmt: skip


def native_extension_in_backends(path: str, source: str) -> list[str]:
    """Only the backends import the native extension."""
    if package(path) == "backends":
        return []
    return [f"{path} imports _C" for name in imports(path, parsed(source)) if package_of(name) == "_C"]


def package_of(name: str) -> str:
    """swiftspec.model.weights.fuse -> model; torch.nn -> torch."""
    parts = name.split(".")
    return parts[1] if parts[0] == "swiftspec" and len(parts) > 1 else parts[0]


def core_libraries_only(path: str, source: str) -> list[str]:
    if path == "__init__.py" or LAYERS[package(path)] >= USER_INTERFACE:
        return []
    allowed = CORE_LIBRARIES.union(*(heavy for where, heavy in ALLOWED_LIBRARIES.items() if path.startswith(where)))
    tops = {name.partition(".")[0] for name in imports(path, parsed(source))}
    return [f"{path} imports {top}" for top in sorted(tops - allowed)]


def forbidden_knowledge(path: str, source: str) -> list[str]:
    """tree/, sampling/ and cache/ use neither models nor ranks; model/ uses neither trees nor samplers; batching/ and
    smc/ use no ranks, and of model/ only the batch and cache types."""
    ranks = {"torch.distributed", "socket", "grpc", "swiftspec.distributed"}
    weights = {"swiftspec.model.transformer", "swiftspec.model.loader", "swiftspec.model.tensor_parallel"}
    others = {
        "tree": {"swiftspec.model", *ranks},
        "sampling": {"swiftspec.model", *ranks},
        "cache": {"swiftspec.model", *ranks},
        "batching": {*weights, *ranks},
        "smc": {*weights, *ranks},
        "model": {"swiftspec.tree", "swiftspec.sampling", "sampler", *ranks},
    }
    return [f"{path} uses {name}" for name in uses(path, source, others.get(package(path), set()))]


def forward_calls(path: str, source: str) -> list[str]:
    if package(path) in ("runtime", "smc"):
        return []
    calls = [node for node in ast.walk(parsed(source)) if isinstance(node, ast.Call)]
    called = [ast.unparse(call.func) for call in calls]
    return [f"{path} calls {name}" for name in called if f".{name}".endswith(".model.forward")]


Rule = Callable[[str, str], list[str]]
RULES: list[Rule] = [native_extension_in_backends, core_libraries_only, forbidden_knowledge, forward_calls]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_rules_hold(rule: Rule) -> None:
    complaints = [complaint for path, source in python_sources().items() for complaint in rule(path, source)]
    assert not complaints, "\n" + "\n".join(complaints)


def file_cycles(sources: Mapping[str, str]) -> list[list[str]]:
    return cycles(imported_files(sources))


def folder_cycles(sources: Mapping[str, str]) -> list[list[str]]:
    """Cycles among the files and folders of each folder."""
    edges: dict[str, dict[str, set[str]]] = {}
    for path, targets in imported_files(sources).items():
        for target in targets:
            source_parts, target_parts = PurePosixPath(path).parts, PurePosixPath(target).parts
            same = next(i for i, (a, b) in enumerate(zip(source_parts, target_parts)) if a != b)
            folder = edges.setdefault("/".join(source_parts[:same]), {})
            folder.setdefault(source_parts[same], set()).add(target_parts[same])
            folder.setdefault(target_parts[same], set())
    return [cycle for folder in edges.values() for cycle in cycles(folder)]


@pytest.mark.parametrize("find", [file_cycles, folder_cycles])
def test_there_are_no_import_cycles(find: Callable[[Mapping[str, str]], list[list[str]]]) -> None:
    assert find({path: source for path, source in python_sources().items() if path != "__init__.py"}) == []


def test_cycles_are_found() -> None:
    files = {
        "a/x.py": "from swiftspec.b import y",
        "a/z.py": "",
        "b/y.py": "def f():\n    from ..a.z import g",
        "c/__init__.py": "from swiftspec.c.d import f",
        "c/d.py": "import swiftspec.c.e",
        "c/e.py": "from swiftspec import c",
    }
    assert file_cycles(files) == [["c/__init__.py", "c/d.py", "c/e.py"]]
    assert ["a", "b"] in folder_cycles(files)


BAD: list[tuple[Rule, str, str]] = [
    (native_extension_in_backends, "runtime/runner.py", "from swiftspec import _C"),
    (core_libraries_only, "engine.py", "import transformers"),
    (core_libraries_only, "model/loader.py", "from huggingface_hub import snapshot_download"),
    (core_libraries_only, "distributed/remote/client.py", "import grpc"),
    (forbidden_knowledge, "tree/verify.py", "import torch\ntorch.distributed.barrier()"),
    (forbidden_knowledge, "tree/verify.py", "from ..model import loader"),
    (forbidden_knowledge, "model/transformer.py", "from swiftspec.sampling.sampler import sample"),
    (forbidden_knowledge, "model/transformer.py", "import swiftspec.runtime.sampler"),
    (forbidden_knowledge, "smc/scheduler.py", "from swiftspec.model.transformer import Transformer"),
    (forward_calls, "builder/models.py", "logits = runner.model.forward(batch, cache)"),
    (forward_calls, "cli/chat.py", "model.forward(batch)"),
]


@pytest.mark.parametrize(("rule", "path", "source"), BAD)
def test_a_violation_is_found(rule: Rule, path: str, source: str) -> None:
    assert rule(path, source)


GOOD = [
    ("params.py", "import dataclasses\nfrom .errors import Refused"),
    ("messages.py", "import torch\nfrom swiftspec.params import EngineConfig"),
    ("backends/cpu/x.py", "from swiftspec import _C\nfrom .. import reference"),
    ("model/weights.py", "from safetensors import safe_open\nfrom .config import ModelConfig"),
    ("runtime/drafter.py", "from swiftspec.model.loader import load\nlogits = self.model.forward(batch)"),
    ("distributed/transport/grpc/client.py", "import grpc"),
    ("cli/chat.py", "from swiftspec import demo\nimport typer"),
    (
        "__init__.py",
        "import importlib\nif TYPE_CHECKING:\n    from swiftspec.llm_engine import LLMEngine\n__version__ = '1'",
    ),
]


@pytest.mark.parametrize(("path", "source"), GOOD)
def test_allowed_code_passes(path: str, source: str) -> None:
    assert [complaint for rule in RULES for complaint in rule(path, source)] == []
