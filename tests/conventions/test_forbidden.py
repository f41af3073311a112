"""Constructs that no file uses, or only one package: pickle, sockets, CUDA graphs, device synchronisation, globals."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator

import pytest

from tests.conventions.sources import native_sources, package, parsed, python_sources, uses
from tests.conventions.test_layers import LAYERS, USER_INTERFACE

PICKLING = {  # in addition to the modules that ruff bans (pyproject.toml)
    "broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list", "send_object_list",
    "recv_object_list",
}  # fmt: skip
GRAPHS = {"CUDAGraph", "make_graphed_callables", "graph_pool_handle", "torch.cuda.graph", "torch.cuda.graphs"}
WAITS = {"torch.cuda.synchronize", "torch.cuda.empty_cache", "torch.cuda.ipc_collect"}
ENVIRONMENT = {"os.environ", "os.environb", "os.getenv", "os.putenv"}
ENVIRONMENT_USERS = {
    "distributed/launch/launched_rank.py",
    "distributed/launch/network_interface.py",
    "distributed/launch/supervised_process.py",  # passes the environment on
    "text/codec.py",  # sets a variable of the tokenizers library
}
OUTPUT = {"sys.stdout", "sys.stderr", "sys.__stdout__", "sys.__stderr__"}
MUTABLE = {"list", "dict", "set", "bytearray", "defaultdict", "deque", "Counter", "OrderedDict"}
MUTATORS = {
    "append", "add", "extend", "insert", "pop", "popitem", "remove", "discard", "clear", "update",
    "setdefault", "appendleft", "popleft",
}  # fmt: skip
GPU_TRIAL = "backends/cuda/trial.py"
PROGRAMS = (GPU_TRIAL, "sampling/grammar_process.py")  # run in a process of their own
CACHES = {"functools.cache", "functools.lru_cache"}


def is_user_interface(path: str) -> bool:
    return path == "__init__.py" or LAYERS[package(path)] >= USER_INTERFACE


def sockets_in_distributed_only(path: str, source: str) -> list[str]:
    """Process groups are used in distributed/ only; sockets also in the HTTP server, and to the
    process that renders chat templates."""
    if package(path) == "distributed":
        return []
    local = ("serve/", "text/template.py")
    banned = {"torch.distributed", *(() if path.startswith(local) else ("socket.socket",))}
    return [f"{path} uses {name}" for name in uses(path, source, banned)]


def cuda_graphs_in_one_file(path: str, source: str) -> list[str]:
    if path in ("runtime/executors/graph.py", GPU_TRIAL):
        return []
    return [f"{path} uses {name}" for name in uses(path, source, GRAPHS)]


def no_device_synchronisation(path: str, source: str) -> list[str]:
    """No device-wide synchronisation, which CUDA reports as an error while another thread captures a graph.

    The exceptions run before any capture (overlapped mode) and after the last one (a group that shuts down).
    """
    if path in ("runtime/overlapped.py", "backends/cuda/peers.py", "distributed/collectives/leave.py"):
        return []
    return [f"{path} uses {name}" for name in uses(path, source, WAITS)]


def no_environment_and_no_output(path: str, source: str) -> list[str]:
    """Below the user interface only the variables of the launcher, Gloo and tokenizers are used, in ENVIRONMENT_USERS,
    and nothing writes to the standard streams, except the programs in PROGRAMS. Ruff bans `print` there."""
    banned = set() if is_user_interface(path) or path in PROGRAMS else ENVIRONMENT | OUTPUT
    if path in ENVIRONMENT_USERS:
        banned -= ENVIRONMENT
    return [f"{path} uses {name}" for name in uses(path, source, banned)]


def no_pickle(path: str, source: str) -> list[str]:
    complaints = [f"{path} uses {name}" for name in uses(path, source, PICKLING)]
    for node in ast.walk(parsed(source)):
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
    """No `global`, no cache on a function, no get_context(); a module-level container is an UPPER_CASE table that
    nothing writes to. The user interface is exempt."""
    if path != "__init__.py" and is_user_interface(path):
        return []
    tree = parsed(source)
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


def no_torch_in_native_code(path: str, source: str) -> list[str]:
    headers = re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', source, re.MULTILINE)
    complaints = [f"{path} includes {h}" for h in headers if re.match(r"(torch|ATen|c10|caffe2)\b", h)]
    if any(h.startswith("pybind11/") or h == "Python.h" for h in headers) and not path.startswith("bind/"):
        complaints.append(f"{path} knows Python; only the bindings do")
    return complaints


def no_waiting_in_native_code(path: str, source: str) -> list[str]:
    """The same rule for csrc, except for an inbox, which is created before a group runs."""
    waits = re.findall(r"\b(?:cudaDeviceSynchronize|cuCtxSynchronize|cudaDeviceReset)\b", source)
    return [] if path == "cuda/peers/peers.cu" else [f"{path} calls {name}" for name in waits]


Rule = Callable[[str, str], list[str]]
RULES: list[Rule] = [
    sockets_in_distributed_only, cuda_graphs_in_one_file, no_device_synchronisation, no_environment_and_no_output,
    no_pickle, no_module_state,
]  # fmt: skip
NATIVE_RULES: list[Rule] = [no_torch_in_native_code, no_waiting_in_native_code]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_rules_hold(rule: Rule) -> None:
    complaints = [complaint for path, source in python_sources().items() for complaint in rule(path, source)]
    assert not complaints, "\n" + "\n".join(complaints)


@pytest.mark.parametrize("rule", NATIVE_RULES, ids=lambda rule: rule.__name__)
def test_the_rules_for_native_code_hold(rule: Rule) -> None:
    complaints = [complaint for path, source in native_sources().items() for complaint in rule(path, source)]
    assert not complaints, "\n" + "\n".join(complaints)


def test_the_sources_are_found() -> None:
    assert len(python_sources()) > 50 and any(path.endswith(".cpp") for path in native_sources())


BAD: list[tuple[Rule, str, str]] = [
    (sockets_in_distributed_only, "runtime/runner.py", "import torch.distributed as dist"),
    (sockets_in_distributed_only, "runtime/runner.py", "from torch import distributed"),
    (sockets_in_distributed_only, "serve/api.py", "import torch as t\nt.distributed.init_process_group()"),
    (sockets_in_distributed_only, "smc/population.py", "import socket\nsocket.socket()"),
    (cuda_graphs_in_one_file, "runtime/runner.py", "import torch\ng = torch.cuda.CUDAGraph()"),
    (cuda_graphs_in_one_file, "engine.py", "from torch import cuda\nwith cuda.graph(g): pass"),
    (cuda_graphs_in_one_file, "engine.py", "from torch.cuda import graph"),
    (no_device_synchronisation, "runtime/runner.py", "import torch\ntorch.cuda.synchronize()"),
    (no_device_synchronisation, "smc/round.py", "from torch import cuda\ncuda.empty_cache()"),
    (no_environment_and_no_output, "decode.py", "import os\nx = os.environ['A']"),
    (no_environment_and_no_output, "tree/tree.py", "from os import getenv"),
    (no_environment_and_no_output, "model/loader.py", "import os as o\no.getenv('A')"),
    (no_environment_and_no_output, "distributed/launch/world.py", "import os\nx = os.environ['RANK']"),
    (no_environment_and_no_output, "runtime/runner.py", "import sys\nsys.stderr.write('x')"),
    (no_pickle, "engine.py", "import torch.distributed as d\nd.broadcast_object_list([1])"),
    (no_pickle, "model/loader.py", "import numpy as np\nnp.load('x', allow_pickle=True)"),
    (no_module_state, "engine.py", "x = None\ndef f():\n    global x"),
    (no_module_state, "tree/tree.py", "cache = {}"),
    (no_module_state, "tree/tree.py", "seen: set[int] = set()"),
    (no_module_state, "tree/tree.py", "CACHE = {}\ndef f():\n    CACHE[1] = 2"),
    (no_module_state, "tree/tree.py", "CACHE = []\ndef f():\n    CACHE.append(2)"),
    (no_module_state, "tree/tree.py", "import functools\n@functools.lru_cache(1)\ndef f(): pass"),
    (no_module_state, "runtime/runner.py", "def get_context(): pass"),
    (no_torch_in_native_code, "host/a.cpp", "#include <torch/extension.h>"),
    (no_torch_in_native_code, "cuda/a.cu", '# include "ATen/cuda/CUDAContext.h"'),
    (no_torch_in_native_code, "host/a.cpp", "#include <pybind11/pybind11.h>"),
    (no_torch_in_native_code, "binder.cpp", "#include <Python.h>"),
    (no_waiting_in_native_code, "cuda/linear/linear.cu", "cudaDeviceSynchronize();"),
]


@pytest.mark.parametrize(("rule", "path", "source"), BAD)
def test_a_violation_is_found(rule: Rule, path: str, source: str) -> None:
    assert rule(path, source)


GOOD = [
    ("distributed/collectives/torch_dist.py", "import torch.distributed as dist\ndist.all_reduce(x)"),
    ("distributed/launch/launched_rank.py", "import os\nrank = os.environ['RANK']"),
    ("distributed/transport/grpc/client.py", "import grpc"),
    ("tree/tree.py", "KINDS = {'a': 1}\nx = KINDS['a']\n__all__ = ['x']"),
    ("tree/tree.py", "def f(state):\n    out = []\n    out.append(state.print)\n    state.load(1)"),
    ("runtime/executors/graph.py", "import torch\ng = torch.cuda.CUDAGraph()"),
    ("serve/__main__.py", "import os, typer\nprint(os.environ)\nimport swiftspec.engine\nx = {}"),
    ("cli/chat.py", "import numpy as np\nnp.load('x', allow_pickle=False)"),
]


@pytest.mark.parametrize(("path", "source"), GOOD)
def test_allowed_code_passes(path: str, source: str) -> None:
    assert [complaint for rule in RULES for complaint in rule(path, source)] == []
