"""Device, dtype and number of CPU threads that a model pair uses on this machine."""

from __future__ import annotations

import os
from pathlib import Path

from swiftspec.errors import UserError
from swiftspec.file_io import expand_user
from swiftspec.model.checkpoint_files import read_config
from swiftspec.serve.settings.flags import MAX_THREADS
from swiftspec.serve.settings.settings import Settings


def resolve_device(name: str) -> str:
    """Returns "cuda" or "cpu" for the value of --device. Raises UserError if it is cuda and PyTorch finds no GPU."""
    import torch

    found = torch.cuda.is_available()
    if name == "cuda" and not found:
        from swiftspec.backends.cuda.devices import why_no_gpu

        raise UserError(f"--device cuda: PyTorch finds no NVIDIA GPU ({why_no_gpu()}); use --device cpu")
    return ("cuda" if found else "cpu") if name == "auto" else name


def resolve_dtype(settings: Settings, target: Path, device: str) -> str:
    """Returns the name of the dtype for --dtype. For auto this is bfloat16 if the checkpoint has 16-bit weights and
    bfloat16 is fast on the device, else the checkpoint's own."""
    if settings.dtype != "auto":
        return settings.dtype
    own = read_config(target).dtype
    from swiftspec.backends import cpu as host

    fast = device == "cuda" or (settings.ops == "auto" and host.level() != "none") or _cpu_has_bf16()
    return "bfloat16" if own in ("bfloat16", "float16") and fast else own


def _cpu_has_bf16() -> bool:
    """Returns whether the CPU has bfloat16 instructions. Without them bfloat16 is slower than float32."""
    try:
        flags = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    except OSError:
        return False
    return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})


def set_thread_counts(settings: Settings, target: Path, dtype: str, device: str, ranks: int) -> int:
    """Sets the CPU threads of the native operators and of torch. Returns the number of threads of one operator.

    `ranks`: ranks on this machine, which share its cores. If the models run on the native operators, torch gets one
    thread: its remaining operations are too small for more.
    """
    import torch

    from swiftspec.backends import cpu as host
    from swiftspec.builder.load_options import select_operators

    spec, where = read_config(target).spec, torch.device(device)
    native = select_operators(settings.ops, spec, getattr(torch, dtype), where) is host
    count = settings.threads or min(max(physical_cores() // ranks, 1), MAX_THREADS)
    torch.set_num_threads(1 if native else count)
    host.set_threads(count)
    return count


def packed_cache_folder(settings: Settings) -> Path | None:
    """Returns the directory in which packed weights are stored; None if they are not stored (`--packed-cache off`, or
    no home directory)."""
    if settings.packed_cache is not None:
        return None if settings.packed_cache == "off" else expand_user(settings.packed_cache)
    try:
        return expand_user(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "swiftspec" / "packed"
    except UserError:  # no home directory
        return None


def available_cpus() -> set[int]:
    """Returns the numbers of the logical CPUs that this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)
    return affinity(0) if affinity is not None else set(range(os.cpu_count() or 1))


def physical_cores() -> int:
    """Returns the number of physical cores that this process may run on."""
    cores = set()
    for cpu in available_cpus():
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            cores.add(siblings.read_text(encoding="utf-8").strip())
        except OSError:
            cores.add(str(cpu))
    return max(len(cores), 1)
