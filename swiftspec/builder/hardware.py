"""Device, dtype and number of CPU threads that a model pair uses on this machine. `LLMEngine` and the commands choose
them here."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from swiftspec.backends.cpu import cpu as host
from swiftspec.backends.cuda.devices import why_no_gpu
from swiftspec.builder.rules import GIVEN, Reason
from swiftspec.config import MAX_THREADS
from swiftspec.distributed.launch.world import available_cores
from swiftspec.errors import UserError, truncated_repr
from swiftspec.model.config_json import DTYPES
from swiftspec.settings_schema import require

MOST_THREADS = 1024  # limit of a given number of threads, as of --threads
DEVICE_TYPES = ("cpu", "cuda")


def cpu_name() -> str:
    """Returns the model name of the CPU; on aarch64, where Linux has none, the numbers of its implementer and part."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    entries = (line.partition(":") for line in reversed(lines))  # those of the first CPU last
    fields = {name.strip(): value.strip() for name, _, value in entries}
    if "model name" in fields:
        return fields["model name"]
    numbers = [f"{name} {fields[name]}" for name in ("CPU implementer", "CPU part") if name in fields]
    return ", ".join([platform.processor() or platform.machine(), *numbers])


def memory_bytes() -> int:
    """Returns the size of this machine's memory in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def resolve_device(device: torch.device | str) -> torch.device:
    """Returns the device for a value such as "cuda:1"; "auto" is cuda if PyTorch finds an NVIDIA GPU, otherwise cpu.
    Raises UserError if the device is unknown, or cuda without a GPU."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        found = None
    if found is None or found.type not in DEVICE_TYPES:
        raise UserError(f"device must be auto, cpu or cuda, not {truncated_repr(device)}")
    if found.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device cuda: PyTorch finds no NVIDIA GPU ({why_no_gpu()}); use device cpu")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device {found}: this machine has {torch.cuda.device_count()} GPUs, counted from 0")
    return found


def dtype_reason(dtype: torch.dtype | str | None, own: str, ops: str, device: torch.device) -> Reason:
    """Returns the dtype of the models, as `resolve_dtype` takes it, and why. `dtype`: the option; None and "auto" leave
    it open. `own`: name of the checkpoint's dtype. `ops`: name of the operators, as in `LoadOptions`."""
    if dtype is not None and dtype != "auto":
        return Reason(dtype, GIVEN)
    fast = device.type == "cuda" or (ops == "auto" and host.level() != "none") or _cpu_has_bf16()
    if own in ("bfloat16", "float16") and fast:
        return Reason("bfloat16", "fast bfloat16", "the weights have 16 bits, and the device computes in bfloat16 fast")
    return Reason(own, "checkpoint", "it is that of the weights")


def resolve_dtype(dtype: torch.dtype | str | None, own: str, ops: str, device: torch.device) -> torch.dtype:
    """Returns the dtype for a torch dtype or its name; see `dtype_reason`. Raises UserError if it is not supported."""
    dtype = dtype_reason(dtype, own, ops, device).value
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES or not isinstance(dtype, torch.dtype | str):
        raise UserError(f"dtype must be auto or one of {', '.join(DTYPES)}, not {truncated_repr(dtype)}")
    found: torch.dtype = getattr(torch, name)
    return found


def _cpu_flags() -> set[str]:
    """Returns the features of the CPU as Linux names them; empty on other systems."""
    try:
        return set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    except OSError:
        return set()


def _cpu_has_bf16() -> bool:
    """Returns whether the CPU has bfloat16 instructions. Without them bfloat16 is slower than float32."""
    return bool(_cpu_flags() & {"avx512_bf16", "amx_bf16", "bf16"})


def matrix_tiles_refused() -> bool:
    """Returns whether the CPU has matrix tiles (AMX) for which the operating system gives no permission."""
    return host.level() == "avx512_bf16" and {"amx_tile", "amx_int8", "amx_bf16"} <= _cpu_flags()


def thread_count(threads: int | None, ranks: int) -> int:
    """Returns the number of CPU threads of one operator: `threads`, or for None this rank's share of the physical
    cores, at most MAX_THREADS. Raises UserError if `threads` is not an integer or out of range.

    `ranks`: ranks on this machine, which share its cores.
    """
    if threads is None:
        return min(max(physical_cores() // ranks, 1), MAX_THREADS)
    valid = type(threads) is int and 1 <= threads <= MOST_THREADS
    require(valid, f"threads must lie in 1..{MOST_THREADS}, not {truncated_repr(threads)}")
    return threads


def set_thread_counts(threads: int, *, native: bool, set_torch_threads: bool) -> None:
    """Sets the CPU threads of the native operators, and with `set_torch_threads` those of torch, both for the whole
    process.

    `native`: whether all models run on the native CPU operators. torch then gets one thread: its remaining operations
    are too small for more, and its idle threads would compete with those of the operators.
    """
    host.set_threads(threads)
    if set_torch_threads:
        torch.set_num_threads(1 if native else threads)


def physical_cores() -> int:
    """Returns the number of physical cores that this process may run on."""
    cores = set()
    for number in available_cores():
        siblings = Path(f"/sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list")
        try:
            cores.add(siblings.read_text(encoding="utf-8").strip())
        except OSError:
            cores.add(str(number))
    return max(len(cores), 1)
