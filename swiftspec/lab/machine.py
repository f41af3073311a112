"""What this machine has: CPU, memory, GPUs and limits of the process, read from the operating system and torch."""

from __future__ import annotations

import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from swiftspec.builder.hardware import physical_cores, thread_count
from swiftspec.distributed.launch.world import available_cores

READ_BYTES = 256 << 20  # of the buffer whose reading is timed; larger than the caches of most CPUs
READ_REPEATS = 3
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


def describe_cores() -> tuple[int, int, int]:
    """Returns the numbers of CPUs that this process may use, of their physical cores, and of the machine's CPUs."""
    return len(available_cores()), physical_cores(), os.cpu_count() or 1
