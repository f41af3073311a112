"""What this machine has: CPU, memory, GPUs and limits of the process, read from the operating system and torch."""

from __future__ import annotations

import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from swiftspec.backends.cpu import cpu as host
from swiftspec.builder.hardware import physical_cores, thread_count
from swiftspec.distributed.launch.world import available_cores
from swiftspec.lab.latency_model import GPUS, Constants, Gpu, LatencyLine, constants

READ_BYTES = 256 << 20  # of the buffer whose reading is timed; larger than the caches of most CPUs
READ_REPEATS = 3
PEAK_ROUNDS = 2_000_000  # of `cpu.peak`; a few milliseconds
CPU_OPERATOR_S = (4e-6, 2e-6)  # (slow, fast): assumed fixed cost of an operator on the CPU
CPU_READ_SHARE = (0.6, 1.0)  # (slow, fast): assumed share of the read bandwidth that products with few rows reach
CPU_PEAK_SHARE = (0.3, 0.7)  # (slow, fast): assumed share of the arithmetic peak of one thread, times the threads
CPU_SAMPLER_S = (60e-6, 20e-6)  # (slow, fast): assumed time of sampling per forward
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class MemorySizes:
    """Memory of this machine, in bytes. `limit`: of the process's control group; None without one."""

    total: int
    available: int
    limit: int | None


def memory_sizes() -> MemorySizes | None:
    """Returns the memory of this machine, or None where /proc/meminfo does not exist."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    found = {name: 1024 * int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if rest}
    limit = _cgroup_words("memory.max")
    return MemorySizes(
        found.get("MemTotal", 0),
        found.get("MemAvailable", 0),
        int(limit[0]) if limit and limit[0].isdecimal() and int(limit[0]) < found.get("MemTotal", 0) else None,
    )


def cpu_quota() -> float | None:
    """Returns the number of CPUs that the control group may use, or None without a quota."""
    words = _cgroup_words("cpu.max")
    if len(words) != 2 or not all(word.isdecimal() for word in words) or int(words[1]) == 0:
        return None
    return int(words[0]) / int(words[1])


def _cgroup_words(name: str) -> list[str]:
    try:
        return (CGROUP / name).read_text(encoding="utf-8").split()
    except OSError:
        return []


def transparent_huge_pages() -> str:
    """Returns the mode of transparent huge pages: "always", "madvise" or "never"; "unknown" if it cannot be read."""
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(encoding="utf-8")
    except OSError:
        return "unknown"
    return text.partition("[")[2].partition("]")[0] or "unknown"


def locked_memory_limit() -> int | None:
    """Returns the bytes that this process may lock in memory; None if they are not limited."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def read_bandwidth() -> float:
    """Measures the bytes per second at which the CPU reads memory, with the threads that operators use by default.
    Takes a fifth of a second."""
    before = torch.get_num_threads()
    torch.set_num_threads(thread_count(None, 1))
    try:
        numbers = torch.ones(READ_BYTES // 8, dtype=torch.int64)
        best = float("inf")
        for _ in range(READ_REPEATS):
            began = time.perf_counter()
            numbers.sum()
            best = min(best, time.perf_counter() - began)
        return numbers.nbytes / best
    finally:
        torch.set_num_threads(before)


def cpu_constants() -> tuple[Constants, Constants]:
    """Returns the (slow, fast) constants of the latency model for this machine's CPU, from its measured read bandwidth
    and arithmetic peak and assumed shares of them."""
    bandwidth, threads = read_bandwidth(), thread_count(None, 1)
    peak = _arithmetic_peak() * threads
    slow, fast = (
        Constants(
            LatencyLine(CPU_OPERATOR_S[end], CPU_READ_SHARE[end] * bandwidth),
            LatencyLine(CPU_OPERATOR_S[end], CPU_READ_SHARE[end] * bandwidth),
            LatencyLine(10 * CPU_OPERATOR_S[end], bandwidth),
            CPU_SAMPLER_S[end],
            CPU_PEAK_SHARE[end] * peak,
        )
        for end in (0, 1)
    )
    return slow, fast


def _arithmetic_peak() -> float:
    """Returns the floating-point operations per second of one thread of the native operators, or an assumption of 10
    billion where they cannot run."""
    if host.level() == "none":
        return 1e10
    began = time.perf_counter()
    count = host.peak(PEAK_ROUNDS, True)
    return count / (time.perf_counter() - began)


def gpu_model(name: str) -> Gpu | None:
    """Returns the data of a GPU that the latency model knows, by the name that torch reports, such as "NVIDIA H200"."""
    return next((gpu for key, gpu in GPUS.items() if key in name.lower()), None)


@dataclass(frozen=True, slots=True)
class PredictedMachine:
    """The machine that speeds are predicted for. `title`: for messages. `ends`: (slow, fast) constants of the latency
    model. `ranks`: GPUs, or 1 on a CPU."""

    title: str
    ends: tuple[Constants, Constants]
    ranks: int


def this_machine() -> PredictedMachine | None:
    """Returns this machine for predictions: its GPUs if there are any, otherwise its CPU. None if the latency model
    does not know the GPU."""
    if torch.cuda.is_available():
        name, count = torch.cuda.get_device_name(), torch.cuda.device_count()
        gpu = gpu_model(name)
        return None if gpu is None else PredictedMachine(f"{count} x {name}", constants(gpu), count)
    threads = thread_count(None, 1)
    return PredictedMachine(f"this CPU with {threads} thread{'s' if threads > 1 else ''}", cpu_constants(), 1)


def describe_cores() -> tuple[int, int, int]:
    """Returns the numbers of CPUs that this process may use, of their physical cores, and of the machine's CPUs."""
    return len(available_cores()), physical_cores(), os.cpu_count() or 1
