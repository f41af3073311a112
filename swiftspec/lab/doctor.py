"""Command `swiftspec doctor`: shows what this machine has, and what would be slow or unavailable, why, and the fix."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from swiftspec import __version__
from swiftspec.backends.cpu import cpu as host
from swiftspec.backends.cuda.devices import build_info, driver_version, require_usable, why_no_gpu
from swiftspec.builder.hardware import matrix_tiles_refused
from swiftspec.distributed.collectives.torch_dist import nccl_version
from swiftspec.errors import UserError
from swiftspec.extras import EXTRAS, has_extra, install_hint
from swiftspec.lab import machine
from swiftspec.profiles.store import hardware

LOW_MEMORY_BYTES = 2e9  # available memory below which hardly any model but the demo models fits
LOW_SHM_BYTES = 32 << 20  # of /dev/shm, in which ranks exchange messages and sums
NVIDIA_DEVICE = Path("/dev/nvidiactl")  # exists where an NVIDIA driver is loaded
SHM = Path("/dev/shm")
FASTEST_LEVELS = ("amx", "avx512_bf16", "neon_dotprod")  # levels beyond which nothing is gained


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that makes SwiftSpec slow or a feature unavailable on this machine. `fix`: what to do about it."""

    what: str
    why: str
    fix: str

    def __str__(self) -> str:
        return f"{self.what}: {self.why}; {self.fix}"


@dataclass(frozen=True, slots=True)
class Report:
    """The result of the command. `facts`: (name, value)."""

    facts: tuple[tuple[str, str], ...]
    findings: tuple[Finding, ...]

    def __str__(self) -> str:
        width = max(len(name) for name, _ in self.facts)
        lines = [f"{name:{width}}  {value}" for name, value in self.facts]
        lines += ["", "slow or unavailable:"] if self.findings else ["", "nothing here would be slow"]
        return "\n".join([*lines, *(f"- {finding}" for finding in self.findings)])


def examine() -> Report:
    """Examines this machine. Takes less than a second."""
    facts = (
        ("swiftspec", f"{__version__}, {build_info()}"),
        ("python", f"{platform.python_version()} on {platform.system()} {platform.release()} {platform.machine()}"),
        ("torch", f"{torch.__version__}, {_torch_build()}"),
        ("cpu", _cpu()),
        ("memory", _memory()),
        ("pages", _pages()),
        ("gpus", "; ".join(_gpu(index) for index in _gpu_indices()) or f"none: {why_no_gpu()}"),
        ("extras", ", ".join(f"{name} {'installed' if has_extra(name) else 'missing'}" for name in EXTRAS)),
    )
    findings = (*_cpu_findings(), *_memory_findings(), *_gpu_findings(), *_extra_findings())
    return Report(facts, findings)


def _torch_build() -> str:
    if torch.version.cuda is None:
        return "without CUDA"
    driver, nccl = driver_version(), nccl_version()
    words = [f"CUDA {torch.version.cuda}", "no driver" if driver is None else f"driver for CUDA {driver}"]
    return ", ".join([*words, "no NCCL" if nccl is None else f"NCCL {nccl}"])


def _cpu() -> str:
    usable, cores, total = machine.describe_cores()
    quota = machine.cpu_quota()
    words = [str(hardware("cpu")["name"]), f"{usable} of {total} CPUs on {cores} physical cores"]
    words += [] if quota is None else [f"a quota of {quota:g} CPUs"]
    return ", ".join([*words, f"operators: {host.level()}"])


def _memory() -> str:
    sizes = machine.memory_sizes()
    words = [] if sizes is None else [f"{sizes.total / 1e9:.1f} GB, {sizes.available / 1e9:.1f} available"]
    words += [] if sizes is None or sizes.limit is None else [f"a limit of {sizes.limit / 1e9:.1f} GB"]
    return ", ".join([*words, f"read at {machine.read_bandwidth() / 1e9:.1f} GB/s"])


def _pages() -> str:
    limit = machine.locked_memory_limit()
    locked = "unlimited" if limit is None else f"{limit / 2**20:.0f} MiB"
    size = os.sysconf("SC_PAGE_SIZE") // 1024
    return f"{size} KiB, transparent huge pages: {machine.transparent_huge_pages()}, locked memory: {locked}"


def _gpu_indices() -> range:
    return range(torch.cuda.device_count() if torch.cuda.is_available() else 0)


def _gpu(index: int) -> str:
    data = torch.cuda.get_device_properties(index)
    return f"{data.name} ({data.total_memory / 1e9:.0f} GB, compute capability {data.major}.{data.minor})"


def _cpu_findings() -> Iterator[Finding]:
    level = host.level()
    usable, cores, _ = machine.describe_cores()
    if level == "none":
        yield Finding(
            "models on the CPU",
            "the native operators need x86-64 with AVX2, or aarch64, so plain torch runs",
            "use such a CPU, or a GPU",
        )
    elif level not in FASTEST_LEVELS:
        lacks = "without dot products of bytes" if level == "neon" else "below AVX-512 BF16"
        yield Finding(
            "products on the CPU",
            f"its operators run at the level {level}, {lacks}",
            "use 4-bit weights (`swiftspec quantize`), which read fewer bytes",
        )
    if matrix_tiles_refused():
        yield Finding(
            "products of many rows on the CPU",
            "the operating system refuses this CPU's matrix tiles (AMX)",
            "allow arch_prctl(ARCH_REQ_XCOMP_PERM) in the sandbox, or use Linux 5.16 or later",
        )
    quota = machine.cpu_quota()
    if quota is not None and quota < min(cores, 8):
        yield Finding(
            "threads of operators",
            f"the control group may use {quota:g} CPUs, but {cores} cores are visible",
            f"pass --threads {max(int(quota), 1)}, or raise the quota",
        )
    load = os.getloadavg()[0]
    if load > usable / 2:
        yield Finding(
            "everything",
            f"the load average of the last minute is {load:.1f} with {usable} CPUs",
            "stop other processes, since ranks and threads wait for each other",
        )


def _memory_findings() -> Iterator[Finding]:
    sizes = machine.memory_sizes()
    if sizes is not None and min(sizes.available, sizes.limit or sizes.available) < LOW_MEMORY_BYTES:
        free = min(sizes.available, sizes.limit or sizes.available)
        yield Finding(
            "large models",
            f"only {free / 1e9:.1f} GB of memory are available, and swapping stops decoding",
            "free memory, raise the limit, or use a model with 4-bit weights",
        )
    try:
        shm = shutil.disk_usage(SHM).total
    except OSError:
        shm = None
    if shm is None or shm < LOW_SHM_BYTES:
        size = "does not exist" if shm is None else f"has {shm / 2**20:.0f} MiB"
        yield Finding(
            "several ranks",
            f"{SHM} {size}, and ranks of one machine exchange messages there",
            "start the container with a larger one, such as --shm-size 1g",
        )


def _gpu_findings() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        if NVIDIA_DEVICE.exists():
            yield Finding("the GPU", "PyTorch cannot use it", why_no_gpu())
        return
    count = torch.cuda.device_count()
    for index in range(count):
        try:
            require_usable(f"cuda:{index}")
        except UserError as error:
            cause, _, fix = str(error).partition("; ")
            yield Finding(
                f"GPU {index}",
                f"torch's own operators run in place of the CUDA operators ({cause})",
                fix or "use a newer GPU",
            )
    apart = [
        (a, b) for a in range(count) for b in range(count) if a != b and not torch.cuda.can_device_access_peer(a, b)
    ]
    if apart:
        yield Finding(
            "sums over GPUs",
            f"GPUs {apart[0][0]} and {apart[0][1]} cannot access each other's memory, so NCCL sums",
            "use GPUs that are connected by NVLink or one PCIe switch",
        )
    if count > 1 and nccl_version() is None:
        yield Finding("several GPUs", "this PyTorch has no NCCL", "install a CUDA build of PyTorch for Linux")


def _extra_findings() -> Iterator[Finding]:
    for name, extra in EXTRAS.items():
        if not has_extra(name):
            yield Finding(extra.purpose, f"{extra.library} is not installed", install_hint(name))


def main(argv: Sequence[str] | None = None, prog: str = "swiftspec doctor") -> int:
    """Runs the command `doctor` and returns its exit code."""
    from swiftspec.serve.__main__ import run_guarded

    return run_guarded(lambda first: _run(list(sys.argv[1:] if argv is None else argv), prog))


@dataclass(frozen=True, slots=True)
class OneMachine:
    """The first of several ranks, all on this machine."""

    size: int
    local_rank: int = 0

    @property
    def local_size(self) -> int:
        return self.size


def plan_lines(argv: Sequence[str]) -> list[str]:
    """Returns the lines of the plan that `swiftspec serve` with the flags `argv` would run. Reads the configurations of
    the models. Raises UserError as that command does."""
    from swiftspec.builder.plan import Plan
    from swiftspec.cli.arguments import parse_command
    from swiftspec.startup.built_in_models import requested_ranks_of
    from swiftspec.startup.model_resolution import ResolvedModels
    from swiftspec.startup.reporter import LogReporter
    from swiftspec.startup.session import load_options

    settings = parse_command(argv).settings
    ranks = requested_ranks_of(settings)
    found = ResolvedModels.resolve(settings, ranks, LogReporter())
    options = load_options(settings)
    options["gpu_trial"] = "off"
    layout = None if ranks == 1 else OneMachine(ranks)
    return Plan.create(found.target, found.draft, found.choices, layout, options).describe()


def _run(argv: Sequence[str], prog: str) -> int:
    from swiftspec.cli.arguments import CommandParser

    if argv[:1] == ["--plan"]:
        print("\n".join(plan_lines(argv[1:])))
        return 0
    parser = CommandParser(prog, description=__doc__)
    text = "Show every option as `swiftspec serve` with these flags would resolve it, and why. Must be the first flag."
    parser.add_argument("--plan", nargs=argparse.REMAINDER, metavar="FLAGS", help=text)
    parser.parse_args(argv)
    print(examine())
    return 0
