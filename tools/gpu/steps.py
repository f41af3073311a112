"""What is done on a GPU, step by step: a process each, with a time limit of its own."""

from __future__ import annotations

import re
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRATCH = ROOT / "build" / "gpu-check"
SECONDS = "{seconds}"  # in a command: its limit less what its end takes
PATIENCE = 30  # seconds for one test
EPOCHS = "6"  # of each test under the sanitizer: every number of rows once
PAIR, SMALL_PAIR = "Llama-3-70B,Llama-3.2-3B", "Llama-3-8B,Llama-3.2-1B"


@dataclass(frozen=True, slots=True)
class Step:
    """A process. What it writes to `result` is JSON; where there are results or constants in it, `keep` gets it too."""

    name: str
    command: tuple[str, ...]
    limit: float  # seconds
    result: Path | None = None
    keep: Path | None = None
    environment: dict[str, str] = field(default_factory=dict)
    extra: bool = False  # done if time is left


def plan(output: Path, gpu: str) -> list[Step]:
    """The steps, the most telling first."""
    python, kernels = sys.executable, SCRATCH / "kernels.json"
    constants = SCRATCH / "constants.json"
    bench = (python, "-m", "bench.gpu.kernels", "--budget", SECONDS, "--json", str(kernels))
    bench += ("--constants", str(constants))
    kept = output / f"{gpu}-kernels.json"
    verify = (python, "-m", "bench.verify", "--gpu", "--batch")
    measure = (python, "-m", "bench.gpu.constants", "--json", str(constants))
    return [
        Step("build", (python, "setup.py", "build_ext", "--inplace"), 65),
        *tests(),
        decode("demo", 25),
        Step("constants", measure, 30, constants, output / f"{gpu}-constants.json"),
        Step("kernels", bench, 65, kernels, kept),
        decode(PAIR, 70),
        decode(SMALL_PAIR, 40),
        sanitize("memcheck", "virtual"),
        decode(PAIR, 70, "unfused", extra=True),  # what the paper's Figure 8 calls the base
        decode("Llama-3-70B,Llama-3.2-1B", 60, extra=True),
        Step("verify 1 x 8", (*verify, "1", "--steps", "8"), 20, extra=True),
        Step("verify 16 x 5", (*verify, "16", "--steps", "5"), 20, extra=True),
        decode(SMALL_PAIR, 40, early=False, extra=True),
        # four ranks, for it takes long; it may take bulk copies and clusters for races that are none
        sanitize("racecheck", "virtual and 4", extra=True),
        profile(),
        Step("kernels, the rest", (*bench, "--resume"), 300, kernels, kept, extra=True),
    ]


def tests() -> list[Step]:
    """Three processes, so that an error of the device, which stays until its process ends, takes few tests with it."""
    files = sorted((ROOT / "tests" / "gpu").glob("test_*.py"))
    groups: dict[str, tuple[str, ...]] = {
        "operators": ("test_linear", "test_cuda_ops"),
        "ranks": ("test_sums", "test_peers"),
    }
    named = [stem for stems in groups.values() for stem in stems]
    groups["engine"] = tuple(file.stem for file in files if file.stem not in named)
    return [
        Step(f"tests of {name}", pytest(*(f"tests/gpu/{stem}.py" for stem in groups[name])), limit)
        for name, limit in (("operators", 35.0), ("engine", 55.0), ("ranks", 45.0))
    ]


def pytest(*arguments: str) -> tuple[str, ...]:
    """Names each test as it begins. One that hangs says where, be it in the driver, and ends the process if it can."""
    limits = ("-o", f"faulthandler_timeout={PATIENCE - 5}", "-o", f"timeout={PATIENCE}", "-o", "timeout_method=thread")
    return (sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "-vv", *limits, *arguments)


def decode(pair: str, limit: float, ops: str = "auto", early: bool = True, extra: bool = False) -> Step:
    name = f"{pair} {ops}" + ("" if early else ", nothing early")
    file = SCRATCH / f"{slug(name)}.json"
    command = (sys.executable, "-m", "bench.gpu.step", "--pair", pair, "--ops", ops, "--json", str(file))
    environment = {} if early else {"SWIFTSPEC_EARLY_STARTS": "0"}
    return Step(f"decode {name}", command, limit, file, environment=environment, extra=extra)


def tool(name: str) -> str:
    """A program of the CUDA toolkit."""
    return shutil.which(name) or f"/usr/local/cuda/bin/{name}"


def sanitize(kind: str, which: str, *, extra: bool = False) -> Step:
    """The tests of several ranks on this one GPU, those that `which` chooses as pytest's -k does; of all kernels only
    ours are looked at. Each tensor is an allocation of its own, so that what lies beside it is nobody's."""
    options = ("--error-exitcode", "9", "--kernel-name", "kns=swiftspec")
    command = (
        tool("compute-sanitizer"),
        "--tool",
        kind,
        *options,
        *pytest("tests/gpu/test_sums.py", "-k", which),
    )
    environment = {"SWIFTSPEC_TEST_EPOCHS": EPOCHS, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return Step(kind, command, 40, environment=environment, extra=extra)


def profile() -> Step:
    """Whether the profiler works here, and what it says of one projection."""
    metric = "dram__throughput.avg.pct_of_peak_sustained_elapsed"
    options = ("--clock-control", "none", "--kernel-name", "regex:linear_kernel", "--launch-count", "1")
    test = pytest("tests/gpu/test_linear.py", "-k", "bitwise and 128")
    return Step("profile", (tool("ncu"), *options, "--metrics", metric, *test), 40, extra=True)


def slug(gpu: str) -> str:
    """NVIDIA H100 80GB HBM3 -> h100, as `profile predict --hardware` has it; others by all their name."""
    name = re.sub(r"[^a-z0-9]+", "-", gpu.lower().removeprefix("nvidia ")).strip("-")
    return re.sub(r"-\d+gb-hbm\d\w*$", "", name)
