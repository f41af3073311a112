"""The house: import directions and the never-list of docs/architecture.md, read from the sources by `ast`.

Every rule is a function from (path, source) to a list of complaints, so each is shown to fail too.
"""

import ast
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 320

FLOORS = {
    "errors": 0, "params": 0, "config": 0, "batch": 0, "_C": 0, "ops": 1, "model": 2, "spec": 2, "worker": 3,
    "remote": 4, "decode": 5, "engine": 6, "profile": 6, "serve": 7, "demo": 7, "exactness": 7,
    "profile/__main__.py": 8, "profile/progress.py": 8,  # a command, which finds its models and prompts as serve does
}  # fmt: skip
GROUND = ["errors", "params", "config", "batch"]  # floor 0: a file may import those before it
NEIGHBOURS = {("serve", "demo"), ("exactness", "serve"), ("profile", "engine")}
SAME_FLOOR = NEIGHBOURS | {(a, b) for i, a in enumerate(GROUND) for b in GROUND[:i]}
LIGHT = set(sys.stdlib_module_names) | {"torch", "numpy", "safetensors", "swiftspec"}
HEAVY_FILES = {"remote/grpc.py": {"grpc", "google"}, "profile/report.py": {"matplotlib"}}
DISTRIBUTED_FILES = {"model/parallel.py", "remote/group.py", "engine.py"}
PICKLERS = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "multiprocessing", "shelve"}
PICKLING = {
    "broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list", "send_object_list",
    "recv_object_list", "torch.load", "torch.save", "torch.multiprocessing",
    "concurrent.futures.ProcessPoolExecutor",
}  # fmt: skip
GRAPHS = {"CUDAGraph", "make_graphed_callables", "graph_pool_handle", "torch.cuda.graph", "torch.cuda.graphs"}
ENVIRONMENT = {"os.environ", "os.environb", "os.getenv", "os.putenv"}
OUTPUT = {"print", "sys.stdout", "sys.stderr", "sys.__stdout__", "sys.__stderr__"}
MUTABLE = {"list", "dict", "set", "bytearray", "defaultdict", "deque", "Counter", "OrderedDict"}
MUTATORS = {
    "append", "add", "extend", "insert", "pop", "popitem", "remove", "discard", "clear", "update",
    "setdefault", "appendleft", "popleft",
}  # fmt: skip
CACHES = {"functools.cache", "functools.lru_cache"}


def room(path: str) -> str:
    """model/linear.py -> model; decode.py -> decode. Paths are relative to swiftspec/."""
    first = PurePosixPath(path).parts[0]
    return first.removesuffix(".py").removesuffix(".pyi")


def floor(path: str) -> int:
    return FLOORS.get(path, FLOORS[room(path)])


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


def uses(path: str, source: str, wanted: set[str]) -> list[str]:
    """Which of the wanted names occur: a dotted one from the start, a bare one as any part."""
    found = set()
    for name in names(path, ast.parse(source)):
        parts = name.split(".")
        found |= {w for w in wanted if name == w or name.startswith(w + ".")}
        found |= {w for w in wanted if "." not in w and w in parts and w not in OUTPUT}
    return sorted(found)


def import_directions(path: str, source: str) -> list[str]:
    if path == "__init__.py":
        return [f"{path} imports {name}" for name in imports(path, ast.parse(source))]
    if room(path) not in FLOORS:
        return [f"{path} is on no floor; give {room(path)} one in FLOORS"]
    complaints = []
    for name in imports(path, ast.parse(source)):
        parts = name.split(".")
        if parts[0] != "swiftspec" or parts[-1] == "__version__":
            continue
        target = parts[1] if len(parts) > 1 else "swiftspec"
        here = room(path)
        if target == here or (here, target) in SAME_FLOOR:
            continue
        if target == "_C":
            if here != "ops":
                complaints.append(f"{path} imports _C; only ops/ does")
        elif target not in FLOORS:
            complaints.append(f"{path} imports {name}, which is on no floor")
        elif FLOORS[target] >= floor(path):
            complaints.append(f"{path} (floor {floor(path)}) imports {name} (floor {FLOORS[target]})")
    return complaints


def light_imports(path: str, source: str) -> list[str]:
    if path == "__init__.py" or floor(path) > 6:
        return []
    allowed = LIGHT | HEAVY_FILES.get(path, set())
    tops = {name.partition(".")[0] for name in imports(path, ast.parse(source))}
    return [f"{path} imports {top}" for top in sorted(tops - allowed)]


def separate_rooms(path: str, source: str) -> list[str]:
    """spec/ knows no model and no ranks; model/ knows no tree and no sampler."""
    banned = {
        "spec": {"swiftspec.model", "torch.distributed", "grpc"},
        "model": {"swiftspec.spec", "sampler"},
    }.get(room(path), set())
    return [f"{path} uses {name}" for name in uses(path, source, banned)]


def distributed(path: str, source: str) -> list[str]:
    if path in DISTRIBUTED_FILES:
        return []
    return [f"{path} uses {name}" for name in uses(path, source, {"torch.distributed"})]


def cuda_graphs(path: str, source: str) -> list[str]:
    if path == "worker/graph.py":
        return []
    return [f"{path} uses {name}" for name in uses(path, source, GRAPHS)]


def grpc_only_there(path: str, source: str) -> list[str]:
    if path == "remote/grpc.py":
        return []
    found = imports(path, ast.parse(source))
    return [f"{path} imports {name}" for name in found if name.partition(".")[0] in ("grpc", "grpc_tools")]


def no_environment(path: str, source: str) -> list[str]:
    if path == "__init__.py" or floor(path) >= 6:
        return []
    return [f"{path} uses {name}" for name in uses(path, source, ENVIRONMENT | OUTPUT)]


def no_pickle(path: str, source: str) -> list[str]:
    tree = ast.parse(source)
    tops = {name.partition(".")[0] for name in imports(path, tree)}
    complaints = [f"{path} imports {top}" for top in sorted(tops & PICKLERS)]
    complaints += [f"{path} uses {name}" for name in uses(path, source, PICKLING)]
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
            complaints.append(f"{path}:{node.value.lineno} allows pickle")
    return complaints


def module_assignments(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    for node in tree.body:
        if isinstance(node, ast.Assign):
            yield from ((t.id, node.value) for t in node.targets if isinstance(t, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            yield node.target.id, node.value


def is_mutable(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        return ast.unparse(value.func).rpartition(".")[2] in MUTABLE
    return isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp)


def no_module_state(path: str, source: str) -> list[str]:
    """No `global`, no cache on a function, no get_context(); a module-level container is an UPPER_CASE table
    that nothing writes to. Floor 7 may do as it likes."""
    if path != "__init__.py" and floor(path) > 6:
        return []
    tree = ast.parse(source)
    complaints = [f"{path} uses {name}" for name in uses(path, source, CACHES)]
    tables = {name for name, value in module_assignments(tree) if is_mutable(value)}
    complaints += [
        f"{path}: module-level container {name} is not an UPPER_CASE constant"
        for name in sorted(tables)
        if not name.isupper() and name != "__all__"
    ]
    for node in ast.walk(tree):
        written: ast.AST | None = None
        if isinstance(node, ast.Global):
            complaints.append(f"{path}:{node.lineno} has a global statement")
        elif isinstance(node, ast.FunctionDef) and node.name == "get_context":
            complaints.append(f"{path}:{node.lineno} defines get_context")
        elif isinstance(node, ast.Subscript):
            written = None if isinstance(node.ctx, ast.Load) else node.value
        elif isinstance(node, ast.Attribute):
            written = node.value if node.attr in MUTATORS else None
        if isinstance(written, ast.Name) and written.id in tables and written.id.isupper():
            complaints.append(f"{path}: {written.id} is written to")
    return complaints


def short_enough(path: str, source: str) -> list[str]:
    lines = len(source.splitlines())
    return [f"{path} has {lines} lines: two rooms"] if lines > MAX_LINES else []


def csrc_without_torch(path: str, source: str) -> list[str]:
    headers = re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', source, re.MULTILINE)
    complaints = [f"{path} includes {h}" for h in headers if re.match(r"(torch|ATen|c10|caffe2)\b", h)]
    if any(h.startswith("pybind11/") or h == "Python.h" for h in headers) and not path.startswith("bind/"):
        complaints.append(f"{path} knows Python; only the bindings do")
    return complaints


Rule = Callable[[str, str], list[str]]
RULES: list[Rule] = [
    import_directions, light_imports, separate_rooms, distributed, cuda_graphs, grpc_only_there,
    no_environment, no_pickle, no_module_state, short_enough,
]  # fmt: skip


def python_sources() -> list[Path]:
    files = sorted((ROOT / "swiftspec").rglob("*.py"))
    return [file for file in files if not file.stem.endswith(("_pb2", "_pb2_grpc"))]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_house_holds(rule: Rule) -> None:
    complaints = []
    for file in python_sources():
        path = file.relative_to(ROOT / "swiftspec").as_posix()
        complaints += rule(path, file.read_text(encoding="utf-8"))
    assert not complaints, "\n" + "\n".join(complaints)


def test_there_is_something_to_read() -> None:
    assert len(python_sources()) >= 5
    assert list((ROOT / "csrc").rglob("*.cpp"))


def test_csrc_includes_no_torch_and_no_long_file() -> None:
    complaints = []
    for file in sorted((ROOT / "csrc").rglob("*")):
        if file.is_file():
            path = file.relative_to(ROOT / "csrc").as_posix()
            source = file.read_text(encoding="utf-8")
            complaints += csrc_without_torch(path, source) + short_enough(path, source)
    assert not complaints, "\n" + "\n".join(complaints)


BAD: list[tuple[Rule, str, str]] = [
    (import_directions, "ops/host.py", "from swiftspec.model import linear"),
    (import_directions, "ops/host.py", "from ..worker.runner import Runner"),
    (import_directions, "config.py", "from .ops import reference"),
    (import_directions, "config.py", "from swiftspec import batch"),
    (import_directions, "spec/tree.py", "import swiftspec.model.loader"),
    (import_directions, "model/loader.py", "def f():\n    from swiftspec.spec.tree import DraftTree"),
    (import_directions, "decode.py", "if TYPE_CHECKING:\n    from .engine import LLM"),
    (import_directions, "engine.py", "from swiftspec.profile.sweep import run"),
    (import_directions, "engine.py", "importlib.import_module('swiftspec.serve.api')"),
    (import_directions, "worker/runner.py", "from swiftspec import _C"),
    (import_directions, "attic/x.py", "x = 1"),
    (import_directions, "worker/runner.py", "from swiftspec import attic"),
    (import_directions, "__init__.py", "import torch"),
    (light_imports, "engine.py", "import transformers"),
    (light_imports, "model/loader.py", "from huggingface_hub import snapshot_download"),
    (light_imports, "remote/group.py", "import grpc"),
    (separate_rooms, "spec/verify.py", "import torch\ntorch.distributed.barrier()"),
    (separate_rooms, "spec/verify.py", "from ..model import loader"),
    (separate_rooms, "model/transformer.py", "from swiftspec.spec.sampler import sample"),
    (separate_rooms, "model/transformer.py", "import swiftspec.worker.sampler"),
    (distributed, "worker/runner.py", "import torch.distributed as dist"),
    (distributed, "worker/runner.py", "from torch import distributed"),
    (distributed, "serve/api.py", "import torch as t\nt.distributed.init_process_group()"),
    (cuda_graphs, "worker/runner.py", "import torch\ng = torch.cuda.CUDAGraph()"),
    (cuda_graphs, "engine.py", "from torch import cuda\nwith cuda.graph(g): pass"),
    (cuda_graphs, "engine.py", "from torch.cuda import graph"),
    (grpc_only_there, "serve/api.py", "import grpc"),
    (grpc_only_there, "remote/group.py", "from grpc import aio"),
    (no_environment, "decode.py", "import os\nx = os.environ['A']"),
    (no_environment, "spec/tree.py", "from os import getenv"),
    (no_environment, "model/loader.py", "import os as o\no.getenv('A')"),
    (no_environment, "worker/runner.py", "print('x')"),
    (no_environment, "worker/runner.py", "import sys\nsys.stderr.write('x')"),
    (no_pickle, "serve/api.py", "import pickle"),
    (no_pickle, "engine.py", "from torch import multiprocessing"),
    (no_pickle, "engine.py", "import torch.distributed as d\nd.broadcast_object_list([1])"),
    (no_pickle, "model/loader.py", "import torch as t\nt.load('x')"),
    (no_pickle, "model/loader.py", "from torch import load as read"),
    (no_pickle, "model/loader.py", "import numpy as np\nnp.load('x', allow_pickle=True)"),
    (no_module_state, "engine.py", "x = None\ndef f():\n    global x"),
    (no_module_state, "spec/tree.py", "cache = {}"),
    (no_module_state, "spec/tree.py", "seen: set[int] = set()"),
    (no_module_state, "spec/tree.py", "CACHE = {}\ndef f():\n    CACHE[1] = 2"),
    (no_module_state, "spec/tree.py", "CACHE = []\ndef f():\n    CACHE.append(2)"),
    (no_module_state, "spec/tree.py", "import functools\n@functools.lru_cache(1)\ndef f(): pass"),
    (no_module_state, "worker/runner.py", "def get_context(): pass"),
    (short_enough, "engine.py", "x = 1\n" * (MAX_LINES + 1)),
    (csrc_without_torch, "host/a.cpp", "#include <torch/extension.h>"),
    (csrc_without_torch, "cuda/a.cu", '# include "ATen/cuda/CUDAContext.h"'),
    (csrc_without_torch, "host/a.cpp", "#include <pybind11/pybind11.h>"),
    (short_enough, "host/a.cpp", "int x;\n" * (MAX_LINES + 1)),
]


@pytest.mark.parametrize(("rule", "path", "source"), BAD)
def test_a_bad_house_is_seen(rule: Rule, path: str, source: str) -> None:
    assert rule(path, source)


GOOD = [
    ("config.py", "import dataclasses\nfrom .errors import Refused"),
    ("batch.py", "import torch\nfrom swiftspec.config import Plan"),
    ("ops/host.py", "from swiftspec import _C\nfrom . import reference"),
    ("model/parallel.py", "import torch.distributed as dist\ndist.all_reduce(x)"),
    ("model/linear.py", "from safetensors import safe_open\nfrom ..ops.reference import linear"),
    ("spec/tree.py", "KINDS = {'a': 1}\nx = KINDS['a']\n__all__ = ['x']"),
    ("spec/tree.py", "def f(state):\n    out = []\n    out.append(state.print)\n    state.load(1)"),
    ("worker/graph.py", "import torch\ng = torch.cuda.CUDAGraph()"),
    ("worker/drafter.py", "from swiftspec.model.loader import load\nfrom swiftspec.spec.tree import T"),
    ("engine.py", "from swiftspec import decode\nimport torch.distributed"),
    ("remote/grpc.py", "import grpc"),
    ("serve/__main__.py", "import os, typer\nprint(os.environ)\nimport swiftspec.engine\nx = {}"),
    ("serve/chat.py", "from swiftspec import demo\nimport numpy as np\nnp.load('x', allow_pickle=False)"),
    ("__init__.py", "__version__ = '1'"),
]


@pytest.mark.parametrize(("path", "source"), GOOD)
def test_a_good_house_passes(path: str, source: str) -> None:
    assert [complaint for rule in RULES for complaint in rule(path, source)] == []
