"""Which room may import which; no circles; the engine is light; who knows models, samplers and ranks."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Mapping
from pathlib import PurePosixPath

import pytest

from tests.conventions.sources import circles, imported_files, imports, parsed, python_sources, room, uses

ROOMS = (
    "errors", "settings_schema", "file_io", "params", "config", "messages", "model", "backends", "sampling", "tree",
    "runtime", "decode", "engine", "observe", "smc", "control", "distributed", "builder", "llm", "profiles",
    "serve", "lab", "profile", "exactness", "__main__",
)  # fmt: skip
FLOORS = {name: floor for floor, name in enumerate(ROOMS)} | {"_C": 0, "demo": 0}
PEOPLE = FLOORS["profiles"]  # from here on a person is spoken to
LIGHT = set(sys.stdlib_module_names) | {"torch", "numpy", "safetensors", "swiftspec"}
HEAVY = {  # of files and folders
    "distributed/rpc/": {"grpc", "grpc_health", "grpc_reflection", "google"}, "sampling/grammar.py": {"llguidance"},
}  # fmt: skip
ON_DEMAND = {"swiftspec.llm.LLM", "swiftspec.config.EngineConfig", "swiftspec.params.SamplingParams"}


def import_directions(path: str, source: str) -> list[str]:
    found = list(imports(path, parsed(source)))
    if path == "__init__.py":
        allowed = ON_DEMAND | set(sys.stdlib_module_names)
        return [f"{path} imports {name}" for name in found if name not in allowed and room_of(name) not in allowed]
    here = room(path)
    if here not in FLOORS:
        return [f"{path} is in no room that the house knows"]
    complaints = []
    for name in found:
        if not name.startswith("swiftspec.") or name == "swiftspec.__version__" or room_of(name) == here:
            continue
        if room_of(name) == "_C":
            if here != "backends":
                complaints.append(f"{path} imports _C; only backends/ does")
        elif room_of(name) not in FLOORS or FLOORS[room_of(name)] >= FLOORS[here]:
            complaints.append(f"{path} imports {name}, which is not below it")
    return complaints


def room_of(name: str) -> str:
    """swiftspec.model.weights.fuse -> model; torch.nn -> torch."""
    parts = name.split(".")
    return parts[1] if parts[0] == "swiftspec" and len(parts) > 1 else parts[0]


def light_imports(path: str, source: str) -> list[str]:
    if path == "__init__.py" or FLOORS[room(path)] >= PEOPLE:
        return []
    allowed = LIGHT.union(*(heavy for where, heavy in HEAVY.items() if path.startswith(where)))
    tops = {name.partition(".")[0] for name in imports(path, parsed(source))}
    return [f"{path} imports {top}" for top in sorted(tops - allowed)]


def strangers(path: str, source: str) -> list[str]:
    """What is proposed and sampled knows no model and no ranks; a model knows no tree and no sampler; particles know
    no ranks, and of models only how rows are handed to them."""
    ranks = {"torch.distributed", "socket", "grpc", "swiftspec.distributed"}
    others = {
        "tree": {"swiftspec.model", *ranks},
        "sampling": {"swiftspec.model", *ranks},
        "smc": {"swiftspec.model.transformer", "swiftspec.model.loader", "swiftspec.model.tensor_parallel", *ranks},
        "model": {"swiftspec.tree", "swiftspec.sampling", "sampler", *ranks},
    }
    return [f"{path} uses {name}" for name in uses(path, source, others.get(room(path), set()))]


def forwards(path: str, source: str) -> list[str]:
    if room(path) in ("runtime", "smc"):
        return []
    calls = [node for node in ast.walk(parsed(source)) if isinstance(node, ast.Call)]
    called = [ast.unparse(call.func) for call in calls]
    return [f"{path} calls {name}" for name in called if f".{name}".endswith(".model.forward")]


Rule = Callable[[str, str], list[str]]
RULES: list[Rule] = [import_directions, light_imports, strangers, forwards]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_house_holds(rule: Rule) -> None:
    complaints = [complaint for path, source in python_sources().items() for complaint in rule(path, source)]
    assert not complaints, "\n" + "\n".join(complaints)


def file_circles(sources: Mapping[str, str]) -> list[list[str]]:
    return circles(imported_files(sources))


def folder_circles(sources: Mapping[str, str]) -> list[list[str]]:
    """Within each folder, among its files and folders."""
    edges: dict[str, dict[str, set[str]]] = {}
    for path, targets in imported_files(sources).items():
        for target in targets:
            here, there = PurePosixPath(path).parts, PurePosixPath(target).parts
            same = next(i for i, (a, b) in enumerate(zip(here, there)) if a != b)
            folder = edges.setdefault("/".join(here[:same]), {})
            folder.setdefault(here[same], set()).add(there[same])
            folder.setdefault(there[same], set())
    return [circle for folder in edges.values() for circle in circles(folder)]


@pytest.mark.parametrize("find", [file_circles, folder_circles])
def test_there_are_no_circles(find: Callable[[Mapping[str, str]], list[list[str]]]) -> None:
    assert find({path: source for path, source in python_sources().items() if path != "__init__.py"}) == []


def test_circles_are_found() -> None:
    files = {
        "a/x.py": "from swiftspec.b import y",
        "a/z.py": "",
        "b/y.py": "def f():\n    from ..a.z import g",
        "c/__init__.py": "from swiftspec.c.d import f",
        "c/d.py": "import swiftspec.c.e",
        "c/e.py": "from swiftspec import c",
    }
    assert file_circles(files) == [["c/__init__.py", "c/d.py", "c/e.py"]]
    assert ["a", "b"] in folder_circles(files)


BAD: list[tuple[Rule, str, str]] = [
    (import_directions, "backends/cpu/x.py", "from swiftspec.sampling import sampler"),
    (import_directions, "backends/cpu/x.py", "from ...runtime.runner import Runner"),
    (import_directions, "params.py", "from .backends import reference"),
    (import_directions, "params.py", "from swiftspec import messages"),
    (import_directions, "tree/tree.py", "import swiftspec.runtime.runner"),
    (import_directions, "model/loader.py", "def f():\n    from swiftspec.tree.tree import DraftTree"),
    (import_directions, "decode.py", "if TYPE_CHECKING:\n    from .engine import Engine"),
    (import_directions, "engine.py", "from swiftspec.lab.sweep import run"),
    (import_directions, "engine.py", "from swiftspec.builder.roles import assemble"),
    (import_directions, "engine.py", "importlib.import_module('swiftspec.serve.api')"),
    (import_directions, "runtime/runner.py", "from swiftspec import _C"),
    (import_directions, "attic/x.py", "x = 1"),
    (import_directions, "runtime/runner.py", "from swiftspec import attic"),
    (import_directions, "__init__.py", "import torch"),
    (import_directions, "__init__.py", "from swiftspec.engine import Engine"),
    (light_imports, "engine.py", "import transformers"),
    (light_imports, "model/loader.py", "from huggingface_hub import snapshot_download"),
    (light_imports, "distributed/draft/client.py", "import grpc"),
    (strangers, "tree/verify.py", "import torch\ntorch.distributed.barrier()"),
    (strangers, "tree/verify.py", "from ..model import loader"),
    (strangers, "model/transformer.py", "from swiftspec.sampling.sampler import sample"),
    (strangers, "model/transformer.py", "import swiftspec.runtime.sampler"),
    (strangers, "smc/population.py", "from swiftspec.model.transformer import Transformer"),
    (forwards, "builder/model_pair.py", "logits = runner.model.forward(batch, cache)"),
    (forwards, "serve/cli/chat.py", "model.forward(batch)"),
]


@pytest.mark.parametrize(("rule", "path", "source"), BAD)
def test_a_bad_house_is_seen(rule: Rule, path: str, source: str) -> None:
    assert rule(path, source)


GOOD = [
    ("params.py", "import dataclasses\nfrom .errors import Refused"),
    ("messages.py", "import torch\nfrom swiftspec.params import EngineConfig"),
    ("backends/cpu/x.py", "from swiftspec import _C\nfrom .. import reference"),
    ("model/weights.py", "from safetensors import safe_open\nfrom .config import ModelConfig"),
    ("runtime/drafter.py", "from swiftspec.model.loader import load\nlogits = self.model.forward(batch)"),
    ("distributed/rpc/connection.py", "import grpc"),
    ("serve/cli/chat.py", "from swiftspec import demo\nimport typer"),
    ("__init__.py", "import importlib\nif TYPE_CHECKING:\n    from swiftspec.llm import LLM\n__version__ = '1'"),
]


@pytest.mark.parametrize(("path", "source"), GOOD)
def test_a_good_house_passes(path: str, source: str) -> None:
    assert [complaint for rule in RULES for complaint in rule(path, source)] == []
