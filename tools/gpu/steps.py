"""Steps of tools/gpu_queue.py: two tables, the questions that a GPU decides and the checks of correctness.

The most important steps come first, since the last ones are skipped if the budget ends. A step is a process with its
own time limit. Adding a variant is adding a row, with its rule in decisions.py.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SCRATCH = ROOT / "build" / "gpu-queue"
STAMPS = ROOT / "build" / "stamps"  # an extension with SWIFTSPEC_STAMPS
SECONDS = "{seconds}"  # placeholder in a command for the limit of the step minus the time for ending it
EPOCHS = "6"  # epochs of each test under the sanitizer: every number of rows once
PAIR, SMALL_PAIR, MIDDLE_PAIR = "Llama-3-70B,Llama-3.2-1B", "Llama-3-8B,Llama-3.2-1B", "Llama-3-70B,Llama-3.2-3B"
MODELS = "Llama-3-8B,Llama-3-70B,Llama-3.2-1B"
NOTHING_EARLY = {"SWIFTSPEC_EARLY_STARTS": "0"}  # csrc/cuda/launch.cuh
SIZES, SWEEP_S = (2, 4, 8), "180"  # GPUs of the sums over several; seconds of the sweep
TRIAL = "trial"  # queue.py follows what it finds
TREES = "4,8;3,16;4,16;5,16"  # d,bs
ROWS = "1,4,8,16,32"
PARTS = ("100,32", "108,24")  # multiprocessors of target and draft that run at the same time on an H100
# up to two units of 16 keys around the lengths at which rows get own units, and long ones
STAMPED_CONTEXTS = "488,496,500,508,512,520,32000"
CONTEXTS = "128,488,492,496,500,504,508,512,516,520,1000,2000,4000,32000"


@dataclass(frozen=True, slots=True)
class Step:
    """A step: a command with a time limit, in seconds.

    It writes JSON to `result`. Several steps may share the file `keep`, which gets their results or constants. `needs`:
    a file without which the step is skipped.
    """

    name: str
    command: tuple[str, ...]
    limit: float
    result: Path | None = None
    keep: Path | None = None
    environment: dict[str, str] = field(default_factory=dict)
    needs: Path | None = None


def module(name: str, *options: str) -> tuple[str, ...]:
    return (sys.executable, "-m", name, *options)


def measured(name: str, command: tuple[str, ...], limit: float, **more: Any) -> Step:
    """Returns a step whose command takes --json."""
    file = SCRATCH / f"{slug(name)}.json"
    return Step(name, (*command, "--json", str(file)), limit, file, **more)


def with_stamps(*command: str) -> tuple[str, ...]:
    return module("bench.gpu.with_extension", str(STAMPS), *command)


def questions(output: Path, gpu: str) -> list[Step]:
    """Returns the steps of one GPU: experiments that explain, operators, and whole decodes."""
    kept = output / f"{gpu}-kernels.json"
    kernels = module("bench.gpu.kernels", "--budget", SECONDS, "--constants", str(SCRATCH / "constants.json"))
    ours = (*kernels, "--competitors", "swiftspec")
    both = (*kernels, "--competitors", "swiftspec,swiftspec paired")
    attention = (*both, "--only", "Llama-3-(8B|70B) TP(1|4) attention", "--contexts", CONTEXTS, "--rows", "8")
    projections = (*ours, "--only", "TP1 (qkv|o|swiglu|down|head) ", "--rows", "8,1,16,32")
    tuned = ("--tuned", str(SCRATCH / f"{TRIAL}.json"))  # as the product runs
    step, chain = module("bench.gpu.step", *tuned, "--pair"), module("bench.gpu.chain")
    trees = ("--modes", "serial,adapt,ar", "--trees", TREES, "--rows", ROWS)
    together = (*step, SMALL_PAIR, "--modes", "async")
    long = ("--modes", "serial", "--prompts", "1", "--context", "32000")
    many = ("--particles", "64", "--draft-tokens", "1", "--ablate", "--prompts", "2")
    touched = with_stamps("bench.gpu.footprint", "--sizes", "36", "--touch")
    stamps = with_stamps("bench.gpu.stamps", "--models", MODELS, "--trace", str(SCRATCH / "trace.json"))
    of_attention = with_stamps("bench.gpu.stamps", "--models", "Llama-3-8B", "--contexts", STAMPED_CONTEXTS)
    return [
        trial(),
        measured("footprint", module("bench.gpu.footprint"), 40),
        measured("chain", chain, 50),
        measured("chain, tuned", (*chain, "--no-leave-out", *tuned), 25),
        measured("stamps", stamps, 30, needs=STAMPS),
        measured(f"decode {SMALL_PAIR}", (*step, SMALL_PAIR, *trees), 70),
        measured("footprint, pages touched", touched, 35, needs=STAMPS),
        measured(f"decode {PAIR}", (*step, PAIR, *trees), 100),
        measured("constants", module("bench.gpu.constants"), 30, keep=output / f"{gpu}-constants.json"),
        measured("attention", attention, 40, keep=kept),
        measured("sampling", (*ours, "--only", "(draw|children|resample)", "--rows", "8"), 20, keep=kept),
        measured("stamps of attention", of_attention, 30, needs=STAMPS),
        measured("chain, nothing early", (*chain, "--no-leave-out"), 35, environment=NOTHING_EARLY),
        measured("stalls", module("bench.gpu.stalls"), 40),
        measured("tilings", module("bench.gpu.tilings", "--models", MODELS), 60),
        measured("projections", projections, 40, keep=kept),
        measured(f"decode {SMALL_PAIR}, async", together, 30),
        *(
            measured(f"decode {SMALL_PAIR}, async on {parts}", (*together, "--multiprocessors", parts), 30)
            for parts in PARTS
        ),
        measured(f"decode {SMALL_PAIR}, 32000 tokens", (*step, SMALL_PAIR, *long), 45),
        measured(
            "projections, many rows", (*ours, "--only", "Llama-3-70B TP1 ", "--rows", "32,64,128,256"), 30, keep=kept
        ),
        measured(f"decode {SMALL_PAIR}, particles", (*step, SMALL_PAIR, "--particles", "4,8,16"), 60),
        measured(f"decode {SMALL_PAIR}, 64 particles", (*step, SMALL_PAIR, *many), 60),
    ]


def trial() -> Step:
    """Returns the first step. Its limit leaves time for a check that hangs, whose process is killed and started
    again."""
    return measured(TRIAL, module("tools.gpu.trial"), 70)


def checks(gpus: int = 1) -> list[Step]:
    """Returns the steps that show whether results are right, and those that need several GPUs. `gpus`: their number."""
    return [
        trial(),
        *tests(),
        measured("decode demo", module("bench.gpu.step", "--pair", "demo", "--least", "0.5"), 25),
        *several_gpus(gpus),
        sanitize("memcheck", "virtual", 50),
        sanitize("racecheck", "virtual and 4", 60),  # four ranks; it may report false positives
    ]


def summed(size: int) -> str:
    """Returns the name of the step that sums over `size` GPUs."""
    return f"all-reduce over {size} GPUs"


def several_gpus(gpus: int) -> list[Step]:
    """Returns the steps of a machine with several GPUs: sums over 2, 4 and 8 of them, a large pair on the default split
    of all, and a sweep over all splits, which needs a package that a bare image lacks."""
    sizes = [size for size in SIZES if size <= gpus]
    steps = [measured(summed(size), on_ranks(size, "bench.gpu.all_reduce", "--budget", SECONDS), 45) for size in sizes]
    if not sizes:
        return []
    size = sizes[-1]
    draft = max(1, size // 4)  # as builder/rules.py splits them
    split = f"{size - draft}+{draft}"
    command = on_ranks(size, "bench.gpu.step", "--pair", MIDDLE_PAIR, "--split", split)
    steps.append(measured(f"decode {MIDDLE_PAIR}, split {split}", command, 120))
    if importlib.util.find_spec("pydantic") is not None:
        sweep = on_ranks(size, "bench.gpu.sweep", "--pair", SMALL_PAIR, "--budget", SWEEP_S)
        steps.append(measured(f"sweep over {size} GPUs", sweep, 240))
    return steps


def on_ranks(size: int, name: str, *options: str) -> tuple[str, ...]:
    """Returns the command that runs a module on `size` ranks of this machine."""
    return module("tools.gpu.ranks", str(size), name, *options)


def build() -> Step:
    """Returns the step that builds the extension; it takes no time if the existing one is usable."""
    return Step("build", module("tools.gpu.build"), 300)


def tests() -> list[Step]:
    """Returns the three steps of the GPU tests. If one takes too long, it does not use the time of the others."""
    files = sorted((ROOT / "tests" / "gpu").glob("test_*.py"))
    groups: dict[str, tuple[str, ...]] = {
        "operators": ("test_cuda_ops", "test_resampling", "test_linear"),  # the last ones may not be reached
        "ranks": ("test_sums", "test_peers"),
    }
    named = [stem for stems in groups.values() for stem in stems]
    groups["engine"] = tuple(file.stem for file in files if file.stem not in named)
    # with seconds of a test: those of the engine import transformers or run a trial, those of ranks start processes
    limits = (("operators", 90, 12), ("engine", 120, 25), ("ranks", 80, 20))
    return [tested(name, groups[name], limit, timeout_s) for name, limit, timeout_s in limits]


def tested(name: str, stems: tuple[str, ...], limit: float, timeout_s: int) -> Step:
    """Returns the step that runs tests in a process, which is restarted if it hangs for `timeout_s` seconds or breaks
    the GPU."""
    paths = (f"tests/gpu/{stem}.py" for stem in stems)
    command = module("tools.gpu.resumable_tests", "--budget", SECONDS, "--timeout", str(timeout_s), *paths)
    return measured(f"tests of {name}", command, limit)


def tool(name: str) -> str:
    """Returns the path of a program of the CUDA toolkit."""
    return shutil.which(name) or f"/usr/local/cuda/bin/{name}"


def sanitize(kind: str, which: str, limit: float) -> Step:
    """Returns the step that runs compute-sanitizer on tests of several ranks on one GPU, for kernels of this project
    only.

    `which` selects the tests like pytest's -k. Each tensor is a separate allocation, so that accesses out of bounds are
    found.
    """
    options = ("--error-exitcode", "9", "--kernel-name", "kns=swiftspec")
    test = module("pytest", "-m", "gpu", "-p", "no:cacheprovider", "-vv")
    command = (tool("compute-sanitizer"), "--tool", kind, *options, *test, "tests/gpu/test_sums.py", "-k", which)
    environment = {"SWIFTSPEC_TEST_EPOCHS": EPOCHS, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return Step(kind, command, limit, environment=environment, needs=Path(command[0]))


# Modules that run on a CPU, too (tools/gpu/stand_in.py)
ON_CPU = ("tools.gpu.trial", "bench.gpu.footprint", "bench.gpu.chain", "bench.gpu.kernels", "bench.gpu.step")


def stand_in(steps: list[Step]) -> list[Step]:
    """Returns the steps for a CPU, on which they run the same code as far as a CPU can. Those that need a GPU as a
    whole stay as they are, and fail or are skipped. A CPU that runs other things takes longer."""
    python = module("tools.gpu.stand_in")
    return [
        replace(step, command=(*python, *step.command[2:]), limit=2 * step.limit, keep=None)
        if step.command[2] in ON_CPU
        else step
        for step in steps
    ]


def slug(gpu: str) -> str:
    """Returns a name in a form for files.

    NVIDIA H100 80GB HBM3 becomes h100, as in `bench.prediction --hardware`. Other names are retained whole.
    """
    name = re.sub(r"[^a-z0-9]+", "-", gpu.lower().removeprefix("nvidia ")).strip("-")
    return re.sub(r"-\d+gb-hbm\d\w*$", "", name)
