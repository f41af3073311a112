"""Variants of the projection kernels on the emulated GPU: their results have the bits of the default kernel
(variants.cpp), and planted faults are found."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.simt.emulate import CSRC, FLAGS, HOPPER, device_code

SIMT = Path(__file__).resolve().parent
DIRECT, STREAM = CSRC / "cuda/linear/direct.cu", CSRC / "cuda/linear/stream.cu"
KERNELS = (*(CSRC / f"cuda/linear/{name}.cu" for name in ("linear", "embed")), CSRC / "cuda/device/device.cu")
OUTPUTS = 40  # two strips, the second with padding
# 21 strips on 8 multiprocessors: more per cluster of 8 than a block has slots for their sums
MANY = (1024, 648, 128, 5)
MULTIPROCESSORS = 8
SEEDS = (1, 2, 3)
HANGS_AFTER_S = 150.0  # many times what a sound program takes
# Inputs of the projections of Llama 1B, 3B, 8B and 70B on 1, 2, 4 and 8 ranks, and inputs per int4 group
SHAPES = [
    (256, 64), (384, 128), (512, 64), (768, 128), (1024, 128), (1024, 64), (1536, 128), (1792, 128), (2048, 128),
    (2048, 32), (3072, 128), (3584, 128), (4096, 128), (7168, 128), (8192, 128), (14336, 128), (28672, 128),
]  # fmt: skip
DIRECT_FAULTS = {
    "inputs are read before the launch in front has ended": (
        "  ptx::wait_for_dependencies();\n  SWIFTSPEC_STAMP(task, kDependencies);\n  Inputs x;\n"
        "  load_inputs<kWarps>(task, at, x);\n",
        "  Inputs x;\n  load_inputs<kWarps>(task, at, x);\n  ptx::wait_for_dependencies();\n",
    ),
    "a tile is not waited for": ("    ptx::barrier_wait(arrived_ + tile * kStrips + strip, 0);\n", ""),
    "the norm's weight is not waited for": (
        "    ptx::barrier_wait(reinterpret_cast<uint64_t*>(shared + direct.smem.norm_barrier), 0);\n", "",
    ),
    "warps are added in another order": ("strip * kWarps + warp) * 2", "strip * kWarps + kWarps - warp) * 2"),
    "sums are read before all warps have stored them": (
        "  __syncthreads();\n  SWIFTSPEC_STAMP(task, kWarpSum);", "  SWIFTSPEC_STAMP(task, kWarpSum);",
    ),
    "squares of some inputs are left out": (
        "for (int b = 0; b < 4; ++b) sums[i % kEach]", "for (int b = 1; b < 4; ++b) sums[i % kEach]",
    ),
    "squares of the cluster are read too early": ("  ptx::cluster_sync();\n  float sum = 0;", "  float sum = 0;"),
    "a block exits while another reads its sums": ("  if (ctas > 1) ptx::cluster_meet();", ""),
    "all strips have the weights of the first": ("at.cluster * kStrips + s, first", "at.cluster * kStrips, first"),
    "a group has the sum of another row": ("sum, from + 4)", "sum, from + 8)"),
    "all tiles have the inputs of the first": ("x[piece / 4 + 1][piece % 4];", "x[piece / 4][piece % 4];"),
}  # fmt: skip
STREAM_FAULTS = {
    "inputs are read before the launch in front has ended": (
        "  sync_cluster(task);\n  ptx::wait_for_dependencies();\n", "  sync_cluster(task);\n",
    ),
    "sums are added before all warps have stored them": (
        "    wait(StreamBarriers::kStored + slot, strip / kStreamSlots);\n", "",
    ),
    "sums of the cluster are added before they have arrived": (
        "    ptx::cluster_barrier_wait(barriers_ + StreamBarriers::kArrived + slot, use / kStreamSlots & 1);\n", "",
    ),
    "the owner does not say what it expects": ("    if (to == at_.cta && at_.lane == 0)", "    if (to < 0)"),
    "no other block may send again": ("at_.lane < ctas_) {", "at_.lane < 1) {"),
    "the last strip is not advanced": ("epilogue.strips() + 2; ++strip", "epilogue.strips() + 1; ++strip"),
    "warps are added in another order": ("place(slot, warp, f)]);", "place(slot, kWarps - warp, f)]);"),
}  # fmt: skip
FAULTS = [(source, name) for source, faults in ((DIRECT, DIRECT_FAULTS), (STREAM, STREAM_FAULTS)) for name in faults]

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("g++") is None or sys.platform != "linux", reason="no g++, or no Linux"),
]
Link = Callable[[str, str, str], Path]


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory) -> Link:
    """Returns the program with a source in which one text replaces another; with the sources as they are for ""."""
    folder = tmp_path_factory.mktemp("variants")

    def compiled(source: Path) -> str:
        device = device_code(HOPPER) if source.suffix == ".cu" else ()
        out = folder / f"{source.parent.name}.{source.name}.o"
        includes = (f"-I{SIMT}", f"-I{CSRC}")
        subprocess.run(["g++", *FLAGS, "-O1", *includes, *device, "-c", str(source), "-o", str(out)], check=True)
        return str(out)

    sources = (*KERNELS, DIRECT, STREAM, SIMT / "variants.cpp", *sorted(SIMT.glob("simt/*.cpp")))
    objects = {source.name: compiled(source) for source in sources}

    def linked(name: str, original: str, mutated: str) -> Path:
        changed = dict(objects)
        if name:
            text = (CSRC / "cuda/linear" / name).read_text()
            assert text.count(original) == 1
            copy = folder / "mutated" / name
            copy.parent.mkdir(exist_ok=True)
            copy.write_text(text.replace(original, mutated))
            changed[name] = compiled(copy)
        program = folder / "program"
        subprocess.run(["g++", "-o", str(program), *changed.values(), "-lrt", "-pthread"], check=True)
        return program

    return linked


def run(program: Path, *numbers: int, timeout_s: float | None = None) -> subprocess.CompletedProcess[str]:
    command = [str(program), *map(str, numbers)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s)


@pytest.mark.timeout(900)
def test_variants_are_bitwise_equal(link: Link) -> None:
    """Of every shape, with all splits that fit; with norm, SwiGLU, residual, bias and logits. And a cluster with more
    strips than it keeps sums of."""
    program = link("", "", "")
    for inputs, group in SHAPES:
        for rows in (8, 3) if inputs == 1024 else (8,):
            done = run(program, inputs, OUTPUTS, group, rows, 1)
            assert done.returncode == 0, f"{inputs} inputs: {done.stdout}"
            assert int(done.stdout) >= 4, "at least one split, four projections each"
    done = run(program, *MANY, 1, MULTIPROCESSORS)
    assert done.returncode == 0, done.stdout


def fails(program: Path, *numbers: int) -> bool:
    """Whether a program reports a difference, or waits for ever."""
    try:
        return run(program, *numbers, timeout_s=HANGS_AFTER_S).returncode != 0
    except subprocess.TimeoutExpired:
        return True


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("source", "name"), FAULTS, ids=lambda value: getattr(value, "stem", value))
def test_faults_are_found(link: Link, source: Path, name: str) -> None:
    faults = DIRECT_FAULTS if source == DIRECT else STREAM_FAULTS
    program = link(source.name, *faults[name])
    numbers = [(1024, OUTPUTS, 64, 5, seed) if source == DIRECT else (*MANY, seed, MULTIPROCESSORS) for seed in SEEDS]
    assert any(fails(program, *each) for each in numbers)
