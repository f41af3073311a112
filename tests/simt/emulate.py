"""Builds the kernels of csrc/cuda for the emulated GPU of this folder, and installs it instead of a real one.

Device memory is then CPU memory, all streams are one, and graphs cannot be captured: tests skip those parts if
tests.gpu.device.EMULATED is set. Launches wait until two more follow or torch, in the thread that called `install`,
accesses a tensor.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import subprocess
import sysconfig
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pybind11
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import swiftspec.backends.cuda as cuda_package
from swiftspec import _C
from swiftspec.backends.cuda import linear as cuda_linear
from swiftspec.backends.cuda import torch_interop

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
# all except cuda_place.cpp, which module.cpp replaces: arrays of the emulated GPU are in CPU memory
SOURCES = (*(p for p in sorted(CSRC.glob("bind/cuda*.cpp")) if p.stem != "cuda_place"), CSRC / "bind/array.cpp",
           CSRC / "host/shm/segment.cpp")  # fmt: skip
# pybind11 shares its types among modules of one version; these stay apart from those of a _C that was built with CUDA
APART = "-DPYBIND11_INTERNALS_VERSION=1000"
FLAGS = (APART, "-std=c++20", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas",
         "-Wno-clobbered")  # fmt: skip
HOPPER, AMPERE = 900, 860
LINE = 256  # bytes, as a GPU's allocator aligns
USED = 64  # calls whose arguments are kept alive, more than the launches in flight have


def device_code(arch: int) -> tuple[str, ...]:
    """Compiler options for kernels of the emulated GPU."""
    # functions are unused where an architecture discards the branch that calls them
    return (f"-D__CUDA_ARCH__={arch}", "-Wno-unused-function", "-include", "cuda_runtime.h", "-x", "c++")


def build(compiler: str, folder: Path, arch: int = HOPPER, flags: Sequence[str] = ("-O2",), csrc: Path = CSRC) -> Path:
    """Compiles the module with the kernels of `csrc` into `folder`, and returns its path. The folder may already hold
    the module of another architecture: objects other than kernels are shared. Raises CalledProcessError on failure."""
    includes = (f"-I{ROOT / 'tests/simt'}", f"-I{csrc}", f"-I{pybind11.get_include()}",
                f"-I{sysconfig.get_path('include')}")  # fmt: skip
    folder_of_sources = Path(__file__).resolve().parent
    plain = [*SOURCES, folder_of_sources / "module.cpp", *sorted(folder_of_sources.glob("simt/*.cpp"))]
    jobs: list[tuple[Path, tuple[str, ...], Path]] = [(source, (), folder / f"{source.name}.o") for source in plain]
    for source in sorted(csrc.glob("cuda/*/*.cu")):
        jobs.append((source, device_code(arch), folder / f"{source.name}.{arch}.o"))

    def compile_one(job: tuple[Path, tuple[str, ...], Path]) -> str:
        source, more, out = job
        if not out.exists():
            command = [compiler, *FLAGS, *flags, *includes, *more, "-c", str(source), "-o", str(out)]
            subprocess.run(command, check=True)
        return str(out)

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, jobs))
    module = folder / f"emulated{arch}{sysconfig.get_config_var('EXT_SUFFIX')}"
    subprocess.run([compiler, *flags, "-shared", "-o", str(module), *objects, "-lrt", "-pthread"], check=True)
    return module


def install(module: Path, seed: int) -> None:
    """Patches torch and the extension so that this process has one GPU, the emulated one."""
    spec = importlib.util.spec_from_file_location("emulated", module)
    assert spec is not None and spec.loader is not None
    emulated = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(emulated)
    emulated.seed(seed)
    stream = Stream(emulated)
    for name, value in vars(emulated).items():
        if not name.startswith("__"):
            setattr(_C, name, stream.noting(value))
    native: Any = _C
    native.cuda_built = True
    cpu = torch.device("cpu")
    gpu: Any = torch.cuda
    gpu.is_available = lambda: True
    gpu.get_device_capability = lambda *_: divmod(_C.cuda_device()["arch"], 10)
    gpu.device_count = lambda: 1
    gpu.current_device = lambda: 0
    gpu.set_device = lambda *_: None
    gpu.device = lambda *_: contextlib.nullcontext()
    gpu.current_stream = lambda *_: SimpleNamespace(cuda_stream=0, synchronize=_synchronize)
    gpu.synchronize = lambda *_: _synchronize()
    modules: tuple[Any, ...] = (cuda_package, cuda_linear, torch_interop)
    for ops in modules:  # torch versions have one of the two
        ops.require_usable = lambda *_: cpu
        ops.on_gpu = lambda device: device == cpu
    torch.empty = _aligned(torch.empty)
    emulated.queues(True)
    atexit.register(_synchronize)
    stream.__enter__()


class Stream(TorchFunctionMode):
    """torch on the stream of the emulated GPU: operations that access memory first finish the queued launches, and
    recent arguments of the module are kept alive."""

    # an address, a shape, another name for the same memory, new memory, a mode
    BLIND = frozenset((Tensor.data_ptr, Tensor.size, Tensor.stride, Tensor.dim, Tensor.numel, Tensor.element_size,
                       Tensor.__len__, Tensor.is_contiguous, Tensor.view, Tensor.new_empty, torch.empty,
                       torch.empty_like, torch._C._set_grad_enabled))  # fmt: skip

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module
        self.used: deque[Any] = deque(maxlen=USED)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.looks(func, args):
            self.module.finish()
        return func(*args, **(kwargs or {}))

    def noting(self, native: Any) -> Any:
        """Wraps a function of the module, or the methods of a class, so that recent arguments are kept alive."""
        if isinstance(native, type):
            for name, method in list(vars(native).items()):
                if name == "__init__" or (callable(method) and not name.startswith("_")):
                    setattr(native, name, self.noting(method))
            return native
        if not callable(native):
            return native

        def noted(*args: Any, **kwargs: Any) -> Any:
            self.used.append((args, kwargs))
            return native(*args, **kwargs)

        return noted

    def looks(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Whether the function may access memory."""
        if func is Tensor.contiguous:
            return not args[0].is_contiguous()
        if func is Tensor.__getitem__:
            keys = args[1] if isinstance(args[1], tuple) else (args[1],)
            return not all(key is None or key is ... or type(key) in {int, slice} for key in keys)
        return func not in self.BLIND and getattr(func, "__name__", "") != "__get__"


def _synchronize() -> None:
    native: Any = _C
    native.finish()
    if native.broken():
        raise RuntimeError("CUDA error: unspecified launch failure")


def _aligned(empty: Any) -> Any:
    """Wraps torch.empty so that byte buffers are aligned as on a GPU."""

    def aligned(*shape: Any, **kind: Any) -> Tensor:
        sizes = shape[0] if shape and isinstance(shape[0], Sequence) else shape
        if kind.get("dtype") is not torch.uint8 or len(sizes) != 1:
            return empty(*shape, **kind)
        memory = empty(sizes[0] + LINE, **kind)
        start = -memory.data_ptr() % LINE
        return memory[start : start + sizes[0]]

    return aligned
