"""Steps of tools/gpu_check.py. Each is a process with its own time limit."""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRATCH = ROOT / "build" / "gpu-check"
SECONDS = "{seconds}"  # placeholder in a command for the limit of the step minus the time for ending it
EPOCHS = "6"  # epochs of each test under the sanitizer: every number of rows once
PAIR, SMALL_PAIR, MIDDLE_PAIR = "Llama-3-70B,Llama-3.2-1B", "Llama-3-8B,Llama-3.2-1B", "Llama-3-70B,Llama-3.2-3B"
NOTHING_EARLY = {"SWIFTSPEC_EARLY_STARTS": "0"}  # csrc/cuda/launch.cuh
NAMES = {"SWIFTSPEC_EARLY_STARTS": "nothing early"}
SIZES, SWEEP_S = (2, 4, 8), "180"  # GPUs of the sums over several; seconds of the sweep
SMOKE = "smoke"  # if this fails, all later steps run without early starts


@dataclass(frozen=True, slots=True)
class Step:
    """A step of the check: a command with a time limit.

    It writes JSON to `result`. If the JSON contains results or constants, it is also copied to `keep`.
    """

    name: str
    command: tuple[str, ...]
    limit: float  # seconds
    result: Path | None = None
    keep: Path | None = None
    environment: dict[str, str] = field(default_factory=dict)
    extra: bool = False  # runs only if time is left
    stretches: bool = True  # may use the time that earlier steps have saved, for a slow machine
    patient: bool = False  # may use all that is left of the budget: without it the other steps show nothing


def plan(output: Path, gpu: str, gpus: int = 1) -> list[Step]:
    """Returns the steps, the most informative first. `gpus`: number of GPUs of this machine."""
    python, kernels = sys.executable, SCRATCH / "kernels.json"
    constants = SCRATCH / "constants.json"
    bench = (python, "-m", "bench.gpu.kernels", "--budget", SECONDS, "--json", str(kernels))
    bench += ("--constants", str(constants))
    kept, many = output / f"{gpu}-kernels.json", SCRATCH / "many-rows.json"
    rows = (python, "-m", "bench.gpu.kernels", "--only", "Llama-3-70B TP1", "--rows", "32,64,128,256")
    rows += ("--budget", SECONDS, "--json", str(many), "--constants", str(constants))
    verify = (python, "-m", "bench.gpu.verify_chains", "--batch")
    measure = (python, "-m", "bench.gpu.constants", "--json", str(constants))
    return [
        Step("constants", measure, 30, constants, output / f"{gpu}-constants.json"),
        build(),
        smoke("smoke, nothing early", NOTHING_EARLY),
        smoke(SMOKE, {}),
        *tests(),
        decode("demo", 25),
        Step("kernels", bench, 60, kernels, kept, stretches=False),  # fills its time; "the rest" continues
        decode(SMALL_PAIR, 40),
        decode(PAIR, 70),
        sanitize("memcheck", "virtual", 35),
        *several_gpus(output, gpu, gpus),
        profile(),
        decode(SMALL_PAIR, 40, "--context", "32000", extra=True),
        decode(SMALL_PAIR, 60, "--particles", "4,8,16", extra=True),
        decode(SMALL_PAIR, 40, environment=NOTHING_EARLY, extra=True),
        decode(PAIR, 70, "--context", "32000", extra=True),
        decode(MIDDLE_PAIR, 70, extra=True),
        decode(PAIR, 70, "--ops", "unfused", extra=True),  # base configuration of the paper's Figure 8
        Step("verify 1 x 8", (*verify, "1", "--steps", "8"), 20, extra=True),
        Step("verify 16 x 5", (*verify, "16", "--steps", "5"), 20, extra=True),
        Step("kernels, many rows", rows, 60, many, output / f"{gpu}-many-rows.json", extra=True),
        sanitize("racecheck", "virtual and 4", 60, extra=True),  # four ranks; it may report false positives
        Step("kernels, the rest", (*bench, "--resume"), 300, kernels, kept, extra=True),
    ]


def several_gpus(output: Path, gpu: str, gpus: int) -> list[Step]:
    """Returns the steps of a machine with several GPUs: sums over 2, 4 and 8 of them, a large pair on the default split
    of all, and a sweep over all splits, which needs a package that a bare image lacks."""
    sizes = [size for size in SIZES if size <= gpus]
    if not sizes:
        return []
    steps = []
    for size in sizes:
        file = SCRATCH / f"all-reduce-{size}.json"
        command = on_ranks(size, "bench.gpu.all_reduce", "--budget", SECONDS, "--json", str(file))
        kept = output / f"{gpu}-all-reduce-{size}.json"
        steps.append(Step(f"all-reduce over {size} GPUs", command, 45, file, kept, extra=True))
    size = sizes[-1]
    draft = max(1, size // 4)  # as `split_ranks` splits them
    split, file = f"{size - draft}+{draft}", SCRATCH / "split.json"
    command = on_ranks(size, "bench.gpu.step", "--pair", MIDDLE_PAIR, "--split", split, "--json", str(file))
    steps.append(Step(f"decode {MIDDLE_PAIR}, split {split}", command, 120, file, extra=True))
    if importlib.util.find_spec("pydantic") is not None:
        file = SCRATCH / "sweep.json"
        command = on_ranks(size, "bench.gpu.sweep", "--pair", SMALL_PAIR, "--budget", SWEEP_S, "--json", str(file))
        steps.append(Step(f"sweep over {size} GPUs", command, 240, file, extra=True))
    return steps


def on_ranks(size: int, module: str, *options: str) -> tuple[str, ...]:
    """Returns the command that runs a module on `size` ranks of this machine."""
    return (sys.executable, "-m", "tools.gpu.ranks", str(size), module, *options)


SWITCHES: tuple[tuple[tuple[str, ...], dict[str, str]], ...] = (
    ((), {}),
    ((), NOTHING_EARLY),
    (("--head", "native"), {}),
    (("--kv-cache-dtype", "fp8"), {}),
)


def comparison(turns: int = 2) -> list[Step]:
    """Returns the steps of `--compare`: `turns` times a decode with the defaults and one with each switch in its other
    position.

    Weight prefetch is not among the switches, because every decode measures with and without it.
    """
    return [
        decode(SMALL_PAIR, 40, "--prompts", "2", *options, environment=environment, turn=turn)
        for turn in range(1, turns + 1)
        for options, environment in SWITCHES
    ]


def build() -> Step:
    """Returns the step that builds the extension. It takes no time if the existing one is usable."""
    return Step("build", (sys.executable, "-m", "tools.gpu.build"), 65, patient=True)


def smoke(name: str, environment: dict[str, str]) -> Step:
    """Returns the step that decodes a few tokens with the demo models.

    It fails if the text differs from that of the CPU in its first half.
    """
    file = SCRATCH / f"{slug(name)}.json"
    short = ("--prompts", "1", "--tokens", "24", "--context", "200", "--least", "0.5")
    command = (sys.executable, "-m", "bench.gpu.step", *short, "--json", str(file))
    return Step(name, command, 25, file, environment=environment)


def tests() -> list[Step]:
    """Returns the three steps of the GPU tests. If one takes too long, it does not use the time of the others."""
    files = sorted((ROOT / "tests" / "gpu").glob("test_*.py"))
    groups: dict[str, tuple[str, ...]] = {
        "operators": ("test_linear", "test_cuda_ops", "test_resampling"),
        "ranks": ("test_sums", "test_peers"),
    }
    named = [stem for stems in groups.values() for stem in stems]
    groups["engine"] = tuple(file.stem for file in files if file.stem not in named)
    limits = (("operators", 35, 8), ("engine", 55, 8), ("ranks", 45, 16))  # tests of ranks may start processes
    return [tested(name, groups[name], limit, timeout_s) for name, limit, timeout_s in limits]


def tested(name: str, stems: tuple[str, ...], limit: float, timeout_s: int) -> Step:
    """Returns the step that runs tests in a process, which is restarted if it hangs for `timeout_s` seconds or breaks
    the GPU."""
    name = f"tests of {name}"
    file = SCRATCH / f"{slug(name)}.json"
    paths = (f"tests/gpu/{stem}.py" for stem in stems)
    command = (sys.executable, "-m", "tools.gpu.resumable_tests", "--budget", SECONDS, "--timeout", str(timeout_s))
    command += ("--json", str(file), *paths)
    return Step(name, command, limit, file)


def decode(
    pair: str,
    limit: float,
    *options: str,
    environment: dict[str, str] | None = None,
    extra: bool = False,
    turn: int | None = None,
) -> Step:
    about = [option.removeprefix("--") for option in options]
    switched = [NAMES[name] for name in environment or {}]
    name = ", ".join([pair, *([" ".join(about)] if about else []), *switched, *([f"turn {turn}"] if turn else [])])
    file = SCRATCH / f"{slug(name)}.json"
    command = (sys.executable, "-m", "bench.gpu.step", "--pair", pair, *options, "--json", str(file))
    return Step(f"decode {name}", command, limit, file, environment=environment or {}, extra=extra)


def tool(name: str) -> str:
    """Returns the path of a program of the CUDA toolkit."""
    return shutil.which(name) or f"/usr/local/cuda/bin/{name}"


def sanitize(kind: str, which: str, limit: float, extra: bool = False) -> Step:
    """Returns the step that runs compute-sanitizer on tests of several ranks on one GPU, for kernels of this project
    only.

    `which` selects the tests like pytest's -k. Each tensor is a separate allocation, so that accesses out of bounds are
    found.
    """
    options = ("--error-exitcode", "9", "--kernel-name", "kns=swiftspec")
    test = (sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "-vv")
    command = (tool("compute-sanitizer"), "--tool", kind, *options, *test, "tests/gpu/test_sums.py", "-k", which)
    environment = {"SWIFTSPEC_TEST_EPOCHS": EPOCHS, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return Step(kind, command, limit, environment=environment, extra=extra)


def profile() -> Step:
    """Returns the step that profiles four operators: share of the memory speed, issue rate, and stall reasons of
    warps."""
    sections = ("SpeedOfLight", "SchedulerStats", "WarpStateStats")
    options = ("--clock-control", "none", "--kernel-name", "regex:linear_kernel|attention_kernel")
    options += tuple(part for section in sections for part in ("--section", section))
    return Step("profile", (tool("ncu"), *options, sys.executable, "-m", "bench.gpu.profile_target"), 45, extra=True)


def slug(gpu: str) -> str:
    """Returns a name in a form for files.

    NVIDIA H100 80GB HBM3 becomes h100, as in `profile predict --hardware`. Other names are retained whole.
    """
    name = re.sub(r"[^a-z0-9]+", "-", gpu.lower().removeprefix("nvidia ")).strip("-")
    return re.sub(r"-\d+gb-hbm\d\w*$", "", name)
